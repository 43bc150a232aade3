"""What baking does to a layer's block scales, counted per projection."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_b12x_fix.formats import e4m3
from trtllm_b12x_fix.formats.nvfp4 import block_is_zero
from trtllm_b12x_fix.layer import ExpertMatrices
from trtllm_b12x_fix.repair import bake


@dataclass(frozen=True)
class ScaleDamage:
    """Damage of the baked block scales of one projection, over blocks with a non-zero weight.

    Attributes:
        blocks: how many blocks count; all-zero blocks (padding, pruned) and blocks whose scale is
            zero in the file do not.
        zero_fraction: baked scales that are exactly 0, so 16 non-zero weights vanish.
        subnormal_fraction: baked scales that are non-zero E4M3 subnormals.
        mean_relative_error, max_relative_error: of the baked scale against
            ``weight_scale * weight_scale_2``; a zero counts as 1. NaN bakes count as infinite.
        worst_expert, worst_expert_error: the expert with the largest mean error.
        weight_scale_2_min, weight_scale_2_max: over experts.
    """

    blocks: int
    zero_fraction: float
    subnormal_fraction: float
    mean_relative_error: float
    max_relative_error: float
    worst_expert: int
    worst_expert_error: float
    weight_scale_2_min: float
    weight_scale_2_max: float


def damage(matrices: ExpertMatrices) -> ScaleDamage:
    """Compare baked with exact block scales, expert by expert in fp64."""
    baked = bake(matrices)
    total = zeros = subnormals = 0
    error_sum = largest = 0.0
    means: list[float] = []
    for expert in range(matrices.experts):
        # A scale that is zero in the file is lost already: baking cannot be blamed for it.
        counted = ~block_is_zero(matrices.packed[expert]) & (matrices.block_scale[expert] != 0)
        errors = _relative_errors(matrices, baked, expert)[counted]
        bytes_ = baked[expert][counted]
        total += errors.numel()
        zeros += int((bytes_ == 0).sum())
        subnormals += int(((bytes_ > 0) & (bytes_ < 8)).sum())
        error_sum += float(errors.sum())
        largest = max(largest, float(errors.max()) if errors.numel() else 0.0)
        means.append(float(errors.mean()) if errors.numel() else 0.0)
    worst = max(range(len(means)), key=means.__getitem__)
    count = max(total, 1)
    return ScaleDamage(
        blocks=total,
        zero_fraction=zeros / count,
        subnormal_fraction=subnormals / count,
        mean_relative_error=error_sum / count,
        max_relative_error=largest,
        worst_expert=worst,
        worst_expert_error=means[worst],
        weight_scale_2_min=float(matrices.weight_scale_2.min()),
        weight_scale_2_max=float(matrices.weight_scale_2.max()),
    )


def _relative_errors(matrices: ExpertMatrices, baked: Tensor, expert: int) -> Tensor:
    exact = e4m3.decode(matrices.block_scale[expert], torch.float64)
    exact = exact * matrices.weight_scale_2[expert].double()
    error = (e4m3.decode(baked[expert], torch.float64) - exact).abs() / exact
    return torch.where(error.isnan(), torch.full_like(error, torch.inf), error)
