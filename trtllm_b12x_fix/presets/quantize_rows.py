"""Quantize one matrix of scaled normal rows into its place in a layer, in little memory.

Two implementations with the same bits: torch, a few rows at a time through
:func:`trtllm_b12x_fix.formats.nvfp4.quantize`; and one fused numba loop, seven times faster, used
where numba is installed and there is enough to do to pay for its compilation.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trtllm_b12x_fix.errors import InputError
from trtllm_b12x_fix.formats import nvfp4

#: ``quantizer(normals, factors, packed, block_scale)`` quantizes ``normals * factors``, fp32 [R, C]
#: and [R], into uint8 [R, C/2] and [R, C/16], contiguous, and returns weight_scale_2, fp32 [].
#: ``normals`` may be overwritten. Safe to call from several threads on different tensors.
Quantizer = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

#: torch runs operations on up to this many values in the calling thread: larger pieces would start
#: a team of threads in each worker.
_PIECE = 32_768
#: numba needs about two seconds for its import and compilation, torch 12 ns a weight.
_WORTH_COMPILING = 300_000_000


def weight_scale_2(row_amax: Tensor, factors: Tensor) -> Tensor:
    """``amax / 2688`` of the matrix, fp32 [], from fp32 [R] row maxima before scaling.

    Rounding is monotone, so the maximum of the rounded products is the rounded product of the
    row's maximum: scaled weights need not be there.

    Raises:
        InputError: the matrix holds NaN, infinity, or nothing but zeros.
    """
    amax = (row_amax * factors).amax()
    if not (bool(torch.isfinite(amax)) and float(amax) > 0):
        raise InputError(f"weights to quantize must be finite and not all zero, amax {amax}")
    return nvfp4.global_scale_from_amax(amax)


def quantize_torch(normals: Tensor, factors: Tensor, packed: Tensor, block_scale: Tensor) -> Tensor:
    """The :data:`Quantizer` that needs torch alone."""
    scale = weight_scale_2(torch.linalg.vector_norm(normals, torch.inf, dim=1), factors)
    rows = max(1, _PIECE // normals.shape[1])
    for start in range(0, normals.shape[0], rows):
        piece = slice(start, start + rows)
        weights = normals[piece].mul_(factors[piece].unsqueeze(1))
        quantized = nvfp4.quantize(weights, scale)
        packed[piece] = quantized.packed
        block_scale[piece] = quantized.block_scale
    return scale


def choose(weights: int) -> Quantizer:
    """The faster quantizer for this many weights in all; the result does not depend on it."""
    if weights < _WORTH_COMPILING:
        return quantize_torch
    try:
        from trtllm_b12x_fix.presets.quantize_rows_numba import quantize_numba
    except ImportError:  # not installed, or not for this numpy: slower, the same bits
        return quantize_torch
    return quantize_numba
