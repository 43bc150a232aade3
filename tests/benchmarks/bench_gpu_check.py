"""The reported layer's check on a GPU: the whole of it, and one arm at 64 rows.

Any CUDA GPU: FP4 units are not used. Without one there is nothing to measure, and no result.
"""

from __future__ import annotations

import sys

import torch

from tests.benchmarks.result import BenchResult, median_seconds
from trtllm_b12x_fix.emulator import moe, reference
from trtllm_b12x_fix.emulator.contract import DEFAULT_VERSION, Shape, contract_for
from trtllm_b12x_fix.layer_check.arms import Arm
from trtllm_b12x_fix.layer_check.check import check
from trtllm_b12x_fix.layer_check.from_preset import Request, load
from trtllm_b12x_fix.layer_check.result import Gate
from trtllm_b12x_fix.layer_check.run import LayerInput, Settings
from trtllm_b12x_fix.repair import InputScales, input_scales

ROWS = (1, 2, 4, 8, 17, 64)
ARMS = (Arm.FIX, Arm.BAKED, Arm.ALPHAS, Arm.UNIT)


def run() -> list[BenchResult]:
    if not torch.cuda.is_available():
        print("bench_gpu_check: not run, torch sees no CUDA GPU", file=sys.stderr)
        return []
    subject = load(Request("super-layer1", max(ROWS), 0)).subject.to(torch.device("cuda"))
    note = f"{torch.cuda.get_device_name()}, torch {torch.__version__}; the layer is on the GPU"
    memory = torch.cuda.max_memory_allocated
    whole_s = median_seconds(lambda: _check(subject), repeats=3)
    whole_mb = memory() / 1e6
    torch.cuda.reset_peak_memory_stats()
    arm_s = median_seconds(lambda: _arm(subject), repeats=9)
    return [
        BenchResult(
            "super-layer1, six row counts, four arms", whole_s, peak_mb=whole_mb, note=note
        ),
        BenchResult("super-layer1, one arm, 64 rows", arm_s, peak_mb=memory() / 1e6, note=note),
    ]


def _check(subject: LayerInput) -> None:
    settings = Settings(contract_for(DEFAULT_VERSION), ARMS, ROWS, None, InputScales.LAYER, 0)
    check(subject, settings, (Gate(Arm.FIX),), lambda _: None)
    torch.cuda.synchronize()


def _arm(subject: LayerInput) -> None:
    layer, (x, routing) = subject.layer, subject.head(64)
    contract = contract_for(DEFAULT_VERSION)
    shape = Shape(
        tokens=64,
        top_k=routing.expert_ids.shape[1],
        hidden=layer.hidden,
        intermediate=layer.intermediate,
        experts=subject.experts,
        activation=layer.activation,
    )
    launch = reference.exact_launch(layer, *input_scales(layer, InputScales.LAYER))
    moe.run(launch, x, routing, contract.arithmetic(contract.select(shape), shape), 0)
    torch.cuda.synchronize()
