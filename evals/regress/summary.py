"""From token scores to metrics with intervals: per arm, between arms, and the A/A floor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from evals.regress.arms import Arm, Variant
from evals.regress.documents import Document
from evals.regress.scoring import Positions, TokenScores
from evals.regress.statistics import Columns, Estimate, Statistic, difference, estimate
from evals.regress.suite import Scored
from trtllm_b12x_fix.law import Powers

#: The group of every document; the others are the tasks.
ALL = "all"
#: How sure the floor is: a metric that moves beyond it did not do so by another order of adds.
FLOOR_CONFIDENCE = 0.999

Metrics = dict[str, Estimate]


@dataclass(frozen=True)
class Comparison:
    """Paired difference ``left - right`` of each metric over all documents.

    Attributes:
        floor: how far each metric moves by another order of adds alone. Intervals know of other
            documents, not of other orders: only what is beyond both is a difference.
    """

    left: Variant
    right: Variant
    metrics: Metrics
    floor: dict[str, float] = field(default_factory=dict)

    def told_apart(self, metric: str) -> bool:
        found = self.metrics[metric]
        return not found.overlaps_zero() and abs(found.value) > self.floor.get(metric, 0.0)


class Summary:
    """Metrics of a run. Every estimate draws the same documents, so all of them are paired.

    Args:
        scored: a run; its first entry is bf16.
        seed: of the bootstrap.
    """

    def __init__(
        self, scored: Sequence[Scored], documents: Sequence[Document], where: Positions, seed: int
    ) -> None:
        self._scores = {each.variant: each.scores for each in scored if each.scores is not None}
        self._base = next(iter(self._scores.values()))
        self._where, self._seed = where, seed
        self._floors: dict[Arm, dict[str, float]] = {}
        self._metrics: dict[tuple[Variant, str], Metrics] = {}
        tasks = [document.task for document in documents]
        self._groups = {ALL: list(range(len(tasks)))}
        for task in dict.fromkeys(tasks):
            self._groups[task] = [number for number, name in enumerate(tasks) if name == task]

    @property
    def variants(self) -> list[Variant]:
        """What has scores, in the order of the run."""
        return list(self._scores)

    @property
    def groups(self) -> list[str]:
        return list(self._groups)

    def metrics(self, variant: Variant, group: str = ALL) -> Metrics:
        """Every metric of one arm on one group of documents."""
        if (variant, group) not in self._metrics:
            count = len(self._groups[group])
            self._metrics[variant, group] = {
                name: estimate(statistic, count, self._seed)
                for name, statistic in self._statistics(variant, group).items()
            }
        return self._metrics[variant, group]

    def compare(self, left: Variant, right: Variant, confidence: float = 0.95) -> Comparison:
        """The paired difference of two arms."""
        ours, theirs = self._statistics(left, ALL), self._statistics(right, ALL)
        count = len(self._groups[ALL])
        metrics = {
            name: estimate(difference(ours[name], theirs[name]), count, self._seed, confidence)
            for name in ours
        }
        return Comparison(left, right, metrics)

    def comparisons(self) -> list[Comparison]:
        """What a reader asks: what baking adds, what the kernel adds, what order adds."""
        return [
            replace(self.compare(variant, other), floor=self._wider_floor(variant, other))
            for variant in self.variants
            for other in _partners(variant)
            if other in self._scores
        ]

    def _wider_floor(self, left: Variant, right: Variant) -> dict[str, float]:
        ours, theirs = self.floor(left.arm), self.floor(right.arm)
        return {metric: max(value, theirs[metric]) for metric, value in ours.items()}

    def floor(self, arm: Arm) -> dict[str, float]:
        """How far each metric may move by another order of adds alone.

        The far end of the paired interval between two runs of one arm that differ in that order:
        the arm's own or the `alphas` arm's, whichever is wider. Empty if neither ran twice.
        """
        if arm not in self._floors:
            own, alphas = self._measure_floor(arm), self._measure_floor(Arm.ALPHAS)
            self._floors[arm] = {
                name: max(floor.get(name, 0.0) for floor in (own, alphas)) for name in own | alphas
            }
        return self._floors[arm]

    def _measure_floor(self, arm: Arm) -> dict[str, float]:
        for other in self.variants:
            own = replace(other, seed=0)
            if other.seed and other.arm is arm and own in self._scores:
                metrics = self.compare(other, own, FLOOR_CONFIDENCE).metrics
                return {name: max(abs(e.low), abs(e.high)) for name, e in metrics.items()}
        return {}

    def states_sha256(self, variant: Variant) -> str:
        return self._scores[variant].states_sha256

    def _statistics(self, variant: Variant, group: str) -> dict[str, Statistic]:
        members = self._groups[group]
        chosen = np.isin(self._where.document, members)
        renumbered = np.searchsorted(members, self._where.document[chosen])
        columns = Columns(
            renumbered,
            len(members),
            _rows(self._scores[variant], chosen),
            _rows(self._base, chosen),
            self._where.gold[chosen],
        )
        return columns.statistics()


def _rows(scores: TokenScores, chosen: npt.NDArray[np.bool_]) -> TokenScores:
    return TokenScores(
        scores.kl[chosen], scores.surprise[chosen], scores.choice[chosen], scores.states_sha256
    )


def _partners(variant: Variant) -> list[Variant]:
    """What an arm is compared with."""
    if variant.seed:
        return [replace(variant, seed=0)]
    if variant.arm in (Arm.BAKED, Arm.UNIT):
        return [Variant(Arm.ALPHAS, variant.kernel, variant.powers)]
    if variant.arm is Arm.ALPHAS and variant.powers == Powers():
        return [Variant(Arm.REFERENCE)]
    if variant.arm is Arm.REFERENCE and variant.powers == Powers():
        return [Variant(Arm.W4A16)]
    return []
