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
Flags = npt.NDArray[np.bool_]


class _Wanted(NamedTuple):
    """Where a tensor's numbers go: into which array, and to which places of it."""

    dtype: str
    target: Floats
    read: Flags
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
        input_scales: whether a missing input scale is a finding (W4A16 has none). Where no matrix
            of a layer has one, the layer is W4A16 whatever a config says.

    Raises:
        InputError: a file cannot be read.
    """
    wanted: dict[Span, list[_Wanted]] = defaultdict(list)
    quantizing = {group.layer for group in groups if _has_inputs(checkpoint, group)}
    read = []
    for group in groups:
        count = len(group.units)
        group.weight_scale_2 = np.full(count, np.nan, np.float32)
        group.input_scale = np.full(count, np.nan, np.float32)
        group.weight_only = group.layer not in quantizing
        if group.weight_only and input_scales:
            notebook.add(Code.WEIGHT_ONLY, group.where(group.spellings[0].input_global))
        # Apart from the numbers: a file may hold any NaN.
        read.append((np.zeros(count, np.bool_), np.zeros(count, np.bool_)))
        needed = input_scales and not group.weight_only
        _plan(checkpoint, shards, group, read[-1], wanted, notebook, needed)
    for span, raw in read_many(shards, wanted):
        for one in wanted[span]:
            part = slice(one.first, one.first + one.places)
            one.target[part] = to_floats(raw, one.dtype)
            one.read[part] = True
    for group, masks in zip(groups, read, strict=True):
        _judge(checkpoint, group, masks, notebook)


def _has_inputs(checkpoint: Checkpoint, group: Group) -> bool:
    return any(checkpoint.has(one.input_global) for one in group.spellings)


def _plan(
    checkpoint: Checkpoint,
    shards: Shards,
    group: Group,
    read: tuple[Flags, Flags],
    wanted: dict[Span, list[_Wanted]],
    notebook: Notebook,
    input_scales: bool,
) -> None:
    """Experts of a fused tensor stand one after the other and share a spelling."""
    place = 0
    for _, same in itertools.groupby(group.spellings, id):
        one, *others = same
        count = 1 + len(others)
        for tensor, target, mask in (
            (one.weight_global, group.weight_scale_2, read[0]),
            (one.input_global, group.input_scale, read[1]),
        ):
            info = checkpoint.tensors.get(tensor)
            if info is not None and info.dtype in FLOATS and math.prod(info.shape) in {1, count}:
                place_of = _Wanted(info.dtype, target, mask, place, count)
                wanted[shards.span(tensor, info)].append(place_of)
                group.one_scale |= tensor == one.weight_global and math.prod(info.shape) < count
                continue
            needed = input_scales or target is group.weight_scale_2
            expert = group.units[place].expert
            where = group.where(tensor, expert, checkpoint.file_of(tensor))
            _note_unread(checkpoint, info, where, count, notebook, needed=needed)
            if info is None and checkpoint.partial and checkpoint.has(tensor):
                weight = target is group.weight_scale_2
                code = Code.WEIGHT_SCALE_ELSEWHERE if weight else Code.INPUT_SCALE_ELSEWHERE
                for unit in group.units[place : place + count]:
                    notebook.add(code, group.where(tensor, unit.expert, where.file))
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


def _judge(
    checkpoint: Checkpoint, group: Group, read: tuple[Flags, Flags], notebook: Notebook
) -> None:
    """Reciprocals become multipliers; values that no kernel can use become NaN and a finding."""
    reciprocal = np.array(
        [one.dialect is Dialect.COMPRESSED_TENSORS for one in group.spellings], np.bool_
    )
    for values, mask, is_weight in (
        (group.weight_scale_2, read[0], True),
        (group.input_scale, read[1], False),
    ):
        stored = values.copy()
        with np.errstate(all="ignore"):
            values[reciprocal] = np.float32(1) / values[reciprocal]
        bad = ~(np.isfinite(stored) & (stored > 0) & np.isfinite(values) & (values > 0))
        for place in np.flatnonzero(bad & mask):
            spelling = group.spellings[place]
            tensor = spelling.weight_global if is_weight else spelling.input_global
            code = Code.BAD_WEIGHT_SCALE_2 if is_weight else Code.BAD_INPUT_SCALE
            where = group.where(tensor, group.units[place].expert, checkpoint.file_of(tensor))
            notebook.add(code, where, f"it is {float(stored[place])!r}")
        values[bad] = np.nan
