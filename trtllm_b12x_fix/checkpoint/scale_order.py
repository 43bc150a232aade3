"""Whether block scales look like they lie in a kernel's tiles rather than in rows.

A checkpoint stores block scales linear; a file dumped from a running engine may hold them swizzled
into 128x4 tiles. Where the padded size is the same, nothing but the values can tell.
"""

from __future__ import annotations

from torch import Tensor

from trtllm_b12x_fix.formats import e4m3
from trtllm_b12x_fix.formats.scale_layout import COLUMN_TILE, padded_shape, unswizzle

#: Least gain, in share of variance, and least gain in standard errors of noise; the embedded real
#: layer's gates gain 0.035 to 0.15 when they are swizzled, sound and random ones at most 0.005.
_LEAST_GAIN = 0.03
_LEAST_SIGMAS = 8.0
_LEAST_RATIO = 1.5


def looks_swizzled(block_scale: Tensor) -> bool:
    """Whether one matrix's scales make much more sense after unswizzling.

    Trained weights have rows and columns of their own magnitude, which a scrambled order hides. The
    share of the log scales' variance that rows and columns explain is compared under both readings.
    Weak structure, matrices of one column tile (there, swizzling only reorders rows) and sizes that
    swizzling would pad are never reported.

    Args:
        block_scale: uint8 [R, C], neither NaN nor negative.
    """
    rows, columns = block_scale.shape
    if (rows, columns) != padded_shape(rows, columns) or columns == COLUMN_TILE:
        return False
    linear = _explained(block_scale)
    turned = _explained(unswizzle(block_scale, rows, columns))
    noise = 2.0 * (rows + columns) ** 0.5 / (rows * columns)
    least = max(_LEAST_GAIN, _LEAST_SIGMAS * noise)
    return turned - linear > least and turned > _LEAST_RATIO * linear


def _explained(block_scale: Tensor) -> float:
    """Share of the variance of log scales that row means and column means explain."""
    # A zero scale counts as the smallest there is.
    logs = e4m3.decode(block_scale).clamp(min=e4m3.E4M3_MIN_SUBNORMAL).log2()
    logs = logs - logs.mean()
    total = float(logs.square().sum())
    if total == 0:
        return 0.0
    rows, columns = logs.shape
    by_row = columns * float(logs.mean(1).square().sum())
    return (by_row + rows * float(logs.mean(0).square().sum())) / total
