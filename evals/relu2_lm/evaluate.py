"""Accuracy with exact answers and KL of every arm, on the same problems."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from evals.relu2_lm.arms import (
    EmulatedExperts,
    Kernel,
    Magnitude,
    standing_in,
    weights_only,
)
from evals.relu2_lm.data import Corpus, encode
from evals.relu2_lm.decode import answers, divergence, solution_log_probabilities
from evals.relu2_lm.model import LanguageModel
from evals.relu2_lm.problems import Problem, Split, generate
from evals.relu2_lm.quantize import plain_experts
from trtllm_b12x_fix.emulator.contract import contract_for
from trtllm_b12x_fix.errors import NoExactFormError
from trtllm_b12x_fix.layer import MoELayer
from trtllm_b12x_fix.layer_check.arms import Arm

#: Seed of every evaluation's problems; training starts its seeds at 1000.
PROBLEM_SEED = 7
SPLITS = (Split.NEW_NUMBERS, Split.NEW_TEMPLATES, Split.NEW_BOTH)
#: FlashInfer versions whose contracts differ for relu2, and the tokens of a decode step: one
#: (direct micro, from 0.6.17) and sixteen (static).
VERSIONS = ("0.6.16", "0.6.18", "0.7.2", "0.7.4")
MANY_TOKENS, ONE_TOKEN = 16, 1


class Plain(enum.Enum):
    """Arms without an emulated kernel."""

    BF16 = "bf16"
    W4A16 = "w4a16"


@dataclass(frozen=True)
class Emulated:
    """An arm on a kernel; ``arm`` is ``None`` for the reference (exact scales)."""

    arm: Arm | None
    version: str
    tokens: int
    magnitude: Magnitude
    order_seed: int | None = None

    @property
    def arm_name(self) -> str:
        return "reference" if self.arm is None else self.arm.value


Case = Plain | Emulated


@dataclass(frozen=True)
class Subject:
    """What is evaluated: the model, its experts in NVFP4, and the problems."""

    model: LanguageModel
    layers: dict[int, MoELayer]
    problems: list[Problem]
    corpus: Corpus


@dataclass(frozen=True)
class Outcome:
    """One case: right or not per problem, and KL from bf16 per problem (nats per token)."""

    case: Case
    right: list[bool]
    divergence: list[float]
    seconds: float


def problems_of(count: int) -> list[Problem]:
    """``count`` held-out problems of each split."""
    return [p for split in SPLITS for p in generate(split, PROBLEM_SEED, count)]


def subject(model: LanguageModel, layers: dict[int, MoELayer], problems: list[Problem]) -> Subject:
    device = model.lm_head.weight.device
    return Subject(model, layers, problems, encode(problems).to(device))


def cases() -> list[Case]:
    """All of the matrix, most wanted first: a run that ends early has what matters."""
    many = [_case(arm, "0.6.18") for arm in (None, Arm.BAKED, Arm.ALPHAS, Arm.FP32_RESCALE)]
    controls = [_case(Arm.BAKED, "0.6.18", m) for m in (Magnitude.HALF, Magnitude.QUARTER)]
    other_order = replace(_case(None, "0.6.18"), order_seed=1)
    versions = [
        _case(arm, version)
        for version in ("0.7.4", "0.6.16", "0.7.2")
        for arm in (None, Arm.BAKED, Arm.ALPHAS, Arm.FP32_RESCALE)
    ]
    own = [_case(arm, v, Magnitude.OWN) for v in VERSIONS for arm in (None, Arm.BAKED)]
    one = [
        replace(_case(arm, version), tokens=ONE_TOKEN)
        for version in VERSIONS
        for arm in (None, Arm.BAKED, Arm.ALPHAS, Arm.FP32_RESCALE, Arm.FIX)
    ]
    return [*Plain, *many, *controls, other_order, *versions, *own, *one]


def _case(arm: Arm | None, version: str, magnitude: Magnitude = Magnitude.REPORTED) -> Emulated:
    return Emulated(arm, version, MANY_TOKENS, magnitude)


def run(
    given: Subject, wanted: Sequence[Case], seconds: float, tell: Callable[[str], None]
) -> tuple[list[Outcome], list[tuple[Case, str]]]:
    """Every case until the time is up.

    Returns:
        Outcomes, and the cases that were not run with the reason.
    """
    start = time.monotonic()
    own = solution_log_probabilities(given.model, given.corpus)
    outcomes: list[Outcome] = []
    left_out: list[tuple[Case, str]] = []
    for case in wanted:
        if time.monotonic() - start > seconds:
            left_out.append((case, "not run: no time left"))
            continue
        try:
            outcome = _run(given, case, own)
        except NoExactFormError as error:
            left_out.append((case, f"not possible: {error}"))
            continue
        outcomes.append(outcome)
        tell(f"{case}: {sum(outcome.right) / len(outcome.right):.4f} in {outcome.seconds:.1f} s")
    return outcomes, left_out


def _run(given: Subject, case: Case, own: Tensor) -> Outcome:
    start = time.monotonic()
    with standing_in(given.model, experts_of(given, case)) as model:
        found = answers(model, given.problems)
        log_q = solution_log_probabilities(model, given.corpus)
    kl = divergence(own, log_q, given.corpus)
    right = [a == p.answer for a, p in zip(found, given.problems, strict=True)]
    return Outcome(case, right, kl.tolist(), time.monotonic() - start)


def experts_of(given: Subject, case: Case) -> dict[int, torch.nn.Module]:
    """What replaces the experts of each layer, by layer number.

    Raises:
        NoExactFormError: see :class:`EmulatedExperts`.
    """
    if case is Plain.BF16:
        return {}
    made: dict[int, torch.nn.Module] = {}
    for number, moe in given.model.moe_layers():
        layer = given.layers[number]
        if isinstance(case, Plain):
            made[number] = weights_only(layer, plain_experts(moe))
            continue
        powers = case.magnitude.powers(layer)
        kernel = Kernel(contract_for(case.version), case.tokens)
        top_k = given.model.config.top_k
        made[number] = EmulatedExperts(layer, case.arm, kernel, top_k, powers, case.order_seed)
    return made
