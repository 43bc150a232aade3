"""Counting scale bytes: 256 counts per matrix, and with codes how much energy each byte carries.

Two implementations with the same counts: numpy, and loops compiled by numba (three to ten times
faster, without the interpreter's lock), used where numba is installed.
"""

from __future__ import annotations

import enum
from functools import cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Counts = npt.NDArray[np.int64]
Places = npt.NDArray[np.int64]

#: Bytes of codes to one byte of block scale.
CODE_BYTES = 8
#: numpy widens bytes to 64 bits for counting: pieces of this many keep that in the cache.
_PIECE = 1 << 18


class CountingBackend(enum.Enum):
    """Who counts."""

    NUMBA = "numba"
    NUMPY = "numpy"


class Counter(Protocol):
    """Adds to tallies of 256; one per thread, since it may own scratch space."""

    def count(self, scales: Bytes, ends: Places, rows: Places, counts: Counts) -> None:
        """Add how often each byte occurs, for several pieces of matrices in one buffer.

        Args:
            scales: uint8 [N], contiguous: the pieces, one behind the other.
            ends: int64 [K], increasing: where each piece ends.
            rows: int64 [K]: which row of ``counts`` a piece belongs to.
            counts: int64 [M, 256], contiguous, added to.
        """

    def weigh(self, scales: Bytes, codes: Bytes, nonzero: Counts, energy: Counts) -> None:
        """Add what each scale byte stands over.

        Args:
            scales: uint8 [N], contiguous.
            codes: uint8 [8 * N], contiguous, the 16 codes of each block together.
            nonzero: int64 [256], added to: blocks with a code that is not (plus or minus) zero.
            energy: int64 [256], added to: sum of squared codes, in quarters (codes are halves).
        """


def code_squares() -> npt.NDArray[np.int64]:
    """int64 [256]: squares of the two codes in a byte, summed, in quarters (0 to 288)."""
    # E2M1 magnitudes in halves: 0, 0.5, 1, 1.5, 2, 3, 4, 6.
    halves = np.array([0, 1, 2, 3, 4, 6, 8, 12], np.int64)
    every = np.arange(256)
    return halves[every & 7] ** 2 + halves[(every >> 4) & 7] ** 2


class NumpyCounter:
    """The :class:`Counter` that needs numpy alone."""

    def __init__(self) -> None:
        self._squares = code_squares()

    def count(self, scales: Bytes, ends: Places, rows: Places, counts: Counts) -> None:
        begin = 0
        for end, row in zip(ends.tolist(), rows.tolist(), strict=True):
            for start in range(begin, end, _PIECE):
                piece = scales[start : min(start + _PIECE, end)]
                counts[row] += np.bincount(piece, minlength=256)
            begin = end

    def weigh(self, scales: Bytes, codes: Bytes, nonzero: Counts, energy: Counts) -> None:
        step = _PIECE // CODE_BYTES
        for start in range(0, scales.size, step):
            piece = scales[start : start + step]
            part = codes[start * CODE_BYTES : (start + step) * CODE_BYTES]
            sums = self._squares[part].reshape(-1, CODE_BYTES).sum(axis=1)
            nonzero += np.bincount(piece[sums > 0], minlength=256)
            # Sums of integers below 2^53 are exact in fp64.
            weighed = np.bincount(piece, weights=sums, minlength=256)
            energy += weighed.astype(np.int64)


@cache
def _numba_module() -> Any:
    """The compiled loops, ``None`` where numba cannot be imported, for whatever reason."""
    try:
        from trtllm_b12x_fix.scan import histogram_numba
    except Exception:  # a numba of another numpy fails with any error
        return None
    return histogram_numba


def best_backend() -> CountingBackend:
    """The faster backend that is installed; the counts do not depend on it."""
    return CountingBackend.NUMPY if _numba_module() is None else CountingBackend.NUMBA


def make_counter(backend: CountingBackend) -> Counter:
    """A counter for one thread."""
    if backend is CountingBackend.NUMPY:
        return NumpyCounter()
    counter: Counter = _numba_module().NumbaCounter()
    return counter


def prepare(backend: CountingBackend) -> None:
    """Compile before any thread starts."""
    if backend is CountingBackend.NUMBA:
        counter = make_counter(backend)
        tally = np.zeros((1, 256), np.int64)
        counter.count(np.zeros(9, np.uint8), np.array([9]), np.array([0]), tally)
        counter.weigh(np.zeros(1, np.uint8), np.zeros(8, np.uint8), tally[0], tally[0])
