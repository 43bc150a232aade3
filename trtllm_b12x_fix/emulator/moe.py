"""One emulated b12x launch: quantize, FC1, activation, quantize, FC2, sum; every stage kept."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_b12x_fix.emulator.accumulate import combine
from trtllm_b12x_fix.emulator.arithmetic import SLICE, Arithmetic, OutputSum, SigmoidMath
from trtllm_b12x_fix.emulator.grouped import grouped_matmul
from trtllm_b12x_fix.emulator.matmul import full_precision, operand_dtype
from trtllm_b12x_fix.emulator.quantize import Quantized, quantize_rows
from trtllm_b12x_fix.errors import InputError, ShapeError
from trtllm_b12x_fix.layer import Activation


@dataclass(frozen=True)
class LaunchTensors:
    """What a kernel gets, after the wrapper has folded and broadcast its arguments.

    Attributes:
        w1_packed, w1_block_scale: uint8 [E, R, H/2] and [E, R, H/16], R = I or 2I ([up; gate]),
            linear layout.
        w2_packed, w2_block_scale: uint8 [E, H, I/2] and [E, H, I/16].
        w1_alpha: fp32 [E], multiplies FC1's accumulator.
        w2_alpha: fp32 [E], multiplies FC2's accumulator.
        input_global_scale: fp32 [] or [E], FC1's activation quantization scale.
        fc2_input_scale: fp32 [] or [E], FC2's activation quantization scale.
        activation: the layer's activation.
    """

    w1_packed: Tensor
    w1_block_scale: Tensor
    w2_packed: Tensor
    w2_block_scale: Tensor
    w1_alpha: Tensor
    w2_alpha: Tensor
    input_global_scale: Tensor
    fc2_input_scale: Tensor
    activation: Activation

    @property
    def experts(self) -> int:
        return self.w1_packed.shape[0]

    @property
    def intermediate(self) -> int:
        return self.w2_packed.shape[2] * 2


@dataclass(frozen=True)
class Routing:
    """expert_ids int64 [T, K]; weights fp32 [T, K], applied after FC2."""

    expert_ids: Tensor
    weights: Tensor


@dataclass(frozen=True)
class MoETrace:
    """Every stage of one launch, per token and route.

    Attributes:
        input: quantized activations [N, H]; N = T where one scale serves all experts (the token
            is quantized once), else T*K.
        fc1: fp32 [T, K, R], ``w1_alpha * accumulator``.
        intermediate: bf16 [T, K, I], the activation's output as rounded by every family.
        intermediate_quantized: its quantization, [T*K, I].
        fc2: fp32 [T, K, H], ``w2_alpha * accumulator`` over the whole intermediate.
        output: bf16 [T, H], added up as the family does.
        unrounded: fp32 [T, H], see :class:`trtllm_b12x_fix.emulator.accumulate.Combined`.
    """

    input: Quantized
    fc1: Tensor
    intermediate: Tensor
    intermediate_quantized: Quantized
    fc2: Tensor
    output: Tensor
    unrounded: Tensor


def run(
    tensors: LaunchTensors,
    x: Tensor,
    routing: Routing,
    arithmetic: Arithmetic,
    order_seed: int | None = None,
) -> MoETrace:
    """Emulate one launch.

    Args:
        tensors: weights and scales as the kernel gets them.
        x: bf16 [T, H]; b12x takes nothing else (its dynamic family misreads fp16).
        routing: expert choice and weights.
        arithmetic: what the family does, bit for bit.
        order_seed: see :func:`trtllm_b12x_fix.emulator.accumulate.combine`.

    Raises:
        InputError: ``x`` is not bf16, or an expert id is out of range.
        ShapeError: sizes that contradict each other.
    """
    _check(tensors, x, routing)
    with torch.no_grad(), full_precision():
        quantized, rows = _quantize_input(tensors, x, routing, arithmetic)
        fc1 = _fc1(tensors, quantized, rows, routing)
        intermediate = _activate(fc1, tensors.activation, arithmetic.sigmoid).to(torch.bfloat16)
        inner = quantize_rows(
            intermediate.flatten(0, 1),
            _per_route(tensors.fc2_input_scale, routing).flatten(),
            arithmetic,
        )
        partials = _fc2(tensors, inner, routing, arithmetic)
        alpha = tensors.w2_alpha[routing.expert_ids]
        rows_out = combine(partials, alpha, routing.weights, arithmetic.output_sum, order_seed)
        fc2 = partials.sum(dim=2) * alpha.unsqueeze(-1)
    return MoETrace(quantized, fc1, intermediate, inner, fc2, rows_out.output, rows_out.unrounded)


def _check(tensors: LaunchTensors, x: Tensor, routing: Routing) -> None:
    if x.dtype != torch.bfloat16:
        raise InputError(f"b12x kernels take bf16 activations, got {x.dtype}")
    if not bool(torch.isfinite(x).all()):
        raise InputError("activations hold NaN or infinity")
    hidden = tensors.w1_packed.shape[2] * 2
    if x.dim() != 2 or x.shape[1] != hidden:
        raise ShapeError(f"activations must be [tokens, {hidden}], got {tuple(x.shape)}")
    if routing.expert_ids.shape != routing.weights.shape or (
        routing.expert_ids.shape[0] != x.shape[0]
    ):
        raise ShapeError(
            f"routing {tuple(routing.expert_ids.shape)} / {tuple(routing.weights.shape)} does not "
            f"fit {x.shape[0]} tokens"
        )
    low, high = routing.expert_ids.aminmax()
    if int(low) < 0 or int(high) >= tensors.experts:
        raise InputError(
            f"expert ids must be 0..{tensors.experts - 1}, got {int(low)}..{int(high)}"
        )


def _per_route(scale: Tensor, routing: Routing) -> Tensor:
    if scale.numel() == 1:
        return scale.reshape(()).expand(routing.expert_ids.shape)
    return scale[routing.expert_ids]


def _quantize_input(
    tensors: LaunchTensors, x: Tensor, routing: Routing, arithmetic: Arithmetic
) -> tuple[Quantized, Tensor]:
    """Quantize tokens once per scale; returns the rows and each route's row index [T, K]."""
    tokens, routes = routing.expert_ids.shape
    index = torch.arange(tokens, device=x.device)
    if tensors.input_global_scale.numel() == 1:
        quantized = quantize_rows(x, tensors.input_global_scale.reshape(()), arithmetic)
        return quantized, index.unsqueeze(1).expand(tokens, routes)
    repeated = x.repeat_interleave(routes, dim=0)
    scale = _per_route(tensors.input_global_scale, routing).flatten()
    rows = torch.arange(tokens * routes, device=x.device).view(tokens, routes)
    return quantize_rows(repeated, scale, arithmetic), rows


def routes_by_expert(routing: Routing) -> list[tuple[int, Tensor]]:
    """(expert, flat route indices) for every expert that has work, in expert order."""
    flat = routing.expert_ids.flatten()
    order = flat.argsort(stable=True)
    experts, counts = flat[order].unique_consecutive(return_counts=True)
    groups = order.split(counts.tolist())
    return list(zip(experts.tolist(), groups, strict=True))


def _fc1(tensors: LaunchTensors, quantized: Quantized, rows: Tensor, routing: Routing) -> Tensor:
    operand = quantized.operand(operand_dtype(rows.device))
    sums = grouped_matmul(
        operand,
        rows.flatten(),
        tensors.w1_packed,
        tensors.w1_block_scale,
        routes_by_expert(routing),
        [slice(0, operand.shape[1])],
    )
    alpha = tensors.w1_alpha[routing.expert_ids]
    return sums.view(*rows.shape, -1) * alpha.unsqueeze(-1)


def _activate(fc1: Tensor, activation: Activation, sigmoid: SigmoidMath) -> Tensor:
    if activation is Activation.RELU2:
        positive = fc1.clamp(min=0)
        return positive * positive
    up, gate = fc1.chunk(2, dim=-1)
    if sigmoid is SigmoidMath.TORCH:
        return gate * torch.sigmoid(gate) * up
    return gate * (1.0 / (1.0 + torch.exp(-gate))) * up


def _groups(intermediate: int, arithmetic: Arithmetic) -> list[slice]:
    """Column ranges of the intermediate that FC2 sums in fp32 before its first rounding."""
    if arithmetic.output_sum in (OutputSum.FP32, OutputSum.SINGLE_STORE):
        return [slice(0, intermediate)]
    width = SLICE * arithmetic.retained_slices
    starts = range(0, intermediate, width)
    return [slice(start, min(start + width, intermediate)) for start in starts]


def _fc2(
    tensors: LaunchTensors, inner: Quantized, routing: Routing, arithmetic: Arithmetic
) -> Tensor:
    device = routing.expert_ids.device
    columns = _groups(tensors.intermediate, arithmetic)
    sums = grouped_matmul(
        inner.operand(operand_dtype(device)),
        torch.arange(routing.expert_ids.numel(), device=device),
        tensors.w2_packed,
        tensors.w2_block_scale,
        routes_by_expert(routing),
        columns,
    )
    return sums.view(*routing.expert_ids.shape, len(columns), -1)
