"""Foreign tensor names and reciprocals, converted to one record at the edge.

ModelOpt stores dequantizing multipliers (``weight_scale_2``, ``input_scale``); compressed-tensors
stores their reciprocals (``weight_global_scale``, ``input_global_scale``). After this module there
are only multipliers.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trtllm_b12x_fix.errors import InputError, ScaleError, ShapeError
from trtllm_b12x_fix.formats.e4m3 import NAN_BYTES
from trtllm_b12x_fix.formats.nvfp4 import BLOCK


class TensorSource(Protocol):
    """Anything that hands out named tensors one at a time."""

    @property
    def name(self) -> str:
        """What to call the source in messages: a file name, usually."""

    def has(self, tensor: str) -> bool:
        """Whether the tensor exists."""

    def get(self, tensor: str) -> Tensor:
        """Read one tensor."""


class Dialect(enum.Enum):
    """Who wrote the checkpoint."""

    MODELOPT = "modelopt"
    COMPRESSED_TENSORS = "compressed-tensors"


@dataclass(frozen=True)
class _Names:
    packed: str
    block_scale: str
    weight_global: str
    input_global: str


_NAMES = {
    Dialect.MODELOPT: _Names("weight", "weight_scale", "weight_scale_2", "input_scale"),
    Dialect.COMPRESSED_TENSORS: _Names(
        "weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"
    ),
}


@dataclass(frozen=True)
class QuantizedLinear:
    """One NVFP4 matrix in our language: packed uint8 [R, C/2], block_scale uint8 [R, C/16],
    weight_scale_2 and input_scale fp32 scalars (dequantizing multipliers)."""

    packed: Tensor
    block_scale: Tensor
    weight_scale_2: Tensor
    input_scale: Tensor


def detect(source: TensorSource, prefix: str) -> Dialect:
    """The dialect in which the linear at ``prefix`` is stored.

    Raises:
        InputError: neither dialect's weight is there.
    """
    for dialect, names in _NAMES.items():
        # ModelOpt's ".weight" alone could be an unquantized matrix: its scale must be there too.
        if source.has(f"{prefix}.{names.packed}") and source.has(f"{prefix}.{names.block_scale}"):
            return dialect
    looked = " or ".join(
        f"{prefix}.{names.packed} with {names.block_scale}" for names in _NAMES.values()
    )
    raise InputError(f"{source.name}: no NVFP4 weight at {prefix}: looked for {looked}")


def read_linear(source: TensorSource, prefix: str) -> QuantizedLinear:
    """Read one quantized linear and convert its scales to dequantizing multipliers.

    Raises:
        InputError: a tensor is missing or has the wrong dtype.
        ShapeError: codes and block scales do not belong together.
        ScaleError: a global scale that cannot be inverted or used.
    """
    dialect = detect(source, prefix)
    names = _NAMES[dialect]
    packed = _get(source, f"{prefix}.{names.packed}")
    if packed.dtype != torch.uint8:
        raise InputError(
            f"{source.name}: {prefix}.{names.packed} must hold packed FP4 as U8, got {packed.dtype}"
        )
    if packed.dim() != 2 or packed.shape[1] * 2 % BLOCK:
        raise ShapeError(
            f"{source.name}: {prefix}.{names.packed} must be [rows, columns / 2] with columns a "
            f"multiple of {BLOCK}, got {tuple(packed.shape)}"
        )
    block_scale = _block_scale(source, f"{prefix}.{names.block_scale}")
    if block_scale.shape != (packed.shape[0], packed.shape[1] * 2 // BLOCK):
        raise ShapeError(
            f"{source.name}: {prefix}: {names.packed} {tuple(packed.shape)} needs "
            f"{names.block_scale} [{packed.shape[0]}, {packed.shape[1] * 2 // BLOCK}], got "
            f"{tuple(block_scale.shape)}"
        )
    return QuantizedLinear(
        packed,
        block_scale,
        _multiplier(source, f"{prefix}.{names.weight_global}", dialect),
        _multiplier(source, f"{prefix}.{names.input_global}", dialect),
    )


def _block_scale(source: TensorSource, tensor: str) -> Tensor:
    scales = _get(source, tensor)
    if scales.dtype not in (torch.float8_e4m3fn, torch.uint8):
        raise InputError(f"{source.name}: {tensor} must be F8_E4M3 or U8, got {scales.dtype}")
    scales = scales.view(torch.uint8)
    nan = (scales == NAN_BYTES[0]) | (scales == NAN_BYTES[1])
    for bad, word in ((nan, "NaN"), (scales >= 0x80, "negative")):
        if bool(bad.any()):
            where = bad.nonzero()[0].tolist()
            byte = int(scales[tuple(where)])
            raise ScaleError(f"{source.name}: {tensor} is {word} at {where} (byte 0x{byte:02x})")
    return scales


def _get(source: TensorSource, tensor: str) -> Tensor:
    if not source.has(tensor):
        raise InputError(f"{source.name}: tensor {tensor} is missing")
    return source.get(tensor)


def _multiplier(source: TensorSource, tensor: str, dialect: Dialect) -> Tensor:
    stored = _get(source, tensor)
    if stored.dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        raise InputError(f"{source.name}: {tensor} must be floating, got {stored.dtype}")
    value = stored.to(torch.float32).reshape(-1)
    if value.numel() != 1:
        raise ShapeError(f"{source.name}: {tensor} must be one number, got {value.numel()}")
    multiplier = 1.0 / value if dialect is Dialect.COMPRESSED_TENSORS else value
    if not bool(
        (torch.isfinite(value) & (value > 0) & torch.isfinite(multiplier) & (multiplier > 0)).all()
    ):
        raise ScaleError(
            f"{source.name}: {tensor} is {float(value)!r}; it must be positive and finite"
        )
    return multiplier.reshape(())
