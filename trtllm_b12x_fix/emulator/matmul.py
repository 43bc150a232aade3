"""The block-scaled matrix product, exact up to the order of its fp32 additions.

Operands (code times block scale) have at most 6 significant bits, so a product has at most 12 and
is exact in fp32; only the accumulation rounds. On a CPU both operands are fp32. On CUDA they are
bf16, which holds them exactly, with fp32 accumulation and output.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator


def operand_dtype(device: torch.device) -> torch.dtype:
    """The dtype in which operands are decoded on this device."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def matmul(left: Tensor, right: Tensor) -> Tensor:
    """``left [N, C] @ right [R, C].T`` with fp32 accumulation: fp32 [N, R].

    Both operands must be in :func:`operand_dtype` of their device, or both fp64 for fp64 sums.
    """
    if left.device.type == "cuda" and left.dtype is torch.bfloat16:
        return torch.mm(left, right.t(), out_dtype=torch.float32)
    return left @ right.t()


@contextmanager
def full_precision() -> Iterator[None]:
    """Forbid reduced-precision reductions and TF32 for the duration; restores the old settings."""
    cuda = torch.backends.cuda.matmul
    reduced, tf32 = cuda.allow_bf16_reduced_precision_reduction, cuda.allow_tf32
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        cuda.allow_bf16_reduced_precision_reduction = False
        cuda.allow_tf32 = False
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        cuda.allow_bf16_reduced_precision_reduction = reduced
        cuda.allow_tf32 = tf32
