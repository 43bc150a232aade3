"""Metrics over documents with paired bootstrap intervals.

Documents are drawn, not tokens: tokens of one document are not independent. Every metric of an arm
is a comparison with bf16 on the same documents; the difference of two arms is taken on the same
draws, hence paired.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from scipy import stats

from evals.regress.scoring import Floats, Integers, TokenScores

#: Draws of the bootstrap.
DRAWS = 4000
CONFIDENCE = 0.95
#: Share of a sorted column that is looked through first for its 99th percentile.
_TAIL = 0.05

#: From draws [R, D], how often each document was drawn, to the metric of each draw [R].
Statistic = Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]


@dataclass(frozen=True)
class Estimate:
    """A metric with its interval, fractions and nats."""

    value: float
    low: float
    high: float

    def overlaps_zero(self) -> bool:
        return self.low <= 0 <= self.high


@dataclass(frozen=True)
class Columns:
    """One arm's token columns over one group of documents.

    Attributes:
        document: document number of each token, 0 to ``documents`` - 1, in this group.
        arm, base: scores of the arm and of bf16 on these tokens.
        gold: the gold token.
    """

    document: Integers
    documents: int
    arm: TokenScores
    base: TokenScores
    gold: Integers

    def statistics(self) -> dict[str, Statistic]:
        """Every metric by its name in the JSON."""
        was_right = self.base.choice == self.gold
        is_right = self.arm.choice == self.gold
        rise = self._mean(self.arm.surprise - self.base.surprise)
        return {
            "kl_mean": self._mean(self.arm.kl),
            "kl_p99": self._p99(self.arm.kl),
            "perplexity_change": lambda draws: np.expm1(rise(draws)),
            "top1_agreement": self._mean(self.arm.choice == self.base.choice),
            "gold_lost": self._mean(was_right & ~is_right),
            "gold_gained": self._mean(~was_right & is_right),
        }

    @cached_property
    def _tokens(self) -> Floats:
        return np.bincount(self.document, minlength=self.documents).astype(np.float64)

    def _mean(self, column: npt.NDArray[np.generic]) -> Statistic:
        """Mean over tokens, so that a long document counts for more than a short one."""
        sums = np.bincount(
            self.document, weights=column.astype(np.float64), minlength=self.documents
        )
        return lambda draws: (draws @ sums) / (draws @ self._tokens)

    def _p99(self, column: Floats) -> Statistic:
        """The smallest value that at most 1% of the drawn tokens exceed."""
        order = np.argsort(-column, kind="stable")
        values, owners = column[order], self.document[order]

        def statistic(draws: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
            allowed = 0.01 * (draws @ self._tokens)
            looked = max(1, int(np.ceil(len(order) * _TAIL)))
            while True:
                above = np.cumsum(draws[:, owners[:looked]], axis=1)
                if looked >= len(order) or bool((above[:, -1] > allowed).all()):
                    return values[np.argmax(above > allowed[:, None], axis=1)]
                looked *= 2  # a draw left out the documents that hold the largest values

        return statistic


def difference(left: Statistic, right: Statistic) -> Statistic:
    """``left - right`` on the same draws."""
    return lambda draws: left(draws) - right(draws)


def estimate(
    statistic: Statistic, documents: int, seed: int, confidence: float = CONFIDENCE
) -> Estimate:
    """The metric over all documents and its percentile bootstrap interval.

    Args:
        documents: how many there are; with one, the interval is the value itself.
        seed: of the draws; the same seed draws the same documents for every metric.
    """
    value = float(statistic(np.ones((1, documents)))[0])
    if documents < 2:
        return Estimate(value, value, value)

    def resampled(numbers: Integers, axis: int = -1) -> npt.NDArray[np.float64]:
        drawn = np.moveaxis(np.atleast_2d(numbers), axis, -1)
        return statistic(_counts(drawn, documents)).reshape(numbers.shape[:-1])

    result = stats.bootstrap(
        (np.arange(documents),),
        resampled,
        n_resamples=DRAWS,
        batch=500,
        vectorized=True,
        method="percentile",
        confidence_level=confidence,
        rng=np.random.default_rng(seed),
    )
    interval = result.confidence_interval
    return Estimate(value, float(interval.low), float(interval.high))


def _counts(numbers: Integers, documents: int) -> npt.NDArray[np.float64]:
    """[R, D] from drawn document numbers [R, D]."""
    rows = np.arange(numbers.shape[0])[:, None]
    flat = (rows * documents + numbers).ravel()
    counted = np.bincount(flat, minlength=numbers.shape[0] * documents)
    return counted.reshape(-1, documents).astype(np.float64)
