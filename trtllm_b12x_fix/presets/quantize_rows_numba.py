"""The fused quantizer of :mod:`.quantize_rows` in numba: same bits, no temporaries, no GIL.

Every operation is IEEE fp32 in the order of ``formats.nvfp4.quantize`` (no fast-math, every
constant fp32), so codes and scales are those of torch bit for bit; the tests compare them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from numba import njit
from torch import Tensor

from trtllm_b12x_fix.formats.e4m3 import E4M3_VALUES
from trtllm_b12x_fix.presets.quantize_rows import weight_scale_2

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

_DECODED = np.array(E4M3_VALUES, dtype=np.float32)
_f32 = np.float32
_u8 = np.uint8
_u32 = np.uint32


@njit(nogil=True)
def _row_amax(values: Floats, out: Floats) -> None:
    for row in range(values.shape[0]):
        largest = _f32(0)
        for column in range(values.shape[1]):
            magnitude = abs(values[row, column])
            # NaN is smaller than nothing, so ask the other way round: it must be kept.
            largest = largest if magnitude <= largest else magnitude
        out[row] = largest


@njit(nogil=True)
def _encode_e4m3(value: np.float32) -> np.uint8:
    """Nearest E4M3 byte, ties to even, of a value from 2^-9 to 448."""
    if value < _f32(2.0**-6):
        # Adding 2^23 leaves an fp32 number no room for a fraction: it rounds to nearest even.
        # A multiple of 2^-9 is its own byte, up to 8 * 2^-9, the smallest normal.
        return _u8((value * _f32(512) + _f32(2.0**23)) - _f32(2.0**23))
    bits = _f32(value).view(_u32)
    # Keep 3 of 23 mantissa bits; 7 and 127 are the two exponent biases.
    bits = bits + _u32(0x7FFFF) + ((bits >> _u32(20)) & _u32(1))
    return _u8((bits >> _u32(20)) - _u32((127 - 7) << 3))


@njit(nogil=True, error_model="numpy")
def _quantize(
    normals: Floats,
    factors: Floats,
    scale: np.float32,
    decoded: Floats,
    packed: Bytes,
    block_scale: Bytes,
) -> None:
    six_scales = _f32(6) * scale
    codes = np.empty(16, _u8)
    for row in range(normals.shape[0]):
        factor = factors[row]
        for block in range(normals.shape[1] // 16):
            largest = _f32(0)
            for i in range(16):
                magnitude = abs(normals[row, block * 16 + i])
                largest = max(magnitude, largest)
            raw = (largest * factor) / six_scales
            if raw == _f32(0):
                raw = _f32(1)  # a block of zeros has scale 1.0
            byte = _encode_e4m3(min(max(raw, _f32(2.0**-9)), _f32(448)))
            block_scale[row, block] = byte
            divisor = decoded[byte] * scale
            for i in range(16):
                value = (normals[row, block * 16 + i] * factor) / divisor
                size = abs(value)
                code = (
                    _u8(size > _f32(0.25))
                    + _u8(size >= _f32(0.75))
                    + _u8(size > _f32(1.25))
                    + _u8(size >= _f32(1.75))
                    + _u8(size > _f32(2.5))
                    + _u8(size >= _f32(3.5))
                    + _u8(size > _f32(5.0))
                )
                # Negative zero is stored as code 0, as ModelOpt does.
                codes[i] = _u8(code) | (_u8(value < _f32(0)) << _u8(3))
            for i in range(8):
                packed[row, block * 8 + i] = codes[2 * i] | (codes[2 * i + 1] << _u8(4))


def quantize_numba(normals: Tensor, factors: Tensor, packed: Tensor, block_scale: Tensor) -> Tensor:
    """The :data:`trtllm_b12x_fix.presets.quantize_rows.Quantizer` that needs numba."""
    values, row_factors = normals.numpy(), factors.numpy()
    row_amax = np.empty(values.shape[0], np.float32)
    _row_amax(values, row_amax)
    scale = weight_scale_2(torch.from_numpy(row_amax), factors)
    as_fp32 = np.float32(float(scale))
    _quantize(values, row_factors, as_fp32, _DECODED, packed.numpy(), block_scale.numpy())
    return scale
