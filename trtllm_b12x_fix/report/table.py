"""A layer check as text for a terminal: the answer first, then the figures behind it."""

from __future__ import annotations

import math

from trtllm_b12x_fix.emulator.arithmetic import KernelFamily
from trtllm_b12x_fix.layer_check.result import (
    ArmResult,
    FamilyResult,
    LayerCheckResult,
)
from trtllm_b12x_fix.layer_check.scales import ScaleDamage
from trtllm_b12x_fix.report import answer, preset, real_kernels
from trtllm_b12x_fix.report.text import bullet, count_rows, grid, paragraph, percent

Noise = dict[tuple[int, KernelFamily], float]


def render(result: LayerCheckResult) -> str:
    """The report as plain text, ending in a newline."""
    parts = [
        answer.header(result),
        answer.answer(result),
        _findings(result),
        _scales(result),
        _arms(result),
        _families(result),
    ]
    if result.own_magnitude is not None:
        parts.append(_own(result))
    if result.preset is not None:
        parts.append(preset.render(result.preset))
    if result.real_kernels is not None:
        parts.append(real_kernels.render(result.real_kernels))
    parts.append(_footnotes(result))
    return "\n\n".join(part for part in parts if part) + "\n"


_SHOWN_FINDINGS = 8


def _findings(result: LayerCheckResult) -> str:
    lines = [
        bullet(f"{finding.severity.value}: {finding.tensor or finding.file}: {finding.message}")
        for finding in result.findings[:_SHOWN_FINDINGS]
    ]
    if len(result.findings) > _SHOWN_FINDINGS:
        lines.append(bullet(f"and {len(result.findings) - _SHOWN_FINDINGS} more (--json has all)"))
    return "\n".join(["findings in the checkpoint", *lines]) if lines else ""


_SCALE_HEADER = [
    "block scales",
    "weight_scale_2",
    "blocks",
    "baked to 0",
    "subnormal",
    "mean error",
    "largest",
    "worst expert",
]


def _scale_row(name: str, scales: ScaleDamage) -> list[str]:
    low, high = f"{scales.weight_scale_2_min:.1e}", f"{scales.weight_scale_2_max:.1e}"
    return [
        name,
        low if low == high else f"{low} to {high}",
        f"{scales.blocks:,}",
        percent(scales.zero_fraction),
        percent(scales.subnormal_fraction),
        percent(scales.mean_relative_error),
        percent(scales.max_relative_error),
        f"{scales.worst_expert} ({percent(scales.worst_expert_error)})",
    ]


def _scales(result: LayerCheckResult) -> str:
    rows = [_scale_row("FC1", result.fc1), _scale_row("FC2", result.fc2)]
    return grid(_SCALE_HEADER, rows, left=1)


_ARM_HEADER = [
    "rows",
    "kernel",
    "arm",
    "fidelity",
    "SQNR dB",
    "cosine",
    "true error",
    "noise",
    "published",
    "first divergence",
]


def _arms(result: LayerCheckResult) -> str:
    noise = {(family.rows, family.family): family.noise for family in result.families}
    rows = []
    previous = 0
    for arm in result.results:
        label = str(arm.rows) if arm.rows != previous else ""
        previous = arm.rows
        rows.append([label, *_arm_row(arm, noise)])
    return grid(_ARM_HEADER, rows, left=3)


def _arm_row(arm: ArmResult, noise: Noise) -> list[str]:
    name = arm.arm.value
    if arm.arm.report_name:
        name += f" ({arm.arm.report_name})"
    kernel = arm.family.value if arm.family else "cutlass"
    if not (arm.family and arm.fidelity and arm.true_error and arm.published):
        return [kernel, name, "-", "-", "-", "-", "-", "-", "no figures: see notes"]
    sqnr = arm.fidelity.sqnr_db
    return [
        kernel,
        name,
        "exact" if arm.fidelity.relative_rms == 0 else percent(arm.fidelity.relative_rms),
        f"{sqnr + 0.0:.1f}" if math.isfinite(sqnr) else "-",
        f"{arm.fidelity.cosine:.5f}" if math.isfinite(arm.fidelity.cosine) else "-",
        percent(arm.true_error.relative_rms),
        percent(noise[arm.rows, arm.family]),
        percent(arm.published.relative_rms),
        arm.first_divergence.value if arm.first_divergence else "none",
    ]


_FAMILY_HEADER = [
    "rows",
    "kernel with exact scales",
    "true error",
    "noise",
    "vs published: order",
    "summation",
    "layer vs file input scales",
]


def _families(result: LayerCheckResult) -> str:
    return grid(_FAMILY_HEADER, [_family_row(f) for f in result.families], left=2)


def _family_row(family: FamilyResult) -> list[str]:
    return [
        str(family.rows),
        family.family.value,
        percent(family.true_error.relative_rms),
        percent(family.noise),
        percent(family.evaluation_order),
        percent(family.summation),
        percent(family.input_scales),
    ]


def _own(result: LayerCheckResult) -> str:
    own = result.own_magnitude
    assert own is not None
    rows = [_scale_row("FC1, own magnitude", own.fc1), _scale_row("FC2, own magnitude", own.fc2)]
    text = grid(_SCALE_HEADER, rows, left=1)
    fidelity, true = own.baked.fidelity, own.baked.true_error
    if fidelity and true:
        text += "\n" + paragraph(
            f"At its own magnitude the same layer loses {percent(fidelity.relative_rms)} to the "
            f"bake at {count_rows(own.baked.rows)}, true error {percent(true.relative_rms)}: "
            "damage follows weight magnitude alone, so small models with large weights look clean."
        )
    return text


_LEGEND = (
    "fidelity: against the same kernel's arithmetic with exact scales, the same terms in the same "
    "order, added in fp32 on both sides. true error: against fp64 on the dequantized weights and "
    "unquantized activations. noise: two random orders of the kernel's own bf16 adds, never an "
    "arm's error. published: against b12x's reference (direct division, fp32 sum); how much of it "
    "is evaluation order and how much summation stands in the kernel's line."
)


def _footnotes(result: LayerCheckResult) -> str:
    parts = [paragraph(_LEGEND)]
    notes: dict[str, list[str]] = {}
    for arm in result.results:
        text = arm.unavailable or arm.trap or arm.note
        if text and arm.arm.value not in notes.setdefault(text, []):
            notes[text].append(arm.arm.value)
    if notes:
        lines = [bullet(f"{', '.join(names)}: {text}") for text, names in notes.items()]
        parts.append("\n".join(["notes", *lines]))
    if result.contract_exceptions:
        parts.append(
            "per-shape exceptions of this version that are not modelled\n"
            + "\n".join(bullet(text) for text in result.contract_exceptions)
        )
    return "\n\n".join(parts)
