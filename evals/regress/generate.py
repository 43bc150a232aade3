"""Greedy generation: where an arm leaves the bf16 model's words, and whether it talks longer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from evals.regress.arms import Arm, Variant
from evals.regress.documents import Text
from evals.regress.language_model import LanguageModel, LayerFunction, replaced
from evals.regress.suite import layer_function
from trtllm_b12x_fix.layer import MoELayer


@dataclass(frozen=True)
class Generation:
    """One variant's answers.

    Attributes:
        tokens: new tokens of each prompt, up to and without the end token.
        seconds: it took.
        not_run: why there are none.
    """

    variant: Variant
    tokens: list[list[int]]
    seconds: float = 0.0
    not_run: str = ""


@dataclass(frozen=True)
class Divergence:
    """One variant's answers beside bf16's.

    Attributes:
        identical: share of prompts with the same answer.
        first: index of the first token that differs, per prompt; ``None`` where none does.
        length_shift: tokens more than bf16's, per prompt.
    """

    identical: float
    first: list[int | None]
    length_shift: list[int]


def diverge(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> Divergence:
    """Compare answers prompt by prompt."""
    first = [_first_difference(a, b) for a, b in zip(ours, theirs, strict=True)]
    shift = [len(a) - len(b) for a, b in zip(ours, theirs, strict=True)]
    return Divergence(sum(each is None for each in first) / len(first), first, shift)


def _first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    for index, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return index
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def chat_prompts(texts: Sequence[Text], tokenizer: Any) -> list[list[int]]:
    """Token ids of each prompt as a user's message, ready for the answer."""
    return [
        list(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text.prompt}],
                add_generation_prompt=True,
                return_dict=False,
            )
        )
        for text in texts
    ]


@torch.no_grad()
def generate(
    model: LanguageModel,
    layers: Sequence[MoELayer],
    prompts: Sequence[Sequence[int]],
    variant: Variant,
    new_tokens: int,
) -> list[list[int]]:
    """Greedy answers to all prompts side by side.

    Prompts are read by the reference arm, as CUTLASS reads them whatever serves decode; only the
    new tokens come from the variant.
    """
    bf16 = variant.arm is Arm.BF16
    phase = _Phase(
        None if bf16 else layer_function(Variant(Arm.REFERENCE, powers=variant.powers), layers),
        None if bf16 else layer_function(variant, layers),
    )
    ids, mask = _left_padded(prompts, model.device)
    head, end = model.head, model.causal.config.eos_token_id
    found = torch.empty(len(prompts), 0, dtype=torch.int64, device=model.device)
    cache = None
    with replaced(model, None if bf16 else phase, variant.powers.k) as batch:
        batch.real = mask.bool()
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        for _ in range(new_tokens):
            out = model.causal.model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            )
            cache = out.past_key_values
            logits = out.last_hidden_state[:, -1].float() @ head.t()
            ids = logits.argmax(dim=1, keepdim=True)
            found = torch.cat([found, ids], dim=1)
            mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
            positions = mask.sum(dim=1, keepdim=True) - 1
            batch.real, phase.prefill = None, None
    return [_until(answer, end) for answer in found.tolist()]


class _Phase:
    """The reference while the prompt is read, then the variant."""

    def __init__(self, prefill: LayerFunction | None, decode: LayerFunction | None) -> None:
        self.prefill, self._decode = prefill, decode

    def __call__(self, number: int, x: Tensor) -> Tensor:
        function = self.prefill or self._decode
        if function is None:
            raise RuntimeError("bf16 keeps its own MLPs")
        return function(number, x)


def _left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and attention mask int64 [B, L], prompts at the right edge."""
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    return ids.to(device), mask.to(device)


def _until(tokens: list[int], end: int | list[int]) -> list[int]:
    ends = set(end) if isinstance(end, list) else {end}
    stop = next((index for index, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[:stop]
