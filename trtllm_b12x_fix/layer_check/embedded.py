"""The embedded layer as input of a layer check: padded, routed, at two magnitudes."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from trtllm_b12x_fix.checkpoint import embedded
from trtllm_b12x_fix.emulator.moe import Routing
from trtllm_b12x_fix.layer import MoELayer, move_magnitude, pad_activations, pad_to_tiles
from trtllm_b12x_fix.layer_check.run import LayerInput

_INPUTS = "recorded on GSM8K text, every expert with weight 1"


def load_inputs() -> tuple[LayerInput, LayerInput]:
    """The layer moved to the magnitude of the reported checkpoint, and at its own."""
    layer, x = embedded.load()
    k = embedded.reported_shift(layer)
    moved = replace(
        move_magnitude(layer, k),
        source=f"{layer.source}; FC1 weights / 2^{k}, inputs * 2^{k} (the same function)",
    )
    # A power of two moves bf16 activations without rounding.
    return _prepare(moved, torch.ldexp(x, torch.tensor(k)).to(x.dtype)), _prepare(layer, x)


def _prepare(layer: MoELayer, x: Tensor) -> LayerInput:
    padded = pad_to_tiles(layer)
    experts = torch.arange(layer.experts).expand(x.shape[0], -1).contiguous()
    weights = torch.ones(experts.shape, dtype=torch.float32)
    return LayerInput(padded, pad_activations(x, padded.hidden), Routing(experts, weights), _INPUTS)
