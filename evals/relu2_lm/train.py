"""Training by the clock: the schedule follows elapsed time, so a run ends when it was told to."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from evals.relu2_lm.config import ModelConfig
from evals.relu2_lm.data import Batch, Corpus, batch, batches
from evals.relu2_lm.model import LanguageModel, initialize

#: Weight of a prompt token in the loss; a solution token has 1.
PROMPT_WEIGHT = 0.1
#: Steps between two looks at the clock's lag, the loss and its finiteness.
_SYNC_EVERY = 20


@dataclass(frozen=True)
class Recipe:
    """How to train; the defaults are those of the kept checkpoint."""

    seconds: float
    batch_size: int = 512
    peak_rate: float = 2e-3
    last_rate: float = 2e-5
    warmup: float = 0.03
    weight_decay: float = 0.05
    clip: float = 1.0
    #: Step of the router's bias towards balance; it stands still for the last fifth.
    balance: float = 1e-3
    log_every: int = 100
    validate_every: float = 0.1  # of the time
    seed: int = 0


@dataclass(frozen=True)
class LogEntry:
    """One line of the training log.

    Attributes:
        loss, imbalance: of this step; the imbalance is the largest expert's rows over the mean.
        exact: validation problems whose every solution token is the likeliest, where looked at.
    """

    step: int
    seconds: float
    problems: int
    rate: float
    loss: float
    imbalance: float
    exact: float | None = None


def train(
    config: ModelConfig,
    recipe: Recipe,
    corpus: Corpus,
    validation: Corpus,
    device: torch.device,
    tell: Callable[[LogEntry], None],
) -> LanguageModel:
    """Train from scratch.

    Args:
        corpus, validation: on any device.
        tell: is given each log entry.

    Returns:
        The model in bf16 on a GPU, fp32 on a CPU.

    Raises:
        FloatingPointError: the loss is not finite.
    """
    model = LanguageModel(config)
    initialize(model, recipe.seed)
    model = model.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    _keep_bias_in_fp32(model)
    _Run(model, recipe, corpus.to(device), validation.to(device), tell).go()
    return model.eval()


def _keep_bias_in_fp32(model: LanguageModel) -> None:
    for _, moe in model.moe_layers():
        moe.gate.e_score_correction_bias = moe.gate.e_score_correction_bias.float()


class Masters:
    """fp32 copies of the parameters, which the optimizer moves."""

    def __init__(self, model: LanguageModel, recipe: Recipe) -> None:
        self.parameters = list(model.parameters())
        self.masters = [p.detach().float().clone() for p in self.parameters]
        groups: list[dict[str, Any]] = [
            {"params": [m for m in self.masters if m.dim() > 1]},
            {"params": [m for m in self.masters if m.dim() == 1], "weight_decay": 0.0},
        ]
        fused = self.masters[0].device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            groups, betas=(0.9, 0.98), weight_decay=recipe.weight_decay, fused=fused
        )
        self.clip = recipe.clip

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, self.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        torch._foreach_copy_([p.detach() for p in self.parameters], self.masters)


class _Run:
    def __init__(
        self,
        model: LanguageModel,
        recipe: Recipe,
        corpus: Corpus,
        validation: Corpus,
        tell: Callable[[LogEntry], None],
    ) -> None:
        self.model, self.recipe, self.tell = model, recipe, tell
        self.corpus, self.validation = corpus, validation
        self.masters = Masters(model, recipe)
        self.generator = torch.Generator().manual_seed(recipe.seed)

    def go(self) -> None:
        start = time.monotonic()
        looked = 0.0
        self.model.train()
        for step, each in enumerate(self._endless(), start=1):
            done = (time.monotonic() - start) / self.recipe.seconds
            rate = rate_at(done, self.recipe)
            loss = self._step(each, rate, done)
            if step % _SYNC_EVERY == 0 and not math.isfinite(loss.item()):
                raise FloatingPointError(f"loss is {loss.item()} at step {step}")
            look = done >= 1 or done >= looked + self.recipe.validate_every
            if look or step % self.recipe.log_every == 0:
                looked = done if look else looked
                exact = self._exact() if look else None
                self._log(step, time.monotonic() - start, rate, loss, exact)
            if done >= 1:
                return

    def _endless(self) -> Iterator[Batch]:
        while True:
            yield from batches(self.corpus, self.recipe.batch_size, self.generator)

    def _step(self, each: Batch, rate: float, done: float) -> Tensor:
        loss = weighted_loss(self.model(each.inputs), each)
        loss.backward()
        self.masters.step(rate)
        if done < 0.8:
            self._balance()
        return loss.detach()

    @torch.no_grad()
    def _balance(self) -> None:
        """Raise the bias of experts with less than their share (auxiliary-loss-free balancing)."""
        for _, moe in self.model.moe_layers():
            assert moe.gate.load is not None
            load = moe.gate.load.float()
            moe.gate.e_score_correction_bias += self.recipe.balance * (load.mean() - load).sign()

    def _imbalance(self) -> float:
        loads = [moe.gate.load for _, moe in self.model.moe_layers()]
        return max(float(load.max() / load.float().mean()) for load in loads if load is not None)

    def _exact(self) -> float:
        return float(teacher_forced_exact(self.model, self.validation).float().mean())

    def _log(
        self, step: int, seconds: float, rate: float, loss: Tensor, exact: float | None = None
    ) -> None:
        problems = step * self.recipe.batch_size
        entry = LogEntry(step, seconds, problems, rate, float(loss), self._imbalance(), exact)
        self.tell(entry)


def rate_at(done: float, recipe: Recipe) -> float:
    """Learning rate after this fraction of the time: linear warm-up, then a cosine."""
    if done < recipe.warmup:
        return recipe.peak_rate * max(done, 1e-4) / recipe.warmup
    fall = (done - recipe.warmup) / (1 - recipe.warmup)
    span = recipe.peak_rate - recipe.last_rate
    return recipe.last_rate + span * 0.5 * (1 + math.cos(math.pi * min(1.0, fall)))


def weighted_loss(logits: Tensor, each: Batch) -> Tensor:
    """Mean cross entropy; prompt tokens count :data:`PROMPT_WEIGHT`, padding nothing."""
    losses = functional.cross_entropy(
        logits.flatten(0, 1), each.targets.flatten(), reduction="none"
    ).view_as(each.targets)
    prompt = (~each.solution & (each.targets != 0)) * PROMPT_WEIGHT
    weights = each.solution + prompt
    return (losses * weights).sum() / weights.sum()


@torch.no_grad()
def teacher_forced_exact(model: LanguageModel, corpus: Corpus, size: int = 512) -> Tensor:
    """bool [N]: every solution token is the likeliest, as greedy decoding would write them."""
    was_training = model.training
    model.eval()
    found = []
    for rows in torch.arange(len(corpus), device=corpus.ids.device).split(size):
        each = batch(corpus, rows, int(corpus.lengths[rows].max()))
        right = model(each.inputs).argmax(-1) == each.targets
        found.append((right | ~each.solution).all(-1))
    model.train(was_training)
    return torch.cat(found)
