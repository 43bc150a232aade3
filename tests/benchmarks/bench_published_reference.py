"""One layer of the reported shape in the published arithmetic: our emulator against b12x's own.

Both start from the same packed codes and scale bytes and end at the output, decoding included;
nothing decoded is kept between calls. The peer, whose time grows with routed rows alone, runs few
rows and is scaled to ours.
"""

from __future__ import annotations

import site
from importlib import import_module
from typing import Any

import torch

from tests import published
from tests.benchmarks.result import BenchResult, median_seconds, peak_rss_mb
from tests.oracles.fetch import ORACLES
from trtllm_b12x_fix.emulator import grouped, moe
from trtllm_b12x_fix.emulator.arithmetic import PUBLISHED
from trtllm_b12x_fix.emulator.grouped import MatmulBackend, forced
from trtllm_b12x_fix.layer import Activation
from trtllm_b12x_fix.metrics import distance

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 512, 1024, 2688, 22
ROWS = (1, 8, 64)
MOST_PEER_ROWS = 2
THREADS = 2


def make() -> tuple[moe.LaunchTensors, torch.Tensor, moe.Routing]:
    """Random bytes: the time does not depend on values, and scales stay far from NaN."""
    generator = torch.Generator().manual_seed(0)

    def codes(*shape: int) -> torch.Tensor:
        words = (*shape[:-1], shape[-1] // 8)
        return torch.randint(-(2**63), 2**63 - 1, words, generator=generator).view(torch.uint8)

    def scales(*shape: int) -> torch.Tensor:
        return (codes(*shape) & 0x1F) + 0x30

    launch = moe.LaunchTensors(
        w1_packed=codes(EXPERTS, INTERMEDIATE, HIDDEN // 2),
        w1_block_scale=scales(EXPERTS, INTERMEDIATE, HIDDEN // 16),
        w2_packed=codes(EXPERTS, HIDDEN, INTERMEDIATE // 2),
        w2_block_scale=scales(EXPERTS, HIDDEN, INTERMEDIATE // 16),
        w1_alpha=torch.full((EXPERTS,), 1e-6),
        w2_alpha=torch.full((EXPERTS,), 1e-6),
        input_global_scale=torch.tensor(4.5 / 2688),
        fc2_input_scale=torch.tensor(2e-4),
        activation=Activation.RELU2,
    )
    x = torch.randn(max(ROWS), HIDDEN, generator=generator).to(torch.bfloat16)
    weights, ids = torch.rand(max(ROWS), EXPERTS, generator=generator).topk(TOP_K, dim=1)
    return launch, x, moe.Routing(ids, weights / weights.sum(dim=1, keepdim=True))


def ours(rows: int) -> None:
    """What the peak memory is of."""
    torch.set_num_threads(THREADS)
    launch, x, routing = make()
    moe.run(launch, x[:rows], _head(routing, rows), PUBLISHED)


def run() -> list[BenchResult]:
    torch.set_num_threads(THREADS)
    inputs = make()
    for name in published.ORACLES:
        site.addsitedir(str(ORACLES[name].path))
    module = import_module(published.MODULE)
    return [_measure(*inputs, rows, module) for rows in ROWS]


def _measure(
    launch: moe.LaunchTensors, x: torch.Tensor, routing: moe.Routing, rows: int, module: Any
) -> BenchResult:
    peer_rows = min(rows, MOST_PEER_ROWS)
    arguments = published.arguments(launch, x[:peer_rows], _head(routing, peer_rows))
    x, routing = x[:rows], _head(routing, rows)

    def peer() -> torch.Tensor:
        return module.moe_reference_nvfp4(*arguments, activation="relu2")

    def emulate() -> torch.Tensor:
        return moe.run(launch, x, routing, PUBLISHED).output

    apart = distance(emulate()[:peer_rows], peer())
    # Zero outputs would agree too, but have no cosine.
    if not (apart.relative_rms < 0.01 and apart.cosine > 0.999):
        raise AssertionError(f"the two disagree ({apart}): there is nothing to time")
    ours_s = median_seconds(emulate, repeats=5)
    peer_s = median_seconds(peer, repeats=3) * rows / peer_rows
    with forced(MatmulBackend.TORCH):
        torch_s = median_seconds(emulate, repeats=1 if rows > 8 else 3)
    return BenchResult(
        name=f"published arithmetic, rows {rows}, top-{TOP_K} of {EXPERTS} experts",
        ours_s=ours_s,
        peer_s=peer_s,
        peer="b12x 1.5.1 moe_reference_nvfp4",
        peak_mb=peak_rss_mb(ours, rows),
        note=f"CPU, {THREADS} threads, {grouped.describe(x.device)}; without numba "
        f"{peer_s / torch_s:.1f}x; peer ran {peer_rows} of {rows} rows; outputs differ by "
        f"{apart.relative_rms:.1e}",
    )


def _head(routing: moe.Routing, rows: int) -> moe.Routing:
    return moe.Routing(routing.expert_ids[:rows], routing.weights[:rows])
