"""From counts to results: one projection, one layer, all of them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

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
    """A result and the sums it came from."""

    result: ProjectionResult
    sums: Tally


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
    lossy = (rms > LIMIT) & (tally.zeros + tally.subnormals > 0)
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
    )
    return Projection(result, tally.total())


def _effective(counted: Counted) -> tuple[Counts, int, int | None]:
    """Counts of blocks that count, and how many were left out, assumed or known."""
    if counted.nonzero is not None:
        return counted.nonzero, 0, int(counted.counts.sum() - counted.nonzero.sum())
    assumed = statistics.assumed_zero_blocks(counted.counts)
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
    projections: list[Projection], dense: list[Projection], scale_bytes: int, code_bytes: int
) -> Totals:
    """Everything together; layers that cannot be used are in the numbers of matrices only."""
    experts = [one for one in projections if one.result.kind is Kind.EXPERTS]
    return Totals(
        layers=len({one.result.layer for one in projections}),
        projections=len(projections),
        matrices=sum(one.result.matrices for one in projections),
        affected_projections=sum(one.result.affected > 0 for one in experts),
        affected_matrices=sum(one.result.affected for one in experts),
        damage=Tally.joined([one.sums for one in experts]).all(),
        dense_matrices=sum(one.result.matrices for one in dense),
        scale_bytes=scale_bytes,
        weight_bytes=code_bytes,
    )
