"""A comparison as JSON. Fractions; what does not exist is null."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from evals.statistics import words
from evals.statistics.compare import Comparison, Result


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Everything that a report or a dashboard shows."""
    pairing = comparison.pairing
    unpaired = comparison.unpaired
    return {
        "arm_a": comparison.arm_a,
        "arm_b": comparison.arm_b,
        "conclusion": comparison.conclusion.value,
        "depends_on_unjudged": comparison.depends_on_unjudged,
        "words": words.paragraph(comparison),
        "result": _result(comparison.result),
        "counting_failures": _result(comparison.counting_failures),
        "discordant": [asdict(one) for one in comparison.discordant],
        "unjudged": [asdict(one) for one in pairing.unjudged],
        "only_a": pairing.only_a,
        "only_b": pairing.only_b,
        "statuses_a": dict(pairing.statuses_a),
        "statuses_b": dict(pairing.statuses_b),
        "floors": [{**asdict(one), "origin": one.origin.value} for one in comparison.floors],
        "unpaired": None if unpaired is None else asdict(unpaired),
    }


def _result(result: Result | None) -> dict[str, Any] | None:
    if result is None:
        return None
    interval = {**asdict(result.interval), "method": result.interval.method.value}
    return {
        **asdict(result),
        "interval": interval,
        "test": result.test.value,
        "conclusion": result.conclusion.value,
    }
