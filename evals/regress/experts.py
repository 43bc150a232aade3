"""The model's MLPs as NVFP4 experts: split, calibrated and quantized as ModelOpt does.

A SwiGLU MLP is a sum over its intermediate rows, so cutting those into experts, all selected with
routing weight 1, leaves the function as it is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evals.make_embedded_layer import (
    EXPERTS,
    PROJECTIONS,
    Expert,
    intermediate,
    split_experts,
)
from evals.regress.documents import Document, fingerprint
from evals.regress.language_model import LanguageModel, hidden_states
from trtllm_b12x_fix.emulator.moe import Routing
from trtllm_b12x_fix.errors import InputError
from trtllm_b12x_fix.formats.nvfp4 import BLOCK, global_scale_from_amax
from trtllm_b12x_fix.layer import Activation, ExpertMatrices, MoELayer, validate
from trtllm_b12x_fix.presets import quantize_rows

#: Calibrated once and kept: a run elsewhere then quantizes the same, whatever its matrix products.
CALIBRATION = Path(__file__).with_name("calibration.json")


@dataclass(frozen=True)
class Calibration:
    """Largest inputs seen per layer, and what they were seen on.

    Attributes:
        fc1: [layers], largest magnitude of an MLP's input.
        fc2: [layers][experts], largest magnitude of each expert's intermediate.
        documents_sha256: of the calibration documents.
        model_sha256: of the model file.
    """

    fc1: list[float]
    fc2: list[list[float]]
    documents_sha256: str
    model_sha256: str


def calibrate(model: LanguageModel, documents: Sequence[Document]) -> Calibration:
    """Run the bf16 model and keep maxima over every token, as ModelOpt's max calibration does."""
    parts = experts_of(model)
    fc1 = [0.0] * len(parts)
    fc2 = [[0.0] * EXPERTS for _ in parts]

    own = [layer.mlp for layer in model.layers]

    def look(number: int, x: Tensor) -> Tensor:
        fc1[number] = max(fc1[number], float(x.abs().max()))
        for index, expert in enumerate(parts[number]):
            seen = float(intermediate(expert, x).abs().max())
            fc2[number][index] = max(fc2[number][index], seen)
        return own[number](x)

    hidden_states(model, documents, look)
    return Calibration(fc1, fc2, fingerprint(documents), model.sha256)


def load_calibration(path: Path, model: LanguageModel) -> Calibration:
    """Read a calibration and hold it against the model.

    Raises:
        InputError: it cannot be read, or belongs to another model file.
    """
    try:
        stored = Calibration(**json.loads(path.read_text(encoding="utf-8"))["calibration"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: not a calibration: {error}") from error
    if stored.model_sha256 != model.sha256:
        raise InputError(
            f"{path} belongs to a model file with SHA-256 {stored.model_sha256[:12]}, and "
            f"{model.name} has {model.sha256[:12]}: calibrate anew with --calibrate {path.name}"
        )
    if len(stored.fc1) != len(model.layers):
        raise InputError(f"{path}: {len(stored.fc1)} layers, the model has {len(model.layers)}")
    return stored


def experts_of(model: LanguageModel) -> list[list[Expert]]:
    """fp32 weights (of bf16 values) of every layer's experts."""
    return [
        split_experts(*(getattr(layer.mlp, name).weight.detach().float() for name in PROJECTIONS))
        for layer in model.layers
    ]


def quantize(model: LanguageModel, calibration: Calibration) -> list[MoELayer]:
    """Every MLP as a layer of NVFP4 experts, hidden size as it is (the emulator needs no padding).

    Raises:
        InputError: sizes that do not divide into blocks, or a scale no backend can use.
    """
    layers = []
    for number, parts in enumerate(experts_of(model)):
        amax = torch.tensor(calibration.fc1[number]).expand(len(parts))
        layer = MoELayer(
            # b12x's order; gate and up share a global scale, as ModelOpt exports them.
            _quantize([torch.cat([each.up, each.gate]) for each in parts], amax),
            _quantize([each.down for each in parts], torch.tensor(calibration.fc2[number])),
            Activation.SILU,
            f"{model.name}, MLP of layer {number} as {len(parts)} experts",
            logical_hidden=parts[0].gate.shape[1],
            logical_intermediate=parts[0].gate.shape[0],
        )
        validate(layer)
        layers.append(layer.to(model.device))
    return layers


def _quantize(weights: Sequence[Tensor], input_amax: Tensor) -> ExpertMatrices:
    """One projection of all experts, fp32 [R, C] each, on the CPU: everywhere the same bits."""
    rows, columns = weights[0].shape
    packed = torch.empty(len(weights), rows, columns // 2, dtype=torch.uint8)
    block_scale = torch.empty(len(weights), rows, columns // BLOCK, dtype=torch.uint8)
    quantizer = quantize_rows.choose(packed.numel() * 2)
    ones = torch.ones(rows)
    scales = [
        quantizer(weight.cpu().clone(), ones, packed[index], block_scale[index])
        for index, weight in enumerate(weights)
    ]
    input_scale = global_scale_from_amax(input_amax).contiguous()
    return ExpertMatrices(packed, block_scale, torch.stack(scales), input_scale)


def route_to_all(layer: MoELayer, tokens: int, device: torch.device) -> Routing:
    """Every expert selected with weight 1."""
    ids = torch.arange(layer.experts, device=device).expand(tokens, -1).contiguous()
    return Routing(ids, torch.ones(ids.shape, device=device))


def to_document(calibration: Calibration, about: dict[str, Any]) -> dict[str, Any]:
    """JSON of a calibration with what made it."""
    return {"about": about, "calibration": vars(calibration)}
