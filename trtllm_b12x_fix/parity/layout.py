"""Where trtllm-gen wants rows and block scales, by FlashInfer's documented index functions.

``get_shuffle_matrix_a_row_indices`` (flashinfer/utils.py) moves the rows of a weight within blocks
of 32, or of 16 if the epilogue tile is no multiple of 128;
``get_reorder_rows_for_gated_act_gemm_row_indices`` (flashinfer/fused_moe/core.py) lays the two
halves of a gated FC1 row by row; ``block_scale_interleave`` puts scales into tiles of 128 by 4, see
:mod:`trtllm_b12x_fix.formats.scale_layout`. Read in the wheels 0.6.16.post3 and 0.7.2.post1.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trtllm_b12x_fix.errors import ShapeError
from trtllm_b12x_fix.formats import scale_layout
from trtllm_b12x_fix.formats.gate_order import GateOrder

EPILOGUE_TILE = 128
_ROWS_PER_STEP = 8


class RowMap(enum.Enum):
    """Where a row goes within its block of rows; the value is the block's size."""

    #: the contract: epilogue tile of 128
    BLOCK_32 = 32
    #: what an epilogue tile of 64 would get
    BLOCK_16 = 16
    UNMOVED = 1


class GateMap(enum.Enum):
    """How the two halves of a gated FC1 stand, before the rows are moved."""

    #: no gate: one half
    NONE = "none"
    #: up row, gate row, up row, ...: the contract
    ALTERNATING_UP_GATE = "alternating, up first"
    ALTERNATING_GATE_UP = "alternating, gate first"
    HALVES_UP_GATE = "up half, then gate half"
    HALVES_GATE_UP = "gate half, then up half"

    @property
    def alternates(self) -> bool:
        return self in (GateMap.ALTERNATING_UP_GATE, GateMap.ALTERNATING_GATE_UP)

    @property
    def order(self) -> GateOrder:
        swapped = self in (GateMap.ALTERNATING_GATE_UP, GateMap.HALVES_GATE_UP)
        return GateOrder.GATE_UP if swapped else GateOrder.UP_GATE


class ScaleMap(enum.Enum):
    """How block scales are stored."""

    INTERLEAVED_128X4 = "128x4-interleaved"
    LINEAR = "linear"


@dataclass(frozen=True)
class Layout:
    """One way of storing a matrix; :func:`contract` gives the right one."""

    rows: RowMap
    gate: GateMap
    scales: ScaleMap

    def but(
        self,
        rows: RowMap | None = None,
        gate: GateMap | None = None,
        scales: ScaleMap | None = None,
    ) -> Layout:
        """The same layout with one thing otherwise."""
        return replace(
            self,
            rows=rows or self.rows,
            gate=gate or self.gate,
            scales=scales or self.scales,
        )


def contract(*, gated: bool) -> Layout:
    """The layout that trtllm-gen's NVFP4 MoE kernels take."""
    gate = GateMap.ALTERNATING_UP_GATE if gated else GateMap.NONE
    return Layout(RowMap.BLOCK_32, gate, ScaleMap.INTERLEAVED_128X4)


def padded(size: int, multiple: int) -> int:
    """``size`` rounded up to a multiple."""
    return -(-size // multiple) * multiple


def row_index(rows: int, layout: Layout) -> Tensor:
    """int64 [rows]: stored row i holds row ``index[i]`` of the linear matrix ([up; gate]).

    Raises:
        ShapeError: rows that are no whole blocks, or an odd number of gated rows.
    """
    index = torch.arange(rows)
    if layout.gate is not GateMap.NONE:
        index = _gate_index(rows, layout.gate)
    block = layout.rows.value
    if rows % block:
        raise ShapeError(f"{rows} rows are no whole blocks of {block}")
    if layout.rows is RowMap.UNMOVED:
        return index
    # Row r of a block goes to place (r % steps) * 8 + r // steps.
    steps = block // _ROWS_PER_STEP
    within = torch.arange(block)
    source = torch.empty(block, dtype=torch.long)
    source[(within % steps) * _ROWS_PER_STEP + within // steps] = within
    return index.view(-1, block)[:, source].flatten()


def _gate_index(rows: int, gate: GateMap) -> Tensor:
    if rows % 2:
        raise ShapeError(f"a gated FC1 needs an even number of rows, got {rows}")
    up, gated = torch.arange(rows).chunk(2)
    first, second = (up, gated) if gate.order is GateOrder.UP_GATE else (gated, up)
    if gate.alternates:
        return torch.stack([first, second], dim=1).flatten()
    return torch.cat([first, second])


def store_rows(linear: Tensor, layout: Layout) -> Tensor:
    """Codes [E, R, C] in linear order to their stored order."""
    return linear[:, row_index(linear.shape[1], layout).to(linear.device)]


def read_rows(stored: Tensor, layout: Layout) -> Tensor:
    """Undo :func:`store_rows`."""
    linear = torch.empty_like(stored)
    linear[:, row_index(stored.shape[1], layout).to(stored.device)] = stored
    return linear


def store_scales(linear: Tensor, layout: Layout) -> Tensor:
    """Block scales uint8 [E, R, G] in linear order to their storage, of the same shape.

    Raises:
        ShapeError: not whole tiles of 128 rows and 4 groups, which interleaving would have to pad.
    """
    _check_tiles(linear, layout)
    moved = store_rows(linear, layout)
    return moved if layout.scales is ScaleMap.LINEAR else scale_layout.swizzle(moved)


def read_scales(stored: Tensor, layout: Layout) -> Tensor:
    """Undo :func:`store_scales`.

    Raises:
        ShapeError: not whole tiles.
    """
    _check_tiles(stored, layout)
    rows, groups = stored.shape[-2:]
    linear = stored
    if layout.scales is ScaleMap.INTERLEAVED_128X4:
        linear = scale_layout.unswizzle(stored, rows, groups)
    return read_rows(linear, layout)


def _check_tiles(scales: Tensor, layout: Layout) -> None:
    rows, groups = scales.shape[-2:]
    if layout.scales is ScaleMap.LINEAR:
        return
    if (rows, groups) != scale_layout.padded_shape(rows, groups):
        raise ShapeError(
            f"block scales {tuple(scales.shape)} are no whole tiles of "
            f"{scale_layout.ROW_TILE} rows by {scale_layout.COLUMN_TILE} groups"
        )
