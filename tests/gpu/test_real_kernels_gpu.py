"""The clock and memory counter on a CUDA GPU, and what one without b12x kernels is told."""

from __future__ import annotations

import pytest
import torch

from trtllm_b12x_fix.emulator.contract import contract_for
from trtllm_b12x_fix.integrations.b12x_availability import CAPABILITIES, why_not
from trtllm_b12x_fix.integrations.cuda_meter import CudaMeter

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


def test_longer_work_takes_longer() -> None:
    meter = CudaMeter(CUDA)
    small, large = (torch.randn(size, size, device=CUDA) for size in (1024, 8192))
    for operand in (small, large):
        operand @ operand
    meter.synchronize()
    short, long = (min(meter.times(lambda m=m: m @ m, 20)) for m in (small, large))
    assert 0 < 10 * short < long < 10


def test_the_peak_is_what_was_allocated_on_top() -> None:
    meter = CudaMeter(CUDA)
    kept = torch.empty(2**20, dtype=torch.uint8, device=CUDA)
    meter.start_peak()
    assert meter.peak_bytes() == 0
    torch.empty(2**22, dtype=torch.uint8, device=CUDA)
    assert meter.peak_bytes() == 2**22
    del kept


def test_a_gpu_without_the_kernels_is_named() -> None:
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) in CAPABILITIES:
        pytest.skip("this GPU has them")
    reason = why_not(contract_for("0.7.4"), CUDA)
    name = torch.cuda.get_device_name()
    assert reason == f"{name} is SM{major}{minor}, b12x kernels need SM120 or SM121"
