"""What headers say of one layer's matrices: whether they are NVFP4, and their sizes."""

from __future__ import annotations

import math

from trtllm_b12x_fix.checkpoint import conventions
from trtllm_b12x_fix.checkpoint.conventions import Spelling
from trtllm_b12x_fix.checkpoint.files import Checkpoint
from trtllm_b12x_fix.checkpoint.header import TensorInfo
from trtllm_b12x_fix.errors import InputError


def nvfp4(checkpoint: Checkpoint, matrix: str) -> Spelling | None:
    """How a matrix is spelled, ``None`` where it is not NVFP4.

    FP8 linears have a ``weight`` and a ``weight_scale`` too, and INT8 and INT4 ones: only codes of
    one byte's two, with E4M3 scales, are ours. MXFP4 has such codes, but a scale for 32 of them.

    Raises:
        InputError: block scales of NVFP4 with codes of a dtype that is not read.
    """
    spelling = conventions.spelling_of(checkpoint, matrix)
    if spelling is None:
        return None
    info, scales = (info_of(checkpoint, name) for name in (spelling.packed, spelling.block_scale))
    if info is None or scales is None:
        # Their shard is missing: of the formats with these names, only NVFP4 scales matrices, too.
        return spelling if checkpoint.has(spelling.weight_global) else None
    if info.dtype in conventions.UNPACKED_DTYPES:
        return None
    if info.dtype != conventions.CODE_DTYPE:
        if scales.dtype != conventions.SCALE_DTYPES[0]:
            return None
        raise InputError(
            f"{checkpoint.file_of(spelling.packed)}: {spelling.packed} must hold packed FP4 as "
            f"{conventions.CODE_DTYPE}, got {info.dtype}"
        )
    if scales.dtype in conventions.MX_SCALE_DTYPES:
        codes = 2 * math.prod(info.shape)
        if codes == conventions.MX_BLOCK * math.prod(scales.shape):
            return None
    return spelling if scales.dtype in conventions.SCALE_DTYPES else None


def fit(
    codes: tuple[int, ...], scales: tuple[int, ...], block: int = conventions.BLOCK
) -> tuple[tuple[int, int], bool] | None:
    """((rows, columns / block), turned) of one matrix whose codes and block scales belong together.

    Args:
        codes, scales: shapes [R, C / 2] and [R, C / block]; or both turned, which is ``turned``.
    """
    if len(codes) > 2 and codes[:-1] == scales[:-1]:
        # Matrices stacked in one linear: a block stays within the last dimension.
        codes, scales = ((math.prod(shape[:-1]), shape[-1]) for shape in (codes, scales))
    if len(codes) != 2 or len(scales) != 2:
        return None
    if codes[0] == scales[0] and codes[1] * 2 == scales[1] * block:
        return (scales[0], scales[1]), False
    if codes[1] == scales[1] and codes[0] * 2 == scales[0] * block:
        return (scales[1], scales[0]), True
    return None


def is_wide(checkpoint: Checkpoint, spelling: Spelling) -> bool:
    """Whether a matrix, or a stack of them, has one block scale for 32 codes."""
    info, scales = (info_of(checkpoint, n) for n in (spelling.packed, spelling.block_scale))
    if info is None or scales is None:
        return False
    if info.end - info.begin != (scales.end - scales.begin) * conventions.WIDE_BLOCK // 2:
        return False
    pairs = [(info.shape, scales.shape)]
    if len(info.shape) == len(scales.shape) == 3 and info.shape[0] == scales.shape[0]:
        pairs.append((info.shape[1:], scales.shape[1:]))
    if any(fit(*pair) for pair in pairs):
        return False
    return any(fit(*pair, conventions.WIDE_BLOCK) for pair in pairs)


def info_of(checkpoint: Checkpoint, tensor: str) -> TensorInfo | None:
    """What the header says of a tensor, ``None`` where its shard is missing."""
    return checkpoint.tensors.get(tensor)


def split_shape(
    checkpoint: Checkpoint, prefix: str, experts: int, projection: str
) -> tuple[int, int]:
    """(rows, columns / 2) of the first expert whose shard is there; zeros where none is.

    Raises:
        InputError: codes that are no matrix.
    """
    for expert in range(experts):
        spelling = nvfp4(checkpoint, f"{prefix}.{expert}.{projection}")
        info = info_of(checkpoint, spelling.packed) if spelling else None
        if spelling and info:
            if len(info.shape) != 2 or not all(info.shape):
                raise InputError(
                    f"{checkpoint.file_of(spelling.packed)}: {spelling.packed} must be "
                    f"[rows, columns / 2], got {list(info.shape)}"
                )
            return info.shape[0], info.shape[1]
    return 0, 0


def fused_shape(checkpoint: Checkpoint, spelling: Spelling) -> tuple[int, int, int]:
    """(experts, rows, columns) of a fused matrix stored straight or transposed; zeros where its
    shard is missing.

    Raises:
        InputError: codes and scales that make no sense.
    """
    packed, block_scale = spelling.packed, spelling.block_scale
    info, scales = info_of(checkpoint, packed), info_of(checkpoint, block_scale)
    if info is None or scales is None:
        return 0, 0, 0
    if len(info.shape) != 3 or len(scales.shape) != 3 or not all(info.shape):
        raise InputError(
            f"{checkpoint.file_of(packed)}: {packed} must be [experts, rows, columns / 2], got "
            f"{list(info.shape)} with scales {list(scales.shape)}"
        )
    experts, first, second = info.shape
    if scales.shape[0] != experts:
        raise InputError(
            f"{checkpoint.file_of(packed)}: {packed} has {experts} experts, {block_scale} has "
            f"{scales.shape[0]}"
        )
    if first != scales.shape[1] and second == scales.shape[2]:
        return experts, second, first * 2
    return experts, first, second * 2
