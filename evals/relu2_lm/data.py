"""Problems as padded rows of token ids."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from evals.relu2_lm import tokenizer
from evals.relu2_lm.problems import Problem, Split, generate

#: Positions of a row, beginning and end marks included; the longest problem has 133 tokens.
ROW = 136
#: Training problems made from one seed.
SHARE = 10_000


@dataclass(frozen=True)
class Corpus:
    """Encoded problems.

    Attributes:
        ids: int16 [N, ROW], begin mark, prompt, solution, end mark, padding.
        lengths: int16 [N], without padding.
        prompts: int16 [N], begin mark and prompt.
    """

    ids: Tensor
    lengths: Tensor
    prompts: Tensor

    def __len__(self) -> int:
        return self.ids.shape[0]

    def to(self, device: torch.device) -> Corpus:
        return Corpus(self.ids.to(device), self.lengths.to(device), self.prompts.to(device))


@dataclass(frozen=True)
class Batch:
    """Inputs int64 [B, T], targets int64 [B, T], and bool [B, T]: the target is of the solution."""

    inputs: Tensor
    targets: Tensor
    solution: Tensor


def encode_prompt(problem: Problem) -> list[int]:
    return [tokenizer.BEGIN_ID, *tokenizer.build().encode(problem.prompt).ids]


def encode(problems: Sequence[Problem]) -> Corpus:
    """Prompt and solution are encoded each by itself, as serving a prompt does."""
    ids = torch.full((len(problems), ROW), tokenizer.PAD_ID, dtype=torch.int16)
    lengths = torch.zeros(len(problems), dtype=torch.int16)
    prompts = torch.zeros(len(problems), dtype=torch.int16)
    for number, problem in enumerate(problems):
        prompt = encode_prompt(problem)
        row = [*prompt, *tokenizer.build().encode(problem.solution).ids, tokenizer.END_ID]
        ids[number, : len(row)] = torch.tensor(row, dtype=torch.int16)
        lengths[number], prompts[number] = len(row), len(prompt)
    return Corpus(ids, lengths, prompts)


def training_corpus(seed: int, count: int, workers: int) -> Corpus:
    """``count`` training problems in shares, each from its own seed: any number of
    workers gives the same corpus."""
    shares = [(seed + n, min(SHARE, count - n * SHARE)) for n in range(-(-count // SHARE))]
    if workers == 1:
        parts = [_share(each) for each in shares]
    else:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        with ProcessPoolExecutor(workers) as pool:
            parts = list(pool.map(_share, shares))
    stacked = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("ids", "lengths", "prompts")
    )
    return Corpus(*stacked)


def _share(seed_and_count: tuple[int, int]) -> Corpus:
    torch.set_num_threads(1)
    return encode(list(generate(Split.TRAIN, *seed_and_count)))


def batches(corpus: Corpus, size: int, generator: torch.Generator) -> Iterator[Batch]:
    """One epoch of full batches of about equal lengths, in random order; a rest is left out."""
    device = corpus.ids.device
    shuffled = torch.randperm(len(corpus), generator=generator).to(device)
    by_length = shuffled[corpus.lengths[shuffled].argsort(stable=True)]
    groups = by_length[: len(corpus) // size * size].view(-1, size)
    longest = corpus.lengths[groups[:, -1]].tolist()
    for number in torch.randperm(len(groups), generator=generator).tolist():
        yield batch(corpus, groups[number], longest[number])


def batch(corpus: Corpus, rows: Tensor, longest: int) -> Batch:
    """The named rows, cut to ``longest`` positions."""
    ids = corpus.ids[rows, :longest].long()
    targets = ids[:, 1:]
    positions = torch.arange(1, longest, device=ids.device)
    prompt, length = corpus.prompts[rows].unsqueeze(1), corpus.lengths[rows].unsqueeze(1)
    return Batch(ids[:, :-1], targets, (positions >= prompt) & (positions < length))
