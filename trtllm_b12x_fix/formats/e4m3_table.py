"""The 256 E4M3 codes as a table, for those who must not import torch.

Source of the format: "FP8 Formats for Deep Learning" (arXiv:2209.05433). E4M3fn has no infinity;
0x7F and 0xFF are NaN. Smallest normal 2^-6, smallest subnormal 2^-9, largest 448.
"""

from __future__ import annotations

import math

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
