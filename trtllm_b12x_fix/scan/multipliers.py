"""Scales of whole matrices (weight_scale_2, input_scale): read, made multipliers, judged."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trtllm_b12x_fix.checkpoint.conventions import Dialect
from trtllm_b12x_fix.checkpoint.files import Checkpoint
from trtllm_b12x_fix.checkpoint.header import TensorInfo
from trtllm_b12x_fix.scan.findings import Code, Notebook, Where
from trtllm_b12x_fix.scan.inventory import Group
from trtllm_b12x_fix.scan.reading import FLOATS, Shards, Span, read_many, to_floats

Floats = npt.NDArray[np.float32]

#: A NaN that no conversion makes: the place of a scale that was not there to read, which has a
#: finding already.
_UNREAD = np.uint32(0x7FC0_B12F)


class _Wanted(NamedTuple):
    """Where a tensor's numbers go: into which array, and to which places of it."""

    dtype: str
    target: Floats
    first: int
    places: int


def read_globals(
    checkpoint: Checkpoint,
    shards: Shards,
    groups: list[Group],
    notebook: Notebook,
    *,
    input_scales: bool,
) -> None:
    """Fill every group's ``weight_scale_2`` and ``input_scale``; NaN where unusable.

    Args:
        input_scales: whether a missing input scale is a finding (W4A16 has none).

    Raises:
        InputError: a file cannot be read.
    """
    wanted: dict[Span, list[_Wanted]] = defaultdict(list)
    for group in groups:
        group.weight_scale_2 = _unread(len(group.units))
        group.input_scale = _unread(len(group.units))
        _plan(checkpoint, shards, group, wanted, notebook, input_scales)
    for span, raw in read_many(shards, wanted):
        for one in wanted[span]:
            one.target[one.first : one.first + one.places] = to_floats(raw, one.dtype)
    for group in groups:
        _judge(checkpoint, group, notebook)


def _plan(
    checkpoint: Checkpoint,
    shards: Shards,
    group: Group,
    wanted: dict[Span, list[_Wanted]],
    notebook: Notebook,
    input_scales: bool,
) -> None:
    """Experts of a fused tensor stand one after the other and share a spelling."""
    place = 0
    for _, same in itertools.groupby(group.spellings, id):
        one, *others = same
        count = 1 + len(others)
        for tensor, target in (
            (one.weight_global, group.weight_scale_2),
            (one.input_global, group.input_scale),
        ):
            info = checkpoint.tensors.get(tensor)
            if info is not None and info.dtype in FLOATS and math.prod(info.shape) in {1, count}:
                wanted[shards.span(tensor, info)].append(_Wanted(info.dtype, target, place, count))
                continue
            needed = input_scales or target is group.weight_scale_2
            expert = group.units[place].expert
            where = group.where(tensor, expert, checkpoint.file_of(tensor))
            _note_unread(checkpoint, info, where, count, notebook, needed=needed)
        place += count


def _note_unread(
    checkpoint: Checkpoint,
    info: TensorInfo | None,
    where: Where,
    count: int,
    notebook: Notebook,
    *,
    needed: bool,
) -> None:
    """Why a scale cannot be read."""
    if info is None:
        absent = not checkpoint.has(where.tensor)
        if absent and needed:
            notebook.add(Code.MISSING, where)
        elif not absent and not checkpoint.partial:
            notebook.add(Code.MISSING_SHARD, where)
    elif info.dtype not in FLOATS:
        notebook.add(Code.UNREADABLE, where, f"a scale must be floating, got {info.dtype}")
    else:
        detail = (
            f"a scale must be one number{' or one for each expert' if count > 1 else ''}, got "
            f"{list(info.shape)}"
        )
        notebook.add(Code.UNREADABLE, where, detail)


def _judge(checkpoint: Checkpoint, group: Group, notebook: Notebook) -> None:
    """Reciprocals become multipliers; values that no kernel can use become NaN and a finding."""
    reciprocal = np.array(
        [one.dialect is Dialect.COMPRESSED_TENSORS for one in group.spellings], np.bool_
    )
    for values, is_weight in ((group.weight_scale_2, True), (group.input_scale, False)):
        stored = values.copy()
        with np.errstate(all="ignore"):
            values[reciprocal] = np.float32(1) / values[reciprocal]
        bad = ~(np.isfinite(stored) & (stored > 0) & np.isfinite(values) & (values > 0))
        for place in np.flatnonzero(bad & ~_is_unread(stored)):
            spelling = group.spellings[place]
            tensor = spelling.weight_global if is_weight else spelling.input_global
            code = Code.BAD_WEIGHT_SCALE_2 if is_weight else Code.BAD_INPUT_SCALE
            where = group.where(tensor, group.units[place].expert, checkpoint.file_of(tensor))
            notebook.add(code, where, f"it is {float(stored[place])!r}")
        values[bad] = np.nan


def _unread(count: int) -> Floats:
    return np.full(count, _UNREAD, np.uint32).view(np.float32)


def _is_unread(values: Floats) -> npt.NDArray[np.bool_]:
    unread: npt.NDArray[np.bool_] = values.view(np.uint32) == _UNREAD
    return unread
