"""Routed relu2 experts: the parameters, and the plain way to run them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from evals.relu2_lm.config import ModelConfig


class Experts(nn.Module):
    """``down(relu(up(x))^2)`` of each token's experts, weighted and summed.

    Attributes:
        up_proj: [E, I, H].
        down_proj: [E, H, I].
        observe: is given the input [T, H] and every row's intermediate [T*K, I] of each call.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        shape = (config.experts, config.intermediate, config.hidden)
        self.up_proj = nn.Parameter(torch.empty(shape))
        self.down_proj = nn.Parameter(torch.empty(shape[0], shape[2], shape[1]))
        self.observe: Callable[[Tensor, Tensor], None] | None = None

    def forward(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, H], expert_ids int64 [T, K], weights fp32 [T, K]: [T, H] in x's dtype."""
        tokens, top_k = expert_ids.shape
        flat = expert_ids.flatten()
        order = flat.argsort(stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel(), device=order.device)
        routed = x.unsqueeze(1).expand(tokens, top_k, -1).reshape(tokens * top_k, -1)
        rows = _permute(routed, order, inverse)
        numbers = torch.arange(self.up_proj.shape[0], device=flat.device)
        ends = (flat.unsqueeze(1) == numbers).sum(0).cumsum(0).to(torch.int32)
        intermediate = functional.relu(grouped(rows, self.up_proj, ends)).square()
        if self.observe is not None:
            self.observe(x, intermediate)
        y = grouped(intermediate, self.down_proj, ends)
        y = _permute(y, inverse, order).view(tokens, top_k, -1)
        return (y * weights.unsqueeze(-1)).sum(1).to(x.dtype)


def grouped(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Rows sorted by expert times their expert's matrix.

    Args:
        rows: [N, C].
        matrices: [E, R, C].
        ends: int32 [E], where each expert's rows end.
    """
    if rows.device.type == "cuda":
        return functional.grouped_mm(rows, matrices.transpose(1, 2), offs=ends)
    counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
    parts = zip(rows.split(counts), matrices, strict=True)
    return torch.cat([part @ matrix.t() for part, matrix in parts])


class _Permute(Function):
    """``values[order]`` whose gradient is ``gradient[inverse]``: no scattered adds."""

    @staticmethod
    def forward(ctx, values: Tensor, order: Tensor, inverse: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(inverse)
        return values.index_select(0, order)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[no-untyped-def]
        (inverse,) = ctx.saved_tensors
        return gradient.index_select(0, inverse), None, None


def _permute(values: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    permuted: Tensor = _Permute.apply(values, order, inverse)  # type: ignore[no-untyped-call]
    return permuted
