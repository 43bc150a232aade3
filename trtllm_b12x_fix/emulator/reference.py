"""The two yardsticks: exact scales in a kernel's own arithmetic, and the fp64 truth."""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_b12x_fix.emulator.moe import LaunchTensors, Routing
from trtllm_b12x_fix.formats import nvfp4
from trtllm_b12x_fix.layer import Activation, MoELayer


def exact_launch(
    layer: MoELayer, fc1_input_scale: Tensor, fc2_input_scale: Tensor
) -> LaunchTensors:
    """The launch a correct backend makes: intact block scales, global scales in the alphas.

    Args:
        layer: weights and scales.
        fc1_input_scale, fc2_input_scale: fp32 [] or [E], dequantizing multipliers.
    """
    return LaunchTensors(
        w1_packed=layer.fc1.packed,
        w1_block_scale=layer.fc1.block_scale,
        w2_packed=layer.fc2.packed,
        w2_block_scale=layer.fc2.block_scale,
        w1_alpha=layer.fc1.weight_scale_2 * fc1_input_scale,
        w2_alpha=layer.fc2.weight_scale_2 * fc2_input_scale,
        input_global_scale=fc1_input_scale,
        fc2_input_scale=fc2_input_scale,
        activation=layer.activation,
    )


def truth(layer: MoELayer, x: Tensor, routing: Routing) -> Tensor:
    """fp64 on dequantized weights and unquantized activations: fp64 [T, H].

    The quantized weights are taken as given: what is measured is the backend, not ModelOpt.
    """
    x64 = x.double()
    out = torch.zeros(x.shape[0], layer.hidden, dtype=torch.float64, device=x.device)
    for expert in routing.expert_ids.unique().tolist():
        tokens, routes = (routing.expert_ids == expert).nonzero(as_tuple=True)
        w1 = _dequantize(layer, expert, "fc1")
        h = _activate(x64[tokens] @ w1.t(), layer.activation)
        y = h @ _dequantize(layer, expert, "fc2").t()
        out.index_add_(0, tokens, y * routing.weights[tokens, routes].double().unsqueeze(-1))
    return out


def intermediate_amax(layer: MoELayer, x: Tensor, routing: Routing) -> float:
    """Largest magnitude that FC2's input takes for these tokens, in fp64 on exact weights."""
    largest = 0.0
    for expert in routing.expert_ids.unique().tolist():
        tokens = (routing.expert_ids == expert).any(dim=1)
        h = _activate(x[tokens].double() @ _dequantize(layer, expert, "fc1").t(), layer.activation)
        largest = max(largest, float(h.abs().max()))
    return largest


def _dequantize(layer: MoELayer, expert: int, which: str) -> Tensor:
    matrices = layer.fc1 if which == "fc1" else layer.fc2
    return (
        nvfp4.operand(matrices.packed[expert], matrices.block_scale[expert], torch.float64)
        * matrices.weight_scale_2[expert].double()
    )


def _activate(h: Tensor, activation: Activation) -> Tensor:
    if activation is Activation.RELU2:
        return h.clamp(min=0).square()
    up, gate = h.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
