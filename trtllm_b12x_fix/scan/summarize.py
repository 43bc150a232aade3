"""From counts to results: one projection, one layer, all of them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trtllm_b12x_fix.scan import statistics
from trtllm_b12x_fix.scan.counting import Counted
from trtllm_b12x_fix.scan.inventory import Group
from trtllm_b12x_fix.scan.result import (
    ExpertDamage,
    Kind,
    LayerSummary,
    ProjectionResult,
    Totals,
)
from trtllm_b12x_fix.scan.statistics import LIMIT, ONE, Counts, Tally

#: Worst matrices named for each projection.
_WORST = 5


@dataclass(frozen=True)
class Projection:
    """A result and the sums it came from.

    Attributes:
        unsure: places of matrices whose damage depends on what was assumed of scales of 1.0.
    """

    result: ProjectionResult
    sums: Tally
    unsure: Counts


def projection(group: Group, counted: Counted) -> Projection:
    """What baking does to one projection's matrices."""
    effective, assumed, known = _effective(counted)
    good = np.flatnonzero(np.isfinite(group.weight_scale_2))
    energy = None if counted.energy is None else counted.energy[good]
    tally = statistics.tally(effective[good], group.weight_scale_2[good], energy)
    rms = tally.rms()
    order = np.argsort(-rms, kind="stable")[:_WORST]
    scales = group.weight_scale_2[good]
    worst = tuple(
        ExpertDamage(group.units[good[i]].expert, float(scales[i]), tally.one(int(i)))
        for i in order
    )
    stored = counted.counts.sum(axis=0)
    lossy = _lossy(tally) & (not group.weight_only)
    share = tally.zeros / np.maximum(tally.blocks, 1)
    most = int(share.argmax()) if share.any() else None
    undecided = statistics.only_ones(counted.counts) & (counted.nonzero is None)
    result = ProjectionResult(
        layer=group.layer,
        number=group.number,
        stack=group.stack,
        projection=group.projection,
        kind=group.kind,
        matrices=len(group.units),
        affected=int(lossy.sum()),
        damage=tally.all(),
        worst=worst,
        weight_scale_2=(float(scales.min()), float(scales.max())) if len(scales) else None,
        counts=stored,
        baked=statistics.baked_counts(effective[good], scales),
        saturated_fraction=int(stored[statistics.LARGEST]) / max(int(stored.sum()), 1),
        assumed_zero_blocks=assumed,
        zero_blocks=known,
        weight_only=group.weight_only,
        undecided=int(undecided.sum()),
        judged=len(good),
        most_zeros=None
        if most is None
        else ExpertDamage(group.units[good[most]].expert, float(scales[most]), tally.one(most)),
    )
    unsure = np.empty(0, np.int64) if group.weight_only else _unsure(group, counted, good)
    return Projection(result, tally.total(), unsure)


def _lossy(tally: Tally) -> npt.NDArray[np.bool_]:
    lossy: npt.NDArray[np.bool_] = (tally.rms() > LIMIT) & (tally.zeros + tally.subnormals > 0)
    return lossy


def _unsure(group: Group, counted: Counted, good: Counts) -> Counts:
    """Places of matrices that are damaged only with, or only without, a spike at 1.0."""
    if counted.nonzero is not None:
        return np.empty(0, np.int64)
    excess = statistics.spike_at_one(counted.counts)
    excess[statistics.only_ones(counted.counts)] = 0  # undecided, and said to be
    places = good[excess[good] > 0]
    every = counted.counts[places]
    without = every.copy()
    without[:, ONE] -= excess[places]
    scales = group.weight_scale_2[places]
    differs = _lossy(statistics.tally(every, scales)) != _lossy(statistics.tally(without, scales))
    unsure: Counts = places[differs]
    return unsure


def _effective(counted: Counted) -> tuple[Counts, int, int | None]:
    """Counts of blocks that count, and how many were left out, assumed or known."""
    if counted.nonzero is not None:
        return counted.nonzero, 0, int(counted.counts.sum() - counted.nonzero.sum())
    assumed = statistics.assumed_zero_blocks(counted.counts)
    # Nothing but ones: undecided, and said to be. It counts neither as damaged nor as sound.
    assumed = np.where(statistics.only_ones(counted.counts), counted.counts[:, ONE], assumed)
    effective = counted.counts.copy()
    effective[:, ONE] -= assumed
    return effective, int(assumed.sum()), None


def layers(projections: list[Projection]) -> tuple[LayerSummary, ...]:
    """Projections of each layer together, the worst layer first."""
    by_layer: dict[str, list[Projection]] = defaultdict(list)
    for one in projections:
        by_layer[one.result.layer].append(one)
    summaries = [_layer(parts) for parts in by_layer.values()]
    return tuple(sorted(summaries, key=lambda one: -one.worst_rms_error))


def _layer(parts: list[Projection]) -> LayerSummary:
    worst = max((part.result for part in parts), key=lambda result: result.severity)
    return LayerSummary(
        worst.layer,
        worst.number,
        worst.stack,
        sum(part.result.matrices for part in parts),
        sum(part.result.affected for part in parts),
        Tally.joined([part.sums for part in parts]).all(),
        worst.projection,
        worst.worst[0].expert if worst.worst else None,
        worst.severity,
    )


def totals(
    projections: list[Projection],
    dense: list[Projection],
    scale_bytes: int,
    code_bytes: int,
    lost: int,
) -> Totals:
    """Everything together; layers that cannot be used, and those of W4A16, are in the numbers of
    matrices only.

    Args:
        lost: matrices of which a part is in files that were not looked at.
    """
    experts = [
        one for one in projections if one.result.kind is Kind.EXPERTS and not one.result.weight_only
    ]
    judged = sum(one.result.judged for one in projections)
    matrices = sum(one.result.matrices for one in projections)
    return Totals(
        layers=len({one.result.layer for one in projections}),
        projections=len(projections),
        matrices=matrices,
        affected_projections=sum(one.result.affected > 0 for one in experts),
        affected_matrices=sum(one.result.affected for one in experts),
        damage=Tally.joined([one.sums for one in experts]).all(),
        dense_matrices=sum(one.result.matrices for one in dense),
        scale_bytes=scale_bytes,
        weight_bytes=code_bytes,
        judged_matrices=judged,
        unjudged_matrices=matrices - judged + lost,
        undecided_matrices=sum(one.result.undecided for one in projections),
    )
