"""The table of the README, from the recorded runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evals.relu2_lm.arms import Magnitude
from evals.relu2_lm.evaluate import MANY_TOKENS, VERSIONS
from evals.relu2_lm.record import unpack_bits
from evals.relu2_lm.statistics import Comparison, compare

Record = dict[str, Any]

#: The version whose comparisons are shown.
SHOWN = "0.6.18"
_ROWS = (
    ("reference", Magnitude.REPORTED),
    ("alphas", Magnitude.REPORTED),
    ("fp32-rescale", Magnitude.REPORTED),
    ("baked", Magnitude.OWN),
    ("baked", Magnitude.REPORTED),
    ("baked", Magnitude.HALF),
    ("baked", Magnitude.QUARTER),
)
_HEAD = (
    "| arm | weight_scale_2 | " + " | ".join(VERSIONS) + " | lost, gained | p | 95% interval | "
    "KL from bf16 |\n|" + "---|" * (len(VERSIONS) + 6)
)


def table(runs: Sequence[Record]) -> str:
    """Markdown: exact answers in percent per FlashInfer version (static), and for
    :data:`SHOWN` against the reference.

    Args:
        runs: documents of :mod:`.record` on the same problems; earlier ones win.
    """
    lines = [_HEAD]
    for arm in ("bf16", "w4a16"):
        case = _find(runs, arm)
        shares = [_percent(case["accuracy"]), *[""] * (len(VERSIONS) - 1)]
        lines.append(_line(arm, "own", shares, None, case))
    for arm, magnitude in _ROWS:
        found = [_find(runs, arm, version, magnitude) for version in VERSIONS]
        shares = [_percent(case["accuracy"]) if case else "-" for case in found]
        shown = found[VERSIONS.index(SHOWN)]
        lines.append(_line(arm, magnitude.value, shares, against_reference(runs, shown), shown))
    return "\n".join(lines)


def against_reference(runs: Sequence[Record], case: Record) -> Comparison | None:
    """A case of an emulated kernel against that kernel's reference; ``None`` for itself.

    What the law moves does not change the reference (tested), so any magnitude's will do.
    """
    reference = _find(runs, "reference", case["flashinfer"], Magnitude.REPORTED)
    if case["right"] == reference["right"] and case["arm"] == "reference":
        return None
    count = runs[0]["problems"]
    return compare(unpack_bits(case["right"], count), unpack_bits(reference["right"], count))


def _find(
    runs: Sequence[Record], arm: str, version: str = "", magnitude: Magnitude | None = None
) -> Record:
    for case in (case for run in runs for case in run["cases"] if case["arm"] == arm):
        if not version:
            return dict(case)
        wanted = (version, magnitude.value if magnitude else "", MANY_TOKENS, None)
        keys = ("flashinfer", "magnitude", "step_tokens", "order_seed")
        if tuple(case[key] for key in keys) == wanted:
            return dict(case)
    return {}


def _line(
    arm: str, magnitude: str, shares: list[str], against: Comparison | None, case: Record
) -> str:
    compared = ["", "", ""]
    if against is not None:
        p_value = f"{against.p_value:.2g}" if against.p_value > 1e-99 else "below 1e-99"
        interval = f"{100 * against.low:+.2f} to {100 * against.high:+.2f}"
        compared = [f"{against.lost}, {against.gained}", p_value, interval]
    mean = case["kl_from_bf16"]
    kl = f"{mean.get('value', mean.get('mean')):.2g}"
    return f"| {' | '.join([arm, magnitude, *shares, *compared, kl])} |"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"
