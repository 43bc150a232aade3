"""The code that emit-patch puts behind TensorRT-LLM's assignment of ``_b12x_weights``.

A function of its own, so that none of its names meets one of the method's; it imports what it
uses and looks at the module alone. All tensors are made outside inference mode: FlashInfer's
wrapper asks for their version when it folds the alphas.

The block is found again only whole and in its place: a mark alone says nothing about what runs.
"""

from __future__ import annotations

import ast
import enum
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trtllm_b12x_fix import __version__

#: First words of the block, and where it names its version and strategy.
PATCH_MARK = "trtllm-b12x-fix"
_FIRST_LINE = re.compile(rf"\s*# {PATCH_MARK} (?P<version>\S+), begin: strategy (?P<strategy>\S+)")
#: The attribute that the block comes after the assignment of.
ENTRIES = "_b12x_weights"
_FUNCTION = "pass_weight_scale_2"


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


@dataclass(frozen=True)
class FoundBlock:
    """A block in a patched file.

    Attributes:
        statement: the assignment before it.
        last: its last line, counted from 1.
    """

    strategy: PatchStrategy
    statement: ast.Assign
    last: int


def find_block(hook: ast.FunctionDef, lines: Sequence[str]) -> FoundBlock | None:
    """The block that :func:`block` makes, word for word and right behind an assignment.

    Args:
        lines: of the whole file, with or without their ends.
    """
    for before, function in _followed(hook):
        if not isinstance(function, ast.FunctionDef) or function.name != _FUNCTION:
            continue
        module = assigned_module(before)
        first = function.lineno - 2
        match = _FIRST_LINE.fullmatch(lines[first].rstrip("\r\n"))
        known = {strategy.value: strategy for strategy in PatchStrategy}
        if module is None or match is None or match["strategy"] not in known:
            continue
        assert isinstance(before, ast.Assign)
        strategy = known[match["strategy"]]
        indent = lines[first][: lines[first].index("#")]
        wanted = block(strategy, module, indent, match["version"])
        there = [line.rstrip("\r\n") for line in lines[first : first + len(wanted)]]
        if there == list(wanted):
            return FoundBlock(strategy, before, first + len(wanted))
    return None


def marked_line(hook: ast.FunctionDef, lines: Sequence[str]) -> int | None:
    """The first line of a method that has the mark of a block, counted from 1."""
    for number in range(hook.lineno, (hook.end_lineno or hook.lineno) + 1):
        if _FIRST_LINE.match(lines[number - 1]):
            return number
    return None


def assigned_module(statement: ast.AST) -> str | None:
    """What an assignment of the entries calls the layer, ``None`` for any other statement."""
    if not isinstance(statement, ast.Assign):
        return None
    for target in statement.targets:
        if isinstance(target, ast.Attribute) and target.attr == ENTRIES:
            return target.value.id if isinstance(target.value, ast.Name) else None
    return None


def _followed(hook: ast.FunctionDef) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Each statement with the one right behind it."""
    for node in ast.walk(hook):
        for name in ("body", "orelse", "finalbody"):
            statements = getattr(node, name, None)
            if isinstance(statements, list):
                yield from itertools.pairwise(statements)


def block(
    strategy: PatchStrategy, module: str, indent: str, version: str = __version__
) -> tuple[str, ...]:
    """The block's lines, without line ends.

    Args:
        module: what the method calls the layer.
        indent: what stands before the assignment.
        version: of this package, as the first line names it.
    """
    text = (
        _BEGIN.format(version=version, strategy=strategy.value, imports=_IMPORT[strategy])
        + _CHECK[strategy]
        + _SCALES
        + _ALPHAS[strategy]
        + _END.format(module=module)
    )
    return tuple(indent + line if line else "" for line in text.split("\n")[:-1])
