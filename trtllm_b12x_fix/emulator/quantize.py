"""The kernels' activation quantizers, one function per evaluation order.

All arithmetic is fp32 (fp64 where the kernel's is) in the kernel's own order of operations.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_b12x_fix.emulator.arithmetic import (
    Arithmetic,
    QuantMath,
    ScaleConvention,
    SubnormalDecode,
)
from trtllm_b12x_fix.errors import ShapeError
from trtllm_b12x_fix.formats import e2m1, e4m3
from trtllm_b12x_fix.formats.nvfp4 import BLOCK

# Guards the reference and direct micro against a zero block scale; both clamp at this value.
_SMALLEST_EFFECTIVE_SCALE = 1e-30
# Elements at a time. torch divides longer loops among threads, which wait for each other at every
# one of many steps: dear on a busy machine. Temporaries of this size also stay in the cache.
_SINGLE_THREAD = 2**15 - 1
_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Quantized:
    """Quantized rows: codes uint8 [N, C] (one per byte) and block_scale uint8 [N, C/16]."""

    codes: Tensor
    block_scale: Tensor

    def operand(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """``code * block_scale`` as the tensor core sees it, [N, C]; exact in fp32 and bf16."""
        scales = e4m3.decode(self.block_scale, dtype).unsqueeze(-1)
        return (e2m1.decode(self.codes, dtype).unflatten(-1, (-1, BLOCK)) * scales).flatten(-2)


def quantize_rows(values: Tensor, global_scale: Tensor, arithmetic: Arithmetic) -> Quantized:
    """Quantize rows to NVFP4 as one kernel family does.

    Args:
        values: fp32 or bf16 [N, C], C a multiple of 16.
        global_scale: fp32 [N] (or scalar), the dequantizing multiplier handed to the kernel. A
            kernel with :attr:`ScaleConvention.MULTIPLIER` misreads it, which is the point.
        arithmetic: evaluation order, convention, subnormal decode.

    Raises:
        ShapeError: C is not a multiple of 16.
    """
    if values.shape[-1] % BLOCK:
        raise ShapeError(f"activations {tuple(values.shape)} are not whole blocks of {BLOCK}")
    scale = global_scale.to(torch.float32).expand(values.shape[0]).unsqueeze(-1)
    step = _rows_at_a_time(values)
    parts = [
        _quantize(*part, arithmetic)
        for part in zip(values.split(step), scale.split(step), strict=True)
    ]
    if len(parts) == 1:
        return parts[0]
    return Quantized(
        torch.cat([part.codes for part in parts]), torch.cat([part.block_scale for part in parts])
    )


def _rows_at_a_time(values: Tensor) -> int:
    if values.device.type != "cpu":
        return max(1, values.shape[0])
    return max(1, _SINGLE_THREAD // values.shape[1])


def _quantize(values: Tensor, scale: Tensor, arithmetic: Arithmetic) -> Quantized:
    blocks = values.to(torch.float32).unflatten(-1, (-1, BLOCK))
    amax = blocks.abs().amax(dim=-1)
    quantizer = {
        QuantMath.FAST: _fast,
        QuantMath.PRECISE: _precise,
        QuantMath.DIRECT_MICRO: _direct_micro,
        QuantMath.DIRECT_DIVISION: _direct_division,
    }[arithmetic.quant_math]
    return quantizer(blocks, amax, scale, arithmetic)


def _read_back(block_scale: Tensor, decode: SubnormalDecode) -> Tensor:
    value = e4m3.decode(block_scale)
    if decode is SubnormalDecode.IEEE:
        return value
    subnormal = (block_scale > 0) & (block_scale < 8)
    misread = (1 + block_scale.to(torch.float32) / 8) * 2.0**-7
    return torch.where(subnormal, misread, value)


def _flush(values: Tensor) -> Tensor:
    """Flush subnormal results to zero, as ``rcp.approx.ftz`` does."""
    return torch.where(values.abs() < _SMALLEST_NORMAL, torch.zeros_like(values), values)


def _reciprocal_or_zero(values: Tensor) -> Tensor:
    return torch.where(values == 0, torch.zeros_like(values), 1.0 / values)


def _fast(blocks: Tensor, amax: Tensor, scale: Tensor, arithmetic: Arithmetic) -> Quantized:
    sixth = torch.tensor(1.0, device=blocks.device) / 6.0
    scale_reciprocal = _flush(_reciprocal_or_zero(scale))
    block_scale = e4m3.encode(scale_reciprocal * (amax * sixth))
    read_back = _read_back(block_scale, arithmetic.subnormals)
    inverse = _reciprocal_or_zero(read_back) * scale_reciprocal
    return _finish(blocks, inverse, block_scale)


def _precise(blocks: Tensor, amax: Tensor, scale: Tensor, arithmetic: Arithmetic) -> Quantized:
    block_scale = e4m3.encode(torch.where(scale == 0, scale, amax / (6.0 * scale)))
    effective = _read_back(block_scale, arithmetic.subnormals) * scale
    inverse = torch.where(effective == 0, torch.zeros_like(effective), 1.0 / effective)
    return _finish(blocks, inverse, block_scale)


def _direct_micro(blocks: Tensor, amax: Tensor, scale: Tensor, arithmetic: Arithmetic) -> Quantized:
    multiplier = scale
    if arithmetic.convention is ScaleConvention.DIVISOR:
        multiplier = _reciprocal_or_zero(scale)
    raw = (amax.double() * multiplier.double() / 6.0).float()
    block_scale = e4m3.encode(raw)
    effective = torch.where(
        multiplier == 0, torch.zeros_like(raw), e4m3.decode(block_scale) / multiplier
    )
    inverse = 1.0 / effective.clamp(min=_SMALLEST_EFFECTIVE_SCALE)
    return _finish(blocks, inverse, block_scale)


def _direct_division(blocks: Tensor, amax: Tensor, scale: Tensor, _: Arithmetic) -> Quantized:
    # The published reference takes the reciprocal as its argument, so it is rounded to fp32 once.
    reciprocal = 1.0 / scale
    block_scale = e4m3.encode(amax * reciprocal / 6.0)
    effective = (e4m3.decode(block_scale) / reciprocal).clamp(min=_SMALLEST_EFFECTIVE_SCALE)
    codes = e2m1.encode(blocks / effective.unsqueeze(-1)).flatten(-2)
    return Quantized(codes, block_scale)


def _finish(blocks: Tensor, inverse: Tensor, block_scale: Tensor) -> Quantized:
    codes = e2m1.encode(blocks * inverse.unsqueeze(-1)).flatten(-2)
    # A block whose scale or inverse is zero stores zero codes (the kernels skip packing it).
    silent = ((inverse == 0) | (block_scale == 0)).repeat_interleave(BLOCK, dim=-1)
    return Quantized(torch.where(silent, torch.zeros_like(codes), codes), block_scale)
