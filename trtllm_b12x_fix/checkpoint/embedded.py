"""The real layer that ships with the package, and where to move its magnitude."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_b12x_fix.checkpoint.assemble import load_experts
from trtllm_b12x_fix.checkpoint.discovery import discover
from trtllm_b12x_fix.checkpoint.files import open_checkpoint
from trtllm_b12x_fix.checkpoint.json_files import read_json
from trtllm_b12x_fix.errors import InputError
from trtllm_b12x_fix.layer import Activation, MoELayer

if TYPE_CHECKING:
    from torch import Tensor

PATH = Path(__file__).parent.parent / "data" / "smollm2_layer1.safetensors"
#: FC1 weight_scale_2 of the 120B checkpoint in the report (TensorRT-LLM#21461).
REPORTED_WEIGHT_SCALE_2 = 2e-5


def load() -> tuple[MoELayer, Tensor]:
    """The embedded layer at its own magnitude and its recorded activations (bf16 [rows, 576]).

    One MLP of SmolLM2-135M-Instruct as 6 SwiGLU experts; all six with weight 1 are the MLP.
    """
    _check_integrity()
    checkpoint = open_checkpoint(PATH)
    (entry,) = discover(checkpoint).usable
    loaded = load_experts(
        checkpoint,
        entry,
        range(entry.experts),
        Activation.SILU,
        "SmolLM2-135M-Instruct, MLP of layer 1 as 6 SwiGLU NVFP4 experts",
    )
    return loaded.layer, checkpoint.get("recorded.hidden_states")


def _check_integrity() -> None:
    """The file must be the one its provenance describes: a flipped bit would pass as a layer."""
    provenance = read_json(PATH.with_suffix(".json"))
    try:
        digest = hashlib.sha256(PATH.read_bytes()).hexdigest()
    except OSError as error:
        raise InputError(f"{PATH}: cannot be read: {error.strerror}") from error
    if digest != provenance.get("sha256"):
        raise InputError(f"{PATH.name} is damaged (sha256 {digest}): reinstall the package")


def reported_shift(layer: MoELayer) -> int:
    """The k for which dividing FC1 by 2^k brings its weight_scale_2 nearest the reported 2e-5."""
    mean = float(layer.fc1.weight_scale_2.double().mean())
    return round(math.log2(mean / REPORTED_WEIGHT_SCALE_2))
