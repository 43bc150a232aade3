"""The code that emit-patch puts behind TensorRT-LLM's assignment of ``_b12x_weights``.

A function of its own, so that none of its names meets one of the method's; it imports what it
uses and looks at the module alone. All tensors are made outside inference mode: FlashInfer's
wrapper asks for their version when it folds the alphas.
"""

from __future__ import annotations

import enum

from trtllm_b12x_fix import __version__


class PatchStrategy(enum.Enum):
    """How the patched method passes weight_scale_2; as :class:`repair.Strategy` has them."""

    ALPHAS = "alphas"
    FP32_RESCALE = "fp32-rescale"


_BEGIN = '''\
# trtllm-b12x-fix {version}, begin: strategy {strategy}
def pass_weight_scale_2(module):
    """Intact block scales, and weight_scale_2 where it is fp32 (TensorRT-LLM#21461)."""
    import inspect
    import os

    import torch
    from flashinfer.cute_dsl.utils import convert_sf_to_mma_layout
    from flashinfer.fused_moe.cute_dsl.blackwell_sm12x import moe_dispatch
{imports}
    algorithm = getattr(getattr(module, "quant_config", None), "quant_algo", None)
    if getattr(algorithm, "name", str(algorithm)) == "W4A16_NVFP4":
        return  # not baked
    if os.environ.get("FLASHINFER_B12X_FORCE_MOE_W4A16", "0") == "1":
        raise ValueError("FLASHINFER_B12X_FORCE_MOE_W4A16=1 changes the alphas: unset it")
    # Up to FlashInfer 0.7.1 this kernel multiplies by input scales: it is never launched.
    direct_micro = getattr(moe_dispatch, "MoEDirectMicroKernel", None)
    if direct_micro is not None:
        named = inspect.signature(direct_micro.__init__).parameters
        if "input_scales_are_reciprocal" not in named:
            moe_dispatch._DIRECT_MICRO_MAX_N = 0
'''

_IMPORT = {
    PatchStrategy.ALPHAS: "    from flashinfer import B12xMoEWrapper\n",
    PatchStrategy.FP32_RESCALE: "    from tensorrt_llm._torch.utils import ActivationType\n",
}

_CHECK = {
    PatchStrategy.ALPHAS: """\
    if "input_global_scale" not in inspect.signature(B12xMoEWrapper.run).parameters:
        raise RuntimeError(
            "patched for a FlashInfer with input_global_scale: use 0.6.17 or later, or "
            "make the patch again with --strategy fp32-rescale (relu2 only)"
        )
""",
    PatchStrategy.FP32_RESCALE: """\
    if ActivationType(module.activation_type) is not ActivationType.Relu2:
        raise NotImplementedError(
            "without input_global_scale only relu2 has exact scales: use FlashInfer "
            "0.6.17 or later and --strategy alphas, or moe_config.backend: CUTLASS"
        )
""",
}

_SCALES = """\
    experts, rows, words = module.w3_w1_weight.shape
    hidden, inner_words = module.w2_weight.shape[1:]
    entries = module._b12x_weights
    with torch.inference_mode(False), torch.no_grad():
        entries["w1_weight_sf"] = convert_sf_to_mma_layout(
            module.w3_w1_weight_scale.data.view(torch.float8_e4m3fn),
            m=rows,
            k=16 * words,
            num_groups=experts,
        )
        entries["w2_weight_sf"] = convert_sf_to_mma_layout(
            module.w2_weight_scale.data.view(torch.float8_e4m3fn),
            m=hidden,
            k=16 * inner_words,
            num_groups=experts,
        )
        weight_scale_2 = (module.fc31_alpha * module.fc31_input_scale).float().contiguous()
        fc1_scale = (1.0 / module.fc31_input_scale).float()
        fc2_scale = (1.0 / module.fc2_input_scale).float()
        entries["w2_alpha"] = module.fc2_alpha.data.float().clone()
"""

_ALPHAS = {
    PatchStrategy.ALPHAS: """\
        entries["w1_alpha"] = weight_scale_2
        entries["input_global_scale"] = fc1_scale
        entries["fc2_input_scale"] = fc2_scale
""",
    PatchStrategy.FP32_RESCALE: """\
        if not bool((weight_scale_2 >= 1e-19).all()):
            raise ValueError("a weight_scale_2 below 1e-19 cannot ride in fc2_input_scale")
        entries["w1_alpha"] = fc1_scale.expand(experts).contiguous()
        # Divided twice: the square may leave fp32's range where the quotient does not.
        entries["fc2_input_scale"] = fc2_scale / weight_scale_2 / weight_scale_2
""",
}

_END = """\

pass_weight_scale_2({module})
# trtllm-b12x-fix, end
"""


def block(strategy: PatchStrategy, module: str, indent: str) -> tuple[str, ...]:
    """The block's lines, without line ends.

    Args:
        module: what the method calls the layer.
        indent: what stands before the assignment.
    """
    text = (
        _BEGIN.format(version=__version__, strategy=strategy.value, imports=_IMPORT[strategy])
        + _CHECK[strategy]
        + _SCALES
        + _ALPHAS[strategy]
        + _END.format(module=module)
    )
    return tuple(indent + line if line else "" for line in text.split("\n")[:-1])
