"""E4M3 (FP8, the "fn" variant): the 256 codes as a table, saturating encode, decode.

Source of the format: "FP8 Formats for Deep Learning" (arXiv:2209.05433). E4M3fn has no infinity;
0x7F and 0xFF are NaN. Smallest normal 2^-6, smallest subnormal 2^-9, largest 448.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trtllm_b12x_fix.errors import InputError

E4M3_MAX = 448.0
E4M3_MIN_NORMAL = 2.0**-6
E4M3_MIN_SUBNORMAL = 2.0**-9
NAN_BYTES = (0x7F, 0xFF)


def _value(byte: int) -> float:
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = (byte >> 3) & 0xF, byte & 0x7
    if exponent == 0xF and mantissa == 0x7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * E4M3_MIN_SUBNORMAL
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


#: Value of each byte, from the definition; the tests compare it with ml-dtypes and torch.
E4M3_VALUES: tuple[float, ...] = tuple(_value(byte) for byte in range(256))


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
