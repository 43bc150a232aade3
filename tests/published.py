"""b12x's published reference, called with the tensors of a launch of ours."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trtllm_b12x_fix.emulator.moe import LaunchTensors, Routing
from trtllm_b12x_fix.formats import scale_layout

MODULE = "b12x.moe._shared.kernels.reference"
ORACLES = ("flashinfer-deps", "b12x")


def arguments(launch: LaunchTensors, x: Tensor, routing: Routing) -> tuple[Any, ...]:
    """Positional arguments of moe_reference_nvfp4: swizzled scales, reciprocal input scales."""
    return (
        x,
        launch.w1_packed,
        scale_layout.swizzle(launch.w1_block_scale).view(torch.float8_e4m3fn),
        launch.w1_alpha,
        launch.w2_packed,
        scale_layout.swizzle(launch.w2_block_scale).view(torch.float8_e4m3fn),
        launch.w2_alpha,
        1.0 / launch.input_global_scale.reshape(-1),
        1.0 / launch.fc2_input_scale.reshape(-1),
        routing.expert_ids,
        routing.weights,
        launch.experts,
        x.shape[1],
        launch.intermediate,
    )
