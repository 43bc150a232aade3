"""The real layer that ships with the package, and where to move its magnitude."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_b12x_fix.checkpoint.assemble import assemble
from trtllm_b12x_fix.checkpoint.safetensors_source import SafetensorsSource
from trtllm_b12x_fix.layer import Activation, MoELayer

if TYPE_CHECKING:
    from torch import Tensor

PATH = Path(__file__).parent.parent / "data" / "smollm2_layer1.safetensors"
EXPERTS = 6
#: FC1 weight_scale_2 of the 120B checkpoint in the report (TensorRT-LLM#21461).
REPORTED_WEIGHT_SCALE_2 = 2e-5


def load() -> tuple[MoELayer, Tensor]:
    """The embedded layer at its own magnitude and its recorded activations (bf16 [rows, 576]).

    One MLP of SmolLM2-135M-Instruct as 6 SwiGLU experts; all six with weight 1 are the MLP.
    """
    source = SafetensorsSource(PATH)
    layer = assemble(
        source,
        "model.layers.1.mlp.experts",
        EXPERTS,
        Activation.SILU,
        "SmolLM2-135M-Instruct, MLP of layer 1 as 6 SwiGLU NVFP4 experts",
    )
    return layer, source.get("recorded.hidden_states")


def reported_shift(layer: MoELayer) -> int:
    """The k for which dividing FC1 by 2^k brings its weight_scale_2 nearest the reported 2e-5."""
    mean = float(layer.fc1.weight_scale_2.double().mean())
    return round(math.log2(mean / REPORTED_WEIGHT_SCALE_2))
