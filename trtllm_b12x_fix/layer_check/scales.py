"""What baking does to a layer's block scales, counted per projection."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
    """Compare baked with exact block scales in fp64.

    Within an expert a block's damage depends on its scale byte alone, so bytes are counted and
    each of the 256 is baked once.
    """
    # Summed on the CPU whatever counted: a GPU adds in another order, visible in the last digit.
    counted = [_bytes_counted(matrices, expert) for expert in range(matrices.experts)]
    counts = torch.stack(counted).cpu()
    baked = _every_byte_baked(matrices).cpu()
    errors = _relative_errors(matrices.weight_scale_2.cpu(), baked)
    # A byte that does not occur must not turn an infinite error into NaN.
    weighted = torch.where(counts > 0, errors * counts, torch.zeros_like(errors)).sum(dim=1)
    means = weighted / counts.sum(dim=1).clamp(min=1)
    worst = int(means.argmax())
    total = int(counts.sum())
    count = max(total, 1)
    return ScaleDamage(
        blocks=total,
        zero_fraction=int(counts[baked == 0].sum()) / count,
        subnormal_fraction=int(counts[(baked > 0) & (baked < 8)].sum()) / count,
        mean_relative_error=float(weighted.sum()) / count,
        max_relative_error=float(torch.where(counts > 0, errors, torch.zeros_like(errors)).max()),
        worst_expert=worst,
        worst_expert_error=float(means[worst]),
        weight_scale_2_min=float(matrices.weight_scale_2.min()),
        weight_scale_2_max=float(matrices.weight_scale_2.max()),
    )


def _bytes_counted(matrices: ExpertMatrices, expert: int) -> Tensor:
    """int64 [256]: how many blocks with a non-zero weight have each scale byte, 0 left out.

    A scale that is zero in the file is lost already: baking cannot be blamed for it.
    """
    bytes_ = matrices.block_scale[expert].masked_fill(block_is_zero(matrices.packed[expert]), 0)
    counts = torch.bincount(bytes_.flatten(), minlength=256)
    counts[0] = 0
    return counts


def _every_byte_baked(matrices: ExpertMatrices) -> Tensor:
    """uint8 [E, 256]: what baking makes of each scale byte in each expert."""
    every = torch.arange(256, dtype=torch.uint8, device=matrices.block_scale.device)
    scales = every.expand(matrices.experts, 1, 256)
    return bake(replace(matrices, block_scale=scales)).squeeze(1)


def _relative_errors(weight_scale_2: Tensor, baked: Tensor) -> Tensor:
    every = torch.arange(256, dtype=torch.uint8, device=baked.device)
    exact = e4m3.decode(every, torch.float64) * weight_scale_2.double().unsqueeze(1)
    error = (e4m3.decode(baked, torch.float64) - exact).abs() / exact
    return torch.where(error.isnan(), torch.full_like(error, torch.inf), error)
