"""The GPU half of parity with its tensors on a CUDA device; the kernels are stand-ins."""

from __future__ import annotations

import pytest

from tests.parity import stand_in, test_arms
from tests.parity.stand_in import KernelFault
from trtllm_b12x_fix.layer import Activation
from trtllm_b12x_fix.parity import run_kernels
from trtllm_b12x_fix.parity.arms import Arm, Status
from trtllm_b12x_fix.parity.suspects import Suspect

pytestmark = pytest.mark.gpu


def run(fault: KernelFault, activation: Activation):
    kernels = stand_in.kernels(fault, "cuda")
    grid = test_arms.grid((activation,), (640,))
    return run_kernels.run(grid, stand_in.source, kernels, stand_in.Preparation())


@pytest.mark.parametrize("activation", list(Activation))
def test_healthy_kernels_are_right_on_a_cuda_device(activation):
    report = run(KernelFault.NONE, activation)
    assert report.named == ()
    right = {result.arm for result in report.arms if result.status is Status.RIGHT}
    assert right == set(Arm) - {Arm.SWIZZLED, Arm.GATED_SCALARS}


def test_a_fault_is_named_on_a_cuda_device():
    report = run(KernelFault.GATED_SCALARS, Activation.RELU2)
    assert {fault.suspect for fault in report.named} == {Suspect.SCALARS}
