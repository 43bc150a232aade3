"""A comparison in words: a report that never says "equal"."""

from __future__ import annotations

from evals.statistics.bootstrap import IntervalMethod
from evals.statistics.compare import Comparison, Conclusion, PairedTest, Result
from trtllm_b12x_fix.report.text import printable

_TESTS = {
    PairedTest.MCNEMAR: "exact McNemar",
    PairedTest.SIGN_FLIP: "exact sign-flip test by document",
}


def points(fraction: float) -> str:
    """A difference of accuracies in percentage points."""
    return f"{100 * fraction:+.1f} points"


def sentence(comparison: Comparison) -> str:
    """The conclusion in one sentence."""
    a, b = printable(comparison.arm_a), printable(comparison.arm_b)
    result = comparison.result
    if result is None:
        return f"nothing compared: no document has a verdict in both {a} and {b}"
    if comparison.conclusion is Conclusion.NOT_DETECTABLE:
        return f"no difference detectable between {a} and {b}; {_seen(result)}"
    word = comparison.conclusion.value
    return f"{b} is {word} than {a} by {abs(100 * result.difference):.1f} points ({_test(result)})"


def paragraph(comparison: Comparison) -> list[str]:
    """All that belongs beside the conclusion, a line each."""
    lines = [sentence(comparison)]
    result = comparison.result
    if result is not None:
        lines.append(_figures(comparison, result))
        lines += _beside(comparison, result)
    if comparison.pairing.unjudged:
        lines.append(_unjudged(comparison))
    return lines


def _seen(result: Result) -> str:
    if result.detectable_drop is None:
        return f"{result.documents} documents are too few to see any"
    return (
        f"this run could have seen {100 * result.detectable_drop:.1f} points "
        f"(power 0.8, {result.documents} documents)"
    )


def _figures(comparison: Comparison, result: Result) -> str:
    a, b = printable(comparison.arm_a), printable(comparison.arm_b)
    low, high = points(result.interval.low), points(result.interval.high)
    kind = {
        IntervalMethod.PAIRED_BOOTSTRAP: "paired bootstrap",
        IntervalMethod.NONE_DIFFERS: "no document differs: exact bound",
        IntervalMethod.TOO_FEW: "too few documents to say more",
    }[result.interval.method]
    return (
        f"{a} {result.accuracy_a:.1%}, {b} {result.accuracy_b:.1%} of {result.documents} "
        f"documents: {points(result.difference)}, 95% interval {low} to {high} ({kind}); "
        f"{_test(result)}"
    )


def _beside(comparison: Comparison, result: Result) -> list[str]:
    flips = f"{result.lost} documents lost, {result.gained} gained"
    lines = [f"{flips}; A/B answers disagree in {result.disagreement:.1%}"]
    lines += [
        f"A/A floor: {printable(floor.arm)} disagrees with itself in {floor.disagreement:.1%} "
        f"({floor.documents} documents, {floor.origin.value})"
        for floor in comparison.floors
    ]
    if not comparison.floors:
        lines.append("A/A floor: not measured (no repeats and no second run of an arm)")
    if comparison.unpaired is not None:
        unpaired = comparison.unpaired
        lines.append(
            f"TensorRT-LLM's unpaired rule for {unpaired.documents} documents would let "
            f"{100 * unpaired.allowed_drop:.1f} points pass and finds "
            f"{100 * unpaired.detectable_drop:.1f} points"
        )
    return lines


def _unjudged(comparison: Comparison) -> str:
    pairing, counted = comparison.pairing, comparison.counting_failures
    statuses = [
        f"{printable(arm)}: " + ", ".join(f"{n} {status}" for status, n in sorted(counts.items()))
        for arm, counts in (
            (comparison.arm_a, pairing.statuses_a),
            (comparison.arm_b, pairing.statuses_b),
        )
    ]
    line = f"{len(pairing.unjudged)} pairs without a verdict stand aside ({'; '.join(statuses)})"
    if counted is None:
        return line
    line += f"; counted as wrong: {points(counted.difference)}, {_test(counted)}"
    if comparison.depends_on_unjudged:
        line += ": THE CONCLUSION DEPENDS ON THEM"
    return line


def _test(result: Result) -> str:
    return f"{_TESTS[result.test]} p = {result.p_value:.2g}"
