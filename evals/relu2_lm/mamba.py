"""Mamba-2 for short sequences: the scan as one masked product, and one step at a time."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from evals.relu2_lm.config import ModelConfig
from evals.relu2_lm.layers import Context, State


class Convolution(nn.Module):
    """Parameters of a causal depthwise convolution: weight [channels, 1, width], bias."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, padded: Tensor) -> Tensor:
        """[B, width - 1 + T, channels] to [B, T, channels], as shifted products: T is small."""
        width = self.weight.shape[2]
        length = padded.shape[1] - width + 1
        out: Tensor = self.bias
        for tap in range(width):
            out = out + padded[:, tap : tap + length] * self.weight[:, 0, tap]
        return out


class GatedNorm(nn.Module):
    """RMS norm of ``x * silu(gate)``, in fp32."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        wide = x.float() * functional.silu(gate.float())
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return self.weight * wide.to(gate.dtype)


class Mamba(nn.Module):
    """One group; state and scan in fp32."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        width = config.mamba_width
        projected = width + config.convolved + config.mamba_heads
        self.in_proj = nn.Linear(config.hidden, projected, bias=False)
        self.conv1d = Convolution(config.convolved, config.convolution)
        self.dt_bias = nn.Parameter(torch.ones(config.mamba_heads))
        self.A_log = nn.Parameter(torch.arange(1, config.mamba_heads + 1).float().log())
        self.D = nn.Parameter(torch.ones(config.mamba_heads))
        self.norm = GatedNorm(width, config.epsilon)
        self.out_proj = nn.Linear(width, config.hidden, bias=False)

    def forward(self, x: Tensor, state: State | None, context: Context) -> Tensor:
        present = None if context.present is None else context.present[:, context.start :]
        width, states = self.config.mamba_width, self.config.state
        gate, inner, dt = self.in_proj(_without_padding(x, present)).split(
            [width, self.config.convolved, self.config.mamba_heads], dim=-1
        )
        inner = functional.silu(self.conv1d(self._with_window(inner, state)))
        inner = _without_padding(inner, present).float()
        values, b, c = inner.split([width, states, states], dim=-1)
        values = values.unflatten(-1, (self.config.mamba_heads, -1))
        dt = functional.softplus((dt + self.dt_bias).float())
        dt = dt.clamp(min=self.config.smallest_time_step)
        decay = -self.A_log.float().exp() * dt
        scanned = self._scan(values * dt.unsqueeze(-1), decay, b, c, state)
        scanned = scanned + values * self.D.float().unsqueeze(-1)
        out: Tensor = self.out_proj(self.norm(scanned.flatten(2), gate))
        return out

    def _with_window(self, inner: Tensor, state: State | None) -> Tensor:
        """Put the inputs that came before in front, and keep the last ones."""
        before = self.config.convolution - 1
        if state is None or state.window is None:
            return functional.pad(inner, (0, 0, before, 0))
        joined = torch.cat([state.window, inner], dim=1)
        state.window = joined[:, -before:]
        return joined

    def _scan(
        self, values: Tensor, decay: Tensor, b: Tensor, c: Tensor, state: State | None
    ) -> Tensor:
        """values [B, T, heads, P] and log decays [B, T, heads] to [B, T, heads, P], all fp32.

        A state must be empty, or the step one token long.
        """
        if state is not None and state.memory is not None and values.shape[1] == 1:
            added = values[:, 0].unsqueeze(-1) * b[:, 0, None, None, :]
            state.memory = state.memory * decay[:, 0, :, None, None].exp() + added
            return (state.memory @ c[:, 0, None, :, None]).squeeze(-1).unsqueeze(1)
        log = decay.transpose(1, 2).cumsum(-1)  # [B, heads, T]
        between = log.unsqueeze(-1) - log.unsqueeze(-2)
        length = values.shape[1]
        future = torch.ones(length, length, dtype=torch.bool, device=values.device).triu(1)
        weights = between.masked_fill(future, -torch.inf).exp() * (c @ b.transpose(1, 2))[:, None]
        if state is not None:
            left = (log[..., -1:] - log).exp().transpose(1, 2).unsqueeze(-1)
            state.memory = torch.einsum("bthp,btn->bhpn", values * left, b)
        return (weights @ values.transpose(1, 2)).transpose(1, 2)


def _without_padding(x: Tensor, present: Tensor | None) -> Tensor:
    return x if present is None else x * present.unsqueeze(-1).to(x.dtype)
