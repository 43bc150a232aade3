"""The counting loops of :mod:`.histogram`, compiled by numba.

Scale bytes are positive, so two neighbours make an index below 2^15: counting pairs halves the
number of increments, and two equal bytes in a row no longer wait for each other's increment.

Importing this module imports numba; only :mod:`trtllm_b12x_fix.scan.histogram` does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from trtllm_b12x_fix.scan.histogram import CODE_BYTES, Bytes, Counts, code_squares

_OPTIONS: dict[str, Any] = {"nogil": True}
_u64 = np.uint64
_SIGNS = _u64(0x8080808080808080)
_PAIR, _BYTE = _u64(0xFFFF), _u64(0xFF)
#: Bytes between two folds: no pair can overflow 32 bits by then.
_MOST = 1 << 30


def _count_words(words: Any, pairs: Any, counts: Any) -> None:
    """Count the bytes of uint64 words: pairs of positive bytes into uint32 [32768], others into
    int64 [256] one by one."""
    for i in range(words.shape[0]):
        word = words[i]
        if word & _SIGNS:
            for k in range(8):
                counts[(word >> _u64(8 * k)) & _BYTE] += 1
        else:
            pairs[word & _PAIR] += 1
            pairs[(word >> _u64(16)) & _PAIR] += 1
            pairs[(word >> _u64(32)) & _PAIR] += 1
            pairs[word >> _u64(48)] += 1


def _fold(pairs: Any, counts: Any) -> None:
    """Move the pairs' counts to those of single bytes."""
    for high in range(128):
        total = np.int64(0)
        for low in range(128):
            count = np.int64(pairs[high * 256 + low])
            counts[low] += count
            total += count
            pairs[high * 256 + low] = 0
        counts[high] += total


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
    count, fold, weigh = (
        numba.njit(**_OPTIONS, cache=cache)(loop) for loop in (_count_words, _fold, _weigh)
    )
    tally, byte = np.zeros(256, np.int64), np.zeros(8, np.uint8)
    pairs = np.zeros(1 << 15, np.uint32)
    count(byte.view(np.uint64), pairs, tally)
    fold(pairs, tally)
    weigh(byte[:1], byte, code_squares(), tally, tally)
    return count, fold, weigh


class NumbaCounter:
    """The :class:`~trtllm_b12x_fix.scan.histogram.Counter` that needs numba."""

    def __init__(self) -> None:
        self._count, self._fold, self._weigh = _kernels()
        self._pairs: npt.NDArray[np.uint32] = np.zeros(1 << 15, np.uint32)
        self._squares = code_squares()

    def count(self, scales: Bytes, counts: Counts) -> None:
        for start in range(0, scales.size, _MOST):
            piece = scales[start : start + _MOST]
            whole = piece.size // 8 * 8
            self._count(piece[:whole].view(np.uint64), self._pairs, counts)
            self._fold(self._pairs, counts)
            counts += np.bincount(piece[whole:], minlength=256)

    def weigh(self, scales: Bytes, codes: Bytes, nonzero: Counts, energy: Counts) -> None:
        # The loop does not check: too few codes would read foreign memory.
        assert codes.size == CODE_BYTES * scales.size
        self._weigh(scales, codes, self._squares, nonzero, energy)
