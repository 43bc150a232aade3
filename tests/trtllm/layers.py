"""A MoELayer as TensorRT-LLM meets it: as checkpoint tensors, and as its loaded parameters say.

Checkpoint keys are those that TensorRT-LLM's weight mapper hands to a layer: ``3.w1.weight`` with
w1 the gate (or, where nothing is gated, the only projection), w3 up, w2 down.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from trtllm_b12x_fix.layer import ExpertMatrices, MoELayer

Checkpoint = dict[str, Tensor]


def to_checkpoint(layer: MoELayer) -> Checkpoint:
    """What the mapper hands over: an FC1 without gate comes as w1, with empty w3 tensors."""
    tensors: Checkpoint = {}
    for expert in range(layer.experts):
        fc1, fc2 = layer.fc1, layer.fc2
        for what, source in (("weight", fc1.packed), ("weight_scale", fc1.block_scale)):
            rows = source[expert]
            middle = rows.shape[0] // 2 if layer.activation.is_gated else 0
            tensors[f"{expert}.w3.{what}"] = rows[:middle].clone()
            tensors[f"{expert}.w1.{what}"] = rows[middle:].clone()
        tensors[f"{expert}.w2.weight"] = fc2.packed[expert].clone()
        tensors[f"{expert}.w2.weight_scale"] = fc2.block_scale[expert].clone()
        for name, matrices in (("w1", fc1), ("w3", fc1), ("w2", fc2)):
            tensors[f"{expert}.{name}.weight_scale_2"] = matrices.weight_scale_2[expert].clone()
            tensors[f"{expert}.{name}.input_scale"] = matrices.input_scale[expert].clone()
    return tensors


def as_loaded(layer: MoELayer) -> MoELayer:
    """The layer with the scales that TensorRT-LLM's parameters still hold.

    One input scale for the whole layer, stored as its reciprocal, and weight_scale_2 as
    ``alpha * reciprocal``: a few ulps from the checkpoint's, enough to move a rounding tie.
    """
    return replace(layer, fc1=_as_loaded(layer.fc1), fc2=_as_loaded(layer.fc2))


def _as_loaded(matrices: ExpertMatrices) -> ExpertMatrices:
    reciprocal = matrices.largest_input_scale.reciprocal()
    alpha = 1.0 / (reciprocal * (1.0 / matrices.weight_scale_2))
    return replace(
        matrices,
        weight_scale_2=alpha * reciprocal,
        input_scale=(1.0 / reciprocal).expand(matrices.experts).clone(),
        layer_input_scale=None,
    )


class Damage(enum.Enum):
    """Defects a checkpoint may have and TensorRT-LLM loads without an error."""

    NAN_BLOCK_SCALE = "one block scale of w1 is NaN"
    NEGATIVE_BLOCK_SCALE = "one block scale of w2 is negative"
    NO_INPUT_SCALE = "no input scales: both stay 1.0"
    NO_WEIGHT_SCALE_2 = "expert 0 has no weight_scale_2: its alphas stay 1.0"
    ZERO_INPUT_SCALE = "all input scales 0: alpha is 0, its reciprocal infinite, their product NaN"
    DIFFERING_WEIGHT_SCALE_2 = "w3's weight_scale_2 is twice w1's: a warning, the larger is used"
    NAN_WEIGHT_SCALE_2 = "expert 0's w2 has a NaN weight_scale_2"


def damaged(checkpoint: Checkpoint, damage: Damage) -> Checkpoint:
    """A copy with one defect."""
    tensors = {key: value.clone() for key, value in checkpoint.items()}
    _DAMAGES[damage](tensors)
    return tensors


def _nan_block_scale(tensors: Checkpoint) -> None:
    tensors["0.w1.weight_scale"][0, 0] = 0x7F


def _negative_block_scale(tensors: Checkpoint) -> None:
    tensors["0.w2.weight_scale"][0, 0] |= 0x80


def _without(suffix: str, prefix: str = "") -> Callable[[Checkpoint], None]:
    def remove(tensors: Checkpoint) -> None:
        for key in [k for k in tensors if k.startswith(prefix) and k.endswith(suffix)]:
            del tensors[key]

    return remove


def _zero_input_scale(tensors: Checkpoint) -> None:
    for key in tensors:
        if key.endswith(".input_scale"):
            tensors[key] = torch.zeros(())


def _differing_weight_scale_2(tensors: Checkpoint) -> None:
    for key in tensors:
        if key.endswith(".w3.weight_scale_2"):
            tensors[key] = tensors[key] * 2


def _nan_weight_scale_2(tensors: Checkpoint) -> None:
    tensors["0.w2.weight_scale_2"] = torch.tensor(float("nan"))


_DAMAGES: dict[Damage, Callable[[Checkpoint], None]] = {
    Damage.NAN_BLOCK_SCALE: _nan_block_scale,
    Damage.NEGATIVE_BLOCK_SCALE: _negative_block_scale,
    Damage.NO_INPUT_SCALE: _without(".input_scale"),
    Damage.NO_WEIGHT_SCALE_2: _without(".weight_scale_2", "0."),
    Damage.ZERO_INPUT_SCALE: _zero_input_scale,
    Damage.DIFFERING_WEIGHT_SCALE_2: _differing_weight_scale_2,
    Damage.NAN_WEIGHT_SCALE_2: _nan_weight_scale_2,
}
