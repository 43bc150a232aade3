"""The counting loops of :mod:`.histogram`, compiled by numba.

Two neighbours are one index of a table: counting pairs halves the number of increments, and two
equal bytes in a row no longer wait for each other's increment.

Importing this module imports numba; only :mod:`trtllm_b12x_fix.scan.histogram` does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from trtllm_b12x_fix.scan.histogram import CODE_BYTES, Bytes, Counts, Places, code_squares

_OPTIONS: dict[str, Any] = {"nogil": True}
_u64 = np.uint64
_SIGNS = _u64(0x8080808080808080)
_PAIR = _u64(0xFFFF)
#: Emptying the table of pairs costs as much as counting so many bytes one by one.
_FEW = 4096
#: Words between two emptyings: no pair can overflow 32 bits by then.
_MOST = 1 << 29


def _count_pieces(scales: Any, words: Any, ends: Any, rows: Any, pairs: Any, counts: Any) -> None:
    """Count every piece: whole words of 8 bytes as pairs, what is beside them byte by byte.

    Args:
        words: uint64, the same memory as ``scales``.
        pairs: uint32 [65536], all 0 before and after.
    """
    begin = 0
    for k in range(ends.shape[0]):
        end, count = ends[k], counts[rows[k]]
        first, last = (begin + 7) // 8, end // 8
        # Slices, so that every loop starts at 0: numba need not look for negative places then.
        head, tail = scales[begin : first * 8], scales[last * 8 : end]
        if end - begin < _FEW:
            head, tail, first = scales[begin:end], scales[end:end], last
        begin = end
        for part in (head, tail):
            for i in range(part.shape[0]):
                count[part[i]] += 1
        for start in range(first, last, _MOST):
            piece = words[start : min(start + _MOST, last)]
            seen = _u64(0)
            for i in range(piece.shape[0]):
                word = piece[i]
                seen |= word
                pairs[word & _PAIR] += 1
                pairs[(word >> _u64(16)) & _PAIR] += 1
                pairs[(word >> _u64(32)) & _PAIR] += 1
                pairs[word >> _u64(48)] += 1
            # Sound scales are positive: three quarters of the table were not touched.
            width = 256 if seen & _SIGNS else 128
            for high in range(width):
                total = np.int64(0)
                for low in range(width):
                    pair = np.int64(pairs[high * 256 + low])
                    count[low] += pair
                    total += pair
                    pairs[high * 256 + low] = 0
                count[high] += total


def _weigh(scales: Any, codes: Any, squares: Any, nonzero: Any, energy: Any) -> None:
    for block in range(scales.shape[0]):
        total = np.int64(0)
        for i in range(block * 8, block * 8 + 8):
            total += squares[codes[i]]
        scale = scales[block]
        energy[scale] += total
        nonzero[scale] += np.int64(total > 0)


@cache
def _kernels() -> tuple[Callable[..., None], ...]:
    """The compiled loops, from numba's cache on disk where there is one."""
    try:
        kernels = _compiled(cache=True)
    except Exception:
        # No folder can be written, the disk is full, or what lies in the cache does not load:
        # compile in memory, every time. What is wrong with a loop itself is raised there.
        kernels = _compiled(cache=False)
    return kernels


def _compiled(*, cache: bool) -> tuple[Callable[..., None], ...]:
    """Compile now: before any thread starts, and where a broken cache is met."""
    count, weigh = (numba.njit(**_OPTIONS, cache=cache)(loop) for loop in (_count_pieces, _weigh))
    tally, byte = np.zeros((1, 256), np.int64), np.zeros(8, np.uint8)
    place = np.zeros(1, np.int64)
    count(byte, byte.view(np.uint64), place, place, np.zeros(1 << 16, np.uint32), tally)
    weigh(byte[:1], byte, code_squares(), tally[0], tally[0])
    return count, weigh


class NumbaCounter:
    """The :class:`~trtllm_b12x_fix.scan.histogram.Counter` that needs numba."""

    def __init__(self) -> None:
        self._count, self._weigh = _kernels()
        self._pairs: npt.NDArray[np.uint32] = np.zeros(1 << 16, np.uint32)
        self._squares = code_squares()

    def count(self, scales: Bytes, ends: Places, rows: Places, counts: Counts) -> None:
        # The loop does not check: an end beyond the buffer would read foreign memory.
        assert not ends.size or ends[-1] <= scales.size
        words = scales[: scales.size // 8 * 8].view(np.uint64)
        self._count(scales, words, ends, rows, self._pairs, counts)

    def weigh(self, scales: Bytes, codes: Bytes, nonzero: Counts, energy: Counts) -> None:
        # As above: too few codes.
        assert codes.size == CODE_BYTES * scales.size
        self._weigh(scales, codes, self._squares, nonzero, energy)
