"""Routed rows times packed expert matrices on a CPU, compiled by numba: decoding in the loop.

A look-up by scale byte and code byte gives two finished weights, so a weight row is decoded once
into a buffer of a few kilobytes and meets all rows of its expert there. Threads are ordinary ones
that run compiled code without the interpreter's lock: numba's own threading layers need libraries
that may be missing, and do not survive a fork.

Importing this module imports numba; only :mod:`trtllm_b12x_fix.emulator.grouped` does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from trtllm_b12x_fix.formats import nvfp4

VERSION: str = numba.__version__

# Additions may be reordered, as in any GEMM. NaN and infinity keep their meaning: a scale byte may
# be NaN, and has to reach the output.
_OPTIONS: dict[str, Any] = {"nogil": True, "fastmath": {"reassoc", "contract"}}
#: A group, its first and its last weight row.
Task = tuple[int, int, int]
#: Tasks per thread: enough for the last ones to end together, few enough to cost nothing.
_TASKS_PER_THREAD = 16
#: Cost of decoding one weight, in multiplications by it.
_DECODE_COST = 4


def grouped(
    operand: Tensor,
    rows: Tensor,
    packed: Tensor,
    block_scale: Tensor,
    groups: list[tuple[int, Tensor]],
    columns: list[slice],
) -> Tensor:
    """See :func:`trtllm_b12x_fix.emulator.grouped.grouped_matmul`, which checks all arguments.

    This loop does not: an index out of range reads foreign memory.

    Args:
        operand: fp32 or fp64 [N, C]; sums are in its dtype.

    Returns:
        [n_routes, S, R] in the operand's dtype.
    """
    out = torch.empty(rows.numel(), len(columns), packed.shape[1], dtype=operand.dtype)
    values, codes, scales, target = (_numpy(t) for t in (operand, packed, block_scale, out))
    source = _numpy(rows)
    slices = np.array([(part.start, part.stop) for part in columns], np.int64)
    routes = [_numpy(group) for _, group in groups]
    kernel, table = _kernel(), _table()

    def work(task: Task) -> None:
        group, first, last = task
        expert, mine = groups[group][0], routes[group]
        kernel(
            values, source[mine], mine, codes[expert], scales[expert], table, slices, target,
            first, last,
        )  # fmt: skip

    threads = torch.get_num_threads()
    tasks = _tasks([len(mine) for mine in routes], packed.shape[1], threads)
    _share(work, tasks, threads)
    return out


def _share(work: Callable[[Task], None], tasks: list[Task], threads: int) -> None:
    """Do all tasks: this thread too takes one after the other, so that none waits for a hand-over.

    Raises:
        Exception: whatever a task raises, once every thread has stopped.
    """
    pending = deque(tasks)

    def drain() -> None:
        while pending:
            try:
                task = pending.popleft()
            except IndexError:  # another thread was faster
                return
            work(task)

    helpers = min(threads, len(tasks)) - 1
    if helpers < 1:
        drain()
        return
    with ThreadPoolExecutor(helpers) as pool:
        running = [pool.submit(drain) for _ in range(helpers)]
        drain()
        for one in running:
            one.result()


def _numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    return tensor.detach().contiguous().numpy()


def _tasks(counts: list[int], rows: int, threads: int) -> list[Task]:
    """(group, first weight row, last weight row) of about equal cost, the costliest groups first.

    Args:
        counts: routed rows of each group.
        rows: weight rows of an expert.
    """
    costs = [_DECODE_COST + count for count in counts]
    budget = sum(costs) * rows / (threads * _TASKS_PER_THREAD)
    tasks = []
    for group in sorted(range(len(counts)), key=counts.__getitem__, reverse=True):
        step = max(1, int(budget / costs[group]))
        starts = range(0, rows, step) if counts[group] else ()
        tasks += [(group, first, min(first + step, rows)) for first in starts]
    return tasks


@cache
def _table() -> np.ndarray[Any, Any]:
    """uint64 [256, 256]: by scale byte and code byte, two fp32 weights in one word.

    fp32 holds every weight exactly, so fp64 sums use the same table.
    """
    scales = torch.arange(256, dtype=torch.uint8).repeat_interleave(256)
    codes = torch.arange(256, dtype=torch.uint8).repeat(256)
    blocks = codes.unsqueeze(1).expand(-1, nvfp4.BLOCK // 2).contiguous()
    pairs = nvfp4.operand(blocks, scales.unsqueeze(1))[:, :2].contiguous()
    return pairs.numpy().view(np.uint64).reshape(256, 256)


def _decode_row(codes: Any, scales: Any, table: Any, buffer: Any) -> None:
    """One weight row, codes uint8 [C/2] and scales uint8 [C/16], into buffer uint64 [C/2]."""
    for block in range(scales.shape[0]):
        line = table[scales[block]]
        for i in range(block * 8, block * 8 + 8):
            buffer[i] = line[codes[i]]


_decode_row_compiled = numba.njit(**_OPTIONS)(_decode_row)


def _expert(
    values: Any, source: Any, routes: Any, codes: Any, scales: Any, table: Any, slices: Any,
    out: Any, first: int, last: int,
) -> None:  # fmt: skip
    """Weight rows first..last of one expert times its routed rows, source [n] of values [N, C]."""
    real = values.dtype.type
    buffer = np.empty(codes.shape[1], np.uint64)
    weights = buffer.view(np.float32)
    count = len(routes)
    paired = count - count % 4
    for row in range(first, last):
        _decode_row_compiled(codes[row], scales[row], table, buffer)
        for part in range(slices.shape[0]):
            # Views that start at 0: an index that might be negative would not vectorize.
            span = slice(slices[part, 0], slices[part, 1])
            weight = weights[span]
            # Four rows at a time: each decoded weight is read once for all of them.
            for k in range(0, paired, 4):
                a, b = values[source[k]][span], values[source[k + 1]][span]
                c, d = values[source[k + 2]][span], values[source[k + 3]][span]
                sum_a = sum_b = sum_c = sum_d = real(0)
                for j in range(len(weight)):
                    w = real(weight[j])
                    sum_a += w * a[j]
                    sum_b += w * b[j]
                    sum_c += w * c[j]
                    sum_d += w * d[j]
                out[routes[k], part, row] = sum_a
                out[routes[k + 1], part, row] = sum_b
                out[routes[k + 2], part, row] = sum_c
                out[routes[k + 3], part, row] = sum_d
            for k in range(paired, count):
                a = values[source[k]][span]
                sum_a = real(0)
                for j in range(len(weight)):
                    sum_a += real(weight[j]) * a[j]
                out[routes[k], part, row] = sum_a


@cache
def _kernel() -> Callable[..., None]:
    """The compiled loop for fp32 and fp64, from numba's cache on disk where there is one."""
    try:
        kernel = numba.njit(**_OPTIONS, cache=True)(_expert)
        _warm_up(kernel)
    except Exception:
        # No folder can be written, the disk is full, or what lies in the cache does not load:
        # compile in memory, every time. What is wrong with the loop itself is raised there.
        kernel = numba.njit(**_OPTIONS)(_expert)
        _warm_up(kernel)
    return kernel


def _warm_up(kernel: Callable[..., None]) -> None:
    """Compile before any thread starts, and meet a broken cache here rather than there."""
    index = np.zeros(1, np.int64)
    codes, scales = np.zeros((1, 8), np.uint8), np.zeros((1, 1), np.uint8)
    slices = np.array([(0, 16)], np.int64)
    for dtype in (np.float32, np.float64):
        values, out = np.zeros((1, 16), dtype), np.zeros((1, 1, 1), dtype)
        kernel(values, index, index, codes, scales, _table(), slices, out, 0, 1)
