"""The GPU half's host side: stand-in kernels, healthy and with a fault, through our own caller."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.parity import faults, layers, stand_in
from tests.parity.stand_in import KernelFault
from trtllm_b12x_fix.errors import InputError
from trtllm_b12x_fix.layer import Activation
from trtllm_b12x_fix.metrics import Distance
from trtllm_b12x_fix.parity import arms, run_kernels
from trtllm_b12x_fix.parity.arms import Arm, ArmResult, Cell, Status
from trtllm_b12x_fix.parity.call import Path
from trtllm_b12x_fix.parity.result import Verdict
from trtllm_b12x_fix.parity.run import Grid
from trtllm_b12x_fix.parity.suspects import Suspect

#: 192 is padded to 256, 384 to 512; 256 and 512 are not padded.
HIDDEN = (192, 256, 384, 512)


def grid(activations=(Activation.RELU2,), hidden: Iterable[int] = HIDDEN, tokens=(128,)) -> Grid:
    return Grid(
        tuple(activations),
        tuple(hidden),
        (80,),
        tuple(tokens),
        tuple(Path),
        layers.EXPERTS,
        layers.TOP_K,
        0,
    )


def run(fault=KernelFault.NONE, preparation=None, **sizes):
    kernels = stand_in.kernels(fault)
    return run_kernels.run(grid(**sizes), stand_in.source, kernels, preparation)


def suspects(report) -> set[Suspect]:
    return {fault.suspect for fault in report.named}


@pytest.mark.parametrize("activation", list(Activation))
def test_healthy_kernels_are_right_in_every_arm(activation):
    # 640 becomes 640, 768 and 1024: three arms of padding that all differ.
    report = run(activations=(activation,), hidden=(640,), preparation=stand_in.Preparation())
    assert report.named == ()
    assert report.verdict is Verdict.GOOD
    statuses = {result.arm: result.status for result in report.arms}
    wrong = {Arm.SWIZZLED, Arm.GATED_SCALARS}  # they must be: else they would tell nothing
    for arm, status in statuses.items():
        wanted = Status.WRONG if arm in wrong else Status.RIGHT
        if arm is Arm.GATED_SCALARS and activation.is_gated:
            wanted = Status.NOT_APPLICABLE
        assert status is wanted, (arm, status)
    assert set(statuses) == set(Arm)


@pytest.mark.parametrize(
    ("fault", "suspect", "words"),
    [
        (KernelFault.K_TAIL, Suspect.PADDING, "hidden 192 wrong at 256, right padded to 512"),
        (KernelFault.GATED_SCALARS, Suspect.SCALARS, "gated formula"),
        (KernelFault.SWIZZLED, Suspect.ACTIVATION_SCALES, "wants swizzled"),
        (KernelFault.NO_BIAS, Suspect.ROUTING, "wrong where the kernel does"),
        (KernelFault.REPLAY, Suspect.ROUTING_REPLAY, "wrong with it"),
        (KernelFault.REPLAY_EMPTY, Suspect.ROUTING_REPLAY, "wrong with it"),
        (KernelFault.PAD_512, Suspect.PADDING, "wrong padded to 512"),
    ],
    ids=lambda value: value.value if isinstance(value, KernelFault) else "",
)
def test_a_fault_of_the_kernel_is_named(fault, suspect, words):
    report = run(fault, hidden=(192,))
    assert report.verdict is Verdict.FINDING
    assert suspects(report) == {suspect}
    assert any(words in one.detail for one in report.named), report.named


def test_a_kernel_wrong_exactly_where_the_hidden_size_is_padded():
    report = run(KernelFault.PADDING)
    assert suspects(report) == {Suspect.PADDING}
    assert any("exactly where the hidden size is padded" in one.detail for one in report.named)


def test_a_kernel_wrong_off_multiples_of_512_is_not_blamed_on_padding_alone():
    results = []
    for hidden, right in ((256, False), (512, True), (768, False), (1024, True)):
        cell = Cell(Activation.RELU2, hidden, 80, 8)
        status = Status.RIGHT if right else Status.WRONG
        results.append(ArmResult(cell, Arm.CUTLASS, Status.RIGHT))
        results.append(ArmResult(cell, Arm.MODULAR, status))
    named, failed = arms.conclude(results)
    assert failed == ()
    assert [one.suspect for one in named] == [Suspect.KERNEL]
    assert "no multiple of 512" in named[0].detail
    assert "hidden 256, 768" in named[0].detail


def test_a_kernel_wrong_everywhere_is_named_the_kernel():
    cell = Cell(Activation.RELU2, 512, 80, 8)
    named, _ = arms.conclude([ArmResult(cell, Arm.MODULAR, Status.WRONG)])
    assert [one.suspect for one in named] == [Suspect.KERNEL]


def test_nothing_follows_where_the_control_is_wrong():
    report = run(KernelFault.CONTROL, hidden=(192,))
    assert report.verdict is Verdict.INCONCLUSIVE
    assert report.named == ()
    assert [cell.hidden for cell in report.controls_failed] == [192]


def test_a_refusal_is_shown_and_stops_nothing_else():
    report = run(KernelFault.REFUSES, hidden=(192,))
    by_arm = {result.arm: result for result in report.arms}
    assert by_arm[Arm.MONOLITHIC].status is Status.REFUSED
    assert "No valid config found" in by_arm[Arm.MONOLITHIC].detail
    assert by_arm[Arm.MODULAR].status is Status.RIGHT
    assert report.verdict is Verdict.GOOD


def test_after_a_cuda_error_nothing_more_is_run():
    report = run(KernelFault.CUDA_ERROR)
    lost = [result for result in report.arms if result.status is Status.LOST]
    assert {result.cell.hidden for result in lost} >= {256, 384, 512}
    assert all("illegal memory access" in result.detail for result in lost)
    assert report.verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(
    "name", ["rows not shuffled", "output1_scale_scalar inverted", "scale groups padded in front"]
)
def test_a_wrong_preparation_by_vllm_is_named_where_ours_is_right(name):
    fault = next(one for one in faults.FAULTS if one.name == name)
    report = run(hidden=(192,), preparation=stand_in.Preparation(fault.plant))
    assert suspects(report) == {fault.suspect}


def test_a_vllm_that_refuses_is_shown():
    preparation = stand_in.Preparation(error=InputError("vLLM 0.0.0 refused"))
    report = run(hidden=(192,), preparation=preparation)
    refused = [result for result in report.arms if result.status is Status.REFUSED]
    assert {result.arm for result in refused} == {Arm.VLLM_MODULAR, Arm.VLLM_MONOLITHIC}


def test_swizzled_scales_say_nothing_of_few_tokens():
    report = run(hidden=(192,), tokens=(8,))
    by_arm = {result.arm: result.status for result in report.arms}
    assert by_arm[Arm.SWIZZLED] is Status.NOT_APPLICABLE


def test_noise_between_runs_is_measured():
    report = run(hidden=(192,))
    ran = [result for result in report.arms if isinstance(result.fidelity, Distance)]
    assert ran
    assert all(result.noise == 0 for result in ran)
