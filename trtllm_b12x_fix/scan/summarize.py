"""From counts to results: one projection, one layer, all of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trtllm_b12x_fix.scan import statistics
from trtllm_b12x_fix.scan.bake import Bake
from trtllm_b12x_fix.scan.counting import Counted
from trtllm_b12x_fix.scan.groups import Floats, Group
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
class Part:
    """Sums over some matrices of a projection: all that is kept of their counts.

    Attributes:
        tally: entries of the matrices at ``good`` (int64, places in the projection).
        stored, baked: as in :class:`~trtllm_b12x_fix.scan.result.ProjectionResult`.
        assumed, known: blocks left out as all zero.
        unsure: places of matrices whose damage depends on what was assumed of scales of 1.0.
    """

    tally: Tally
    good: Counts
    stored: Counts
    baked: Counts
    assumed: int
    known: int | None
    undecided: int
    unsure: Counts


@dataclass(frozen=True)
class Projection:
    """A result, the sums it came from, and where it rests on assumptions (see :class:`Part`)."""

    result: ProjectionResult
    sums: Tally
    unsure: Counts


def part(group: Group, counted: Counted) -> Part:
    """What baking does to some matrices of a projection."""
    effective, assumed, known = _effective(counted)
    scale = group.weight_scale_2[counted.first : counted.end]
    good = np.flatnonzero(np.isfinite(scale))
    energy = None if counted.energy is None else counted.energy[good]
    undecided = statistics.only_ones(counted.counts) & (counted.nonzero is None)
    unsure = _unsure(scale, counted, good) if group.bake is Bake.YES else np.empty(0, np.int64)
    return Part(
        statistics.tally(effective[good], scale[good], energy),
        good + counted.first,
        counted.counts.sum(axis=0),
        statistics.baked_counts(effective[good], scale[good]),
        assumed,
        known,
        int(undecided.sum()),
        unsure + counted.first,
    )


def projection(group: Group, parts: Sequence[Part]) -> Projection:
    """What baking does to one projection, from all its parts."""
    tally = Tally.joined([one.tally for one in parts])
    good = np.concatenate([one.good for one in parts])
    scales = group.weight_scale_2[good]

    def damage(place: int) -> ExpertDamage:
        expert = group.unit(int(good[place])).expert
        return ExpertDamage(expert, float(scales[place]), tally.one(place))

    stored: Counts = sum((one.stored for one in parts), start=np.zeros(256, np.int64))
    lossy = _lossy(tally) & (group.bake is Bake.YES)
    share = tally.zeros / np.maximum(tally.blocks, 1)
    known = [one.known for one in parts if one.known is not None]
    result = ProjectionResult(
        layer=group.layer,
        number=group.number,
        stack=group.stack,
        projection=group.projection,
        kind=group.kind,
        matrices=len(group),
        affected=int(lossy.sum()),
        damage=tally.all(),
        worst=tuple(damage(int(i)) for i in np.argsort(-tally.rms(), kind="stable")[:_WORST]),
        weight_scale_2=(float(scales.min()), float(scales.max())) if len(scales) else None,
        counts=stored,
        baked=sum((one.baked for one in parts), start=np.zeros(statistics.NAN, np.int64)),
        saturated_fraction=int(stored[statistics.LARGEST]) / max(int(stored.sum()), 1),
        assumed_zero_blocks=sum(one.assumed for one in parts),
        zero_blocks=sum(known) if known else None,
        bake=group.bake,
        undecided=sum(one.undecided for one in parts),
        judged=len(good),
        most_zeros=damage(int(share.argmax())) if share.any() else None,
    )
    return Projection(result, tally.total(), np.concatenate([one.unsure for one in parts]))


def _lossy(tally: Tally) -> npt.NDArray[np.bool_]:
    lossy: npt.NDArray[np.bool_] = (tally.rms() > LIMIT) & (tally.zeros + tally.subnormals > 0)
    return lossy


def _unsure(scale: Floats, counted: Counted, good: Counts) -> Counts:
    """Places of matrices that are damaged only with, or only without, a spike at 1.0."""
    if counted.nonzero is not None:
        return np.empty(0, np.int64)
    excess = statistics.spike_at_one(counted.counts)
    excess[statistics.only_ones(counted.counts)] = 0  # undecided, and said to be
    places = good[excess[good] > 0]
    if not places.size:
        return places
    every = counted.counts[places]
    without = every.copy()
    without[:, ONE] -= excess[places]
    one_way, other_way = (_lossy(statistics.tally(c, scale[places])) for c in (every, without))
    unsure: Counts = places[one_way != other_way]
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
        one
        for one in projections
        if one.result.kind is Kind.EXPERTS and one.result.bake is Bake.YES
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
