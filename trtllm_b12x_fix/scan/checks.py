"""Checks on one projection: what its byte counts and its scales of whole matrices give away."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trtllm_b12x_fix.scan.bake import Bake
from trtllm_b12x_fix.scan.counting import Counted
from trtllm_b12x_fix.scan.findings import Code, Notebook
from trtllm_b12x_fix.scan.groups import Group
from trtllm_b12x_fix.scan.statistics import (
    ENOUGH,
    LARGEST,
    NAN,
    ONE,
    POSITIVE,
    VALUES,
    Counts,
    only_ones,
)

Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]

_SATURATED_SHARE, _SATURATED_LEAST = 0.01, 16
#: As ``checkpoint.damage``: ratios between experts of one layer beyond this are no calibration's
#: doing, and a ratio within this of 1 is two roundings of one number.
_FAR, _ROUNDING = 100.0, 1 + 1e-6
#: Experts from which "all the same" or "far from the others" says something.
_CROWD = 4
_LEAST_WEIGHT, _MOST_WEIGHT = 1e-6, 1e3
#: amax / 2688 of activations of 1e5.
_LARGEST_INPUT = 40.0
_CODE_MAX = 6.0


@dataclass(frozen=True)
class Traits:
    """What the counts of each matrix leave behind for checks of the whole projection.

    Attributes:
        largest: fp64 [N], the largest block scale, 0 where there is none.
        digests: of the counts, the same for two matrices whose counts are; ``None`` where they are
            too few to say something.
    """

    largest: npt.NDArray[np.float64]
    digests: list[bytes | None]


def traits(counts: Counts) -> Traits:
    """Traits of matrices with int64 [N, 256] counts."""
    present = counts[:, :NAN] > 0
    last = NAN - 1 - present[:, ::-1].argmax(axis=1)
    largest = np.where(present.any(axis=1), VALUES[last].astype(np.float64), 0.0)
    telling = (counts.sum(axis=1) >= ENOUGH) & (np.count_nonzero(counts, axis=1) > 1)
    digests = [
        hashlib.blake2b(row.tobytes(), digest_size=16).digest() if tells else None
        for row, tells in zip(counts, telling, strict=True)
    ]
    return Traits(largest, digests)


def joined(parts: Sequence[Traits]) -> Traits:
    """Traits of several parts of a projection as one."""
    largest = np.concatenate([part.largest for part in parts])
    return Traits(largest, [digest for part in parts for digest in part.digests])


def check_counts(group: Group, counted: Counted, notebook: Notebook) -> None:
    """Findings on stored bytes.

    A matrix whose codes were not read in spite of ``--weights`` has its counts for those over codes
    that are not all zero.
    """
    counts, nonzero, first = counted.counts, counted.nonzero, counted.first
    blocks = counts.sum(axis=1)
    shown = counts if nonzero is None else nonzero

    def flag(code: Code, flagged: Counts) -> None:
        _flag(group, first, notebook, code, flagged)

    flag(Code.NAN_SCALE, counts[:, NAN] + counts[:, 0xFF])
    flag(Code.NEGATIVE_SCALE, counts[:, POSITIVE:0xFF].sum(axis=1))
    # As stored, with and without codes: reading more must not hide anything.
    empty = counts[:, 0] == blocks
    flag(Code.ALL_ZERO, np.where(empty, blocks, 0))
    if nonzero is None:
        flag(Code.ZERO_SCALES, np.where(empty, 0, counts[:, 0]))
    else:
        flag(Code.ZERO_OVER_WEIGHTS, nonzero[:, 0])
        # A block of zeros has the scale 0 or 1.0 (ModelOpt): others had weights.
        others = blocks - counts[:, 0] - counts[:, ONE]
        flag(Code.CODES_LOST, np.where(nonzero.any(axis=1), 0, others))
    undecided = only_ones(counts)
    constant = _constant(shown) & ~(undecided if nonzero is None else False)
    constant |= _constant(counts) & ~undecided
    flag(Code.CONSTANT, np.where(constant, shown[:, 1:NAN].sum(axis=1), 0))
    ones = counts[:, ONE]
    if nonzero is None:
        many = (2 * ones > blocks) & (ones >= ENOUGH)
        flag(Code.MANY_ONES, np.where(many, ones, 0))
    full = counts[:, LARGEST]
    saturated = (full >= _SATURATED_LEAST) & (full > _SATURATED_SHARE * blocks) & ~constant
    flag(Code.SATURATED, np.where(saturated, full, 0))


def _constant(counts: Counts) -> Flags:
    """Whether all blocks of a matrix have one positive byte."""
    positive = counts[:, 1:NAN]
    total = positive.sum(axis=1)
    one = (positive > 0).sum(axis=1) == 1
    same: Flags = one & (total >= ENOUGH) & (total == counts.sum(axis=1))
    return same


def _flag(group: Group, first: int, notebook: Notebook, code: Code, blocks: Counts) -> None:
    """One finding for each matrix, from the place ``first`` on, with a number that is not 0."""
    for place in np.flatnonzero(blocks):
        unit = group.unit(first + int(place))
        count, all_blocks = int(blocks[place]), unit.scales.size
        detail = f"{count} of {all_blocks}"
        if unit.expert is not None:
            detail = f"expert {unit.expert}: {detail}"
        notebook.add(code, group.where(unit.tensor, unit.expert, unit.file), detail, count)


def check_scales(group: Group, traits: Traits, notebook: Notebook) -> None:
    """Findings on scales of whole matrices: implausible ones, and experts unlike the others."""
    scale = group.weight_scale_2
    good = np.isfinite(scale)
    with np.errstate(all="ignore"):
        largest = _CODE_MAX * scale.astype(np.float64) * traits.largest
    _point(group, notebook, Code.RECIPROCAL, good & (scale > 1), scale)
    absurd = (largest < _LEAST_WEIGHT) | (largest > _MOST_WEIGHT)
    _point(group, notebook, Code.IMPLAUSIBLE, good & (scale <= 1) & (largest > 0) & absurd, scale)
    if group.bake is Bake.YES:
        _check_inputs(group, notebook)
    if good.sum() < _CROWD:
        return
    median = float(np.median(scale[good]))
    far = good & ((scale > _FAR * median) | (scale < median / _FAR))
    _point(group, notebook, Code.OUTLIER, far, scale)
    if good.all() and not group.one_scale and bool((scale == scale[0]).all()):
        _point(group, notebook, Code.SAME_SCALE, np.arange(len(scale)) == 0, scale)
    _check_twins(group, traits.digests, notebook)


def _check_inputs(group: Group, notebook: Notebook) -> None:
    scale = group.input_scale
    good = np.isfinite(scale)
    _point(group, notebook, Code.IMPLAUSIBLE_INPUT, good & (scale > _LARGEST_INPUT), scale)
    _point(group, notebook, Code.DEFAULT_INPUT, good & (scale == 1), scale)
    if good.sum() < _CROWD:
        return
    median = float(np.median(scale[good]))
    _point(group, notebook, Code.LARGE_INPUT, good & (scale > _FAR * median), scale)
    _point(group, notebook, Code.SMALL_INPUT, good & (scale < median / _FAR), scale)


def _check_twins(group: Group, digests: list[bytes | None], notebook: Notebook) -> None:
    seen: dict[bytes, int] = {}
    for place, digest in enumerate(digests):
        if digest is None:
            continue
        first = seen.setdefault(digest + group.weight_scale_2[place].tobytes(), place)
        if first != place:
            where = group.where_unit(place)
            detail = f"experts {group.unit(first).expert} and {where.expert}"
            notebook.add(Code.SAME_EXPERTS, where, detail)


def _point(group: Group, notebook: Notebook, code: Code, which: Flags, values: Floats) -> None:
    """One finding for each matrix that is flagged, with its value (a multiplier)."""
    for place in np.flatnonzero(which):
        where = group.where_unit(int(place))
        detail = f"multiplier {float(values[place]):.4g}"
        if where.expert is not None:
            detail = f"expert {where.expert}: {detail}"
        notebook.add(code, where, detail)


def check_halves(gate: Group, up: Group, notebook: Notebook) -> None:
    """Gate and up of one expert: one weight_scale_2, or TensorRT-LLM distorts the smaller; and one
    input scale, since they read one input."""
    ups = {unit.expert: place for place, unit in enumerate(up.units())}
    for place, unit in enumerate(gate.units()):
        other = ups.get(unit.expert)
        if other is not None:
            _check_weight_halves(gate, place, up, other, notebook)
            _check_input_halves(gate, place, up, other, notebook)


def _check_weight_halves(
    gate: Group, place: int, up: Group, other: int, notebook: Notebook
) -> None:
    first, second = float(gate.weight_scale_2[place]), float(up.weight_scale_2[other])
    if not (np.isfinite(first) and np.isfinite(second)) or first == second:
        return
    smaller, its = (gate, place) if first < second else (up, other)
    code = Code.GATE_UP_DIFFER
    if max(first, second) <= _ROUNDING * min(first, second):
        code = Code.GATE_UP_ROUNDED
    ratio = max(first, second) / min(first, second)
    where = smaller.where_unit(its)
    detail = (
        f"expert {where.expert}: gate {first:.6g}, up {second:.6g}: {smaller.projection} "
        f"becomes {ratio:.4g} times too large"
    )
    notebook.add(code, where, detail)


def _check_input_halves(gate: Group, place: int, up: Group, other: int, notebook: Notebook) -> None:
    first, second = float(gate.input_scale[place]), float(up.input_scale[other])
    if np.isfinite(first) and np.isfinite(second) and first != second:
        where = gate.where_unit(place)
        detail = f"expert {where.expert}: gate {first:.6g}, up {second:.6g}"
        notebook.add(Code.INPUTS_DIFFER, where, detail)
