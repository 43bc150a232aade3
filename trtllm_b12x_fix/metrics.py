"""How far one result is from another: floats, codes and scales."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_b12x_fix.errors import ShapeError


@dataclass(frozen=True)
class Distance:
    """Distance of a tensor from a reference.

    Attributes:
        relative_rms: ||a - b|| / ||b|| over the whole tensor; NaN where either is not finite,
            infinite where only the reference is zero.
        cosine: cosine of the angle between the two, NaN where one is zero.
    """

    relative_rms: float
    cosine: float

    @property
    def sqnr_db(self) -> float:
        """Signal to quantization noise in dB: +inf for equal tensors, NaN if not finite."""
        if math.isnan(self.relative_rms):
            return math.nan
        if self.relative_rms == 0:
            return math.inf
        return -20 * math.log10(self.relative_rms)


def distance(value: Tensor, reference: Tensor) -> Distance:
    """Distance of ``value`` from ``reference`` in fp64.

    Raises:
        ShapeError: different shapes.
    """
    if value.shape != reference.shape:
        raise ShapeError(f"cannot compare {tuple(value.shape)} with {tuple(reference.shape)}")
    a, b = value.double().flatten(), reference.double().flatten()
    if not bool(torch.isfinite(a).all() and torch.isfinite(b).all()):
        return Distance(math.nan, math.nan)
    error, norm = float((a - b).norm()), float(b.norm())
    relative = 0.0 if error == 0 else (error / norm if norm else math.inf)
    product = float(a.norm()) * norm
    cosine = 1.0 if error == 0 and norm else (float(a @ b) / product if product else math.nan)
    return Distance(relative, cosine)


@dataclass(frozen=True)
class CodeDifference:
    """How many codes differ and by how many steps at most (FP4 magnitudes count 0..7, signed)."""

    total: int
    differing: int
    largest_step: int


def compare_codes(codes: Tensor, reference: Tensor) -> CodeDifference:
    """Compare E2M1 codes (uint8, one per byte). Positive and negative zero are the same value.

    Raises:
        ShapeError: different shapes.
    """
    if codes.shape != reference.shape:
        raise ShapeError(f"cannot compare {tuple(codes.shape)} with {tuple(reference.shape)}")
    steps = (_signed_index(codes) - _signed_index(reference)).abs()
    largest = int(steps.max()) if steps.numel() else 0
    return CodeDifference(steps.numel(), int((steps != 0).sum()), largest)


def _signed_index(codes: Tensor) -> Tensor:
    magnitude = (codes & 0x7).to(torch.int16)
    return torch.where((codes & 0x8) != 0, -magnitude, magnitude)
