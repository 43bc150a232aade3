"""The whole layer check on the embedded layer: six row counts, four arms, all references."""

from __future__ import annotations

import torch

from tests.benchmarks.result import BenchResult, median_seconds, peak_rss_mb
from trtllm_b12x_fix.emulator.contract import DEFAULT_VERSION, contract_for
from trtllm_b12x_fix.layer_check.arms import Arm
from trtllm_b12x_fix.layer_check.check import check
from trtllm_b12x_fix.layer_check.embedded import load_inputs
from trtllm_b12x_fix.layer_check.result import Gate
from trtllm_b12x_fix.layer_check.run import Settings
from trtllm_b12x_fix.repair import InputScales

ROWS = (1, 2, 4, 8, 17, 64)
ARMS = (Arm.FIX, Arm.BAKED, Arm.ALPHAS, Arm.UNIT)


def ours() -> None:
    torch.set_num_threads(2)
    subject, own = load_inputs()
    chosen = Settings(contract_for(DEFAULT_VERSION), ARMS, ROWS, None, InputScales.LAYER, 0)
    check(subject, chosen, (Gate(Arm.FIX),), lambda _: None, own)


def run() -> BenchResult:
    return BenchResult(
        name="layer check on the embedded layer",
        ours_s=median_seconds(ours, repeats=3),
        peak_mb=peak_rss_mb(ours),
        note="CPU, 2 threads; torch already imported",
    )
