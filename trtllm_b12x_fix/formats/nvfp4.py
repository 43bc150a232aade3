"""NVFP4 tensors: E2M1 codes, one E4M3 block scale per 16 elements, one fp32 global scale.

``value = code * block_scale * global_scale``; both scales are dequantizing multipliers. The
quantizer follows NVIDIA ModelOpt's arithmetic (checked code for code against its export):

    global_scale = amax(tensor) / (6 * 448)
    block_scale  = E4M3(clamp(amax(block) / (6 * global_scale), 2^-9, 448)), 1.0 for a zero block
    code         = E2M1(value / (block_scale * global_scale))
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_b12x_fix.errors import InputError, ScaleError, ShapeError
from trtllm_b12x_fix.formats import e2m1, e4m3

BLOCK = 16
#: Largest value one global scale unit can represent: 6 (E2M1) times 448 (E4M3).
CALIBRATION_MAX = e2m1.E2M1_MAX * e4m3.E4M3_MAX


@dataclass(frozen=True)
class NVFP4Tensor:
    """A quantized tensor in linear (unswizzled) layout.

    Attributes:
        packed: uint8 [..., C/2], two codes to a byte, low nibble first.
        block_scale: uint8 [..., C/16], E4M3 bytes.
        global_scale: fp32 scalar tensor, a dequantizing multiplier (``weight_scale_2``).
    """

    packed: Tensor
    block_scale: Tensor
    global_scale: Tensor


def global_scale_from_amax(amax: Tensor) -> Tensor:
    """Calibrated global scale of a tensor (or activation) whose largest magnitude is ``amax``."""
    return amax.to(torch.float32) / CALIBRATION_MAX


def quantize(values: Tensor, global_scale: Tensor | None = None) -> NVFP4Tensor:
    """Quantize along the last dimension as ModelOpt's weight exporter does.

    Args:
        values: floating tensor [..., C] with C a multiple of 16; bf16 is widened to fp32, as
            ModelOpt's division by an fp32 scale does.
        global_scale: fp32 scalar; computed from the tensor's amax when absent (gate and up of one
            expert share one, so callers pass it).

    Raises:
        ShapeError: C is not a multiple of 16.
        InputError: a value is NaN or infinite.
        ScaleError: the global scale is zero, negative or not finite.
    """
    if values.shape[-1] % BLOCK:
        raise ShapeError(f"last dimension must be a multiple of {BLOCK}: {tuple(values.shape)}")
    work = values.to(torch.float32)
    if not bool(torch.isfinite(work).all()):
        raise InputError("cannot quantize a tensor that holds NaN or infinity")
    scale = global_scale_from_amax(work.abs().amax()) if global_scale is None else global_scale
    scale = scale.to(torch.float32)
    if not bool((torch.isfinite(scale) & (scale > 0)).all()):
        raise ScaleError(f"global scale must be positive and finite, got {scale.tolist()}")
    blocks = work.reshape(*work.shape[:-1], -1, BLOCK)
    raw = blocks.abs().amax(dim=-1) / (e2m1.E2M1_MAX * scale)
    raw = torch.where(raw == 0, torch.ones_like(raw), raw)
    block_scale = e4m3.encode(raw.clamp(e4m3.E4M3_MIN_SUBNORMAL, e4m3.E4M3_MAX))
    divisor = (e4m3.decode(block_scale) * scale).unsqueeze(-1)
    # ModelOpt derives the sign from x < 0, so negative zero is stored as code 0.
    codes = e2m1.encode(blocks / divisor + 0.0).flatten(-2)
    return NVFP4Tensor(e2m1.pack(codes), block_scale, scale)


def dequantize(tensor: NVFP4Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return [..., C] values ``code * block_scale * global_scale`` in ``dtype``.

    In fp64 the result is exact: a code times a block scale has at most 6 significant bits and the
    global scale has 24.
    """
    return operand(tensor.packed, tensor.block_scale, dtype) * tensor.global_scale.to(dtype)


def operand(packed: Tensor, block_scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode to what the block-scaled tensor core sees: ``code * block_scale``, no global scale.

    Exact in fp32, bf16 and fp64: at most 6 significant bits, exponents from 2^-10 to 2^11.

    Args:
        packed: uint8 [..., C/2].
        block_scale: uint8 or float8_e4m3fn [..., C/16].

    Raises:
        ShapeError: the two shapes do not belong together.
    """
    if packed.shape[:-1] != block_scale.shape[:-1] or packed.shape[-1] * 2 != (
        block_scale.shape[-1] * BLOCK
    ):
        raise ShapeError(
            f"packed codes {tuple(packed.shape)} and block scales {tuple(block_scale.shape)} do "
            f"not belong together: need [..., C/2] and [..., C/{BLOCK}]"
        )
    scales = e4m3.decode(block_scale, dtype)
    blocks = e2m1.decode_packed(packed, dtype).unflatten(-1, (-1, BLOCK))
    return blocks.mul_(scales.unsqueeze(-1)).flatten(-2)


def block_is_zero(packed: Tensor) -> Tensor:
    """Whether all 16 codes of each block are (positive or negative) zero: bool [..., C/16].

    Such a block is zero whatever its scale, so scale damage there costs nothing: padding and
    pruned blocks are not counted.
    """
    blocks = packed.unflatten(-1, (-1, BLOCK // 2)).contiguous()
    if blocks.storage_offset() % 8:  # a view as words has to start at one
        blocks = blocks.clone()
    # A block is one word of 8 bytes; the mask drops all sign bits, since -0 is zero too.
    return (blocks.view(torch.int64).squeeze(-1) & 0x7777777777777777) == 0
