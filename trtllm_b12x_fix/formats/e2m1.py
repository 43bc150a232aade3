"""E2M1 (FP4): the 16 codes as a table, encoding to nearest even, packing two codes to a byte.

Source of the format: OCP Microscaling Formats (MX) v1.0, section 5.3.3. E2M1 has no NaN and no
infinity; encoding saturates at +-6 as PTX ``cvt.rn.satfinite.e2m1x2.f32`` does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_b12x_fix.errors import InputError, ShapeError

#: Value of each code; bit 3 is the sign, so code 8 is negative zero.
E2M1_VALUES: tuple[float, ...] = (
    0.0,
    0.5,
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
    6.0,
    -0.0,
    -0.5,
    -1.0,
    -1.5,
    -2.0,
    -3.0,
    -4.0,
    -6.0,
)
E2M1_MAX = 6.0

# Midpoints between neighbouring magnitudes. A value on a midpoint goes to the even code, so the
# first, third, ... midpoint rounds down (strict comparison) and the others round up.
_ROUND_DOWN_MIDPOINTS = (0.25, 1.25, 2.5, 5.0)
_ROUND_UP_MIDPOINTS = (0.75, 1.75, 3.5)


def encode(values: Tensor) -> Tensor:
    """Round to the nearest E2M1 code, ties to the even code, saturating at +-6.

    Args:
        values: floating tensor of any shape. Infinities saturate; NaN encodes as +6 (code 7), as
            PTX defines for satfinite conversions. Negative zero keeps its sign (code 8).

    Returns:
        uint8 tensor of the same shape, one code (0..15) per element.

    Raises:
        InputError: ``values`` is not a floating tensor.
    """
    if not values.is_floating_point():
        raise InputError(f"E2M1 encoding needs a floating tensor, got {values.dtype}")
    magnitude = values.abs()
    codes = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    for midpoint in _ROUND_DOWN_MIDPOINTS:
        codes += magnitude > midpoint
    for midpoint in _ROUND_UP_MIDPOINTS:
        codes += magnitude >= midpoint
    codes |= torch.signbit(values).to(torch.uint8) << 3
    return torch.where(values.isnan(), torch.full_like(codes, 7), codes)


def decode(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the value of each E2M1 code. Exact in every floating dtype torch has.

    Args:
        codes: uint8 tensor of codes 0..15, any shape.
        dtype: floating dtype of the result.

    Raises:
        InputError: ``codes`` is not uint8.
    """
    if codes.dtype != torch.uint8:
        raise InputError(f"E2M1 codes must be uint8, got {codes.dtype}")
    table = torch.tensor(E2M1_VALUES, dtype=dtype, device=codes.device)
    return table[codes.long()]


def pack(codes: Tensor) -> Tensor:
    """Pack codes [..., N] two to a byte [..., N/2]; the lower index takes the low nibble.

    Raises:
        ShapeError: the last dimension is odd.
    """
    if codes.shape[-1] % 2:
        raise ShapeError(f"cannot pack an odd number of FP4 codes: shape {tuple(codes.shape)}")
    pairs = codes.reshape(*codes.shape[:-1], -1, 2)
    return (pairs[..., 0] | (pairs[..., 1] << 4)).contiguous()


def unpack(packed: Tensor) -> Tensor:
    """Undo :func:`pack`: uint8 [..., N/2] to codes [..., N].

    Raises:
        InputError: ``packed`` is not uint8.
    """
    if packed.dtype != torch.uint8:
        raise InputError(f"packed FP4 must be uint8, got {packed.dtype}")
    return torch.stack([packed & 0x0F, packed >> 4], dim=-1).flatten(-2)


def decode_packed(packed: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode packed codes [..., N/2] to values [..., N] with one look-up per byte.

    The same values as ``decode(unpack(packed))``, several times faster.

    Raises:
        InputError: ``packed`` is not uint8.
    """
    if packed.dtype != torch.uint8:
        raise InputError(f"packed FP4 must be uint8, got {packed.dtype}")
    bytes_ = torch.arange(256, dtype=torch.uint8)
    table = decode(unpack(bytes_.unsqueeze(1)), dtype).to(packed.device)
    pairs = table.index_select(0, packed.reshape(-1).int())
    return pairs.view(*packed.shape[:-1], -1)
