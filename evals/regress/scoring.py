"""From hidden states to one record per predicted token: KL, surprise, first choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from evals.regress.documents import Document
from trtllm_b12x_fix.emulator.matmul import full_precision

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

#: Tokens whose distributions over the vocabulary are held at a time.
_BLOCK = 256


@dataclass(frozen=True)
class Positions:
    """Which predictions are scored.

    Attributes:
        states: index of the hidden state that predicts each scored token, of all tokens of all
            documents one after the other.
        gold: the token that stands there.
        document: number of its document.
    """

    states: Integers
    gold: Integers
    document: Integers


def positions(documents: Sequence[Document]) -> Positions:
    """Every token of every solution, predicted from the state before it."""
    states, gold, numbers = [], [], []
    start = 0
    for number, document in enumerate(documents):
        scored = range(document.scored_from, len(document.tokens))
        states += [start + index - 1 for index in scored]
        gold += [document.tokens[index] for index in scored]
        numbers += [number] * document.scored
        start += len(document.tokens)
    return Positions(np.array(states), np.array(gold), np.array(numbers))


@dataclass(frozen=True)
class TokenScores:
    """One value per scored token.

    Attributes:
        kl: KL(bf16 model || this arm) in nats, fp64.
        surprise: negative log probability of the gold token in nats, fp64.
        choice: the most probable token.
        states_sha256: of the final hidden states of all tokens: equal bits, equal hash.
    """

    kl: Floats
    surprise: Floats
    choice: Integers
    states_sha256: str


def score(
    states: Tensor, baseline: Tensor, head: Tensor, where: Positions, states_sha256: str
) -> TokenScores:
    """Compare an arm's predictions with those of the bf16 model.

    Args:
        states, baseline: bf16 [all tokens, H], final hidden states of the arm and of bf16.
        head: fp32 [vocabulary, H].
        where: scored positions.
    """
    index = torch.from_numpy(where.states).to(states.device)
    gold = torch.from_numpy(where.gold).to(states.device)
    kl, surprise, choice = [], [], []
    with torch.no_grad(), full_precision():
        for part, targets in zip(index.split(_BLOCK), gold.split(_BLOCK), strict=True):
            ours = _log_probabilities(states[part], head)
            theirs = _log_probabilities(baseline[part], head)
            kl.append((theirs.exp() * (theirs - ours)).sum(dim=1, dtype=torch.float64))
            surprise.append(-ours.gather(1, targets.unsqueeze(1)).squeeze(1).double())
            choice.append(ours.argmax(dim=1))
    return TokenScores(
        torch.cat(kl).cpu().numpy(),
        torch.cat(surprise).cpu().numpy(),
        torch.cat(choice).cpu().numpy(),
        states_sha256,
    )


def _log_probabilities(states: Tensor, head: Tensor) -> Tensor:
    """fp32 [n, vocabulary]."""
    return torch.log_softmax(states.float() @ head.t(), dim=1)
