"""One quantized matrix, read into one record: row-major codes and dequantizing multipliers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_b12x_fix.checkpoint.conventions import Dialect, Spelling, TensorSource, detect
from trtllm_b12x_fix.errors import InputError, ScaleError, ShapeError
from trtllm_b12x_fix.formats.e4m3 import NAN_BYTES
from trtllm_b12x_fix.formats.nvfp4 import BLOCK


@dataclass(frozen=True)
class QuantizedLinear:
    """One NVFP4 matrix in our language: packed uint8 [R, C/2], block_scale uint8 [R, C/16],
    weight_scale_2 and input_scale fp32 scalars (dequantizing multipliers)."""

    packed: Tensor
    block_scale: Tensor
    weight_scale_2: Tensor
    input_scale: Tensor


def read_linear(source: TensorSource, matrix: str) -> QuantizedLinear:
    """Read one quantized linear and convert its scales to dequantizing multipliers.

    Raises:
        InputError: a tensor is missing or has the wrong dtype.
        ShapeError: codes and block scales do not belong together.
        ScaleError: a block scale that is NaN or negative, or a global scale that is NaN, infinite,
            zero or negative.
    """
    spelling = detect(source, matrix)
    packed = _codes(source, spelling.packed, _get(source, spelling.packed))
    scales = _get(source, spelling.block_scale)
    _belong_together(source, spelling, packed, scales)
    scales = _block_scale(source, spelling.block_scale, scales)
    return QuantizedLinear(
        packed,
        scales,
        _multiplier(source, spelling.weight_global, spelling.dialect, None),
        _multiplier(source, spelling.input_global, spelling.dialect, None),
    )


def read_fused(source: TensorSource, matrix: str, expert: int, experts: int) -> QuantizedLinear:
    """Read one of ``experts`` of a fused matrix: [E, R, C/2], or [E, C/2, R] (ModelOpt's bmm).

    Raises:
        InputError, ShapeError, ScaleError: as :func:`read_linear`.
    """
    spelling = detect(source, matrix)
    _require(source, spelling.packed)
    _require(source, spelling.block_scale)
    packed = source.get_row(spelling.packed, expert)
    scales = source.get_row(spelling.block_scale, expert)
    if _is_transposed(packed, scales):
        # A byte still holds two neighbours of the input dimension: bytes move, nibbles do not.
        packed, scales = packed.t().contiguous(), scales.t().contiguous()
    packed = _codes(source, spelling.packed, packed)
    _belong_together(source, spelling, packed, scales)
    scales = _block_scale(source, spelling.block_scale, scales)
    return QuantizedLinear(
        packed,
        scales,
        _multiplier(source, spelling.weight_global, spelling.dialect, expert, experts),
        _multiplier(source, spelling.input_global, spelling.dialect, expert, experts),
    )


def read_input_scale(
    source: TensorSource, matrix: str, expert: int | None = None, experts: int = 1
) -> Tensor:
    """The input scale of one matrix alone: fp32 scalar, a dequantizing multiplier.

    Raises:
        InputError, ShapeError, ScaleError: as :func:`read_linear`.
    """
    spelling = detect(source, matrix)
    return _multiplier(source, spelling.input_global, spelling.dialect, expert, experts)


def _is_transposed(packed: Tensor, scales: Tensor) -> bool:
    if packed.dim() != 2 or scales.dim() != 2:
        return False
    straight = packed.shape[0] == scales.shape[0] and packed.shape[1] * 2 == scales.shape[1] * BLOCK
    turned = packed.shape[1] == scales.shape[1] and packed.shape[0] * 2 == scales.shape[0] * BLOCK
    return turned and not straight


def _codes(source: TensorSource, tensor: str, packed: Tensor) -> Tensor:
    if packed.dtype != torch.uint8:
        raise InputError(
            f"{source.file_of(tensor)}: {tensor} must hold packed FP4 as U8, got {packed.dtype}"
        )
    if packed.dim() != 2 or packed.shape[1] * 2 % BLOCK or not packed.numel():
        raise ShapeError(
            f"{source.file_of(tensor)}: {tensor} must be [rows, columns / 2] with columns a "
            f"multiple of {BLOCK}, got {tuple(packed.shape)}"
        )
    return packed


def _belong_together(
    source: TensorSource, spelling: Spelling, packed: Tensor, scales: Tensor
) -> None:
    rows, columns = packed.shape[0], packed.shape[1] * 2 // BLOCK
    if tuple(scales.shape) == (rows, columns):
        return
    hint = ""
    padded = (-(-rows // 128) * 128, -(-columns // 4) * 4)
    if scales.numel() == padded[0] * padded[1]:
        hint = (
            ": it has the size of scales already swizzled into 128x4 tiles; a checkpoint stores "
            "them linear"
        )
    raise ShapeError(
        f"{source.file_of(spelling.block_scale)}: {spelling.packed} {tuple(packed.shape)} needs "
        f"{spelling.block_scale} [{rows}, {columns}], got {tuple(scales.shape)}{hint}"
    )


def _block_scale(source: TensorSource, tensor: str, scales: Tensor) -> Tensor:
    if scales.dtype not in (torch.float8_e4m3fn, torch.uint8):
        raise InputError(
            f"{source.file_of(tensor)}: {tensor} must be F8_E4M3 or U8, got {scales.dtype}"
        )
    scales = scales.view(torch.uint8)
    nan = (scales == NAN_BYTES[0]) | (scales == NAN_BYTES[1])
    for bad, word in ((nan, "NaN"), (scales >= 0x80, "negative")):
        if bool(bad.any()):
            where = bad.nonzero()[0].tolist()
            byte = int(scales[tuple(where)])
            raise ScaleError(
                f"{source.file_of(tensor)}: {tensor} is {word} at {where} (byte 0x{byte:02x}), "
                f"{int(bad.sum())} in all"
            )
    return scales


def _require(source: TensorSource, tensor: str) -> None:
    if not source.has(tensor):
        raise InputError(f"{source.name}: tensor {tensor} is missing")


def _get(source: TensorSource, tensor: str) -> Tensor:
    _require(source, tensor)
    return source.get(tensor)


def _multiplier(
    source: TensorSource, tensor: str, dialect: Dialect, expert: int | None, experts: int = 1
) -> Tensor:
    stored = _get(source, tensor)
    if stored.dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        raise InputError(f"{source.file_of(tensor)}: {tensor} must be floating, got {stored.dtype}")
    value = stored.to(torch.float32).reshape(-1)
    where = tensor
    if expert is not None and value.numel() > 1:
        # [E, 2] would be a scale for gate and one for up: indexed as [E] it would be another's.
        if value.numel() != experts:
            raise ShapeError(
                f"{source.file_of(tensor)}: {tensor} must have one entry, or one for each of "
                f"{experts} experts, got {tuple(stored.shape)}"
            )
        value, where = value[expert : expert + 1], f"{tensor}[{expert}]"
    if value.numel() != 1:
        raise ShapeError(
            f"{source.file_of(tensor)}: {tensor} must be one number, got {value.numel()}"
        )
    multiplier = 1.0 / value if dialect is Dialect.COMPRESSED_TENSORS else value
    if not bool(
        (torch.isfinite(value) & (value > 0) & torch.isfinite(multiplier) & (multiplier > 0)).all()
    ):
        raise ScaleError(
            f"{source.file_of(tensor)}: {where} is {float(value)!r}; it must be positive and finite"
        )
    return multiplier.reshape(())
