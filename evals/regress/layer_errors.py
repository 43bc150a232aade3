"""Each layer by itself at every power: the law held against backends, and what baking costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from evals.regress.arms import STATIC, Arm, Kernel, Variant, trace
from evals.regress.documents import Document
from evals.regress.experts import route_to_all
from evals.regress.language_model import hidden_states
from evals.regress.suite import Subjects
from trtllm_b12x_fix import law
from trtllm_b12x_fix.checkpoint.embedded import REPORTED_WEIGHT_SCALE_2
from trtllm_b12x_fix.emulator import moe
from trtllm_b12x_fix.law import Powers, Subject
from trtllm_b12x_fix.layer import MoELayer
from trtllm_b12x_fix.metrics import distance

#: Arms that every power has to leave bit for bit as they are.
LAWFUL = (Arm.REFERENCE, Arm.ALPHAS)
#: How many times more tokens than wanted are run, to draw from.
_DRAWN_FROM = 8


@dataclass(frozen=True)
class LayerErrors:
    """One decoder layer's MLP.

    Attributes:
        number: of the decoder layer.
        reported: where the law brings its own ``weight_scale_2`` nearest to 2e-5.
        baked: error of the baked layer at each exponent of the sweep: relative RMS from exact
            scales in the same kernel's arithmetic.
        baked_at_reported: the same at ``reported``.
        violations: of the lawful arms, in words.
        baked_obeys: whether the baked arm has the same bits at ``reported``: it must not.
    """

    number: int
    reported: Powers
    baked: list[float]
    baked_at_reported: float
    violations: list[str]
    baked_obeys: bool

    @property
    def falls(self) -> bool:
        """Whether the error is smaller at the reported magnitude than at the layer's own."""
        return not self.baked_at_reported >= self.baked[0]


def root_mean_square(layers: Sequence[LayerErrors]) -> list[float]:
    """The baked error over all layers, at each exponent of the sweep."""
    columns = zip(*(layer.baked for layer in layers), strict=True)
    return [math.sqrt(sum(error**2 for error in column) / len(layers)) for column in columns]


def record_inputs(subjects: Subjects, tokens: int, seed: int) -> list[Tensor]:
    """Inputs of every MLP in the bf16 model, bf16 [tokens, H], drawn from the first documents."""
    few: list[Document] = []
    for document in subjects.documents:
        few.append(document)
        if sum(len(each.tokens) for each in few) >= _DRAWN_FROM * tokens:
            break
    own = [layer.mlp for layer in subjects.model.layers]
    found: dict[int, Tensor] = {}

    def look(number: int, x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(seed)  # the same tokens in every layer
        drawn = torch.randperm(x.shape[0], generator=generator)[:tokens].to(x.device)
        found.setdefault(number, x[drawn])
        return own[number](x)

    hidden_states(subjects.model, few, look)
    return [found[number] for number in range(len(own))]


def measure(
    layers: Sequence[MoELayer], inputs: Sequence[Tensor], sweep: range, kernel: Kernel = STATIC
) -> list[LayerErrors]:
    """Every layer at every exponent of the sweep, FC1 and FC2 moved together."""
    pairs = zip(layers, inputs, strict=True)
    return [_layer(number, layer, x, sweep, kernel) for number, (layer, x) in enumerate(pairs)]


def _layer(number: int, layer: MoELayer, x: Tensor, sweep: range, kernel: Kernel) -> LayerErrors:
    subject = Subject(layer, x, route_to_all(layer, x.shape[0], x.device))
    powers = [Powers(exponent, exponent) for exponent in sweep]
    reported = Powers(
        law.nearest_shift(layer.fc1.weight_scale_2, REPORTED_WEIGHT_SCALE_2),
        law.nearest_shift(layer.fc2.weight_scale_2, REPORTED_WEIGHT_SCALE_2),
    )
    exact = _backend(Arm.ALPHAS, kernel, number)
    baked = _backend(Arm.BAKED, kernel, number)
    truth = exact(subject).unrounded

    def error(where: Powers) -> float:
        return distance(baked(law.move(subject, where)).unrounded, truth).relative_rms

    return LayerErrors(
        number,
        reported,
        [error(where) for where in powers],
        error(reported),
        [
            f"layer {number}, {arm.value}: {violation}"
            for arm in LAWFUL
            for violation in law.violations(_backend(arm, kernel, number), subject, powers[1:])
        ],
        not law.violations(baked, subject, [reported]),
    )


def _backend(arm: Arm, kernel: Kernel, number: int) -> law.Backend:
    variant = Variant(arm, kernel if arm.strategy else None)

    def run(subject: Subject) -> moe.MoETrace:
        return trace(variant, number, subject)

    return run
