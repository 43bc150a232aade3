"""The two yardsticks: exact scales in a kernel's own arithmetic, and the fp64 truth."""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_b12x_fix.emulator.grouped import grouped_matmul
from trtllm_b12x_fix.emulator.moe import LaunchTensors, Routing, routes_by_expert
from trtllm_b12x_fix.layer import Activation, ExpertMatrices, MoELayer


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
    h = _intermediate(layer, x, routing)
    rows = torch.arange(h.shape[0], device=h.device)
    y = _multiply(layer.fc2, h, rows, routing).view(*routing.expert_ids.shape, -1)
    return (y * routing.weights.double().unsqueeze(-1)).sum(dim=1)


def intermediate_amax(layer: MoELayer, x: Tensor, routing: Routing) -> float:
    """Largest magnitude that FC2's input takes for these tokens, in fp64 on exact weights."""
    return float(_intermediate(layer, x, routing).abs().max())


def _intermediate(layer: MoELayer, x: Tensor, routing: Routing) -> Tensor:
    """FC2's input of every route, fp64 [T*K, I]."""
    tokens = torch.arange(x.shape[0], device=x.device)
    rows = tokens.repeat_interleave(routing.expert_ids.shape[1])
    return _activate(_multiply(layer.fc1, x.double(), rows, routing), layer.activation)


def _multiply(matrices: ExpertMatrices, operand: Tensor, rows: Tensor, routing: Routing) -> Tensor:
    """``operand[rows] @ W.T`` with each route's dequantized expert, fp64 [T*K, R]."""
    product = grouped_matmul(
        operand,
        rows,
        matrices.packed,
        matrices.block_scale,
        routes_by_expert(routing),
        [slice(0, operand.shape[1])],
    )
    scale = matrices.weight_scale_2[routing.expert_ids.flatten()].double()
    return product.squeeze(1) * scale.unsqueeze(1)


def _activate(h: Tensor, activation: Activation) -> Tensor:
    if activation is Activation.RELU2:
        return h.clamp(min=0).square()
    up, gate = h.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
