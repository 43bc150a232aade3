"""From routed FC2 accumulators to one bf16 row per token, as each family adds them up."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_b12x_fix.emulator.arithmetic import OutputSum
from trtllm_b12x_fix.errors import InputError

#: Terms computed at a time: 2 MB of fp32.
_CACHED_TERMS = 2**19


@dataclass(frozen=True)
class Combined:
    """One row per token, twice.

    Attributes:
        output: bf16 [T, H], added up as the family does.
        unrounded: fp32 [T, H], the very same terms added in fp32. Comparing these keeps the
            rounding of the family's adds out of an arm's error: once any term differs, that
            rounding differs everywhere, in the same order too.
    """

    output: Tensor
    unrounded: Tensor


def combine(
    partials: Tensor,
    alpha: Tensor,
    weights: Tensor,
    output_sum: OutputSum,
    order_seed: int | None = None,
) -> Combined:
    """Sum routed outputs.

    Args:
        partials: fp32 [T, K, S, H], FC2 accumulators per token, route and retained group of
            slices (S is 1 where a family sums the whole intermediate in fp32).
        alpha: fp32 [T, K], ``w2_alpha`` of each route's expert.
        weights: fp32 [T, K], routing weights.
        output_sum: which family's summation.
        order_seed: order of atomic adds: ``None`` for slot order, an integer for a random order
            per token drawn from that seed. Ignored by families with a fixed order.

    Raises:
        InputError: a non-integer seed.
    """
    if order_seed is not None and not isinstance(order_seed, int):
        raise InputError(f"order_seed must be an integer or None, got {order_seed!r}")
    terms = _all_terms(partials, alpha[:, :, None, None], weights[:, :, None, None], output_sum)
    terms = terms.flatten(1, 2)
    unrounded = _slot_sum(terms)
    if output_sum.has_random_order:
        return Combined(_atomic_sum(terms, order_seed).to(torch.bfloat16), unrounded)
    return Combined(unrounded.to(torch.bfloat16), unrounded)


def _all_terms(partials: Tensor, alpha: Tensor, weight: Tensor, output_sum: OutputSum) -> Tensor:
    """:func:`_terms` a few tokens at a time, whose temporaries stay in a CPU's cache."""
    if partials.device.type != "cpu":  # no such cache, and every launch costs
        return _terms(partials, alpha, weight, output_sum)
    step = max(1, _CACHED_TERMS // max(1, partials[0].numel()))
    terms = torch.empty_like(partials)
    for start in range(0, partials.shape[0], step):
        tokens = slice(start, start + step)
        terms[tokens] = _terms(partials[tokens], alpha[tokens], weight[tokens], output_sum)
    return terms


def _terms(partials: Tensor, alpha: Tensor, weight: Tensor, output_sum: OutputSum) -> Tensor:
    if output_sum is OutputSum.FP32:
        return (partials * alpha) * weight
    if output_sum is OutputSum.SINGLE_STORE:
        return partials * (alpha * weight)
    if output_sum is OutputSum.BF16_ATOMICS:
        return _bf16(_bf16(partials * alpha) * weight)
    return _bf16(_bf16(partials) * _bf16(alpha * weight))


def _bf16(values: Tensor) -> Tensor:
    return values.to(torch.bfloat16).to(torch.float32)


def _slot_sum(terms: Tensor) -> Tensor:
    total = torch.zeros_like(terms[:, 0])
    for slot in range(terms.shape[1]):
        total += terms[:, slot]
    return total


def _atomic_sum(terms: Tensor, order_seed: int | None) -> Tensor:
    """bf16 adds into a zeroed row; each token's terms arrive in an order of their own.

    Terms are bf16 values, so adding in bf16 (an fp32 sum, rounded) is what the hardware does.
    """
    tokens, slots, _ = terms.shape
    order = torch.arange(slots).expand(tokens, slots)
    if order_seed is not None:
        generator = torch.Generator().manual_seed(order_seed)
        order = torch.rand(tokens, slots, generator=generator).argsort(dim=1)
    order = order.to(terms.device)
    rows = torch.arange(tokens, device=terms.device)
    arriving = terms.to(torch.bfloat16)[rows, order.t()]  # [slots, T, H]
    total = torch.zeros_like(arriving[0])
    for step in arriving:
        total += step
    return total
