"""Run jobs through one vLLM wheel and the FlashInfer that it pins, on a CPU (a process per wheel).

    python -m tests.vllm.worker --version 0.33.0 --job job.pt --out out.pt

``job.pt`` holds a list of jobs, each a dictionary:

    capability    default (12, 1): what vLLM is told of the GPU
    environ       variables to set for the job, our own; all others of ours are unset
    registers     default 1: how often the plugin is called
    upstream      name of a function of tests/vllm/upstream.py, applied before the plugin comes
    late          default False: the plugin comes after the modules are imported
    mutant        name of a mutant of tests/vllm/mutants.py that is in place meanwhile
    kernel        default 1.0: what the kernel's output is multiplied with
    select        a list of (activation, hidden, backend): only choose a backend for each
    key           default "kNvfp4Dynamic": how vLLM calls the activations' quantization there
    layer         a job of tests/vllm/layers.py, with ``cases`` (x, ids, weights) and optionally
                  ``undo`` (take the fix out between loading and running)

``out.pt`` holds a record for each job: what was chosen, what the layer became, parameters before
and after the experts' own preparation, outputs and what reached the kernel, status, ledger and log,
or ``error``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests import kernel_backend
from tests.flashinfer import harness as flashinfer_harness
from tests.trtllm.worker import default_to_cpu
from tests.vllm import harness, layers, mutants, upstream
from trtllm_b12x_fix import fix, patching, vllm_plugin
from trtllm_b12x_fix.integrations import vllm_report
from trtllm_b12x_fix.integrations.targets import VLLM_B12X, VLLM_GUARDED
from trtllm_b12x_fix.integrations.trtllm_summary import QuietPeriod, Summary
from trtllm_b12x_fix.ledger import Ledger
from trtllm_b12x_fix.settings import LEDGER, PREFIX

_KERNEL = ("w1_block_scale", "w2_block_scale", "input_gs", "w1_alpha", "w2_alpha")


class _NoTimer(QuietPeriod):
    """Between two layers of this process lies emulation."""

    def _start(self) -> None:
        pass


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelname, record.getMessage()))


class Worker:
    """One wheel in this process."""

    def __init__(self, version: str) -> None:
        self.loaded = harness.load(version)
        default_to_cpu(self.loaded.flashinfer.B12xMoEWrapper)
        self.calls: list[Any] = []
        self.factor = 1.0
        flashinfer_harness.install(self.loaded.flashinfer, self._on_call)

    def _on_call(self, call: Any) -> None:
        self.calls.append(call)
        kernel_backend.emulate_in_slot_order(call)
        if self.factor != 1.0:
            call.output.mul_(self.factor)

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        self.factor = job.get("kernel", 1.0)
        self.loaded.platform.pretend_capability(*job.get("capability", (12, 1)))
        record: dict[str, Any] = {}
        with contextlib.ExitStack() as stack:
            lines = stack.enter_context(_fresh(job.get("environ", {})))
            # The plugin's modules are not imported again, so a mutant is in place before they run.
            stack.enter_context(mutants.in_place(job.get("mutant")))
            try:
                self._arrive(job)
                if "select" in job:
                    hides = job.get("upstream") == "asks_without_a_config"
                    key = job.get("key", "kNvfp4Dynamic")
                    record["chosen"] = [_choose(*one, hides, key) for one in job["select"]]
                if "layer" in job:
                    record |= self._layer(job["layer"])
            except Exception as error:
                record["error"] = f"{type(error).__name__}: {error}"
            vllm_report.SUMMARY.quiet.finish()
            return record | _told(lines)

    def _arrive(self, job: dict[str, Any]) -> None:
        late = job.get("late", False) or "upstream" in job
        if late:
            modules = [harness.import_module(name) for name in (VLLM_B12X, *VLLM_GUARDED)]
            if "upstream" in job:
                function = getattr(upstream, job["upstream"])
                guarded = job["upstream"] in upstream.GUARDED
                for module in modules[1:] if guarded else modules[:1]:
                    function(module)
        for _ in range(job.get("registers", 1)):
            vllm_plugin.register()

    def _layer(self, job: dict[str, Any]) -> dict[str, Any]:
        layer = layers.make_layer(job)
        record: dict[str, Any] = {}
        with layers.watched(record), _recorded_cutlass(record):
            self.calls.clear()
            with torch.inference_mode(job.get("inference_mode", False)):
                experts = layers.process(layer)
            record |= {
                "class": type(experts).__name__,
                "after": layers.parameters(layer),
                "places after": {
                    name: getattr(layer, name).data_ptr() for name in layers.PARAMETERS
                },
                "calls_while_loading": len(self.calls),
                "a2_gscale": experts.a2_gscale.clone(),
            }
            if job.get("undo"):
                fix.remove()
            record["cases"] = [self._case(layer, *case) for case in job["cases"]]
            view = getattr(experts, "w1_sf_mma", None)
            record["view"] = None if view is None else view.data_ptr()
        return record

    def _case(self, layer: Any, x: Any, ids: Any, weights: Any) -> dict[str, Any]:
        self.calls.clear()
        output = layers.run(layer, x, ids, weights)
        result: dict[str, Any] = {"output": output, "family": None}
        if self.calls:
            (call,) = self.calls
            result |= {"family": call.family, "shared": call.input_gs_shared}
            result |= {name: getattr(call, name).clone() for name in _KERNEL}
            result["fc2_input_scale"] = call.down_input_scale.clone()
        return result


@contextlib.contextmanager
def _recorded_cutlass(record: dict[str, Any]) -> Iterator[None]:
    """FlashInfer's CUTLASS kernel has no CPU form: what it would get is all there is to see."""
    module: Any = harness.module("experts.flashinfer_cutlass_moe")

    def recorded(*_: Any, **named: Any) -> None:
        output = named.pop("output")
        record["cutlass"] = {
            name: value.clone() for name, value in named.items() if isinstance(value, torch.Tensor)
        } | {
            f"quant_scales[{place}]": value.clone()
            for place, value in enumerate(named["quant_scales"])
        }
        output.zero_()

    with mock.patch.object(module, "flashinfer_cutlass_fused_moe", recorded):
        yield


def _choose(activation: str, hidden: int, backend: str, hides: bool, key: str) -> dict[str, str]:
    """What vLLM's own function chooses for a layer of the reported model."""
    oracle: Any = harness.module("oracle.nvfp4")
    keys: Any = harness.import_module("vllm.model_executor.layers.quantization.utils.quant_utils")
    config = layers.moe_config(
        {
            "activation": activation,
            "hidden": hidden,
            "intermediate": 1856,
            "experts": 128,
            "top_k": 6,
            "backend": backend,
        }
    )
    try:
        chosen, owner = oracle.select_nvfp4_moe_backend(
            upstream.Hiding(config) if hides else config, keys.kNvfp4Static, getattr(keys, key)
        )
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"backend": chosen.value, "class": owner.__name__}


@contextlib.contextmanager
def _fresh(environ: dict[str, str]) -> Iterator[_Lines]:
    """As in a new process: nothing of ours patched, asked for, recorded or said."""
    layers.forget_experts()
    patching._INSTALLED.clear()
    patching._REMOVED.clear()
    fix._treated.clear()
    Ledger._current = None
    lines = _Lines()
    logger = vllm_report.logger()
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    cleared = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    with tempfile.TemporaryDirectory() as folder:
        variables = {LEDGER: f"{folder}/ledger", **environ}
        with mock.patch.dict(os.environ, {**cleared, **variables}, clear=True):
            vllm_report.SUMMARY = Summary(vllm_report.logger, _NoTimer)
            vllm_report.SAID.clear()
            try:
                yield lines
            finally:
                vllm_plugin.FINDER.uninstall()
                logger.removeHandler(lines)


def _told(lines: _Lines) -> dict[str, Any]:
    status = fix.status()
    ledger = [
        json.loads(path.read_text(encoding="utf-8"))
        for path in Path(os.environ[LEDGER]).glob("*.json")
    ]
    return {
        "log": lines.lines,
        "state": status.state.value,
        "targets": {
            one.module: {**asdict(one), "state": one.state.value} for one in status.targets
        },
        "good": status.state.is_good,
        "ledger": ledger[0] if ledger else None,
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--version", required=True, choices=tuple(harness.PAIRS))
    parser.add_argument("--job", required=True)
    parser.add_argument("--out", required=True)
    args = parser.parse_args(argv)
    worker = Worker(args.version)
    torch.save([worker.run(job) for job in torch.load(args.job, weights_only=True)], args.out)


if __name__ == "__main__":
    main()
