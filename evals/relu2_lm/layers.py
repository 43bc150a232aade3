"""The layers of a small Nemotron-H, written for batches of short sequences.

The function is transformers' ``NemotronHForCausalLM``, parameter for parameter (tested); what
differs is speed: Mamba's scan is one masked product per sequence (they are short), and experts
run grouped.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from evals.relu2_lm.config import ModelConfig
from evals.relu2_lm.experts import Experts


@dataclass
class State:
    """What one layer keeps between steps of a generation; written in place.

    Attributes:
        keys, values: [B, heads, longest, head size], attention only.
        window: [B, convolution - 1, channels], Mamba's last inputs of the convolution.
        memory: fp32 [B, heads, head size, state], Mamba only.
    """

    keys: Tensor | None = None
    values: Tensor | None = None
    window: Tensor | None = None
    memory: Tensor | None = None

    def select(self, rows: Tensor) -> State:
        """The state of these rows: bool [B]."""
        return State(**{n: None if v is None else v[rows] for n, v in vars(self).items()})


@dataclass(frozen=True)
class Context:
    """Where a step stands.

    Attributes:
        present: bool [B, T], False at padding, over all positions so far and of this step; None
            where nothing is padding.
        start: how many positions came before this step; 0 for whole sequences.
    """

    present: Tensor | None = None
    start: int = 0


class Norm(nn.Module):
    """RMS norm computed in fp32, rounded, then weighted."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    """Causal attention without positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.q_proj = nn.Linear(config.hidden, config.attention_width, bias=False)
        self.k_proj = nn.Linear(config.hidden, config.attention_width, bias=False)
        self.v_proj = nn.Linear(config.hidden, config.attention_width, bias=False)
        self.o_proj = nn.Linear(config.attention_width, config.hidden, bias=False)

    def forward(self, x: Tensor, state: State | None, context: Context) -> Tensor:
        query, key, value = (
            projection(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if state is not None and state.keys is not None and state.values is not None:
            end = context.start + x.shape[1]
            state.keys[:, :, context.start : end] = key
            state.values[:, :, context.start : end] = value
            key, value = state.keys[:, :, :end], state.values[:, :, :end]
        mask = _mask(context, x.shape[1], x.device)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None and x.shape[1] > 1
        )
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


def _mask(context: Context, length: int, device: torch.device) -> Tensor | None:
    """bool [B, 1, length, so far], or None where causal alone does."""
    if context.present is None:
        return None
    positions = torch.arange(context.start + length, device=device)
    causal = positions <= positions[context.start :].unsqueeze(1)
    mask = causal & context.present.unsqueeze(1)
    # A row of padding would attend to nothing, and NaN spreads: it attends to itself.
    itself = positions == positions[context.start :].unsqueeze(1)
    return (mask | itself).unsqueeze(1)


class Router(nn.Module):
    """Sigmoid scores; a bias, balanced while training, counts for the choice alone.

    Attributes:
        load: int64 [E], rows per expert of the last call, for balancing.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.weight = nn.Parameter(torch.empty(config.experts, config.hidden))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.experts))
        self.e_score_correction_bias: Tensor
        self.load: Tensor | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H]: expert ids int64 [T, K] and weights fp32 [T, K]."""
        scores = functional.linear(x.float(), self.weight.float()).sigmoid()
        chosen = (scores + self.e_score_correction_bias).topk(self.top_k, dim=-1).indices
        weights = scores.gather(1, chosen)
        if self.training:
            experts = torch.arange(scores.shape[1], device=x.device)
            self.load = (chosen.flatten().unsqueeze(1) == experts).sum(0)
        return chosen, weights / (weights.sum(-1, keepdim=True) + 1e-20)


class SharedExpert(nn.Module):
    """One relu2 expert that every token takes."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden, config.shared_intermediate, bias=False)
        self.down_proj = nn.Linear(config.shared_intermediate, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.relu(self.up_proj(x)).square())
        return out


class MoE(nn.Module):
    """Router, routed experts and the shared one. ``experts`` may be replaced by an emulation."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts: nn.Module = Experts(config)
        self.shared_experts = SharedExpert(config)

    def forward(self, x: Tensor, _state: State | None, _context: Context) -> Tensor:
        flat = x.flatten(0, -2)
        routed: Tensor = self.experts(flat, *self.gate(flat))
        return routed.view_as(x) + self.shared_experts(x)
