"""The checkpoint folder: what transformers reads, written and read without it.

``model.safetensors`` holds bf16 tensors under the names of published Nemotron-H checkpoints
(``backbone.layers.N.mixer.experts.E.up_proj.weight``), ``calibration.json`` what the experts were
fed, so that every machine quantizes to the same bytes.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from evals.relu2_lm import tokenizer
from evals.relu2_lm.config import from_transformers, to_transformers
from evals.relu2_lm.model import LanguageModel
from evals.relu2_lm.quantize import InputAmax

WEIGHTS, CONFIG, CALIBRATION = "model.safetensors", "config.json", "calibration.json"
KEPT = Path(__file__).parent / "checkpoint"
_FUSED = re.compile(r"(.*\.experts)\.(up_proj|down_proj)")
_SINGLE = re.compile(r"(.*\.experts)\.(\d+)\.(up_proj|down_proj)\.weight")
_BIAS = "e_score_correction_bias"


def save(model: LanguageModel, amax: dict[int, InputAmax], folder: Path) -> None:
    """Write weights (bf16), config, calibration and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        dtype = torch.float32 if name.endswith(_BIAS) else torch.bfloat16
        stored = value.detach().to("cpu", dtype).contiguous()
        outer = re.sub(r"^model\.", "backbone.", name)
        fused = _FUSED.fullmatch(outer)
        if fused is None:
            tensors[outer] = stored
            continue
        for expert, matrix in enumerate(stored):
            tensors[f"{fused[1]}.{expert}.{fused[2]}.weight"] = matrix.contiguous()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    _write(folder / CONFIG, to_transformers(model.config))
    _write(folder / CALIBRATION, {str(n): asdict(each) for n, each in amax.items()})
    tokenizer.save(folder)


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


def load(folder: Path, device: torch.device, dtype: torch.dtype) -> LanguageModel:
    """The model in ``dtype`` (its router's bias stays fp32), ready to evaluate.

    Raises:
        OSError: a file is missing.
        RuntimeError: tensors that are not the config's.
    """
    model = LanguageModel(from_transformers(json.loads((folder / CONFIG).read_text())))
    stored: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, value in load_file(folder / WEIGHTS).items():
        inner = re.sub(r"^backbone\.", "model.", name)
        single = _SINGLE.fullmatch(inner)
        if single is None:
            stored[inner] = value.to(torch.float32)
        else:
            experts.setdefault(f"{single[1]}.{single[3]}", {})[int(single[2])] = value.float()
    for name, matrices in experts.items():
        stored[name] = torch.stack([matrices[expert] for expert in sorted(matrices)])
    model.load_state_dict(stored)
    model = model.to(device, dtype).eval().requires_grad_(False)
    for number, moe in model.moe_layers():  # the bias must not be rounded with the rest
        bias = stored[f"model.layers.{number}.mixer.gate.{_BIAS}"]
        moe.gate.e_score_correction_bias = bias.to(device)
    return model


def load_calibration(folder: Path) -> dict[int, InputAmax]:
    stored = json.loads((folder / CALIBRATION).read_text())
    return {int(number): InputAmax(**each) for number, each in stored.items()}
