"""Whether block scales look like they lie in a kernel's tiles rather than in rows; without torch.

A checkpoint stores block scales linear; a file dumped from a running engine may hold them swizzled
into 128x4 tiles. Where the padded size is the same, nothing but the values can tell.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trtllm_b12x_fix.formats.e4m3_table import E4M3_MIN_SUBNORMAL, E4M3_VALUES, NAN_BYTES

Floats = npt.NDArray[np.float32]

#: Least gain, in share of variance, and least gain in standard errors of noise; the embedded real
#: layer's gates gain 0.035 to 0.15 when they are swizzled, sound and random ones at most 0.005.
_LEAST_GAIN = 0.03
_LEAST_SIGMAS = 8.0
_LEAST_RATIO = 1.5
#: As ``formats.scale_layout``, which needs torch: within a tile, row r and column c sit at byte
#: ``(r % 32) * 16 + (r // 32) * 4 + c``.
TILE_ROWS, TILE_COLUMNS = 128, 4
#: log2 of each byte; a zero scale counts as the smallest there is.
_LOGS = np.log2(
    np.maximum(np.array(E4M3_VALUES[: NAN_BYTES[0]], np.float32), np.float32(E4M3_MIN_SUBNORMAL))
)


def looks_swizzled(block_scale: npt.ArrayLike) -> bool:
    """Whether one matrix's scales make much more sense after unswizzling.

    Trained weights have rows and columns of their own magnitude, which a scrambled order hides. The
    share of the log scales' variance that rows and columns explain is compared under both readings.
    Weak structure, matrices of one column tile (there, swizzling only reorders rows), sizes that
    swizzling would pad and bytes that are NaN or negative are never reported.

    Args:
        block_scale: uint8 [R, C].
    """
    scales: npt.NDArray[Any] = np.asarray(block_scale)
    if not may_be_swizzled(*scales.shape) or int(scales.max()) >= NAN_BYTES[0]:
        return False
    rows, columns = scales.shape
    logs = _LOGS[scales]
    tiles = logs.reshape(rows // TILE_ROWS, columns // TILE_COLUMNS, 32, 4, TILE_COLUMNS)
    # [row tile, column tile, r % 32, r // 32, c] back to rows and columns.
    turned = _explained(tiles.transpose(0, 3, 2, 1, 4).reshape(rows, columns))
    linear = _explained(logs)
    noise = 2.0 * (rows + columns) ** 0.5 / (rows * columns)
    least = max(_LEAST_GAIN, _LEAST_SIGMAS * noise)
    return turned - linear > least and turned > _LEAST_RATIO * linear


def may_be_swizzled(rows: int, columns: int) -> bool:
    """Whether scales of this size could be swizzled in place, and values could tell."""
    whole = not rows % TILE_ROWS and not columns % TILE_COLUMNS
    return whole and rows > 0 and columns > TILE_COLUMNS


def _explained(logs: Floats) -> float:
    """Share of the variance of log scales that row means and column means explain."""
    centred = logs - logs.mean(dtype=np.float64)
    total = float(np.square(centred).sum(dtype=np.float64))
    if total == 0:
        return 0.0
    rows, columns = centred.shape
    by_row = columns * float(np.square(centred.mean(axis=1, dtype=np.float64)).sum())
    by_column = rows * float(np.square(centred.mean(axis=0, dtype=np.float64)).sum())
    return (by_row + by_column) / total
