"""The unpaired threshold of TensorRT-LLM's accuracy suite, to stand beside the paired test.

Its rule: two independent runs of n items with a standard deviation of sigma per item differ by
scale = sqrt(2 * sigma^2 / n); a score below reference - z_alpha * scale fails, and a drop of
(z_alpha + z_beta) * scale is found with chance 1 - beta. One-sided; sigma 0.5 is the worst case.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy import stats

SIGMA, ALPHA, BETA = 0.5, 0.05, 0.2


@dataclass(frozen=True)
class UnpairedThreshold:
    """Fractions.

    Attributes:
        allowed_drop: how far below the reference a score may be.
        detectable_drop: the drop that is found with chance 1 - beta.
    """

    documents: int
    allowed_drop: float
    detectable_drop: float


def unpaired_threshold(
    documents: int, sigma: float = SIGMA, alpha: float = ALPHA, beta: float = BETA
) -> UnpairedThreshold:
    """TensorRT-LLM's rule for a number of documents."""
    scale = math.sqrt(2 * sigma**2 / documents)
    z_alpha, z_beta = (float(stats.norm.ppf(1 - chance)) for chance in (alpha, beta))
    return UnpairedThreshold(documents, z_alpha * scale, (z_alpha + z_beta) * scale)


def unpaired_documents(
    drop: float, sigma: float = SIGMA, alpha: float = ALPHA, beta: float = BETA
) -> int:
    """Documents that the rule needs to find a drop."""
    z_sum = float(stats.norm.ppf(1 - alpha) + stats.norm.ppf(1 - beta))
    return math.ceil(2 * (z_sum * sigma / drop) ** 2)
