"""Run the real-kernel arms through one FlashInfer version on a CPU (one process per version).

    python real_kernels_worker.py --version 0.7.4 --out out.json

FlashInfer's host code is the wheel's own; the emulator stands where the compiled kernels would.
``out.json`` maps each scenario below to its result, as the JSON report has it, with ``launched``:
the families that the harness saw at the kernel while each arm ran.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import harness
import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))

from tests import kernel_backend
from tests.layers import make_inputs, make_layer
from trtllm_b12x_fix.emulator.arithmetic import KernelFamily
from trtllm_b12x_fix.emulator.contract import contract_for
from trtllm_b12x_fix.integrations import b12x_families, b12x_wrapper
from trtllm_b12x_fix.layer import Activation
from trtllm_b12x_fix.layer_check import real_kernels
from trtllm_b12x_fix.layer_check.arms import Arm
from trtllm_b12x_fix.layer_check.run import LayerInput, Settings
from trtllm_b12x_fix.repair import InputScales
from trtllm_b12x_fix.report.real_kernels import to_document

CPU = torch.device("cpu")
EXPERTS, TOP_K, SIZE = 6, 3, 256
ROWS = (1, 8, 64)
COUNTS = real_kernels.Counts(repeats=2, timed=1)
Backend = Callable[[harness.KernelCall, int], None]


class CpuMeter:
    """The clock of the CPU; ``broken`` makes it answer as a device after a sticky error."""

    def __init__(self) -> None:
        self.broken = False

    def now(self) -> float:
        return time.perf_counter()

    def synchronize(self) -> None:
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def times(self, call: Callable[[], object], count: int) -> list[float]:
        found = []
        for _ in range(count):
            start = self.now()
            call()
            found.append(self.now() - start)
        return found

    def start_peak(self) -> None:
        pass

    def peak_bytes(self) -> int | None:
        return None


class Bench:
    """One FlashInfer version with an exchangeable kernel."""

    def __init__(self, ns: SimpleNamespace) -> None:
        self.ns = ns
        self.contract = contract_for(ns.version)
        self.meter = CpuMeter()
        self.backend: Backend = steady
        self.numbers = itertools.count()
        self.launched: list[list[str]] = []
        harness.install(ns, self._on_call)

    def _on_call(self, call: harness.KernelCall) -> None:
        self.launched[-1].append(call.family)
        self.backend(call, next(self.numbers))

    def run(
        self,
        subject: LayerInput,
        *,
        rows: tuple[int, ...] = ROWS,
        capacity: int | None = None,
        forced: KernelFamily | None = None,
        scales: InputScales = InputScales.LAYER,
    ) -> dict[str, Any]:
        kernels = b12x_wrapper.B12xKernels(self.contract, CPU, capacity)
        kernels.meter = self.meter  # type: ignore[assignment]
        settings = Settings(self.contract, tuple(Arm), rows, forced, scales, 0)
        self.launched.clear()
        result = real_kernels.run(
            subject, settings, kernels, lambda _: self.launched.append([]), COUNTS
        )
        return to_document(result) | {"launched": [sorted(set(seen)) for seen in self.launched]}


def steady(call: harness.KernelCall, number: int) -> None:
    kernel_backend._emulate(call, 0)


def noisy(call: harness.KernelCall, number: int) -> None:
    """Atomic adds in another order at every launch, as on a GPU."""
    kernel_backend._emulate(call, number)


def raising(call: harness.KernelCall, number: int) -> None:
    if call.family == "static":
        raise RuntimeError("planted:\nthe kernel\nfailed")
    steady(call, number)


def not_finite(call: harness.KernelCall, number: int) -> None:
    steady(call, number)
    if call.family == "dynamic":
        call.output[0, 0] = float("nan")


def too_large(call: harness.KernelCall, number: int) -> None:
    steady(call, number)
    call.output.mul_(1.125)


def make_subject(activation: Activation, tokens: int = 64) -> LayerInput:
    layer = make_layer(activation, experts=EXPERTS, hidden=SIZE, intermediate=SIZE)
    x, routing = make_inputs(layer, tokens=tokens, top_k=TOP_K)
    return LayerInput(layer, x, routing, "synthetic")


def dense_subject() -> LayerInput:
    """128 tokens for two experts: dense enough for the gated dynamic kernel's 128-row tile."""
    layer = make_layer(Activation.SILU, experts=2, hidden=SIZE, intermediate=SIZE)
    x, routing = make_inputs(layer, tokens=128, top_k=2)
    return LayerInput(layer, x, routing, "synthetic")


def cloned_under_inference(subject: LayerInput) -> LayerInput:
    """The same subject as a server under torch.inference_mode would have made it."""

    def clone(value: Any) -> Any:
        return value.clone() if isinstance(value, torch.Tensor) else value

    def clones(record: Any) -> Any:
        return replace(record, **{name: clone(value) for name, value in vars(record).items()})

    with torch.inference_mode():
        layer = replace(subject.layer, fc1=clones(subject.layer.fc1), fc2=clones(subject.layer.fc2))
        return replace(subject, layer=layer, x=subject.x.clone(), routing=clones(subject.routing))


@contextmanager
def kernel(bench: Bench, backend: Backend) -> Iterator[None]:
    bench.backend, before = backend, bench.backend
    try:
        yield
    finally:
        bench.backend = before


def agreement(bench: Bench) -> dict[str, Any]:
    found = {}
    for activation in Activation:
        subject = make_subject(activation)
        found[f"steady {activation.value}"] = bench.run(subject)
        with kernel(bench, noisy):
            found[f"noisy {activation.value}"] = bench.run(subject, rows=(8,))
        found[f"per expert {activation.value}"] = bench.run(
            subject, rows=(8,), scales=InputScales.FILE
        )
    found["dense"] = bench.run(dense_subject(), rows=(128,))
    found["only static"] = bench.run(
        make_subject(Activation.RELU2), rows=(8,), forced=KernelFamily.STATIC
    )
    return found


def failures(bench: Bench) -> dict[str, Any]:
    subject, found = make_subject(Activation.RELU2), {}
    for backend in (raising, not_finite, too_large):
        with kernel(bench, backend):
            found[backend.__name__] = bench.run(subject, rows=(8,))
    bench.meter.broken = True
    found["sticky"] = bench.run(subject)
    bench.meter.broken = False
    found["fp16"] = bench.run(replace(subject, x=subject.x.half()), rows=(8,))
    return found


def traps(bench: Bench) -> dict[str, Any]:
    subject, found = make_subject(Activation.RELU2), {}
    found["graph"] = bench.run(subject, rows=(8, 64), capacity=64)
    with mock.patch.object(b12x_wrapper.B12xCall, "output", lambda call: call._run()):
        found["graph, not cloned"] = bench.run(subject, rows=(8,), capacity=64)
    under_inference = cloned_under_inference(subject)
    found["inference"] = bench.run(under_inference, rows=(8,))
    with torch.inference_mode():
        found["inside inference"] = bench.run(under_inference, rows=(8,))
    with mock.patch.object(b12x_wrapper, "ordinary", lambda tensor: tensor):
        found["inference, not cloned"] = bench.run(under_inference, rows=(8,))
    with mock.patch.object(b12x_wrapper, "selection", return_value={}):
        found["not forced"] = bench.run(subject, rows=(8,))
    swapped = dict(b12x_families._GETTERS)
    swapped.pop(KernelFamily.STATIC)
    with mock.patch.object(b12x_families, "_GETTERS", swapped):
        found["not observed"] = bench.run(subject, rows=(8,))
    return found


def state(dispatch: Any) -> dict[str, int]:
    """Identities of everything that a session may replace."""
    names = ("_FORCED_BACKEND", "_DIRECT_MICRO_MAX_N", "_STATIC_COMPACT_CUTOVER_PAIRS_CACHE")
    names += ("_MICRO_COMPACT_CUTOVER_PAIRS", "_MICRO_COMPACT_CUTOVER_PAIRS_MULTI_TOPK")
    names += tuple(b12x_families._GETTERS.values())
    return {name: id(getattr(dispatch, name)) for name in names if hasattr(dispatch, name)}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--version", required=True, choices=harness.VERSIONS)
    parser.add_argument("--out", required=True)
    args = parser.parse_args(argv)
    ns = harness.load(args.version)
    torch.cuda.get_device_name = lambda *_: "harness"  # type: ignore[assignment]
    bench = Bench(ns)
    before = state(ns.dispatch)
    found = agreement(bench) | failures(bench) | traps(bench)
    found["restored"] = before == state(ns.dispatch)
    Path(args.out).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
