"""E4M3 (FP8, the "fn" variant): saturating encode, decode; the codes are in ``e4m3_table``."""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_b12x_fix.errors import InputError
from trtllm_b12x_fix.formats.e4m3_table import E4M3_MAX as E4M3_MAX
from trtllm_b12x_fix.formats.e4m3_table import E4M3_MIN_NORMAL as E4M3_MIN_NORMAL
from trtllm_b12x_fix.formats.e4m3_table import E4M3_MIN_SUBNORMAL as E4M3_MIN_SUBNORMAL
from trtllm_b12x_fix.formats.e4m3_table import E4M3_VALUES as E4M3_VALUES
from trtllm_b12x_fix.formats.e4m3_table import NAN_BYTES as NAN_BYTES


def encode(values: Tensor) -> Tensor:
    """Round to the nearest E4M3 byte, ties to even, saturating at +-448.

    torch's own cast saturates in 2.13 but made NaN of 465 in older versions, so the clamp comes
    first. NaN stays NaN.

    Args:
        values: floating tensor of any shape; fp64 is rounded to fp32 first, as the kernels do.

    Returns:
        uint8 tensor of the same shape holding E4M3 bytes.

    Raises:
        InputError: ``values`` is not a floating tensor.
    """
    if not values.is_floating_point():
        raise InputError(f"E4M3 encoding needs a floating tensor, got {values.dtype}")
    clamped = values.to(torch.float32).clamp(-E4M3_MAX, E4M3_MAX)
    return clamped.to(torch.float8_e4m3fn).view(torch.uint8)


def decode(bytes_: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the value of each E4M3 byte. Exact in fp32, bf16 and fp16.

    Args:
        bytes_: uint8 (or float8_e4m3fn) tensor of any shape.
        dtype: floating dtype of the result.

    Raises:
        InputError: the tensor is neither uint8 nor float8_e4m3fn.
    """
    return as_e4m3(bytes_).to(dtype)


def as_e4m3(bytes_: Tensor) -> Tensor:
    """View uint8 bytes as float8_e4m3fn without a copy.

    Raises:
        InputError: the tensor is neither uint8 nor float8_e4m3fn.
    """
    if bytes_.dtype == torch.float8_e4m3fn:
        return bytes_
    if bytes_.dtype != torch.uint8:
        raise InputError(f"E4M3 scales must be uint8 or float8_e4m3fn, got {bytes_.dtype}")
    return bytes_.view(torch.float8_e4m3fn)
