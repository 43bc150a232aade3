"""Storage layouts of block scales: linear, 128x4-swizzled, and the 6-D MMA view.

Tensor cores read scales in tiles of 128 rows by 4 block columns. Within a tile, row r and column
c sit at byte ``(r % 32) * 16 + (r // 32) * 4 + c``. The 6-D "MMA layout" that FlashInfer's kernels
take is a strided view of the same storage: [32, 4, row tiles, 4, column tiles, groups].
"""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_b12x_fix.errors import ShapeError

ROW_TILE = 128
COLUMN_TILE = 4


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def padded_shape(rows: int, columns: int) -> tuple[int, int]:
    """Rows and block columns after padding to whole 128x4 tiles."""
    return _round_up(rows, ROW_TILE), _round_up(columns, COLUMN_TILE)


def swizzle(linear: Tensor) -> Tensor:
    """Linear scales [..., R, C] to swizzled storage of the padded shape [..., R', C'].

    Padding rows and columns hold zero bytes. One-byte dtypes only (uint8 or float8_e4m3fn).

    Raises:
        ShapeError: fewer than two dimensions.
    """
    if linear.dim() < 2:
        raise ShapeError(f"block scales need [..., rows, columns], got {tuple(linear.shape)}")
    rows, columns = linear.shape[-2:]
    padded_rows, padded_columns = padded_shape(rows, columns)
    raw = linear.view(torch.uint8)
    padded = raw.new_zeros(*raw.shape[:-2], padded_rows, padded_columns)
    padded[..., :rows, :columns] = raw
    tiles = padded.reshape(
        -1, padded_rows // ROW_TILE, 4, 32, padded_columns // COLUMN_TILE, COLUMN_TILE
    )
    # [group, row tile, r // 32, r % 32, column tile, c] -> tile-major, then r % 32, r // 32, c
    storage = tiles.permute(0, 1, 4, 3, 2, 5).reshape(padded.shape)
    return storage.contiguous().view(linear.dtype)


def unswizzle(swizzled: Tensor, rows: int, columns: int) -> Tensor:
    """Swizzled storage [..., R', C'] back to linear scales [..., rows, columns].

    Raises:
        ShapeError: the storage is not the padded shape of ``rows`` x ``columns``.
    """
    padded_rows, padded_columns = padded_shape(rows, columns)
    if tuple(swizzled.shape[-2:]) != (padded_rows, padded_columns):
        raise ShapeError(
            f"swizzled scales of {rows}x{columns} must be stored as "
            f"{padded_rows}x{padded_columns}, got {tuple(swizzled.shape)}"
        )
    tiles = swizzled.view(torch.uint8).reshape(
        -1, padded_rows // ROW_TILE, padded_columns // COLUMN_TILE, 32, 4, COLUMN_TILE
    )
    padded = tiles.permute(0, 1, 4, 3, 2, 5).reshape(swizzled.shape)
    return padded[..., :rows, :columns].contiguous().view(swizzled.dtype)


def to_mma(swizzled: Tensor) -> Tensor:
    """Swizzled storage [G, R', C'] as the 6-D MMA view; shares memory with its argument.

    Returns:
        View of shape [32, 4, R'/128, 4, C'/4, G].

    Raises:
        ShapeError: not three dimensions, or not whole tiles.
    """
    if swizzled.dim() != 3 or swizzled.shape[1] % ROW_TILE or swizzled.shape[2] % COLUMN_TILE:
        raise ShapeError(
            f"need swizzled scales [groups, rows % 128 == 0, columns % 4 == 0], "
            f"got {tuple(swizzled.shape)}"
        )
    groups, rows, columns = swizzled.shape
    tiles = swizzled.view(groups, rows // ROW_TILE, columns // COLUMN_TILE, 32, 4, COLUMN_TILE)
    return tiles.permute(3, 4, 1, 5, 2, 0)


def from_mma(mma: Tensor) -> Tensor:
    """The 6-D MMA view back to swizzled storage [G, R', C']; a view where strides allow.

    Raises:
        ShapeError: not a [32, 4, row tiles, 4, column tiles, groups] tensor.
    """
    if mma.dim() != 6 or (mma.shape[0], mma.shape[1], mma.shape[3]) != (32, 4, COLUMN_TILE):
        raise ShapeError(
            f"need the 6-D MMA layout [32, 4, row tiles, 4, column tiles, groups], "
            f"got {tuple(mma.shape)}"
        )
    tiles = mma.permute(5, 2, 4, 0, 1, 3)
    groups, row_tiles, column_tiles = tiles.shape[:3]
    return tiles.reshape(groups, row_tiles * ROW_TILE, column_tiles * COLUMN_TILE)
