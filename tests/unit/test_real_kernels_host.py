"""Whether the real kernels can run, and what their arms make of a backend that misbehaves."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version

from tests.layers import make_inputs, make_layer
from trtllm_b12x_fix.commands import real_kernels as command
from trtllm_b12x_fix.emulator import moe
from trtllm_b12x_fix.emulator.arithmetic import KernelFamily
from trtllm_b12x_fix.emulator.contract import contract_for
from trtllm_b12x_fix.errors import InputError, UnsupportedVersionError
from trtllm_b12x_fix.integrations import b12x_availability, b12x_families, b12x_wrapper
from trtllm_b12x_fix.integrations.b12x_availability import why_not
from trtllm_b12x_fix.integrations.b12x_families import NotSelectableError
from trtllm_b12x_fix.layer import Activation
from trtllm_b12x_fix.layer_check import real_kernels
from trtllm_b12x_fix.layer_check.arms import Arm
from trtllm_b12x_fix.layer_check.real_result import ArmStatus, RunStatus, not_run
from trtllm_b12x_fix.layer_check.run import LayerInput, Settings
from trtllm_b12x_fix.repair import InputScales
from trtllm_b12x_fix.report.real_kernels import render, to_document

CONTRACT = contract_for("0.7.4")
CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture
def gb10(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine on which nothing stands in the way; tests put one thing in it."""
    monkeypatch.delenv(b12x_wrapper.FORCE_W4A16, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (12, 1))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA GB10")
    monkeypatch.setattr(b12x_availability, "installed_contract", lambda: CONTRACT)
    monkeypatch.setattr(b12x_availability, "load_symbols", lambda: None)
    monkeypatch.setattr(b12x_wrapper, "load_symbols", lambda: None)
    use_cuda_version(monkeypatch, "13.0")
    return monkeypatch


def use_cuda_version(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    module = SimpleNamespace(get_cuda_version=lambda: Version(version))
    importlib = SimpleNamespace(import_module=lambda name: module)
    monkeypatch.setattr(b12x_availability, "importlib", importlib)


def test_nothing_in_the_way(gb10: pytest.MonkeyPatch) -> None:
    assert why_not(CONTRACT, CUDA) == ""
    gb10.setattr(torch.cuda, "get_device_capability", lambda _: (12, 0))
    assert why_not(CONTRACT, CUDA) == ""


def test_a_gpu_of_another_architecture(gb10: pytest.MonkeyPatch) -> None:
    gb10.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    gb10.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    line = "NVIDIA H200 is SM90, b12x kernels need SM120 or SM121"
    assert why_not(CONTRACT, CUDA) == line
    assert render(not_run(line)) == f"real kernels: not run: {line}"


def test_no_gpu_or_the_check_is_not_on_it(gb10: pytest.MonkeyPatch) -> None:
    assert "--device cuda" in why_not(CONTRACT, CPU)
    gb10.setattr(torch.cuda, "is_available", lambda: False)
    assert why_not(CONTRACT, CPU).startswith("no CUDA GPU here")


def test_forced_w4a16_is_refused(gb10: pytest.MonkeyPatch) -> None:
    gb10.setenv(b12x_wrapper.FORCE_W4A16, "1")
    assert b12x_wrapper.FORCE_W4A16 in why_not(CONTRACT, CUDA)
    with pytest.raises(InputError, match="W4A16"):
        b12x_wrapper.B12xKernels(CONTRACT, CUDA)
    gb10.setenv(b12x_wrapper.FORCE_W4A16, "0")
    assert why_not(CONTRACT, CUDA) == ""


def test_flashinfer_absent_unknown_or_another_one(gb10: pytest.MonkeyPatch) -> None:
    gb10.setattr(b12x_availability, "installed_contract", lambda: None)
    assert why_not(CONTRACT, CUDA) == "FlashInfer is not installed"
    gb10.setattr(b12x_availability, "installed_contract", lambda: contract_for("0.6.18"))
    assert why_not(CONTRACT, CUDA) == "FlashInfer 0.6.18 is installed, 0.7.4 is emulated"

    def unknown() -> None:
        raise UnsupportedVersionError("FlashInfer 0.5.0: its kernels\nare not known")

    gb10.setattr(b12x_availability, "installed_contract", unknown)
    assert why_not(CONTRACT, CUDA) == "FlashInfer 0.5.0: its kernels are not known"


def test_a_cuda_12_build_and_a_broken_import(gb10: pytest.MonkeyPatch) -> None:
    use_cuda_version(gb10, "12.9")
    line = "FlashInfer's b12x kernels need CUDA 13 or later, here is CUDA 12.9"
    assert why_not(CONTRACT, CUDA) == line

    def broken() -> None:
        raise AttributeError("module 'flashinfer' has no attribute 'B12xMoEWrapper'")

    gb10.setattr(b12x_availability, "load_symbols", broken)
    assert "AttributeError: module 'flashinfer' has no" in why_not(CONTRACT, CUDA)


def test_only_on_makes_it_an_error(gb10: pytest.MonkeyPatch) -> None:
    assert isinstance(command.prepare("auto", CONTRACT, CUDA), b12x_wrapper.B12xKernels)
    assert command.prepare("off", CONTRACT, CUDA) == "--real-kernels off"
    gb10.setattr(torch.cuda, "is_available", lambda: False)
    reason = command.prepare("auto", CONTRACT, CPU)
    assert isinstance(reason, str)
    with pytest.raises(InputError, match=r"--real-kernels on: no CUDA GPU here"):
        command.prepare("on", CONTRACT, CPU)
    result = command.run(reason, *[None] * 3)  # type: ignore[arg-type]
    assert to_document(result) == {
        "status": "not run",
        "why_not": reason,
        "device": None,
        "flashinfer": None,
        "arms": [],
    }


def test_the_option() -> None:
    parser = argparse.ArgumentParser()
    command.add_argument(parser)
    assert parser.parse_args([]).real_kernels == "auto"
    assert parser.parse_args(["--real-kernels", "on"]).real_kernels == "on"


@dataclass
class FakeMeter:
    """Calls take 1, 2, 3... seconds; the host clock moves 10 seconds at each look."""

    clock: float = 0.0
    error: Exception | None = None

    def now(self) -> float:
        self.clock += 10
        return self.clock

    def synchronize(self) -> None:
        if self.error:
            raise self.error

    def times(self, call: Callable[[], object], count: int) -> list[float]:
        for _ in range(count):
            call()
        return [float(number) for number in range(1, count + 1)]

    def start_peak(self) -> None:
        pass

    def peak_bytes(self) -> int | None:
        return 2**20


@dataclass
class FakeKernels:
    """The emulator as a backend; ``plant`` is called with (strategy, forced) before each output."""

    plant: Callable[[str, KernelFamily | None], None] = lambda *_: None
    families: Iterator[KernelFamily] | None = None
    contract: Any = CONTRACT
    capacity: int | None = None
    device: str = "fake"
    meter: FakeMeter = field(default_factory=FakeMeter)

    @contextmanager
    def session(
        self, layer: Any, args: Any, x: Any, routing: Any, forced: Any, keep_out: Any
    ) -> Iterator[Any]:
        launched: set[KernelFamily] = set()

        def output() -> torch.Tensor:
            self.plant(args.strategy.value, forced)
            family = next(self.families) if self.families else forced or KernelFamily.STATIC
            launched.add(family)
            shape = real_kernels.Shape(
                x.shape[0], 4, layer.hidden, layer.intermediate, layer.experts, layer.activation
            )
            arithmetic = CONTRACT.arithmetic(family, shape)
            return moe.run(args.launch(layer), x, routing, arithmetic, 0).output

        yield SimpleNamespace(output=output, launch=output, families=launched)


def run(kernels: FakeKernels, arms: tuple[Arm, ...] = tuple(Arm), rows: tuple[int, ...] = (2,)):
    layer = make_layer(Activation.RELU2, experts=4, hidden=128, intermediate=128)
    x, routing = make_inputs(layer, tokens=4, top_k=4)
    settings = Settings(CONTRACT, arms, rows, None, InputScales.LAYER, 0)
    subject = LayerInput(layer, x, routing, "synthetic")
    counts = real_kernels.Counts(repeats=2, timed=5)
    return real_kernels.run(subject, settings, kernels, lambda _: None, counts)


def test_times_are_medians_and_the_first_call_stands_apart() -> None:
    result = run(FakeKernels())
    assert result.status is RunStatus.RAN
    assert not result.findings
    assert len(result.arms) == 10
    for arm in result.arms:
        assert (arm.time_s, arm.first_call_s, arm.peak_bytes) == (3.0, 10.0, 2**20)
        assert arm.status is ArmStatus.OK
    text = render(result)
    assert "real kernels: FlashInfer 0.7.4 on fake" in text
    assert "3.0 s" in text
    assert "1.0 MiB" in text


def test_only_arms_that_were_asked_for() -> None:
    assert {arm.arm for arm in run(FakeKernels(), (Arm.BAKED, Arm.UNIT)).arms} == {Arm.BAKED}
    assert not run(FakeKernels(), (Arm.UNIT,)).arms


@pytest.mark.parametrize(("strategy", "arm"), [("alphas", Arm.FIX), ("baked", Arm.BAKED)])
def test_out_of_memory_is_a_finding_of_the_fix_and_a_note_on_baked(strategy: str, arm: Arm) -> None:
    def plant(running: str, forced: KernelFamily | None) -> None:
        if running == strategy:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")

    result = run(FakeKernels(plant))
    assert result.status is RunStatus.RAN
    failed = [found for found in result.arms if found.status is ArmStatus.FAILED]
    assert {found.arm for found in failed} == {arm}
    assert len(failed) == 5
    text = "failed: OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    assert {found.status_text for found in failed} == {text}
    assert result.findings == (tuple(failed) if arm is Arm.FIX else ())
    assert "OutOfMemoryError" in render(result)


def test_an_error_that_stays_ends_the_run() -> None:
    kernels = FakeKernels()

    def plant(running: str, forced: KernelFamily | None) -> None:
        if forced is KernelFamily.STATIC:
            kernels.meter.error = RuntimeError("CUDA error: unspecified launch failure")
            raise kernels.meter.error

    kernels.plant = plant
    result = run(kernels, rows=(1, 2))
    assert result.status is RunStatus.STOPPED
    names = [arm.status.value for arm in result.arms]
    assert names == ["ok"] * 3 + ["failed"] + ["skipped"] * 16
    assert len(result.findings) == 1
    assert "not run after a CUDA error" in render(result)
    json.dumps(to_document(result), allow_nan=False)


def test_a_family_that_changes_between_calls_is_no_measurement() -> None:
    families = iter([KernelFamily.STATIC, KernelFamily.MICRO] * 100)
    result = run(FakeKernels(families=families))
    assert {arm.status for arm in result.arms} == {ArmStatus.FAILED}
    assert "several families: micro, static" in result.arms[0].detail


def test_what_cannot_be_selected_is_no_finding() -> None:
    def plant(running: str, forced: KernelFamily | None) -> None:
        if forced is KernelFamily.MICRO:
            raise NotSelectableError("forced micro backend supports at most 8 tokens (got 9)")

    result = run(FakeKernels(plant))
    assert not result.findings
    notes = render(result).partition("notes on the real kernels")[2]
    assert "fix, micro, rows 2; baked, micro, rows 2: not selectable: forced micro" in notes


def test_replaced_values_come_back_and_missing_names_are_refused() -> None:
    module = SimpleNamespace(__name__="moe_dispatch", _FORCED_BACKEND=None)

    def fail_inside() -> None:
        with b12x_families.replaced(module, {"_FORCED_BACKEND": "x"}):
            raise ZeroDivisionError(module._FORCED_BACKEND)

    with pytest.raises(ZeroDivisionError, match="x"):
        fail_inside()
    assert module._FORCED_BACKEND is None
    missing = b12x_families.replaced(module, {"_FORCED_BACKEND": "x", "_GONE": 0})
    with pytest.raises(UnsupportedVersionError, match="_GONE"):
        missing.__enter__()
    assert module._FORCED_BACKEND is None
