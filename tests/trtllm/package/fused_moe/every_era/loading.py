"""From checkpoint tensors to the parameters that CUTLASS reads.

Parameters, with R the rows of FC1 padded to 128 as a whole and I the intermediate size that
follows from it (R, or R / 2 where gated):

=================== ======================= ====================================================
w3_w1_weight        int64 [E, R, H / 16]    16 codes a word; rows [w3; w1], zeros after both
w2_weight           int64 [E, H, I / 16]
w3_w1_weight_scale  int32 [E, R, H / 64]    4 E4M3 bytes a word, swizzled expert by expert
w2_weight_scale     int32 [E, H, I / 64]
fc31_alpha          fp32 [E]                weight_scale_2 * input scale
fc2_alpha           fp32 [E]
fc31_input_scale    fp32 []                 RECIPROCAL of the layer's largest input scale
fc2_input_scale     fp32 []
=================== ======================= ====================================================

Everything a checkpoint does not bring keeps what it was created with: scales and alphas are 1.
"""

import torch
from tensorrt_llm.logger import logger
from torch import nn

from trtllm_b12x_fix.formats import scale_layout

ROW_ALIGNMENT = 128
_STAGED = ("w1", "w3")


def _parameter(module, name, tensor):
    module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


def create_parameters(module):
    """Register every parameter of the table above."""
    experts, hidden = module.expert_size_per_partition, module.hidden_size
    rows = -(-module.expand_intermediate_size_per_partition // ROW_ALIGNMENT) * ROW_ALIGNMENT
    inner = rows // module.intermediate_size_expand_ratio
    module.scaling_vector_size = 16
    _parameter(module, "w3_w1_weight_scale", torch.ones(experts, rows, hidden // 64).int())
    _parameter(module, "w2_weight_scale", torch.ones(experts, hidden, inner // 64).int())
    for name in ("fc31_input_scale", "fc2_input_scale"):
        _parameter(module, name, torch.tensor(1.0))
    names = ["fc31_alpha", "fc2_alpha"]
    if module.force_dynamic_quantization:
        names += ["fc31_weight_scale_2", "fc2_weight_scale_2"]
    for name in names:
        _parameter(module, name, torch.ones(experts))
    module.register_parameter("fc31_act_scale", None)
    # The real ones are not initialized; zeros make runs repeatable.
    _parameter(module, "w3_w1_weight", torch.zeros(experts, rows, hidden // 16).long())
    _parameter(module, "w2_weight", torch.zeros(experts, hidden, inner // 16).long())
    module.rebuild_tensor_metadata = {}


def stage(module, weights):
    """Take what a checkpoint (or a part of one) brings; keys are ``<expert>.<w1|w2|w3>.<what>``."""
    for name in (
        "tmp_cutlass_w3_w1_weights",
        "tmp_cutlass_w3_w1_weight_scales",
        "tmp_raw_input_scales",
        "tmp_weight_scale_2",
    ):
        if not hasattr(module, name):
            setattr(module, name, {})
    for expert in module.initial_local_expert_ids:
        _stage_fc1(module, weights, expert)
        for what, parameter in (
            ("weight", module.w2_weight),
            ("weight_scale", module.w2_weight_scale),
        ):
            source = weights.get(f"{expert}.w2.{what}")
            if source is not None:
                parameter.data[expert].copy_(_padded([source], parameter.data[expert]))
        for what, staged in (
            ("input_scale", module.tmp_raw_input_scales),
            ("weight_scale_2", module.tmp_weight_scale_2),
        ):
            entry = staged.setdefault(expert, {})
            for name in (*_STAGED, "w2"):
                if f"{expert}.{name}.{what}" in weights:
                    entry[name] = weights[f"{expert}.{name}.{what}"].reshape([])


def _stage_fc1(module, weights, expert):
    for what, staged in (
        ("weight", module.tmp_cutlass_w3_w1_weights),
        ("weight_scale", module.tmp_cutlass_w3_w1_weight_scales),
    ):
        for name in _STAGED:
            source = weights.get(f"{expert}.{name}.{what}")
            if source is not None:
                staged.setdefault(expert, {})[name] = source


def _padded(parts, like):
    """Rows of all parts in order, zero bytes to the right and below, in the words of ``like``."""
    rows = torch.cat([part.view(torch.uint8) for part in parts])
    width = like.shape[1] * like.element_size()
    padding = (0, width - rows.shape[1], 0, like.shape[0] - rows.shape[0])
    return nn.functional.pad(rows, padding).contiguous().view(like.dtype)


def finish_layouts(module):
    """Concatenate and pad FC1, swizzle both scales.

    FC2's scales are swizzled at every call, whether new ones were loaded or not.
    """
    for expert, parts in module.__dict__.pop("tmp_cutlass_w3_w1_weights", {}).items():
        if "w3" in parts and "w1" in parts:
            target = module.w3_w1_weight.data[expert]
            target.copy_(_padded([parts["w3"], parts["w1"]], target))
    for expert, parts in module.__dict__.pop("tmp_cutlass_w3_w1_weight_scales", {}).items():
        if "w3" in parts and "w1" in parts:
            target = module.w3_w1_weight_scale.data[expert]
            target.copy_(_swizzled(_padded([parts["w3"], parts["w1"]], target)))
    for target in module.w2_weight_scale.data:
        target.copy_(_swizzled(target))


def _swizzled(words):
    """Stands for ``torch.ops.trtllm.block_scale_interleave``."""
    return scale_layout.swizzle(words.view(torch.uint8)).view(words.dtype).reshape(words.shape)


def finish_scales(module):
    """The layer's input scales, then the alphas; without staged scales nothing happens."""
    if not hasattr(module, "tmp_raw_input_scales"):
        return
    raw = module.__dict__.pop("tmp_raw_input_scales").values()
    for entry in raw:
        if "w1" in entry and "w3" in entry:
            assert torch.allclose(entry["w1"], entry["w3"]), "input scales of w1 and w3 differ"
    first = [entry["w1"] for entry in raw if "w1" in entry and "w3" in entry]
    second = [entry["w2"] for entry in raw if "w2" in entry]
    if first:
        module.fc31_input_scale.data.copy_(torch.stack(first).max().reciprocal())
    if second:
        module.fc2_input_scale.data.copy_(torch.stack(second).max().reciprocal())
    for expert, entry in module.__dict__.pop("tmp_weight_scale_2").items():
        if all(name in entry for name in ("w1", "w2", "w3")):
            _set_alphas(module, expert, entry)


def _set_alphas(module, expert, entry):
    first = entry["w1"]
    if not torch.allclose(first, entry["w3"]):
        logger.warning(
            f"w1_weight_scale_2 != w3_weight_scale_2 ({first} != {entry['w3']}), the larger is used"
        )
        first = torch.maximum(first, entry["w3"])
    # Two reciprocals, so alpha * input scale is weight_scale_2 to a few ulps only.
    module.fc31_alpha.data[expert] = 1.0 / (module.fc31_input_scale.data * (1.0 / first))
    module.fc2_alpha.data[expert] = 1.0 / (module.fc2_input_scale.data * (1.0 / entry["w2"]))
    if module.force_dynamic_quantization:
        module.fc31_weight_scale_2.data[expert] = first
        module.fc2_weight_scale_2.data[expert] = entry["w2"]
