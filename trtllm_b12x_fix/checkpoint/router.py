"""A layer's own router: which experts a token goes to, with what weights.

Two families cover the NVFP4 mixtures of today: softmax then top-k (Qwen3-MoE, Mixtral), and sigmoid
with a correction bias and optional group limits (DeepSeek-V3, Nemotron-H). Checked against
transformers' own router modules.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_b12x_fix.errors import InputError, ShapeError


class Scoring(enum.Enum):
    """How router logits become scores."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


class Renormalize(enum.Enum):
    """Whether the chosen scores are divided by their sum."""

    YES = "yes"
    NO = "no"


@dataclass(frozen=True)
class RouterSpec:
    """What the config says about routing.

    Attributes:
        groups, top_groups: experts are split into ``groups`` equal groups, of which the best
            ``top_groups`` take part (by the sum of their two best biased scores).
        scaling: factor on the routing weights (``routed_scaling_factor``).
    """

    top_k: int
    scoring: Scoring
    renormalize: Renormalize
    groups: int = 1
    top_groups: int = 1
    scaling: float = 1.0


@dataclass(frozen=True)
class Router:
    """Router tensors: weight [E, H] (any float), bias fp32 [E] or None, and the spec."""

    weight: Tensor
    bias: Tensor | None
    spec: RouterSpec

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Choose experts for tokens.

        Args:
            x: [T, H], any float.

        Returns:
            expert ids int64 [T, top_k], routing weights fp32 [T, top_k].

        Raises:
            ShapeError: ``x`` is not [T, H] of this router.
            InputError: top_k or groups do not fit the number of experts.
        """
        experts, hidden = self.weight.shape
        if x.dim() != 2 or x.shape[1] != hidden:
            raise ShapeError(f"the router takes [tokens, {hidden}], got {tuple(x.shape)}")
        _check_spec(self.spec, experts)
        logits = x.float() @ self.weight.float().t()
        if self.spec.scoring is Scoring.SOFTMAX:
            scores = logits.softmax(dim=-1)
        else:
            scores = logits.sigmoid()
        choice = scores if self.bias is None else scores + self.bias.float()
        if self.spec.groups > 1:
            choice = _limit_groups(choice, self.spec)
        ids = choice.topk(self.spec.top_k, dim=-1).indices
        weights = scores.gather(1, ids)
        if self.spec.renormalize is Renormalize.YES:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return ids, weights * self.spec.scaling


def _check_spec(spec: RouterSpec, experts: int) -> None:
    if not 1 <= spec.top_k <= experts:
        raise InputError(f"top-k must be 1 to {experts}, got {spec.top_k}")
    if spec.groups < 1 or experts % spec.groups or not 1 <= spec.top_groups <= spec.groups:
        raise InputError(
            f"{experts} experts do not fit {spec.groups} groups, {spec.top_groups} taking part"
        )
    allowed = experts // spec.groups * spec.top_groups
    if spec.top_k > allowed:
        raise InputError(
            f"top-k is {spec.top_k}, but {spec.top_groups} of {spec.groups} groups hold only "
            f"{allowed} of {experts} experts"
        )


def _limit_groups(choice: Tensor, spec: RouterSpec) -> Tensor:
    """Scores of experts outside a token's best groups become -inf."""
    grouped = choice.unflatten(-1, (spec.groups, -1))
    best_two = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
    chosen = best_two.topk(spec.top_groups, dim=-1).indices
    allowed = torch.zeros_like(best_two, dtype=torch.bool).scatter_(1, chosen, True)
    return grouped.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(-2)


def random_routing(
    tokens: int, experts: int, top_k: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Distinct random experts and softmax weights, for layers whose router cannot be used.

    Raises:
        InputError: top_k does not fit the number of experts.
    """
    if not 1 <= top_k <= experts:
        raise InputError(f"top-k must be 1 to {experts}, got {top_k}")
    logits = torch.randn(tokens, experts, generator=generator)
    chosen = logits.topk(top_k, dim=-1)
    return chosen.indices, chosen.values.softmax(dim=-1)
