"""What a reader wants first: which layer, is the repair right, what does the shipped way cost."""

from __future__ import annotations

import math

from trtllm_b12x_fix.layer_check.arms import Arm
from trtllm_b12x_fix.layer_check.real_result import RealArm
from trtllm_b12x_fix.layer_check.result import (
    ArmResult,
    GateOutcome,
    LayerCheckResult,
    Verdict,
)
from trtllm_b12x_fix.report.text import count_rows, labelled, percent, span

_VERDICTS = {
    Verdict.GOOD: "good (of the repair; what is shipped stands below)",
    Verdict.FINDING: "FINDING",
    Verdict.UNGATED: "none: no arm was held against a limit, figures only",
}


def header(result: LayerCheckResult) -> str:
    """What was checked, on what, emulated how."""
    shape = result.shape
    sizes = [_size(shape, "hidden"), _size(shape, "intermediate")]
    rest = f"{shape['experts']} experts, top-{shape['top_k']}, {shape['activation']}"
    return "\n".join(
        [
            labelled("layer", result.source),
            labelled("", ", ".join([*sizes, rest])),
            labelled("inputs", f"{result.inputs}; {result.input_scales.value} input scales"),
            labelled(
                "kernels",
                f"FlashInfer {result.flashinfer} ({result.contract_origin}), EMULATED on "
                f"{result.device}: {_what_ran(result)}",
            ),
            labelled("fix", result.plan),
        ]
    )


def _what_ran(result: LayerCheckResult) -> str:
    if result.ran_real_kernels:
        return "FlashInfer's own kernels stand in the last table"
    return "no FP4 kernel ran"


def _size(shape: dict[str, int | str], name: str) -> str:
    stored, logical = shape[name], shape[f"logical_{name}"]
    return f"{name} {stored}" + ("" if stored == logical else f" (zero-padded from {logical})")


def answer(result: LayerCheckResult) -> str:
    """The verdict, which judges the repair, and beside it what the shipped conversion costs."""
    lines = [f"VERDICT  {_VERDICTS[result.verdict]}"]
    fix = [gate for gate in result.gates if gate.arm is Arm.FIX]
    others = [gate for gate in result.gates if gate.arm is not Arm.FIX]
    lines += _section("repaired", [*map(_gate, fix), *_cost(Arm.FIX, result)])
    lines += _section("gates", list(map(_gate, others)))
    if result.real_kernels is not None:
        lines += _section("kernels", [_real(arm) for arm in result.real_kernels.findings])
    shipped = _cost(Arm.BAKED, result)
    if shipped and not any(gate.arm is Arm.BAKED for gate in result.gates):
        shipped.append("the verdict judges the repair; to judge what is shipped, --gate baked:5")
    return "\n".join([*lines, *_section("shipped", shipped)])


def _real(arm: RealArm) -> str:
    return f"real {arm.arm.value} at {count_rows(arm.rows)}: {arm.status_text}"


def _section(label: str, lines: list[str]) -> list[str]:
    return [labelled(label if first == 0 else "", line) for first, line in enumerate(lines)]


def _cost(arm: Arm, result: LayerCheckResult) -> list[str]:
    """One line for what the scales cost, and one for rows where the kernel misreads them."""
    mine = [r for r in result.results if r.arm is arm and r.fidelity]
    trapped = [r for r in mine if r.trap]
    clean = [r for r in mine if not r.trap]
    lines = []
    if clean:
        lines.append(
            f"{arm.value} moves the output by {_fidelity(clean)}; true error {_true_error(clean)}, "
            f"{_beside_exact(clean, result)}"
        )
    if trapped:
        rows = ", ".join(str(r.rows) for r in trapped)
        unit = "row" if rows == "1" else "rows"
        lines.append(
            f"{arm.value} at {rows} {unit} moves it by {_fidelity(trapped)}: not the scales' "
            "doing, direct micro misreads input scales (see notes)"
        )
    return lines


def _beside_exact(clean: list[ArmResult], result: LayerCheckResult) -> str:
    """True error against that of exact scales in the same kernels."""
    exact = {(f.rows, f.family): f.true_error.relative_rms for f in result.families}
    pairs = [
        (r.true_error.relative_rms, exact[r.rows, r.family])
        for r in clean
        if r.true_error and r.family and (r.rows, r.family) in exact
    ]
    if not pairs:
        return "exact scales were not run"
    ratios = [own / best for own, best in pairs if best and math.isfinite(own / best)]
    span_of_exact = span([best for _, best in pairs])
    if len(ratios) < len(pairs):
        return f"exact scales {span_of_exact}"
    low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    times = low if low == high else f"{low} to {high}"
    return f"{times} times that of exact scales ({span_of_exact})"


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
