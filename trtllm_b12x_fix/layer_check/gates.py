"""Limits on fidelity: what makes a check fail."""

from __future__ import annotations

import math

from trtllm_b12x_fix.checkpoint.findings import Finding, Severity
from trtllm_b12x_fix.layer_check.result import ArmResult, Gate, GateOutcome, Verdict
from trtllm_b12x_fix.repair import Strategy

#: Default limits by what the arm turned out to be.
DEFAULT_LIMITS = {Strategy.FP32_RESCALE: 0.025}
DEFAULT_LIMIT = 0.01
#: True error above which there is nothing left to be faithful to. Fidelity alone would pass an
#: output that is zero with exact scales too, as it is when input scales are far off.
SIGNAL_LIMIT = 0.5


def apply(gate: Gate, results: tuple[ArmResult, ...]) -> GateOutcome:
    """Hold an arm's fidelity against its limit at every row count.

    An arm that was not run, has no exact form, or whose output is not finite does not pass.
    """
    mine = [result for result in results if result.arm is gate.arm]
    strategy = mine[0].strategy if mine else Strategy.ALPHAS
    limit = DEFAULT_LIMITS.get(strategy, DEFAULT_LIMIT) if gate.limit is None else gate.limit
    if not mine:
        return GateOutcome(gate.arm, limit, math.nan, 0, False, "the arm was not run")
    for result in mine:
        if result.fidelity is None:
            return GateOutcome(gate.arm, limit, math.nan, result.rows, False, result.unavailable)
    if lost := next((result for result in mine if not _is_signal(result)), None):
        return GateOutcome(gate.arm, limit, math.nan, lost.rows, False, _lost(lost))
    worst = max(mine, key=_badness)
    error = worst.fidelity.relative_rms if worst.fidelity else math.nan
    passed = error <= limit
    reason = "" if passed else worst.trap or _above(worst)
    return GateOutcome(gate.arm, limit, error, worst.rows, passed, reason)


def verdict(outcomes: tuple[GateOutcome, ...], findings: tuple[Finding, ...] = ()) -> Verdict:
    """Good only if there are gates, every one passed, and the layer itself is undamaged."""
    if any(finding.severity is Severity.DAMAGE for finding in findings):
        return Verdict.FINDING
    if not outcomes:
        return Verdict.UNGATED
    return Verdict.GOOD if all(outcome.passed for outcome in outcomes) else Verdict.FINDING


def _is_signal(result: ArmResult) -> bool:
    """Whether the output resembles the truth at all: 4-bit activations cost 10% to 25%."""
    if result.true_error is None or result.fidelity is None:
        return False
    finite = not math.isnan(result.fidelity.relative_rms)
    return finite and result.true_error.relative_rms < SIGNAL_LIMIT


def _lost(result: ArmResult) -> str:
    error = result.true_error.relative_rms if result.true_error else math.nan
    if not error >= SIGNAL_LIMIT:  # then it is the fidelity that is NaN, or both
        return "the output is not finite"
    return (
        f"true error {100 * error:.3g}% at {result.rows} rows: the output does not resemble the "
        "truth, whatever its fidelity; look at the input scales and at the arm's notes"
    )


def _above(worst: ArmResult) -> str:
    reason = f"above the limit at {worst.rows} row{'s' if worst.rows > 1 else ''}"
    if worst.strategy is Strategy.FP32_RESCALE:
        # Two independent bf16 roundings of the intermediate flip 2% of its block scales.
        reason += (
            "; fp32-rescale is expected at 2.2% to 2.7% and scatters more over few rows, while "
            "its true error stays the reference's: compare the two, or allow more with --gate"
        )
    return reason


def _badness(result: ArmResult) -> float:
    error = result.fidelity.relative_rms if result.fidelity else math.nan
    return math.inf if math.isnan(error) else error
