"""Scale layouts: our formula, FlashInfer's own functions, and the way back.

FlashInfer's functions run in a process of their own (they are not importable beside torch alone).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trtllm_b12x_fix.errors import ShapeError
from trtllm_b12x_fix.formats import scale_layout

SIZES = [(128, 4), (256, 12), (128, 64), (1, 1), (200, 10), (130, 5), (512, 40)]
HARNESS = Path(__file__).parents[1] / "flashinfer"


def numbered(rows: int, columns: int) -> torch.Tensor:
    """Bytes from which a place can be told: no two neighbours are equal."""
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    return torch.randint(1, 120, (rows, columns), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_swizzle_is_the_formula(rows, columns):
    linear = numbered(rows, columns)
    stored = scale_layout.swizzle(linear).flatten()
    tiles = -(-columns // 4)
    for row in range(rows):
        for column in range(columns):
            tile = (row // 128) * tiles + column // 4
            place = tile * 512 + (row % 32) * 16 + (row % 128 // 32) * 4 + column % 4
            assert stored[place] == linear[row, column]
    assert int((stored != 0).sum()) == rows * columns  # the rest is zero padding


@pytest.mark.parametrize(("rows", "columns"), SIZES)
@pytest.mark.parametrize("groups", [1, 3])
def test_there_and_back(rows, columns, groups):
    linear = torch.stack([numbered(rows + g, columns)[:rows] for g in range(groups)])
    stored = scale_layout.swizzle(linear)
    assert stored.shape == (groups, *scale_layout.padded_shape(rows, columns))
    assert torch.equal(scale_layout.unswizzle(stored, rows, columns), linear)
    mma = scale_layout.to_mma(stored)
    assert mma.data_ptr() == stored.data_ptr()  # a view: intact scales need no second copy
    back = scale_layout.from_mma(mma)
    assert torch.equal(back, stored)
    assert back.data_ptr() == stored.data_ptr()


def test_e4m3_dtype_goes_through_unchanged():
    linear = numbered(128, 8).view(torch.float8_e4m3fn)
    stored = scale_layout.swizzle(linear)
    assert stored.dtype == torch.float8_e4m3fn
    assert scale_layout.unswizzle(stored, 128, 8).dtype == torch.float8_e4m3fn


@pytest.mark.parametrize(
    "call",
    [
        lambda: scale_layout.swizzle(torch.zeros(4, dtype=torch.uint8)),
        lambda: scale_layout.unswizzle(torch.zeros(128, 4, dtype=torch.uint8), 129, 4),
        lambda: scale_layout.to_mma(torch.zeros(1, 100, 4, dtype=torch.uint8)),
        lambda: scale_layout.from_mma(torch.zeros(4, 32, 1, 4, 1, 1, dtype=torch.uint8)),
    ],
)
def test_wrong_shapes_are_named(call):
    with pytest.raises(ShapeError):
        call()


FLASHINFER = """
import sys, torch
sys.path.insert(0, {folder!r})
import harness
ns = harness.load({version!r})
out = []
for linear in torch.load({source!r}, weights_only=True):
    groups, rows, columns = linear.shape
    # Theirs swizzles one matrix of fp32 values at a time; bytes 1..119 are exact in fp32.
    values = linear.view(torch.float8_e4m3fn).float()
    stored = torch.stack([ns.helpers.swizzle_block_scale(v) for v in values])
    stored = stored.to(torch.float8_e4m3fn).view(torch.uint8)
    mma = ns.utils.convert_sf_to_mma_layout(
        stored.reshape(-1, stored.shape[-1]), m=rows, k=columns * 16, num_groups=groups)
    back = ns.utils.convert_sf_from_mma_layout(mma, m=rows, k=columns * 16, num_groups=groups)
    out.append((stored, mma.contiguous(), list(mma.stride()), back.contiguous()))
torch.save(out, {target!r})
"""


@pytest.mark.parametrize("version", ["0.6.16", "0.7.4"])
def test_flashinfers_own_functions_agree(oracle_dir, tmp_path, version):
    oracle_dir(f"flashinfer-{version}")
    oracle_dir("flashinfer-deps")
    sizes = [(128, 4), (256, 12), (512, 40), (200, 12)]
    ours = [
        torch.stack([numbered(rows + g, columns)[:rows] for g in range(3)])
        for rows, columns in sizes
    ]
    source, target = tmp_path / "in.pt", tmp_path / "out.pt"
    torch.save(ours, source)
    code = FLASHINFER.format(
        folder=str(HARNESS), version=version, source=str(source), target=str(target)
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = torch.load(target, weights_only=True)
    for linear, (stored, mma, stride, back) in zip(ours, theirs, strict=True):
        swizzled = scale_layout.swizzle(linear)
        assert torch.equal(swizzled, stored)
        view = scale_layout.to_mma(swizzled)
        assert torch.equal(view.contiguous(), mma)
        assert list(view.stride()) == stride
        assert torch.equal(back.reshape(stored.shape), scale_layout.from_mma(view))
