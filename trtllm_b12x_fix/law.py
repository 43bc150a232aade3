"""The power-of-two law: moving a factor 2^n between weights changes nothing in floating point.

A layer's function stays the same, bit for bit, when a factor 2^n is taken out of its weights and
put back elsewhere, because multiplying by a power of two only moves the exponent. A backend that
carries scales as it should gives the same codes and bits at every power; one that rounds a scale
in a format of fixed range, as the b12x bake does, does not. So the law finds such a backend with
any weights at hand, and moves weights to the magnitude where large mixtures of experts live
without inventing a single one.

It sees no error that is itself free of scale: another rounding to bf16, another order of adds, a
wrong code that is wrong everywhere alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trtllm_b12x_fix.emulator.moe import MoETrace, Routing
from trtllm_b12x_fix.errors import InputError
from trtllm_b12x_fix.layer import Activation, ExpertMatrices, MoELayer


@dataclass(frozen=True, order=True)
class Powers:
    """How far each factor is moved, as exponents of two; negative ones make weights larger.

    Attributes:
        k: FC1 is divided by 2^k, its input multiplied by 2^k (in a network: the norm before it).
        j: FC2 is divided by 2^j, the routing weights, applied after FC2, multiplied by 2^j.
        i: relu2 only: FC1 is divided by 2^i, the routing weights multiplied by 2^(2i).
    """

    k: int = 0
    j: int = 0
    i: int = 0

    def __str__(self) -> str:
        moved = [f"{name}={value}" for name, value in vars(self).items() if value]
        return " ".join(moved) or "own magnitude"


@dataclass(frozen=True)
class Subject:
    """A layer with inputs: x bf16 [T, H] and routing for the same T tokens."""

    layer: MoELayer
    x: Tensor
    routing: Routing


#: A backend: one launch of a layer on its inputs.
Backend = Callable[[Subject], MoETrace]


def move_layer(layer: MoELayer, powers: Powers) -> MoELayer:
    """The layer with its weights divided; codes and block scales stay the very same tensors.

    Input scales follow the activations: FC1's rise by 2^k; for relu2 FC2's fall by 2^(2i).

    Raises:
        InputError: ``i`` for a gated layer, or a scale that leaves fp32's normal range.
    """
    if powers.i and layer.activation is not Activation.RELU2:
        raise InputError(f"the law moves i for relu2 only, not for {layer.activation.value}")
    return replace(
        layer,
        fc1=_scaled(layer.fc1, -powers.k - powers.i, powers.k),
        fc2=_scaled(layer.fc2, -powers.j, -2 * powers.i),
    )


def move_input(x: Tensor, powers: Powers) -> Tensor:
    """bf16 [T, H] times 2^k, exact.

    Raises:
        InputError: a value leaves bf16's normal range.
    """
    return _ldexp(x, powers.k, "activations")


def move_routing(routing: Routing, powers: Powers) -> Routing:
    """The routing with fp32 weights times 2^(j + 2i).

    Raises:
        InputError: a weight leaves fp32's normal range.
    """
    weights = _ldexp(routing.weights, powers.j + 2 * powers.i, "routing weights")
    return Routing(routing.expert_ids, weights)


def move(subject: Subject, powers: Powers) -> Subject:
    """The same function at another magnitude.

    Raises:
        InputError: see :func:`move_layer`, :func:`move_input` and :func:`move_routing`.
    """
    return Subject(
        move_layer(subject.layer, powers),
        move_input(subject.x, powers),
        move_routing(subject.routing, powers),
    )


@dataclass(frozen=True)
class Violation:
    """Where a backend broke the law first, in the order of its stages.

    Attributes:
        stage: codes and block scales of the input, then of the intermediate, then the output.
        differing: how many of ``total`` codes or values differ.
    """

    powers: Powers
    stage: str
    differing: int
    total: int

    def __str__(self) -> str:
        return f"{self.powers}: {self.differing:,} of {self.total:,} differ in {self.stage}"


def violations(backend: Backend, subject: Subject, powers: Iterable[Powers]) -> list[Violation]:
    """Hold a backend against the law: no entry for powers at which every stage has the same bits.

    The backend must give equal bits for equal inputs: fix the order of atomic adds by a seed.

    Raises:
        InputError: the subject cannot be moved that far.
    """
    own = backend(subject)
    found = (_first_violation(own, backend(move(subject, each)), each) for each in powers)
    return [violation for violation in found if violation is not None]


def nearest_shift(weight_scale_2: Tensor, target: float) -> int:
    """The exponent n >= 0 for which ``weight_scale_2 / 2^n`` is nearest to ``target``.

    Args:
        weight_scale_2: fp32, any shape; its geometric mean counts.
    """
    mean_log2 = float(weight_scale_2.double().log2().mean())
    return max(0, round(mean_log2 - math.log2(target)))


def _first_violation(own: MoETrace, moved: MoETrace, powers: Powers) -> Violation | None:
    for stage, ours, theirs in _stages(own, moved):
        if not _same_bits(ours, theirs):
            differing = int((ours != theirs).sum())
            return Violation(powers, stage, differing, ours.numel())
    return None


def _stages(own: MoETrace, moved: MoETrace) -> list[tuple[str, Tensor, Tensor]]:
    """Intermediates themselves carry the moved factor; their codes and block scales do not."""
    ours, theirs = own.intermediate_quantized, moved.intermediate_quantized
    return [
        ("input codes", own.input.codes, moved.input.codes),
        ("input block scales", own.input.block_scale, moved.input.block_scale),
        ("intermediate codes", ours.codes, theirs.codes),
        ("intermediate block scales", ours.block_scale, theirs.block_scale),
        ("output", own.output, moved.output),
        ("output before rounding", own.unrounded, moved.unrounded),
    ]


def _same_bits(ours: Tensor, theirs: Tensor) -> bool:
    same = ours.shape == theirs.shape and ours.dtype == theirs.dtype
    return same and torch.equal(_bits(ours), _bits(theirs))


def _bits(values: Tensor) -> Tensor:
    """As integers, so that NaN equals itself and -0 does not equal 0."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return values.contiguous().view(integers[values.element_size()])


def _scaled(matrices: ExpertMatrices, weights: int, inputs: int) -> ExpertMatrices:
    """Both scales times powers of two."""
    largest = matrices.layer_input_scale
    return replace(
        matrices,
        weight_scale_2=_ldexp(matrices.weight_scale_2, weights, "weight_scale_2"),
        input_scale=_ldexp(matrices.input_scale, inputs, "input_scale"),
        layer_input_scale=None if largest is None else _ldexp(largest, inputs, "input_scale"),
    )


def _ldexp(values: Tensor, exponent: int, what: str) -> Tensor:
    """``values * 2^exponent``, refused where that would round, overflow or flush."""
    moved = torch.ldexp(values, torch.tensor(exponent, device=values.device)).to(values.dtype)
    smallest = torch.finfo(values.dtype).tiny
    kept = torch.isfinite(moved) & ((values == 0) | (moved.abs() >= smallest))
    if not bool(kept.all()):
        raise InputError(f"{what} times 2^{exponent} leave the normal range of {values.dtype}")
    return moved
