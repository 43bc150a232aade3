"""The GPU's grouped product on a CPU in fp64: the same code path but for the dtype.

Its bf16 products need a GPU: tests/gpu has them.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from trtllm_b12x_fix.emulator import grouped_cuda
from trtllm_b12x_fix.formats import e2m1, e4m3, nvfp4

EXPERTS, ROWS, COLUMNS, TOKENS, ROUTES = 10, 48, 64, 7, 40
HALVES = [slice(0, 16), slice(16, 64)]


def problem(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, list[tuple[int, Tensor]]]:
    """Operand, row of each route, codes, scales, groups; some experts have no work."""
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (EXPERTS, ROWS, COLUMNS // 2), generator=generator)
    scales = torch.randint(0, 0x7F, (EXPERTS, ROWS, COLUMNS // 16), generator=generator)
    operand = torch.randn(TOKENS, COLUMNS, generator=generator).double()
    rows = torch.randint(0, TOKENS, (ROUTES,), generator=generator)
    # Uneven on purpose: expert 1 gets most of the routes.
    expert = torch.randint(0, EXPERTS - 2, (ROUTES,), generator=generator)
    expert[: ROUTES // 2] = 1
    order = expert.argsort(stable=True)
    experts, counts = expert[order].unique_consecutive(return_counts=True)
    groups = list(zip(experts.tolist(), order.split(counts.tolist()), strict=True))
    return operand, rows, packed.to(torch.uint8), scales.to(torch.uint8), groups


def expected(
    operand: Tensor,
    rows: Tensor,
    packed: Tensor,
    scales: Tensor,
    groups: list[tuple[int, Tensor]],
    columns: list[slice],
) -> Tensor:
    """One route at a time."""
    out = torch.full((rows.numel(), len(columns), packed.shape[1]), math.nan, dtype=torch.float64)
    for expert, routes in groups:
        weight = nvfp4.operand(packed[expert], scales[expert], torch.float64)
        for route in routes.tolist():
            for number, part in enumerate(columns):
                out[route, number] = weight[:, part] @ operand[rows[route], part]
    return out


@pytest.mark.parametrize("experts_at_once", [1, 3, 4, 100])
@pytest.mark.parametrize("columns", [[slice(0, COLUMNS)], HALVES], ids=["whole", "ranges"])
def test_every_route_meets_its_own_expert(monkeypatch, experts_at_once, columns):
    monkeypatch.setattr(grouped_cuda, "_CHUNK_WEIGHTS", experts_at_once * ROWS * COLUMNS)
    arguments = problem()
    found = grouped_cuda.grouped(*arguments, columns)
    torch.testing.assert_close(found, expected(*arguments, columns), rtol=1e-12, atol=1e-9)


def test_a_nan_scale_reaches_the_rows_of_its_expert_alone():
    operand, rows, packed, scales, groups = problem()
    scales[1, 5, 2] = e4m3.NAN_BYTES[0]
    found = grouped_cuda.grouped(operand, rows, packed, scales, groups, [slice(0, COLUMNS)])
    broken = torch.zeros(ROUTES, ROWS, dtype=torch.bool)
    broken[dict(groups)[1], 5] = True
    assert torch.equal(found.squeeze(1).isnan(), broken)


def test_no_routes_give_no_rows():
    operand, _, packed, scales, _ = problem()
    nothing = torch.zeros(0, dtype=torch.int64)
    for groups in ([], [(3, nothing)]):
        found = grouped_cuda.grouped(operand, nothing, packed, scales, groups, HALVES)
        assert found.shape == (0, 2, ROWS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_table_of_code_bytes(dtype):
    """All 256: low nibble first, both values exact."""
    pairs = grouped_cuda._pairs(dtype, torch.device("cpu")).view(dtype).view(256, 2)
    values = torch.tensor(e2m1.E2M1_VALUES, dtype=dtype)
    for byte in range(256):
        assert torch.equal(pairs[byte], values[[byte & 0xF, byte >> 4]])
