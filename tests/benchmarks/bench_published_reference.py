"""One layer of the reported shape in the published arithmetic: our emulator against b12x's own.

Both start from packed codes and scale bytes and end at the output, decoding included; nothing
decoded is kept between calls. The peer runs fewer rows and is scaled to ours.
"""

from __future__ import annotations

import site
from importlib import import_module
from typing import Any

import torch

from tests import published
from tests.benchmarks.result import BenchResult, median_seconds, peak_rss_mb
from tests.oracles.fetch import ORACLES
from trtllm_b12x_fix.emulator import moe
from trtllm_b12x_fix.emulator.arithmetic import PUBLISHED
from trtllm_b12x_fix.layer import Activation

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, ROWS, PEER_ROWS = 128, 1024, 2688, 22, 8, 1
THREADS = 2


def make() -> tuple[moe.LaunchTensors, torch.Tensor, moe.Routing]:
    """Random bytes: the time does not depend on values, and scales stay far from NaN."""
    generator = torch.Generator().manual_seed(0)

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    def scales(*shape: int) -> torch.Tensor:
        return torch.randint(0x30, 0x50, shape, dtype=torch.uint8, generator=generator)

    launch = moe.LaunchTensors(
        w1_packed=codes(EXPERTS, INTERMEDIATE, HIDDEN // 2),
        w1_block_scale=scales(EXPERTS, INTERMEDIATE, HIDDEN // 16),
        w2_packed=codes(EXPERTS, HIDDEN, INTERMEDIATE // 2),
        w2_block_scale=scales(EXPERTS, HIDDEN, INTERMEDIATE // 16),
        w1_alpha=torch.full((EXPERTS,), 1e-6),
        w2_alpha=torch.full((EXPERTS,), 1e-6),
        input_global_scale=torch.tensor(4.5 / 2688),
        fc2_input_scale=torch.tensor(1e-6),
        activation=Activation.RELU2,
    )
    x = torch.randn(ROWS, HIDDEN, generator=generator).to(torch.bfloat16)
    weights, ids = torch.rand(ROWS, EXPERTS, generator=generator).topk(TOP_K, dim=1)
    return launch, x, moe.Routing(ids, weights / weights.sum(dim=1, keepdim=True))


def ours() -> None:
    torch.set_num_threads(THREADS)
    moe.run(*make(), PUBLISHED)


def run() -> BenchResult:
    torch.set_num_threads(THREADS)
    launch, x, routing = make()
    ours_s = median_seconds(lambda: moe.run(launch, x, routing, PUBLISHED), repeats=3)
    peer_s = median_seconds(_peer(launch, x, routing), repeats=3) * ROWS / PEER_ROWS
    return BenchResult(
        name=f"published arithmetic, {ROWS} rows, top-{TOP_K} of {EXPERTS} experts",
        ours_s=ours_s,
        peer_s=peer_s,
        peer="b12x 1.5.1 moe_reference_nvfp4",
        peak_mb=peak_rss_mb(ours),
        note=f"CPU, {THREADS} threads; peer ran {PEER_ROWS} row, scaled to {ROWS}",
    )


def _peer(launch: moe.LaunchTensors, x: torch.Tensor, routing: moe.Routing) -> Any:
    for name in published.ORACLES:
        site.addsitedir(str(ORACLES[name].path))
    module = import_module(published.MODULE)
    few = moe.Routing(routing.expert_ids[:PEER_ROWS], routing.weights[:PEER_ROWS])
    arguments = published.arguments(launch, x[:PEER_ROWS], few)
    return lambda: module.moe_reference_nvfp4(*arguments, activation="relu2")
