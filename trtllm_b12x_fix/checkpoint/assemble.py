"""Experts stored as separate linears, stacked into one :class:`MoELayer`."""

from __future__ import annotations

import torch

from trtllm_b12x_fix.checkpoint.conventions import QuantizedLinear, TensorSource, read_linear
from trtllm_b12x_fix.errors import InputError, ScaleError, ShapeError
from trtllm_b12x_fix.layer import Activation, ExpertMatrices, MoELayer, validate


def assemble(
    source: TensorSource, prefix: str, experts: int, activation: Activation, description: str
) -> MoELayer:
    """Read experts 0..experts-1 below ``prefix`` (``{prefix}.{e}.up_proj`` and so on).

    Gated layers have gate_proj, up_proj and down_proj and become ``[up; gate]``; relu2 layers have
    up_proj and down_proj.

    Raises:
        InputError, ShapeError, ScaleError: see :func:`read_linear` and
            :func:`trtllm_b12x_fix.layer.validate`; gate and up whose weight_scale_2 differ.
    """
    if experts < 1:
        raise InputError(f"{source.name}: {prefix}: a layer has at least one expert")
    firsts, seconds = [], []
    for expert in range(experts):
        base = f"{prefix}.{expert}"
        up = read_linear(source, f"{base}.up_proj")
        if activation.is_gated:
            firsts.append(_fuse(up, read_linear(source, f"{base}.gate_proj"), base, source.name))
        else:
            firsts.append(up)
        seconds.append(read_linear(source, f"{base}.down_proj"))
        for name, mine in (("first projection", firsts), ("down_proj", seconds)):
            if mine[-1].packed.shape != mine[0].packed.shape:
                raise ShapeError(
                    f"{source.name}: {base}: {name} has codes {tuple(mine[-1].packed.shape)}, "
                    f"expert 0 has {tuple(mine[0].packed.shape)}"
                )
    fc1, fc2 = _stack(firsts), _stack(seconds)
    layer = MoELayer(fc1, fc2, activation, description, fc1.columns, fc2.columns)
    validate(layer)
    return layer


def _fuse(up: QuantizedLinear, gate: QuantizedLinear, base: str, file: str) -> QuantizedLinear:
    if up.weight_scale_2 != gate.weight_scale_2:
        raise ScaleError(
            f"{file}: {base}: weight_scale_2 of gate_proj ({float(gate.weight_scale_2):.6g}) and "
            f"up_proj ({float(up.weight_scale_2):.6g}) differ; a fused FC1 has one"
        )
    if up.packed.shape != gate.packed.shape:
        raise ShapeError(
            f"{file}: {base}: gate_proj {tuple(gate.packed.shape)} and up_proj "
            f"{tuple(up.packed.shape)} must have one shape"
        )
    return QuantizedLinear(
        torch.cat([up.packed, gate.packed]),
        torch.cat([up.block_scale, gate.block_scale]),
        up.weight_scale_2,
        # Both halves read the same activations; backends keep the larger scale.
        torch.maximum(up.input_scale, gate.input_scale),
    )


def _stack(linears: list[QuantizedLinear]) -> ExpertMatrices:
    return ExpertMatrices(
        torch.stack([linear.packed for linear in linears]),
        torch.stack([linear.block_scale for linear in linears]),
        torch.stack([linear.weight_scale_2 for linear in linears]),
        torch.stack([linear.input_scale for linear in linears]),
    )
