"""Scales of whole matrices (weight_scale_2, input_scale): read, made multipliers, judged."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trtllm_b12x_fix.checkpoint.conventions import Dialect
from trtllm_b12x_fix.checkpoint.files import Checkpoint
from trtllm_b12x_fix.checkpoint.header import TensorInfo
from trtllm_b12x_fix.scan.bake import Bake
from trtllm_b12x_fix.scan.findings import Code, Notebook, Where
from trtllm_b12x_fix.scan.groups import Floats, Group, Stored
from trtllm_b12x_fix.scan.reading import FLOATS, Shards, Span, read_many, to_floats

Flags = npt.NDArray[np.bool_]

#: Tensors of scales that are planned for at once: each costs half a kilobyte until it is read.
_BATCH = 1 << 14


class _Wanted(NamedTuple):
    """Where a tensor's numbers go: into which array, and to which places of it."""

    dtype: str
    target: Floats
    read: Flags
    places: slice


class _Scale(NamedTuple):
    """One of the two scales of a group: the numbers, and which of them were read."""

    values: Floats
    read: Flags
    is_weight: bool

    def tensor(self, one: Stored) -> str:
        return one.spelling.weight_global if self.is_weight else one.spelling.input_global


def read_globals(
    checkpoint: Checkpoint, shards: Shards, groups: list[Group], notebook: Notebook
) -> None:
    """Fill every group's ``weight_scale_2`` and ``input_scale``; NaN where unusable.

    A missing input scale is a finding where the layer has others; see :mod:`.decide_bake`.

    Raises:
        InputError: a file cannot be read.
    """
    for batch in _batches(groups):
        wanted: dict[Span, list[_Wanted]] = defaultdict(list)
        scales = [_plan(checkpoint, shards, group, wanted, notebook) for group in batch]
        for span, raw in read_many(shards, wanted):
            for one in wanted[span]:
                one.target[one.places] = to_floats(raw, one.dtype)
                one.read[one.places] = True
        for group, both in zip(batch, scales, strict=True):
            for scale in both:
                _judge(checkpoint, group, scale, notebook)


def _batches(groups: list[Group]) -> Iterator[list[Group]]:
    batch: list[Group] = []
    size = 0
    for group in groups:
        if batch and size + len(group.stored) > _BATCH:
            yield batch
            batch, size = [], 0
        batch.append(group)
        size += len(group.stored)
    if batch:
        yield batch


def _plan(
    checkpoint: Checkpoint,
    shards: Shards,
    group: Group,
    wanted: dict[Span, list[_Wanted]],
    notebook: Notebook,
) -> tuple[_Scale, _Scale]:
    """Put down what to read; what cannot be read is a finding."""
    count = len(group)
    group.weight_scale_2 = np.full(count, np.nan, np.float32)
    group.input_scale = np.full(count, np.nan, np.float32)
    # Apart from the numbers: a file may hold any NaN.
    both = (
        _Scale(group.weight_scale_2, np.zeros(count, np.bool_), is_weight=True),
        _Scale(group.input_scale, np.zeros(count, np.bool_), is_weight=False),
    )
    first = 0
    for one in group.stored:
        places = slice(first, first + one.count)
        for scale in both:
            tensor = scale.tensor(one)
            info = checkpoint.tensors.get(tensor)
            if info is None or info.dtype not in FLOATS or _size(info) not in {1, one.count}:
                needed = scale.is_weight or (group.bake is Bake.YES and not group.lost_inputs)
                _note_unread(checkpoint, group, one, tensor, info, scale, notebook, needed=needed)
                continue
            wanted[shards.span(tensor, info)].append(
                _Wanted(info.dtype, scale.values, scale.read, places)
            )
            group.one_scale |= scale.is_weight and _size(info) < one.count
        first = places.stop
    return both


def _size(info: TensorInfo) -> int:
    return math.prod(info.shape)


def _note_unread(
    checkpoint: Checkpoint,
    group: Group,
    one: Stored,
    tensor: str,
    info: TensorInfo | None,
    scale: _Scale,
    notebook: Notebook,
    *,
    needed: bool,
) -> None:
    """Why a scale cannot be read."""
    where = group.where(tensor, one.unit(0).expert, checkpoint.file_of(tensor))
    if info is not None:
        notebook.add(Code.UNREADABLE, where, _unreadable(info, one.count))
    elif not checkpoint.has(tensor):
        if needed:
            notebook.add(Code.MISSING, where)
    elif not checkpoint.partial:
        notebook.add(Code.MISSING_SHARD, where)
    else:
        code = Code.WEIGHT_SCALE_ELSEWHERE if scale.is_weight else Code.INPUT_SCALE_ELSEWHERE
        notebook.add(code, where, places=one.count)


def _unreadable(info: TensorInfo, count: int) -> str:
    if info.dtype not in FLOATS:
        return f"a scale must be floating, got {info.dtype}"
    each = " or one for each expert" if count > 1 else ""
    return f"a scale must be one number{each}, got {list(info.shape)}"


def _judge(checkpoint: Checkpoint, group: Group, scale: _Scale, notebook: Notebook) -> None:
    """Reciprocals become multipliers; values that no kernel can use become NaN and a finding."""
    reciprocal = group.per_matrix(
        [one.spelling.dialect is Dialect.COMPRESSED_TENSORS for one in group.stored]
    )
    values, stored = scale.values, scale.values.copy()
    with np.errstate(all="ignore"):
        values[reciprocal] = np.float32(1) / values[reciprocal]
    bad = ~(np.isfinite(stored) & (stored > 0) & np.isfinite(values) & (values > 0))
    for place in np.flatnonzero(bad & scale.read):
        tensor = scale.tensor(group.stored_at(int(place))[0])
        code = Code.BAD_WEIGHT_SCALE_2 if scale.is_weight else Code.BAD_INPUT_SCALE
        where: Where = group.where(
            tensor, group.unit(int(place)).expert, checkpoint.file_of(tensor)
        )
        notebook.add(code, where, f"it is {float(stored[place])!r}")
    values[bad] = np.nan
