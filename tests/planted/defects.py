"""Defects as functions of a launch: what a wrong loader, packer or repair would hand the kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from trtllm_b12x_fix.emulator.moe import LaunchTensors
from trtllm_b12x_fix.formats import scale_layout
from trtllm_b12x_fix.layer import Activation
from trtllm_b12x_fix.layer_check.stages import Stage


@dataclass(frozen=True)
class Defect:
    """A defect, the stage at which it must show, and the activations that can have it."""

    name: str
    apply: Callable[[LaunchTensors], LaunchTensors]
    stage: Stage
    activations: tuple[Activation, ...] = tuple(Activation)


def _swap_gate_up(launch: LaunchTensors) -> LaunchTensors:
    return replace(
        launch,
        w1_packed=launch.w1_packed.roll(launch.w1_packed.shape[1] // 2, 1),
        w1_block_scale=launch.w1_block_scale.roll(launch.w1_block_scale.shape[1] // 2, 1),
    )


def _swap_nibbles(launch: LaunchTensors) -> LaunchTensors:
    packed = launch.w1_packed
    return replace(launch, w1_packed=(packed >> 4) | ((packed & 15) << 4))


def _one_scale_one_code_off(field: str) -> Callable[[LaunchTensors], LaunchTensors]:
    def apply(launch: LaunchTensors) -> LaunchTensors:
        scales = getattr(launch, field).clone()
        scales[:, 0, 0] += 1
        return replace(launch, **{field: scales})

    return apply


def _lose_alpha(field: str) -> Callable[[LaunchTensors], LaunchTensors]:
    return lambda launch: replace(launch, **{field: torch.ones_like(getattr(launch, field))})


def _reciprocal(field: str) -> Callable[[LaunchTensors], LaunchTensors]:
    return lambda launch: replace(launch, **{field: 1.0 / getattr(launch, field)})


def _still_swizzled(launch: LaunchTensors) -> LaunchTensors:
    # Swizzled bytes read as linear ones: the same bytes in other places.
    scales = launch.w1_block_scale
    return replace(launch, w1_block_scale=scale_layout.swizzle(scales).reshape(scales.shape))


def _other_experts_scale(launch: LaunchTensors) -> LaunchTensors:
    return replace(launch, w1_alpha=launch.w1_alpha.roll(1))


DEFECTS = (
    Defect("gate and up swapped", _swap_gate_up, Stage.FC1, (Activation.SILU,)),
    Defect("nibbles swapped", _swap_nibbles, Stage.FC1),
    Defect("FC1 scale off by one code", _one_scale_one_code_off("w1_block_scale"), Stage.FC1),
    Defect("FC2 scale off by one code", _one_scale_one_code_off("w2_block_scale"), Stage.FC2),
    Defect("w1_alpha lost", _lose_alpha("w1_alpha"), Stage.FC1),
    Defect("w2_alpha lost", _lose_alpha("w2_alpha"), Stage.FC2),
    Defect("scales still swizzled", _still_swizzled, Stage.FC1),
    Defect("input scale reciprocal", _reciprocal("input_global_scale"), Stage.INPUT_QUANTIZATION),
    Defect(
        "FC2 input scale reciprocal",
        _reciprocal("fc2_input_scale"),
        Stage.INTERMEDIATE_QUANTIZATION,
    ),
    Defect("another expert's alpha", _other_experts_scale, Stage.FC1),
)
CASES = [(defect, activation) for defect in DEFECTS for activation in defect.activations]
IDS = [f"{defect.name}, {activation.value}" for defect, activation in CASES]
