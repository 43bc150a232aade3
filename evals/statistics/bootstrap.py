"""Intervals of a mean difference, drawing whole documents: repeats of one stay together."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
RESAMPLES = 9999
_BATCH = 500


class IntervalMethod(enum.Enum):
    """Where an interval comes from."""

    PAIRED_BOOTSTRAP = "paired-bootstrap"
    NONE_DIFFERS = "exact-bound-none-differs"
    """No document differs, so nothing can be resampled: what could have been missed, exactly."""
    TOO_FEW = "too-few-documents"


@dataclass(frozen=True)
class Interval:
    """An interval of a mean difference, in the unit of the values."""

    low: float
    high: float
    method: IntervalMethod
    confidence: float = CONFIDENCE


def paired_interval(
    differences: Sequence[float], largest: float, seed: int = 0, confidence: float = CONFIDENCE
) -> Interval:
    """Percentile bootstrap interval of the mean of per-document differences.

    Args:
        differences: one number per document: second arm less first.
        largest: how far one document can differ (1 for accuracy; infinite where there is no bound,
            such as lengths).
        seed: of the draws; the same numbers and seed give the same interval.
    """
    values = np.asarray(differences, dtype=np.float64)
    if values.size < 2:
        return Interval(-largest, largest, IntervalMethod.TOO_FEW, confidence)
    if not values.any():
        bound = largest * unseen(values.size, confidence)
        return Interval(-bound, bound, IntervalMethod.NONE_DIFFERS, confidence)
    if np.all(values == values[0]):
        value = float(values[0])
        return Interval(value, value, IntervalMethod.PAIRED_BOOTSTRAP, confidence)
    interval = stats.bootstrap(
        (values,),
        np.mean,
        n_resamples=RESAMPLES,
        batch=_BATCH,
        confidence_level=confidence,
        method="percentile",
        random_state=np.random.default_rng(seed),
    ).confidence_interval
    return Interval(
        float(interval.low), float(interval.high), IntervalMethod.PAIRED_BOOTSTRAP, confidence
    )


def unseen(documents: int, confidence: float = CONFIDENCE) -> float:
    """The largest share of documents that can differ when none of ``documents`` was seen to.

    The exact (Clopper-Pearson) bound, two-sided: about 3.7 / documents at 95%.
    """
    return float(1 - ((1 - confidence) / 2) ** (1 / documents))
