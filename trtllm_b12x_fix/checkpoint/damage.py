"""What reading a layer's matrices and scales brings to light, as findings with their place."""

from __future__ import annotations

from torch import Tensor

from trtllm_b12x_fix.checkpoint.conventions import Spelling, TensorSource, detect
from trtllm_b12x_fix.checkpoint.findings import Finding, Severity
from trtllm_b12x_fix.checkpoint.layers import LayerEntry, Storage
from trtllm_b12x_fix.checkpoint.matrices import QuantizedLinear
from trtllm_b12x_fix.checkpoint.scale_order import looks_swizzled
from trtllm_b12x_fix.formats.nvfp4 import block_is_zero

#: Ratio of weight_scale_2 that is two roundings of one number, no matter to anyone.
_ROUNDING = 1 + 1e-6
#: How far an expert's input_scale may be from the layer's median without a note.
_FAR = 100.0


def of_matrix(
    source: TensorSource, entry: LayerEntry, expert: int, name: str, linear: QuantizedLinear
) -> list[Finding]:
    """Block scales that lose weights, or that lie in a kernel's order."""
    tensor = _spelling(source, entry, expert, name).block_scale
    dead = (linear.block_scale == 0) & ~block_is_zero(linear.packed)
    damage = {}
    if count := int(dead.sum()):
        damage["zero-scale-over-weights"] = (
            f"{count} of {dead.numel()} block scales are 0 over non-zero codes: those weights "
            "are lost in the file itself"
        )
    if looks_swizzled(linear.block_scale.numpy(force=True)):
        damage["scales-look-swizzled"] = (
            "the block scales look swizzled into 128x4 tiles: only unswizzled do they show rows "
            "and columns. A checkpoint stores them linear, and the check reads them so"
        )
    return [
        _finding(source, entry, expert, tensor, code, message, Severity.DAMAGE)
        for code, message in damage.items()
    ]


def of_weight_scales(
    source: TensorSource, entry: LayerEntry, expert: int, up: QuantizedLinear, gate: QuantizedLinear
) -> list[Finding]:
    """Gate and up of one expert with different ``weight_scale_2``."""
    scales = float(up.weight_scale_2), float(gate.weight_scale_2)
    if scales[0] == scales[1]:
        return []
    smaller = entry.names.up if scales[0] < scales[1] else str(entry.names.gate)
    ratio = max(scales) / min(scales)
    known = f"{ratio:.4g}" if ratio > 1.001 else f"{ratio:.9g}"
    severity = Severity.DAMAGE if ratio > _ROUNDING else Severity.NOTE
    message = (
        f"weight_scale_2 of {entry.names.up} is {scales[0]:.9g} and of {entry.names.gate} "
        f"{scales[1]:.9g}; TensorRT-LLM uses the larger for both without rescaling, which makes "
        f"{smaller} {known} times too large. The check does the same"
    )
    tensor = _spelling(source, entry, expert, smaller).weight_global
    return [_finding(source, entry, expert, tensor, "gate-up-scales-differ", message, severity)]


def of_input_scales(
    source: TensorSource, entry: LayerEntry, scales: dict[str, Tensor]
) -> list[Finding]:
    """Input scales that belong to one input and differ, or that are far from all others.

    Args:
        scales: fp32 [E] by projection, all experts of the layer.
    """
    notes: dict[tuple[int, str], str] = {}
    up, gate = entry.names.up, entry.names.gate
    if gate is not None and int(count := (scales[up] != scales[gate]).sum()):
        worst = int(_ratio(scales[up], scales[gate]).argmax())
        notes[worst, gate] = (
            f"input_scale of {gate} is {float(scales[gate][worst]):.9g} and of {up} "
            f"{float(scales[up][worst]):.9g}, though both read one input ({int(count)} of "
            f"{entry.experts} experts differ); TensorRT-LLM asserts that they are equal, the "
            "check uses the larger"
        )
    findings = []
    for name, values in scales.items():
        ratio = _ratio(values, values.median())
        worst = int(ratio.argmax())
        if float(ratio[worst]) > _FAR:
            notes[worst, name] = (
                f"input_scale is {float(values[worst]):.9g}, the layer's median is "
                f"{float(values.median()):.9g} ({int((ratio > _FAR).sum())} of {entry.experts} "
                f"experts are more than {_FAR:g} times off); TensorRT-LLM uses the layer's "
                "largest for all"
            )
    for (expert, name), message in notes.items():
        tensor = _spelling(source, entry, expert, name).input_global
        code = "input-scales-differ"
        findings.append(_finding(source, entry, expert, tensor, code, message, Severity.NOTE))
    return findings


def _ratio(left: Tensor, right: Tensor) -> Tensor:
    """How many times one is the other, never below 1."""
    quotient = left.double() / right.double()
    return quotient.maximum(1 / quotient)


def _spelling(source: TensorSource, entry: LayerEntry, expert: int, name: str) -> Spelling:
    split = entry.storage is Storage.SPLIT
    return detect(source, entry.matrix(expert, name) if split else entry.fused(name))


def _finding(
    source: TensorSource,
    entry: LayerEntry,
    expert: int,
    tensor: str,
    code: str,
    message: str,
    severity: Severity,
) -> Finding:
    return Finding(
        severity,
        code,
        message,
        file=source.file_of(tensor),
        layer=entry.prefix,
        expert=expert,
        tensor=tensor,
    )
