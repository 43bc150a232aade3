"""Greedy answers, and log-probabilities of worked solutions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from evals.relu2_lm import tokenizer
from evals.relu2_lm.data import Corpus, batch, encode_prompt
from evals.relu2_lm.layers import Context
from evals.relu2_lm.model import LanguageModel
from evals.relu2_lm.problems import Problem, extract_answer

#: The longest worked solution has 70 tokens.
NEW_TOKENS = 80
#: Steps after which prompts that ended leave the batch.
_LEAVE_EVERY = 8


@torch.no_grad()
def greedy(model: LanguageModel, prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
    """New tokens of each prompt up to its end mark, which is left out.

    All prompts run as one batch, padded on the left; those that ended leave it now and then. A
    prompt's result depends on the others as little as the device's products do.
    """
    device = model.lm_head.weight.device
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), longest), tokenizer.PAD_ID)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
    ids = ids.to(device)
    present = torch.ones(len(prompts), longest + new_tokens, dtype=torch.bool, device=device)
    present[:, :longest] = ids != tokenizer.PAD_ID
    states = model.empty_states(len(prompts), longest + new_tokens)
    written = torch.full((len(prompts), new_tokens), tokenizer.END_ID, device=device)
    running = torch.arange(len(prompts), device=device)
    step, start = ids, 0
    for number in range(new_tokens):
        end = start + step.shape[1]
        logits = model(step, states, Context(present[:, :end], start))
        step, start = logits[:, -1:].argmax(-1), end
        written[running, number] = step.squeeze(1)
        if number % _LEAVE_EVERY == _LEAVE_EVERY - 1:
            left = (written[running] != tokenizer.END_ID)[:, : number + 1].all(1)
            if not bool(left.any()):
                break
            step, running, present = step[left], running[left], present[left]
            states = [state.select(left) for state in states]
    return [_until_end(row) for row in written.tolist()]


def _until_end(row: list[int]) -> list[int]:
    return row[: row.index(tokenizer.END_ID)] if tokenizer.END_ID in row else row


def answers(
    model: LanguageModel, problems: Sequence[Problem], new_tokens: int = NEW_TOKENS
) -> list[int | None]:
    """The number each answer ends with; ``None`` where there is none."""
    prompts = [encode_prompt(problem) for problem in problems]
    texts = tokenizer.build().decode_batch(greedy(model, prompts, new_tokens))
    return [extract_answer(text) for text in texts]


@torch.no_grad()
def solution_log_probabilities(model: LanguageModel, corpus: Corpus, size: int = 256) -> Tensor:
    """Teacher forced: fp32 [tokens of all solutions, vocabulary], problem by problem."""
    found = []
    for rows in torch.arange(len(corpus), device=corpus.ids.device).split(size):
        each = batch(corpus, rows, int(corpus.lengths[rows].max()))
        found.append(model(each.inputs)[each.solution].log_softmax(-1))
    return torch.cat(found)


def divergence(log_p: Tensor, log_q: Tensor, corpus: Corpus) -> Tensor:
    """Mean KL(p || q) per solution token of each problem, in nats: fp64 [N].

    Args:
        log_p, log_q: from :func:`solution_log_probabilities` of the same corpus.
    """
    # Added up on the CPU: a GPU adds in another order each time.
    each = (log_p.double().exp() * (log_p.double() - log_q.double())).sum(-1).cpu()
    counts = (corpus.lengths - corpus.prompts).long().cpu()
    owner = torch.arange(len(corpus)).repeat_interleave(counts)
    total = torch.zeros(len(corpus), dtype=torch.float64)
    return total.index_add(0, owner, each) / counts
