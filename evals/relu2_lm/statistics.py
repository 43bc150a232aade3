"""Paired comparison of two arms on the same problems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from evals.regress.statistics import Estimate, estimate
from evals.statistics.bootstrap import paired_interval
from evals.statistics.exact import mcnemar
from evals.statistics.power import detectable_drop


@dataclass(frozen=True)
class Comparison:
    """An arm against a baseline, problem by problem; fractions, not percent.

    Attributes:
        difference: accuracy of the arm minus the baseline's.
        low, high: 95% paired bootstrap interval of the difference; where no problem changed sides,
            what could have been missed.
        lost, gained: problems that only the baseline, only the arm, has right.
        p_value: exact McNemar test, two-sided.
        detectable: the smallest drop that the test finds in so many problems with power 0.8, with
            as many of them changing sides as here; ``None`` where it could find nothing.
    """

    problems: int
    difference: float
    low: float
    high: float
    lost: int
    gained: int
    p_value: float
    detectable: float | None


def compare(arm: Sequence[bool], baseline: Sequence[bool], seed: int = 0) -> Comparison:
    """Pair the two problem by problem.

    Raises:
        ValueError: no problems, or not the same number.
    """
    if not len(arm) or len(arm) != len(baseline):
        raise ValueError(f"cannot pair {len(arm)} problems with {len(baseline)}")
    differences = [int(a) - int(b) for a, b in zip(arm, baseline, strict=True)]
    lost, gained = differences.count(-1), differences.count(1)
    interval = paired_interval(differences, largest=1.0, seed=seed)
    count = len(differences)
    return Comparison(
        problems=count,
        difference=(gained - lost) / count,
        low=interval.low,
        high=interval.high,
        lost=lost,
        gained=gained,
        p_value=mcnemar(lost, gained),
        detectable=detectable_drop(count, max(lost + gained, 1) / count),
    )


def mean(values: Sequence[float] | npt.NDArray[np.float64], seed: int = 0) -> Estimate:
    """Mean of per-problem values with its 95% percentile bootstrap interval over problems."""
    data = np.asarray(values, dtype=float)
    return estimate(lambda draws: draws @ data / draws.sum(1), len(data), seed)
