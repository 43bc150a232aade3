"""Power of the exact McNemar test: how many pairs a drop needs, which drop a run could see."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats

from trtllm_b12x_fix.errors import InputError

ALPHA, POWER = 0.05, 0.8
#: Nobody asks more documents than this; a search that gets here has no answer.
MOST_PAIRS = 10_000_000
#: Power saws up and down by less than this many pairs' worth.
_TEETH = 25


@dataclass(frozen=True)
class Effect:
    """What is to be seen, in fractions.

    Attributes:
        drop: accuracy lost by the second arm.
        discordant: share of documents that exactly one arm gets right.
    """

    drop: float
    discordant: float

    def __post_init__(self) -> None:
        if not 0 < self.discordant <= 1 or not 0 < self.drop <= self.discordant:
            raise InputError(
                f"drop {self.drop:g} and discordant {self.discordant:g}: a drop is above 0 and at "
                "most the discordant share, which is at most 1"
            )

    @property
    def lost(self) -> float:
        """Share of documents that only the first arm gets right."""
        return (self.discordant + self.drop) / 2

    @property
    def gained(self) -> float:
        return (self.discordant - self.drop) / 2


def check_baseline(effect: Effect, baseline: float) -> None:
    """Whether an arm of this accuracy has that much to lose and to gain.

    Raises:
        InputError: it has not.
    """
    slack = 1e-12
    if not 0 < baseline < 1:
        raise InputError(f"baseline {baseline:g} is no fraction between 0 and 1")
    if effect.lost > baseline + slack or effect.gained > 1 - baseline + slack:
        raise InputError(
            f"baseline {baseline:g} cannot lose {effect.lost:g} and gain {effect.gained:g}"
        )


def power(pairs: int, effect: Effect, alpha: float = ALPHA) -> float:
    """Chance that the exact two-sided test finds the effect in ``pairs`` documents."""
    mean = pairs * effect.discordant
    around = 20 + 10 * math.sqrt(mean)  # what lies further out has no weight
    counts = np.arange(max(0, int(mean - around)), min(pairs, int(mean + around)) + 1)
    weights = stats.binom.pmf(counts, pairs, effect.discordant)
    critical = _critical(counts, alpha)
    share = effect.lost / effect.discordant
    low = stats.binom.cdf(critical, counts, share)
    high = stats.binom.sf(counts - critical - 1, counts, share)
    found = np.where(critical >= 0, low + high, 0.0)
    return float(weights @ found)


def _critical(counts: np.ndarray, alpha: float) -> np.ndarray:
    """Largest smaller count of a split of ``counts`` that the test rejects; -1 where it cannot."""
    guess = stats.binom.ppf(alpha / 2, counts, 0.5)
    rejected = 2 * stats.binom.cdf(guess, counts, 0.5) <= alpha
    return np.where(rejected, guess, guess - 1)


def pairs_needed(effect: Effect, alpha: float = ALPHA, wanted: float = POWER) -> int:
    """Fewest pairs from which on the exact test has the wanted power.

    Raises:
        InputError: more than ten million.
    """
    low, high = 1, max(8, normal_pairs(effect, alpha, wanted))
    while high <= MOST_PAIRS and power(high, effect, alpha) < wanted:
        low, high = high, high * 2
    if high > MOST_PAIRS:
        raise InputError(f"a drop of {effect.drop:g} needs more than {MOST_PAIRS:,} pairs")
    # Power is not quite monotone: halving finds some crossing, walking on the last one.
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power(middle, effect, alpha) >= wanted else (middle, high)
    last_below = max(
        (n for n in range(high, high + _TEETH) if power(n, effect, alpha) < wanted),
        default=high - 1,
    )
    return last_below + 1


def normal_pairs(effect: Effect, alpha: float = ALPHA, wanted: float = POWER) -> int:
    """What the usual normal approximation asks for; the exact test then has less power."""
    z_alpha, z_power = stats.norm.ppf(1 - alpha / 2), stats.norm.ppf(wanted)
    spread = math.sqrt(effect.discordant - effect.drop**2)
    root = (z_alpha * math.sqrt(effect.discordant) + z_power * spread) / effect.drop
    return math.ceil(root**2)


def detectable_drop(
    pairs: int, discordant: float, alpha: float = ALPHA, wanted: float = POWER
) -> float | None:
    """Smallest drop that ``pairs`` documents find with the wanted power; None if there is none.

    Args:
        discordant: share of discordant documents; a larger drop takes at least its own.
    """
    if pairs < 1 or _reach(1.0, pairs, discordant, alpha) < wanted:
        return None
    low, high = 0.0, 1.0
    while high - low > 1e-5:
        middle = (low + high) / 2
        found = _reach(middle, pairs, discordant, alpha) >= wanted
        low, high = (low, middle) if found else (middle, high)
    return high


def _reach(drop: float, pairs: int, discordant: float, alpha: float) -> float:
    return power(pairs, Effect(drop, max(drop, discordant)), alpha)
