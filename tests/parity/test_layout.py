"""Where rows and scales are stored, against FlashInfer's documented index functions."""

from __future__ import annotations

import pytest
import torch

from tests.parity import oracle
from trtllm_b12x_fix.errors import ShapeError
from trtllm_b12x_fix.integrations import vllm_host
from trtllm_b12x_fix.parity import layout
from trtllm_b12x_fix.parity.layout import GateMap, RowMap, ScaleMap

LAYOUTS = [
    layout.Layout(rows, gate, scales) for rows in RowMap for gate in GateMap for scales in ScaleMap
]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [128, 384])
def test_rows_are_stored_where_the_documented_map_says(rows, gated):
    index = layout.row_index(rows, layout.contract(gated=gated))
    for row in range(rows):
        assert index[oracle.stored_row(row, rows, gated=gated)] == row


def test_blocks_of_16_follow_the_other_documented_map():
    right = layout.contract(gated=False).but(rows=RowMap.BLOCK_16)
    # srcToDstBlk16RowMap: row r goes to [0, 8, 1, 9, 2, 10, ...][r].
    assert layout.row_index(32, right)[:16].tolist() == [*range(0, 16, 2), *range(1, 16, 2)]


@pytest.mark.parametrize(("rows", "groups"), [(128, 4), (256, 12), (384, 176)])
def test_scales_are_interleaved_at_the_documented_offset(rows, groups):
    linear = torch.randint(0, 256, (rows, groups), dtype=torch.uint8)
    stored = vllm_host.interleave(linear)
    for row in (0, 1, 31, 32, 97, 127, rows - 1):
        for group in range(groups):
            assert stored[oracle.stored_scale(row, group, groups)] == linear[row, group]


@pytest.mark.parametrize("kind", LAYOUTS, ids=str)
def test_reading_undoes_storing(kind):
    codes = torch.randint(0, 256, (2, 256, 40), dtype=torch.uint8)
    scales = torch.randint(0, 256, (2, 256, 8), dtype=torch.uint8)
    assert torch.equal(layout.read_rows(layout.store_rows(codes, kind), kind), codes)
    assert torch.equal(layout.read_scales(layout.store_scales(scales, kind), kind), scales)


def test_every_layout_stores_something_else():
    codes = torch.arange(256, dtype=torch.uint8).repeat_interleave(8).view(1, 256, 8)
    stored = {
        layout.store_rows(codes, kind).numpy().tobytes()
        for kind in LAYOUTS
        if kind.scales is ScaleMap.LINEAR
    }
    # Two halves, up first, is what no gate at all stores.
    assert len(stored) == len(RowMap) * (len(GateMap) - 1)


@pytest.mark.parametrize(
    ("rows", "kind", "words"),
    [
        (100, layout.contract(gated=False), "blocks of 32"),
        (33, layout.contract(gated=True).but(rows=RowMap.UNMOVED), "even number"),
    ],
)
def test_rows_that_no_block_divides_are_refused(rows, kind, words):
    with pytest.raises(ShapeError, match=words):
        layout.row_index(rows, kind)


def test_scales_that_no_tile_divides_are_refused():
    with pytest.raises(ShapeError, match="whole tiles"):
        layout.store_scales(torch.zeros(1, 128, 6, dtype=torch.uint8), layout.contract(gated=False))
