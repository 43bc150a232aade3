"""What is run: a suite's documents and variants, and the loop over them."""

from __future__ import annotations

import enum
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from evals.regress.arms import STATIC, Arm, Kernel, Variant, runner
from evals.regress.documents import Document
from evals.regress.experts import route_to_all
from evals.regress.language_model import LanguageModel, LayerFunction, hidden_states
from evals.regress.scoring import Positions, TokenScores, positions, score
from trtllm_b12x_fix import law
from trtllm_b12x_fix.checkpoint.embedded import REPORTED_WEIGHT_SCALE_2
from trtllm_b12x_fix.emulator.arithmetic import KernelFamily
from trtllm_b12x_fix.emulator.contract import KNOWN_VERSIONS
from trtllm_b12x_fix.law import Powers, Subject
from trtllm_b12x_fix.layer import MoELayer

Progress = Callable[[str], None]
OTHER_ORDER = 1
#: Why a variant has no result.
TIME_LIMIT = "the time limit was reached"


class SuiteName(enum.Enum):
    """Values are the names on the command line and in baselines."""

    SMALL = "small"
    FULL = "full"


@dataclass(frozen=True)
class Suite:
    """What to run.

    Attributes:
        gsm8k, human_eval: documents of each task, the first that fit.
        token_limit: longest document.
        sweep: exponents of the layer errors and, in the full suite, of whole-model runs; FC1 and
            FC2 are moved together.
        layer_tokens: tokens per layer for the layer errors.
        prompts: greedy generations, of ``new_tokens`` tokens each.
    """

    name: SuiteName
    gsm8k: int
    human_eval: int
    token_limit: int
    sweep: range
    layer_tokens: int
    prompts: int
    new_tokens: int = 64


SMALL = Suite(SuiteName.SMALL, 16, 8, 160, range(8), 32, 0)
FULL = Suite(SuiteName.FULL, 128, 128, 384, range(11), 64, 32)
SUITES = {suite.name.value: suite for suite in (SMALL, FULL)}

#: Kernels of the full suite: one for every arithmetic that b12x has for layers of this shape.
KERNELS = (
    STATIC,
    Kernel("0.6.16", KernelFamily.STATIC),
    Kernel("0.6.18", KernelFamily.DYNAMIC, graph_capacity=8192),
    Kernel("0.6.18", KernelFamily.DIRECT_MICRO),
    Kernel("0.7.4", KernelFamily.STATIC),
    Kernel("0.7.4", KernelFamily.DIRECT_MICRO),
)


def same_bits(kernel: Kernel, layer: MoELayer) -> list[Kernel]:
    """Every kernel of every known version that computes what this one does, itself included."""
    wanted = replace(kernel.arithmetic(layer), name="")
    return [each for each in every_kernel() if replace(each.arithmetic(layer), name="") == wanted]


def every_kernel() -> list[Kernel]:
    """What FlashInfer's known versions can launch; 0.6.16 never launches its direct micro."""
    never = Kernel("0.6.16", KernelFamily.DIRECT_MICRO)
    kernels = [Kernel(version, family) for version in KNOWN_VERSIONS for family in KernelFamily]
    kernels += [Kernel(version, KernelFamily.DYNAMIC, 8192) for version in KNOWN_VERSIONS]
    return [kernel for kernel in kernels if kernel != never]


def reported_magnitude(layers: Sequence[MoELayer]) -> Powers:
    """Where the law brings ``weight_scale_2`` nearest to the reported checkpoint's 2e-5."""
    fc1 = torch.stack([layer.fc1.weight_scale_2 for layer in layers])
    fc2 = torch.stack([layer.fc2.weight_scale_2 for layer in layers])
    return Powers(
        law.nearest_shift(fc1, REPORTED_WEIGHT_SCALE_2),
        law.nearest_shift(fc2, REPORTED_WEIGHT_SCALE_2),
    )


def variants(suite: Suite, moved: Powers) -> list[Variant]:
    """What a suite runs, the most telling first; bf16 is run before all."""
    here = Powers()
    found = [Variant(Arm.REFERENCE)]
    found += [
        Variant(arm, STATIC, where) for arm in (Arm.ALPHAS, Arm.BAKED) for where in (here, moved)
    ]
    found += [
        Variant(Arm.REFERENCE, powers=moved),
        Variant(Arm.ALPHAS, STATIC, here, OTHER_ORDER),
        Variant(Arm.BAKED, STATIC, moved, OTHER_ORDER),
    ]
    if suite.name is SuiteName.FULL:
        found += _full(suite, moved)
    return list(dict.fromkeys(found))


def _full(suite: Suite, moved: Powers) -> list[Variant]:
    furthest = Powers(suite.sweep[-1], suite.sweep[-1])
    found = [Variant(Arm.W4A16, powers=where) for where in (Powers(), moved)]
    found += [Variant(Arm.REFERENCE, powers=furthest), Variant(Arm.REFERENCE, seed=OTHER_ORDER)]
    found += [Variant(Arm.BAKED, STATIC, where) for where in (Powers(k=moved.k), Powers(j=moved.j))]
    for exponent in suite.sweep:
        where = Powers(exponent, exponent)
        found += [Variant(arm, STATIC, where) for arm in (Arm.BAKED, Arm.UNIT, Arm.ALPHAS)]
    for kernel in KERNELS:
        # Below 0.6.17 there is no input_global_scale: neither `alphas` nor `unit` exists.
        old = kernel.version == "0.6.16"
        arms = (Arm.BAKED,) if old else (Arm.BAKED, Arm.ALPHAS, Arm.UNIT)
        found += [Variant(arm, kernel, where) for arm in arms for where in (Powers(), moved)]
    return found


@dataclass(frozen=True)
class Subjects:
    """The model with its quantized layers, and the documents with their scored positions."""

    model: LanguageModel
    layers: list[MoELayer]
    documents: list[Document]
    where: Positions = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "where", positions(self.documents))


@dataclass(frozen=True)
class Scored:
    """One variant's scores, or why there are none."""

    variant: Variant
    scores: TokenScores | None
    seconds: float
    not_run: str = ""


def layer_function(variant: Variant, layers: Sequence[MoELayer]) -> LayerFunction:
    """A variant as what stands in for the MLPs; the norm before them carries 2^k already."""
    moved = [law.move_layer(layer, variant.powers) for layer in layers]
    run = runner(variant)

    def function(number: int, x: Tensor) -> Tensor:
        routing = route_to_all(moved[number], x.shape[0], x.device)
        return run(number, Subject(moved[number], x, law.move_routing(routing, variant.powers)))

    return function


def states_of(subjects: Subjects, variant: Variant) -> Tensor:
    """Final hidden states of every token under a variant, bf16 [all tokens, H]."""
    function = None if variant.arm is Arm.BF16 else layer_function(variant, subjects.layers)
    return hidden_states(subjects.model, subjects.documents, function, variant.powers.k)


def run(
    subjects: Subjects, wanted: Sequence[Variant], deadline: float, progress: Progress
) -> list[Scored]:
    """bf16 first, then every variant; none is begun after the deadline.

    Args:
        deadline: of :func:`time.monotonic`.
    """
    head = subjects.model.head
    results: list[Scored] = []
    baseline: Tensor | None = None
    for variant in [Variant(Arm.BF16), *wanted]:
        if baseline is not None and time.monotonic() > deadline:
            results.append(Scored(variant, None, 0.0, TIME_LIMIT))
            continue
        began = time.monotonic()
        states = states_of(subjects, variant)
        baseline = states if baseline is None else baseline
        digest = hashlib.sha256(states.cpu().view(torch.uint8).numpy().tobytes()).hexdigest()
        scores = score(states, baseline, head, subjects.where, digest)
        results.append(Scored(variant, scores, time.monotonic() - began))
        progress(f"{variant.name}: {results[-1].seconds:.1f} s, KL {scores.kl.mean():.4f}")
    return results
