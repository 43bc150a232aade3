"""Synthetic layers for the tests: Gaussian experts quantized as ModelOpt does."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from trtllm_b12x_fix.emulator.moe import Routing
from trtllm_b12x_fix.formats import nvfp4
from trtllm_b12x_fix.layer import Activation, ExpertMatrices, MoELayer


def make_layer(
    activation: Activation,
    *,
    experts: int = 8,
    hidden: int = 256,
    intermediate: int = 256,
    sigma: float = 0.02,
    seed: int = 0,
) -> MoELayer:
    """Experts with weights sigma * N(0, 1); sigma 0.02 puts weight_scale_2 near 3e-5."""
    generator = torch.Generator().manual_seed(seed)
    # Calibrated on N(0, 1) tokens; experts differ, as those of real checkpoints do.
    spread = 1 + 0.6 * torch.rand(2, experts, generator=generator)
    fc1 = _matrices(experts, activation.fc1_rows(intermediate), hidden, sigma, generator)
    fc2 = _matrices(experts, hidden, intermediate, sigma, generator)
    tokens = torch.randn(64, hidden, generator=generator)
    amax = torch.stack([_inner_amax(fc1, expert, activation, tokens) for expert in range(experts)])
    return MoELayer(
        replace(fc1, input_scale=tokens.abs().max() / 2688 * spread[0]),
        replace(fc2, input_scale=amax / 2688 * spread[1]),
        activation,
        f"synthetic {activation.value}",
        hidden,
        intermediate,
    )


def _inner_amax(fc1: ExpertMatrices, expert: int, activation: Activation, tokens: Tensor) -> Tensor:
    quantized = nvfp4.NVFP4Tensor(
        fc1.packed[expert], fc1.block_scale[expert], fc1.weight_scale_2[expert]
    )
    h = tokens @ nvfp4.dequantize(quantized).t()
    if not activation.is_gated:
        return h.clamp(min=0).square().max()
    up, gate = h.chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).abs().max()


def _matrices(
    experts: int,
    rows: int,
    columns: int,
    sigma: float,
    generator: torch.Generator,
) -> ExpertMatrices:
    quantized = [
        nvfp4.quantize(torch.randn(rows, columns, generator=generator) * sigma)
        for _ in range(experts)
    ]
    return ExpertMatrices(
        torch.stack([q.packed for q in quantized]),
        torch.stack([q.block_scale for q in quantized]),
        torch.stack([q.global_scale for q in quantized]),
        torch.ones(experts),
    )


def make_inputs(
    layer: MoELayer, *, tokens: int = 8, top_k: int = 4, seed: int = 1
) -> tuple[Tensor, Routing]:
    """bf16 N(0, 1) tokens and distinct random experts with softmax-like weights."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, layer.hidden, generator=generator).to(torch.bfloat16)
    scores = torch.rand(tokens, layer.experts, generator=generator)
    weights, ids = scores.topk(top_k, dim=1)
    return x, Routing(ids, weights / weights.sum(dim=1, keepdim=True))
