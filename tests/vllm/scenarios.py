"""What tests/vllm/worker.py is asked to do, and what should come of it.

Layers are those of real ModelOpt exports, read by this package's own reader for the expectation and
handed to vLLM as its loader would: rows [gate; up], one scale for each of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.exports import EXPERTS, WIDE, Export
from tests.layers import make_inputs
from trtllm_b12x_fix.checkpoint.assemble import load_experts
from trtllm_b12x_fix.checkpoint.discovery import discover
from trtllm_b12x_fix.checkpoint.files import open_checkpoint
from trtllm_b12x_fix.emulator import moe
from trtllm_b12x_fix.emulator.contract import (
    InputQuantization,
    InputScaleArgument,
    Shape,
    contract_for,
)
from trtllm_b12x_fix.layer import Activation, MoELayer, pad_to_tiles
from trtllm_b12x_fix.repair import InputScales, Strategy, arguments, input_scales, plan

ROOT = Path(__file__).resolve().parents[2]
TOP_K = 2
#: Every family: one row, decode, a step of many, and one that only dynamic takes.
TOKENS = (4, 64, 1, 520)
FEW = TOKENS[:2]
CAPACITY = 600
#: Families of tests/exports.py; the last is padded by vLLM, which b12x does not take.
RELU2, SILU, PADDED = WIDE, "qwen3_moe", "nemotron_h"


@dataclass(frozen=True)
class Subject:
    """A layer of an export, and what vLLM's loader leaves of it."""

    name: str
    layer: MoELayer
    weights: dict[str, Tensor]

    def job(self, tokens: tuple[int, ...] = TOKENS, **more: Any) -> dict[str, Any]:
        """For tests/vllm/layers.py, with cases."""
        cases = [self.case(count) for count in tokens]
        return {
            "activation": self.layer.activation.value,
            "hidden": self.layer.hidden,
            "intermediate": self.layer.intermediate,
            "experts": self.layer.experts,
            "top_k": TOP_K,
            "max_num_tokens": CAPACITY,
            "weights": self.weights,
            "cases": cases,
            **more,
        }

    def case(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens and routing; the same for the same count."""
        x, routing = make_inputs(self.layer, tokens=tokens, top_k=TOP_K, seed=tokens)
        return x, routing.expert_ids, routing.weights


def subject_of(name: str, export: Export) -> Subject:
    """The first mixture of experts of an export."""
    checkpoint = open_checkpoint(export.folder)
    entry = discover(checkpoint).usable[0]
    activation = Activation.SILU if entry.is_gated else Activation.RELU2
    layer = load_experts(checkpoint, entry, range(EXPERTS), activation, name).layer
    return Subject(name, layer, _as_vllm_loads(layer))


def _as_vllm_loads(layer: MoELayer) -> dict[str, Tensor]:
    halves = 2 if layer.activation.is_gated else 1

    def rows(tensor: Tensor) -> Tensor:
        return torch.cat([*reversed(tensor.chunk(halves, dim=1))], dim=1).contiguous()

    def per_shard(scale: Tensor) -> Tensor:
        return scale[:, None].repeat(1, halves)

    return {
        "w13_weight": rows(layer.fc1.packed),
        "w13_weight_scale": rows(layer.fc1.block_scale),
        "w13_weight_scale_2": per_shard(layer.fc1.weight_scale_2),
        "w13_input_scale": per_shard(layer.fc1.input_scale),
        "w2_weight": layer.fc2.packed,
        "w2_weight_scale": layer.fc2.block_scale,
        "w2_weight_scale_2": layer.fc2.weight_scale_2,
        "w2_input_scale": layer.fc2.input_scale,
    }


def scales_of(layer: MoELayer, unit: bool = False) -> tuple[Tensor, Tensor]:
    """FC1's and FC2's input scale as vLLM takes them, or 1.0."""
    calibrated = input_scales(layer, InputScales.LAYER)
    if unit:
        return torch.ones_like(calibrated[0]), torch.ones_like(calibrated[1])
    return calibrated


def expected(
    subject: Subject,
    flashinfer: str,
    tokens: int,
    strategy: Strategy | None = None,
    unit: bool = False,
) -> tuple[str, Tensor]:
    """Kernel family and output of the emulated arm: by default that which the contract plans."""
    contract = contract_for(flashinfer)
    planned = plan(contract, subject.layer.activation)
    strategy = strategy or planned.strategy
    # vLLM keeps FlashInfer's own padding of the intermediate size out of sight.
    layer = pad_to_tiles(subject.layer)
    launch = arguments(strategy, layer, *scales_of(layer, unit), contract).launch(layer)
    separate = contract.input_scale is InputScaleArgument.SEPARATE
    shape = Shape(
        tokens=tokens,
        top_k=TOP_K,
        hidden=layer.hidden,
        intermediate=subject.layer.intermediate,
        experts=layer.experts,
        activation=layer.activation,
        graph_capacity=CAPACITY,
        sharing=InputQuantization.SHARED
        if separate and strategy is Strategy.ALPHAS
        else InputQuantization.PER_ROUTE,
    )
    family = contract.without(*planned.keep_out).select(shape)
    x, ids, weights = subject.case(tokens)
    arithmetic = contract.arithmetic(family, shape)
    output = moe.run(launch, x, moe.Routing(ids, weights), arithmetic, None).output
    return family.value, output


def run_worker(
    version: str, jobs: dict[str, dict[str, Any]], folder: Path
) -> dict[str, dict[str, Any]]:
    """Records by the names of the jobs."""
    job, out = folder / "job.pt", folder / "out.pt"
    torch.save(list(jobs.values()), job)
    command = [sys.executable, "-m", "tests.vllm.worker", "--version", version]
    command += ["--job", str(job), "--out", str(out)]
    done = subprocess.run(
        command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    records = torch.load(out, weights_only=True)
    return dict(zip(jobs, records, strict=True))


def with_damage(subject: Subject, **changes: Tensor) -> Subject:
    """The same layer with other tensors."""
    return Subject(subject.name, subject.layer, {**subject.weights, **changes})


def nan_block_scale(subject: Subject) -> Subject:
    """One block scale of expert 1 is NaN."""
    scales = subject.weights["w13_weight_scale"].clone()
    scales[1, 0, 0] = 0x7F
    return with_damage(subject, w13_weight_scale=scales)


def zero_input_scale(subject: Subject) -> Subject:
    """No input scale of FC2 was calibrated."""
    return with_damage(subject, w2_input_scale=torch.zeros_like(subject.weights["w2_input_scale"]))


def jobs(relu2: Subject, silu: Subject, padded: Subject) -> dict[str, dict[str, Any]]:
    """Everything that is asked of one wheel on SM121."""
    few = (4,)
    both = {"relu2": relu2, "silu": silu}
    off, unit = {"TRTLLM_B12X_FIX": "off"}, {"TRTLLM_B12X_FIX_ACT_SCALE": "unit"}
    cutlass = {"TRTLLM_B12X_FIX_ON_UNKNOWN": "cutlass"}
    found: dict[str, dict[str, Any]] = {}
    for name, subject in both.items():
        found |= {
            name: {"layer": subject.job()},
            f"{name}, off": {"environ": off, "layer": subject.job(FEW)},
            f"{name}, unit": {"environ": unit, "layer": subject.job(FEW)},
            f"{name}, cutlass backend": {
                "environ": off,
                "layer": subject.job(few, backend="flashinfer_cutlass"),
            },
        }
    return found | {
        "three times": {"registers": 3, "layer": relu2.job(few)},
        "late": {"late": True, "registers": 2, "layer": relu2.job(few)},
        "inference mode": {"layer": relu2.job(few, inference_mode=True)},
        "undone": {"layer": relu2.job(few, undo=True)},
        "every layer checked": {
            "environ": {"TRTLLM_B12X_FIX_VERIFY": "all"},
            "layer": relu2.job(few),
        },
        "no check": {"environ": {"TRTLLM_B12X_FIX_VERIFY": "off"}, "layer": relu2.job(few)},
        "a16": {"layer": relu2.job(few, a16=True)},
        "alphas": {"environ": {"TRTLLM_B12X_FIX": "alphas"}, "layer": relu2.job(few)},
        "fp32-rescale": {"environ": {"TRTLLM_B12X_FIX": "fp32-rescale"}, "layer": relu2.job(few)},
        "bad value": {"environ": {"TRTLLM_B12X_FIX_ACT_SCALE": "half"}, "layer": relu2.job(few)},
        "wrong kernel": {"kernel": 1.5, "layer": relu2.job(few)},
        "wrong kernel, cutlass": {"kernel": 1.5, "environ": cutlass, "layer": relu2.job(few)},
        "half": {"layer": relu2.job(few, dtype="float16")},
        "padded": {"layer": padded.job(few)},
        "padded, cutlass": {"environ": cutlass, "layer": padded.job(few)},
        "nan": {"layer": nan_block_scale(relu2).job(few)},
        "no input scale": {"layer": zero_input_scale(relu2).job(few)},
        "no input scale, unit": {"environ": unit, "layer": zero_input_scale(relu2).job(few)},
        **{
            f"{name}{suffix}": {
                "upstream": name.replace(" ", "_"),
                "environ": environ,
                "layer": relu2.job(few),
            }
            for name in UNKNOWN
            for suffix, environ in (("", {}), (", cutlass", cutlass))
        },
        "no class": {"upstream": "no_class", "layer": relu2.job(few)},
        "other names at the call": {
            "upstream": "other_names_at_the_call",
            "layer": relu2.job(few),
        },
        "repaired": {"upstream": "repaired", "layer": relu2.job(few)},
    }


#: States of upstream's class that nobody knows, and what the error has to name.
UNKNOWN = {
    "no method": "does not define process_weights_after_loading",
    "another signature": "takes (self",
    "no wrapper method": "_ensure_wrapper",
    "halves block scales": "neither the checkpoint's block scales",
    "keeps scales loses alphas": "neither the checkpoint's block scales",
    "bakes where they lie": "changed where they lay",
}
#: The same with a way to CUTLASS: the checkpoint's scales must still be there.
LOST = ("bakes where they lie",)

_BACKENDS = ("auto", "flashinfer_trtllm", "flashinfer_cutedsl", "flashinfer_cutlass")
#: (activation, hidden, backend)
SELECTED = [
    *(("relu2", 2688, backend) for backend in _BACKENDS),
    *(("silu", 2688, backend) for backend in _BACKENDS),
    ("relu2", 1024, "auto"),
]


def selections() -> dict[str, dict[str, Any]]:
    """Everything that is asked of one wheel on SM100, and on a GPU that is not concerned."""
    cutlass = {"TRTLLM_B12X_FIX_ON_UNKNOWN": "cutlass"}
    unknown = {
        f"{name}{suffix}": {"upstream": name.replace(" ", "_"), "environ": environ, "select": few}
        for few in ([("relu2", 2688, "auto"), ("silu", 2688, "auto")],)
        for name in ("asks without a config", "answers with an object", "no guarded class")
        for suffix, environ in (("", {}), (", cutlass", cutlass))
    }
    off, auto = {"TRTLLM_B12X_FIX": "off"}, {"TRTLLM_B12X_FIX": "auto"}
    blackwell = {
        "guarded": {"select": SELECTED},
        "guarded, off": {"environ": off, "select": SELECTED},
        "guarded three times": {"registers": 3, "select": SELECTED},
        "guarded, per token": {"key": "kNvfp4DynamicToken", "select": [("relu2", 2688, "auto")]},
        **unknown,
    }
    hopper = {
        "hopper": {"select": SELECTED},
        "hopper, off": {"environ": off, "select": SELECTED},
        "hopper, a fault of ours": {"mutant": "a fault of ours", "select": SELECTED},
        "hopper, a fault of ours, asked for": {
            "mutant": "a fault of ours",
            "environ": auto,
            "select": SELECTED,
        },
    }
    return {
        name: {**job, "capability": capability}
        for capability, found in (((10, 0), blackwell), ((9, 0), hopper))
        for name, job in found.items()
    }
