"""Exact tests of two arms on the same documents."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import stats


def mcnemar(lost: int, gained: int) -> float:
    """Exact two-sided p-value of McNemar's test.

    Args:
        lost, gained: documents that only the first, and only the second arm got right.
    """
    if lost + gained == 0:
        return 1.0
    return float(stats.binomtest(lost, lost + gained, 0.5).pvalue)


def sign_flip(differences: Sequence[int]) -> float:
    """Exact two-sided p-value for documents that were asked several times.

    If the arms are alike, swapping them within a document changes nothing, so each document's
    difference is as likely as its negative, however its repeats depend on each other. The p-value
    is the share of all 2^n sign choices whose sum is at least as far from 0. With one repeat this
    is McNemar's exact test.

    Args:
        differences: per document, right answers of the second arm less those of the first.
    """
    sizes = [abs(difference) for difference in differences if difference]
    total = sum(sizes)
    # chance[s]: of the sum being s - total.
    chance = np.zeros(2 * total + 1)
    chance[total] = 1.0
    for size in sizes:
        flipped = np.zeros_like(chance)
        flipped[size:] += chance[:-size]
        flipped[:-size] += chance[size:]
        chance = flipped / 2
    sums = np.arange(-total, total + 1)
    extreme = np.abs(sums) >= abs(sum(differences))
    return min(1.0, float(chance[extreme].sum()))
