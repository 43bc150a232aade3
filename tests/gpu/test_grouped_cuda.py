"""The grouped product on a GPU: bf16 operands, fp32 accumulation, against fp64 on a CPU."""

from __future__ import annotations

import pytest
import torch

from tests.unit.test_grouped_cuda import HALVES, expected, problem
from trtllm_b12x_fix.emulator import grouped
from trtllm_b12x_fix.emulator.grouped import MatmulBackend, backend_for, grouped_matmul
from trtllm_b12x_fix.emulator.matmul import full_precision

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_gpu_agrees_with_fp64(dtype):
    operand, rows, packed, scales, groups = problem()
    operand = operand.to(torch.bfloat16).double()
    exact = expected(operand, rows, packed, scales, groups, HALVES)
    assert backend_for(CUDA, dtype, 1.0) is MatmulBackend.CUDA
    with full_precision():
        found = grouped_matmul(
            operand.to(CUDA, dtype),
            rows.to(CUDA),
            packed.to(CUDA),
            scales.to(CUDA),
            [(expert, routes.to(CUDA)) for expert, routes in groups],
            HALVES,
        )
    assert found.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
    error = (found.double().cpu() - exact).norm() / exact.norm()
    assert error < (1e-12 if dtype is torch.float64 else 1e-6)


def test_the_loop_and_the_batch_agree():
    operand, rows, packed, scales, groups = problem(1)
    arguments = (
        operand.to(CUDA, torch.bfloat16),
        rows.to(CUDA),
        packed.to(CUDA),
        scales.to(CUDA),
        [(expert, routes.to(CUDA)) for expert, routes in groups],
        HALVES,
    )
    with full_precision():
        batch = grouped_matmul(*arguments)
        with grouped.forced(MatmulBackend.TORCH):
            loop = grouped_matmul(*arguments)
    torch.testing.assert_close(batch, loop, rtol=1e-5, atol=1e-3)
