"""The contract emulator of trtllm-gen: consumes a call as it stands, undoes the layout, computes.

What it does, in FlashInfer's words (csrc/trtllm_batched_gemm_runner.cu, KernelRunner.h and
trtllm_fused_moe_dev_kernel.cu of the wheels; the compiled kernels themselves are not readable):

* FC1, not gated: ``relu(acc * output1_scale_gate_scalar)^2 * output1_scale_scalar``;
  gated: ``(x0 * output1_scale_scalar) * silu(x1 * output1_scale_gate_scalar)``, x0 and x1 being
  neighbouring rows;
* the result is quantized to NVFP4 with a global scale of 1, evaluation order assumed;
* FC2: ``bf16(acc * output2_scale_scalar)`` per route, then an fp32 sum over routes with their
  weights, rounded to bf16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_b12x_fix.emulator.arithmetic import (
    Arithmetic,
    OutputSum,
    QuantMath,
    ScaleConvention,
    SigmoidMath,
    SubnormalDecode,
)
from trtllm_b12x_fix.emulator.grouped import grouped_matmul
from trtllm_b12x_fix.emulator.matmul import full_precision, operand_dtype
from trtllm_b12x_fix.emulator.moe import Routing, routes_by_expert
from trtllm_b12x_fix.emulator.quantize import Quantized, quantize_rows
from trtllm_b12x_fix.errors import InputError, UnsupportedVersionError
from trtllm_b12x_fix.formats import e2m1
from trtllm_b12x_fix.formats.nvfp4 import BLOCK
from trtllm_b12x_fix.layer import Activation
from trtllm_b12x_fix.parity import routing
from trtllm_b12x_fix.parity.call import DEEPSEEK_V3, KernelCall, Path, as_bytes
from trtllm_b12x_fix.parity.layout import contract, read_rows, read_scales
from trtllm_b12x_fix.parity.routing import Router, Routes, WeightRecovery

#: How activations are quantized: amax / (6 g), one reciprocal, nearest even. The order in which
#: trtllm-gen's epilogue evaluates this is not readable; ties may fall otherwise on hardware.
ARITHMETIC = Arithmetic(
    name="trtllm-gen, assumed",
    quant_math=QuantMath.PRECISE,
    convention=ScaleConvention.DIVISOR,
    subnormals=SubnormalDecode.IEEE,
    sigmoid=SigmoidMath.RECIPROCAL,
    output_sum=OutputSum.FP32,
)


@dataclass(frozen=True)
class LinearWeights:
    """Both matrices in linear order, FC1 as [up; gate] where gated.

    Attributes:
        fc1_packed, fc1_scale: uint8 [E, R, H/2] and [E, R, H/16].
        fc2_packed, fc2_scale: uint8 [E, H, I/2] and [E, H, I/16].
    """

    fc1_packed: Tensor
    fc1_scale: Tensor
    fc2_packed: Tensor
    fc2_scale: Tensor


@dataclass(frozen=True)
class Scalars:
    """fp32 [E] each, by what they multiply: FC1 before and after the activation, FC2."""

    before_activation: Tensor
    after_activation: Tensor
    output: Tensor


def read_weights(call: KernelCall) -> LinearWeights:
    """Undo shuffle, gate order and interleave by the contract, whatever really is stored.

    Raises:
        ShapeError: sizes that no tile divides.
    """
    fc1 = contract(gated=call.activation.is_gated)
    fc2 = contract(gated=False)
    return LinearWeights(
        read_rows(call.gemm1_weights, fc1),
        read_scales(as_bytes(call.gemm1_weights_scale), fc1),
        read_rows(call.gemm2_weights, fc2),
        read_scales(as_bytes(call.gemm2_weights_scale), fc2),
    )


def read_activations(call: KernelCall) -> Quantized:
    """Codes and scales of the tokens; scales are linear by contract, from the first byte on."""
    groups = call.hidden // BLOCK
    scale = as_bytes(call.hidden_states_scale).flatten()[: call.tokens * groups]
    return Quantized(e2m1.unpack(call.hidden_states), scale.view(call.tokens, groups))


def routes_of(call: KernelCall, recovery: WeightRecovery) -> Routes:
    """The routes the kernel would take.

    Raises:
        UnsupportedVersionError: a routing method that is not emulated.
        InputError: arguments missing, or experts out of range.
    """
    if call.path is Path.MODULAR:
        routes = _given_routes(call)
    else:
        routes = routing.inside_kernel(router_of(call), recovery)
    low, high = int(routes.expert_ids.min()), int(routes.expert_ids.max())
    if low < 0 or high >= call.num_experts:
        raise InputError(f"experts {low} to {high} of {call.num_experts} are routed to")
    return routes


def router_of(call: KernelCall) -> Router:
    """What the kernel routes by.

    Raises:
        UnsupportedVersionError: another method than DeepSeekV3 without groups.
        InputError: no logits or no bias.
    """
    if call.routing_method_type != DEEPSEEK_V3 or (call.n_group or 0) > 1:
        raise UnsupportedVersionError(
            f"routing_method_type {call.routing_method_type} with n_group {call.n_group}: only "
            f"{DEEPSEEK_V3} (DeepSeekV3) with at most one group is emulated"
        )
    if call.routing_logits is None or call.routing_bias is None:
        raise InputError("a monolithic call needs routing_logits and routing_bias")
    scale = 1.0 if call.routed_scaling_factor is None else call.routed_scaling_factor
    return Router(call.routing_logits, call.routing_bias, call.top_k, scale)


def _given_routes(call: KernelCall) -> Routes:
    if isinstance(call.topk_ids, tuple):
        ids, weights = call.topk_ids
        return Routes(ids.long(), weights)
    if call.topk_ids is None:
        raise InputError("a modular call needs topk_ids")
    return routing.unpack(call.topk_ids)


def launch(
    call: KernelCall,
    recovery: WeightRecovery = WeightRecovery.RECOMPUTED,
    weights: LinearWeights | None = None,
) -> Tensor:
    """The output of a call: bf16 [T, H]; fills ``routing_replay_out``.

    Args:
        weights: of :func:`read_weights`, where many calls share them.

    Raises:
        B12xFixError: a call that cannot be emulated.
    """
    routes = routes_of(call, recovery)
    if call.routing_replay_out is not None:
        call.routing_replay_out[: call.tokens] = routes.expert_ids.to(torch.int16)
    scalars = Scalars(
        call.output1_scale_gate_scalar.detach(),
        call.output1_scale_scalar.detach(),
        call.output2_scale_scalar.detach(),
    )
    linear = read_weights(call) if weights is None else weights
    return compute(linear, scalars, read_activations(call), routes, call.activation)


def compute(
    weights: LinearWeights,
    scalars: Scalars,
    tokens: Quantized,
    routes: Routes,
    activation: Activation,
) -> Tensor:
    """The MoE on linear tensors: bf16 [T, H]."""
    groups = routes_by_expert(Routing(routes.expert_ids, routes.weights))
    experts = routes.expert_ids.flatten()
    count, top_k = routes.expert_ids.shape
    with torch.no_grad(), full_precision():
        rows = torch.arange(count, device=experts.device).repeat_interleave(top_k)
        operand = tokens.operand(operand_dtype(experts.device))
        columns = [slice(0, operand.shape[1])]
        sums = grouped_matmul(
            operand, rows, weights.fc1_packed, weights.fc1_scale, groups, columns
        ).squeeze(1)
        inner = quantize_rows(
            _activate(sums, scalars, experts, activation),
            torch.ones((), device=experts.device),
            ARITHMETIC,
        )
        operand = inner.operand(operand_dtype(experts.device))
        columns = [slice(0, operand.shape[1])]
        rows = torch.arange(experts.shape[0], device=experts.device)
        sums = grouped_matmul(
            operand, rows, weights.fc2_packed, weights.fc2_scale, groups, columns
        ).squeeze(1)
        terms = (sums * scalars.output[experts].unsqueeze(1)).to(torch.bfloat16).float()
        weight = routes.weights.float().unsqueeze(-1)
        return (terms.view(count, top_k, -1) * weight).sum(dim=1).to(torch.bfloat16)


def _activate(sums: Tensor, scalars: Scalars, experts: Tensor, activation: Activation) -> Tensor:
    before = scalars.before_activation[experts].unsqueeze(1)
    after = scalars.after_activation[experts].unsqueeze(1)
    if activation is Activation.RELU2:
        return (sums * before).clamp(min=0).square() * after
    up, gate = sums.chunk(2, dim=-1)
    return (up * after) * torch.nn.functional.silu(gate * before)
