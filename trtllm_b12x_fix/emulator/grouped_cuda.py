"""Grouped products on a GPU: many experts decoded at once, one batched GEMM per range of columns.

A loop over experts leaves the GPU waiting for Python: 500 experts are 10,000 small launches. Here a
chunk of experts is decoded by a table from code byte to two values, rows are gathered into a padded
batch, and the padding is dropped on the way out.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from trtllm_b12x_fix.formats import e2m1, e4m3
from trtllm_b12x_fix.formats.nvfp4 import BLOCK

#: Weights decoded at a time: 0.5 GB as bf16, twice that with temporaries.
_CHUNK_WEIGHTS = 2**28

_PAIR = {torch.bfloat16: torch.int32, torch.float64: torch.complex128}


def grouped(
    operand: Tensor,
    rows: Tensor,
    packed: Tensor,
    block_scale: Tensor,
    groups: list[tuple[int, Tensor]],
    columns: list[slice],
) -> Tensor:
    """As :func:`trtllm_b12x_fix.emulator.grouped.grouped_matmul`, which checks the arguments.

    Args:
        operand: bf16 or fp64 [N, C].
    """
    sums = torch.float64 if operand.dtype is torch.float64 else torch.float32
    shape = (rows.numel(), len(columns), packed.shape[1])
    out = torch.empty(shape, dtype=sums, device=operand.device)
    pairs = _pairs(operand.dtype, operand.device)
    for experts, routes, filled in _chunks(groups, packed[0].numel() * 2):
        weight = _decode(packed[experts], block_scale[experts], pairs, operand.dtype)
        left = operand[rows[routes]]
        # Asked once: a boolean index makes the host wait for the GPU each time.
        where = filled.nonzero(as_tuple=True)
        targets = routes[where]
        for number, part in enumerate(columns):
            product = _bmm(left[:, :, part], weight[:, :, part].transpose(1, 2))
            out[targets, number] = product[where]
    return out


def _chunks(
    groups: list[tuple[int, Tensor]], weights: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Experts [n], their routes [n, m] (padded by repeating one), and which of those count."""
    # Experts with about as many rows side by side, so that little is padding.
    ordered = sorted(groups, key=lambda group: group[1].numel())
    size = max(1, _CHUNK_WEIGHTS // weights)
    for start in range(0, len(ordered), size):
        chunk = ordered[start : start + size]
        counts = torch.tensor([routes.numel() for _, routes in chunk])
        most = int(counts.max())
        if not most:
            continue
        device = chunk[0][1].device
        filled = (torch.arange(most) < counts.unsqueeze(1)).to(device)
        routes = torch.zeros(filled.shape, dtype=torch.int64, device=device)
        routes[filled] = torch.cat([routes for _, routes in chunk])
        yield torch.tensor([expert for expert, _ in chunk], device=device), routes, filled


def _pairs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """[256] of the dtype that holds two ``dtype``: a code byte's two values, low nibble first."""
    codes = e2m1.unpack(torch.arange(256, dtype=torch.uint8).unsqueeze(1))
    return e2m1.decode(codes, dtype).view(_PAIR[dtype]).flatten().to(device)


def _decode(packed: Tensor, block_scale: Tensor, pairs: Tensor, dtype: torch.dtype) -> Tensor:
    """``code * block_scale``, [n, R, C]."""
    # int32 indices: a table of 256 needs no int64, which would be eight bytes for each code byte.
    values = pairs.index_select(0, packed.flatten().int()).view(dtype)
    values = values.view(*packed.shape[:2], -1, BLOCK)
    return values.mul_(e4m3.decode(block_scale, dtype).unsqueeze(-1)).flatten(-2)


def _bmm(left: Tensor, right: Tensor) -> Tensor:
    """fp32 accumulation and output for bf16 operands, fp64 for fp64."""
    if left.dtype is torch.float64:
        return torch.bmm(left, right)
    return torch.bmm(left, right, out_dtype=torch.float32)
