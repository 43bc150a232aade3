"""What baking does to block scales, from counts of their bytes.

Every sum here is over blocks that count: positive bytes over weights that are not all zero. Padding
(byte 0) and all-zero blocks lose nothing. Where codes were not read, an all-zero block can only be
guessed: ModelOpt gives it the scale 1.0, byte 0x38, see :func:`assumed_zero_blocks`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trtllm_b12x_fix.formats.e4m3_table import E4M3_MAX, E4M3_VALUES

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

#: RMS error from which a matrix counts as damaged. Rounding normal numbers once more costs a
#: realistic matrix 2.6% on average and 3.9% at most; more takes subnormals or zeros.
LIMIT = 0.05

ONE, LARGEST, NAN, POSITIVE = 0x38, 0x7E, 0x7F, 0x80
#: Baked bytes below this one are subnormal.
_NORMAL = 8
#: A matrix of fewer blocks than this may hold one byte alone, or be another's twin, by chance.
ENOUGH = 64
#: A spike at exactly 1.0 this many times its neighbours, and this high, is all-zero blocks.
_SPIKE, _LEAST = 4, 16

#: fp32 value of each positive byte; 0x7F is NaN.
VALUES = np.array(E4M3_VALUES[:POSITIVE], np.float32)


@dataclass(frozen=True)
class BakeDamage:
    """Damage over a set of blocks, as fractions of those that count.

    Attributes:
        blocks: how many count.
        zero_fraction: baked scales that are exactly 0: 16 weights vanish.
        subnormal_fraction: baked scales that are non-zero E4M3 subnormals.
        mean_error, rms_error, max_error: relative error of the baked scale against
            ``weight_scale * weight_scale_2``; a zero counts as 1.
        weight_error: relative RMS error of the dequantized weights (each block weighted by the
            energy of its codes), ``None`` where codes were not read.
    """

    blocks: int
    zero_fraction: float
    subnormal_fraction: float
    mean_error: float
    rms_error: float
    max_error: float
    weight_error: float | None = None


@dataclass(frozen=True)
class Tally:
    """Sums behind :class:`BakeDamage`, one entry per matrix: fp64 or int64 [N].

    Attributes:
        energy_error, energy: squared error and square of the weights, ``None`` without codes.
    """

    blocks: Counts
    zeros: Counts
    subnormals: Counts
    error: Floats
    square: Floats
    largest: Floats
    energy_error: Floats | None = None
    energy: Floats | None = None

    def one(self, index: int) -> BakeDamage:
        """Damage of one matrix."""
        return self._of(slice(index, index + 1))

    def all(self) -> BakeDamage:
        """Damage of all together."""
        return self._of(slice(None))

    def total(self) -> Tally:
        """All matrices as one entry."""
        return Tally(
            self.blocks.sum(keepdims=True),
            self.zeros.sum(keepdims=True),
            self.subnormals.sum(keepdims=True),
            self.error.sum(keepdims=True),
            self.square.sum(keepdims=True),
            self.largest.max(keepdims=True, initial=0.0),
            None if self.energy_error is None else self.energy_error.sum(keepdims=True),
            None if self.energy is None else self.energy.sum(keepdims=True),
        )

    @staticmethod
    def joined(tallies: list[Tally]) -> Tally:
        """The entries of several tallies; without codes in one of them, without codes."""
        energies = [t.energy for t in tallies if t.energy is not None]
        errors = [t.energy_error for t in tallies if t.energy_error is not None]
        whole = bool(tallies) and len(energies) == len(errors) == len(tallies)
        whole_numbers, floats = np.empty(0, np.int64), np.empty(0)
        return Tally(
            np.concatenate([whole_numbers, *(t.blocks for t in tallies)]),
            np.concatenate([whole_numbers, *(t.zeros for t in tallies)]),
            np.concatenate([whole_numbers, *(t.subnormals for t in tallies)]),
            np.concatenate([floats, *(t.error for t in tallies)]),
            np.concatenate([floats, *(t.square for t in tallies)]),
            np.concatenate([floats, *(t.largest for t in tallies)]),
            np.concatenate(errors) if whole else None,
            np.concatenate(energies) if whole else None,
        )

    def rms(self) -> Floats:
        """RMS error of each matrix, 0 where no block counts."""
        rms: Floats = np.sqrt(self.square / np.maximum(self.blocks, 1))
        return rms

    def _of(self, part: slice) -> BakeDamage:
        blocks = int(self.blocks[part].sum())
        count = max(blocks, 1)
        return BakeDamage(
            blocks,
            int(self.zeros[part].sum()) / count,
            int(self.subnormals[part].sum()) / count,
            float(self.error[part].sum()) / count,
            math.sqrt(float(self.square[part].sum()) / count),
            float(self.largest[part].max(initial=0.0)),
            self._weight_error(part),
        )

    def _weight_error(self, part: slice) -> float | None:
        if self.energy is None or self.energy_error is None:
            return None
        energy = float(self.energy[part].sum())
        return math.sqrt(float(self.energy_error[part].sum()) / energy) if energy > 0 else 0.0


def encode(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Nearest E4M3 byte of positive fp32 values, ties to even, saturating at 448.

    Above 464 older versions of torch made NaN where torch 2.13 saturates; such products are
    counted as a finding, see ``findings``.
    """
    clamped = np.minimum(values, np.float32(E4M3_MAX))
    # Adding 2^23 leaves fp32 no room for a fraction: it rounds to whole multiples of 2^-9, which
    # are their own bytes up to the smallest normal, 8.
    large = np.float32(2.0**23)
    small = (clamped * np.float32(512) + large) - large
    bits = np.ascontiguousarray(clamped).view(np.uint32)
    # Keep 3 of 23 mantissa bits; 7 and 127 are the two exponent biases.
    rounded = bits + np.uint32(0x7FFFF) + ((bits >> np.uint32(20)) & np.uint32(1))
    normal = (rounded >> np.uint32(20)).astype(np.int64) - ((127 - 7) << 3)
    is_small = clamped < np.float32(2.0**-6)
    return np.where(is_small, small, normal).astype(np.uint8)


def bake(weight_scale_2: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """uint8 [N, 127]: what baking makes of each positive byte (NaN left out) of N matrices."""
    products = VALUES[:NAN] * weight_scale_2[:, None]
    return encode(products)


def baked_counts(counts: Counts, weight_scale_2: npt.NDArray[np.float32]) -> Counts:
    """int64 [127]: how often each byte is baked, over N matrices (arguments as :func:`tally`)."""
    with np.errstate(over="ignore", under="ignore"):
        baked = bake(weight_scale_2)[:, 1:]
    total = np.zeros(NAN, np.int64)
    np.add.at(total, baked, counts[:, 1:NAN])
    return total


def tally(
    counts: Counts, weight_scale_2: npt.NDArray[np.float32], energy: Counts | None = None
) -> Tally:
    """Sums over the blocks that count.

    Args:
        counts: int64 [N, 256], how many blocks that count have each byte; only 0x01 to 0x7E are
            looked at: other bytes are no scales (see ``findings``).
        weight_scale_2: fp32 [N], positive and finite.
        energy: int64 [N, 256], squared codes over each byte.
    """
    with np.errstate(over="ignore", under="ignore"):
        baked = bake(weight_scale_2)[:, 1:]
        exact = VALUES[1:NAN].astype(np.float64) * weight_scale_2[:, None].astype(np.float64)
    blocks = counts[:, 1:NAN]
    moved = np.abs(VALUES[baked].astype(np.float64) - exact)
    errors = moved / exact
    energy_error = total = None
    if energy is not None:
        mine = energy[:, 1:NAN].astype(np.float64)
        # Relative to the largest scale first: squares of 1e-30 would underflow.
        unit = exact.max(axis=1, keepdims=True)
        energy_error = (mine * (moved / unit) ** 2).sum(axis=1) * unit[:, 0] ** 2
        total = (mine * (exact / unit) ** 2).sum(axis=1) * unit[:, 0] ** 2
    return Tally(
        blocks.sum(axis=1),
        (blocks * (baked == 0)).sum(axis=1),
        (blocks * ((baked > 0) & (baked < _NORMAL))).sum(axis=1),
        (blocks * errors).sum(axis=1),
        (blocks * errors**2).sum(axis=1),
        np.where(blocks > 0, errors, 0.0).max(axis=1),
        energy_error,
        total,
    )


def assumed_zero_blocks(counts: Counts) -> Counts:
    """int64 [N]: blocks of each matrix that are all zero by the look of its bytes.

    ModelOpt gives an all-zero block the scale 1.0. Scales of real blocks form a smooth curve, so
    what towers above both neighbours of 0x38 is taken for zero blocks. Never more than half of a
    matrix: a matrix of nothing but ones is not sound, and must not pass for padding. And never
    where scales are powers of two, which tower above their neighbours everywhere.

    Args:
        counts: int64 [N, 256].
    """
    excess = spike_at_one(counts)
    total = counts[:, 1:NAN].sum(axis=1)
    powers = counts[:, 8:NAN:8].sum(axis=1) - counts[:, ONE]
    smooth = 2 * powers <= total - counts[:, ONE]
    return np.where((2 * excess <= total) & smooth, excess, 0)


def spike_at_one(counts: Counts) -> Counts:
    """int64 [N]: how many blocks of scale 1.0 stand above both neighbours of that scale."""
    ones = counts[:, ONE]
    beside = np.maximum(counts[:, ONE - 1], counts[:, ONE + 1])
    return np.where(ones >= np.maximum(_SPIKE * beside, _LEAST), ones - beside, 0)


def only_ones(counts: Counts) -> npt.NDArray[np.bool_]:
    """bool [N]: matrices of nothing but scales of 1.0: all zero, or never filled in."""
    ones: npt.NDArray[np.bool_] = (counts[:, ONE] >= ENOUGH) & (
        counts[:, ONE] == counts.sum(axis=1)
    )
    return ones
