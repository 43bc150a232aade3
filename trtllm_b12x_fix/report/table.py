"""A layer check as text for a terminal: the answer first, then the figures behind it."""

from __future__ import annotations

import math

from trtllm_b12x_fix.emulator.arithmetic import KernelFamily
from trtllm_b12x_fix.layer_check.arms import Arm
from trtllm_b12x_fix.layer_check.result import (
    ArmResult,
    FamilyResult,
    GateOutcome,
    LayerCheckResult,
    Verdict,
)
from trtllm_b12x_fix.layer_check.scales import ScaleDamage
from trtllm_b12x_fix.report.text import bullet, count_rows, grid, labelled, paragraph, percent, span

Noise = dict[tuple[int, KernelFamily], float]


def render(result: LayerCheckResult) -> str:
    """The report as plain text, ending in a newline."""
    parts = [
        _header(result),
        _answer(result),
        _findings(result),
        _scales(result),
        _arms(result),
        _families(result),
    ]
    if result.own_magnitude is not None:
        parts.append(_own(result))
    parts.append(_footnotes(result))
    return "\n\n".join(part for part in parts if part) + "\n"


def _header(result: LayerCheckResult) -> str:
    shape = result.shape
    padding = ""
    if (shape["hidden"], shape["intermediate"]) != (
        shape["logical_hidden"],
        shape["logical_intermediate"],
    ):
        padding = (
            f" (zero-padded from {shape['logical_hidden']} and {shape['logical_intermediate']})"
        )
    return "\n".join(
        [
            labelled("layer", result.source),
            labelled(
                "",
                f"hidden {shape['hidden']}, intermediate {shape['intermediate']}{padding}, "
                f"{shape['experts']} experts, top-{shape['top_k']}, {shape['activation']}",
            ),
            labelled("inputs", f"{result.inputs}; {result.input_scales.value} input scales"),
            labelled(
                "kernels",
                f"FlashInfer {result.flashinfer} ({result.contract_origin}), EMULATED on "
                f"{result.device}: no FP4 kernel ran",
            ),
            labelled("fix", result.plan),
        ]
    )


def _answer(result: LayerCheckResult) -> str:
    lines = [f"VERDICT  {_VERDICTS[result.verdict]}"]
    lines += [labelled("", _gate(gate)) for gate in result.gates]
    for arm, words in ((Arm.BAKED, "the baked conversion"), (Arm.FIX, "the repaired one")):
        lines += [labelled("", line) for line in _cost(words, arm, result)]
    return "\n".join(lines)


_VERDICTS = {
    Verdict.GOOD: "good",
    Verdict.FINDING: "FINDING",
    Verdict.UNGATED: "none: no arm was held against a limit, figures only",
}


def _cost(words: str, arm: Arm, result: LayerCheckResult) -> list[str]:
    """One line for what the scales cost, and one for rows where the kernel misreads them."""
    mine = [r for r in result.results if r.arm is arm and r.fidelity]
    trapped = [r for r in mine if r.trap]
    clean = [r for r in mine if not r.trap]
    lines = []
    if clean:
        exact = [
            family.true_error.relative_rms
            for family in result.families
            if (family.rows, family.family) in {(r.rows, r.family) for r in clean}
        ]
        lines.append(
            f"{words} moves the output by {_fidelity(clean)}; true error "
            f"{_true_error(clean)} (exact scales: {span(exact)})"
        )
    if trapped:
        unit = "row" if [r.rows for r in trapped] == [1] else "rows"
        rows = ", ".join(str(r.rows) for r in trapped)
        lines.append(
            f"{words} at {rows} {unit} moves it by {_fidelity(trapped)}: direct micro misreads the "
            "input scales (see notes)"
        )
    return lines


def _fidelity(results: list[ArmResult]) -> str:
    return span([r.fidelity.relative_rms for r in results if r.fidelity])


def _true_error(results: list[ArmResult]) -> str:
    return span([r.true_error.relative_rms for r in results if r.true_error])


def _gate(gate: GateOutcome) -> str:
    state = "passed" if gate.passed else "FAILED"
    if math.isnan(gate.worst):
        return f"gate {gate.arm.value} at most {percent(gate.limit)}: {state}, {gate.reason}"
    where = "exact at every row count"
    if gate.worst > 0:
        where = f"worst {percent(gate.worst)} at {count_rows(gate.worst_rows)}"
    if gate.reason:
        where += f" ({gate.reason})"
    return f"gate {gate.arm.value} at most {percent(gate.limit)}: {state}, {where}"


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
