"""The MoE layers of a checkpoint as TensorRT-LLM hands them to the wrapper; needs torch."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trtllm_b12x_fix.doctor.advisories import TILE, LayerShape, padded
from trtllm_b12x_fix.errors import InputError, MissingDependencyError

W4A16 = "W4A16_NVFP4"
_MAX_JSON_BYTES = 16_000_000


@dataclass(frozen=True)
class Model:
    """What matters of a checkpoint.

    Attributes:
        shapes: one entry for layers of the same shape.
        changed_by_padding: logical intermediate sizes that TensorRT-LLM pads.
        displaced_halves: whether a gated layer's gate and up are padded as one, so that the kernels
            split them in the wrong place.
        quant_algo: as ModelOpt's config names it.
        unusable: layers that the reader cannot use, and why.
    """

    name: str
    shapes: tuple[LayerShape, ...]
    changed_by_padding: tuple[int, ...] = ()
    displaced_halves: bool = False
    quant_algo: str | None = None
    unusable: tuple[str, ...] = ()

    @property
    def is_weight_only(self) -> bool:
        """Whether b12x runs it as W4A16."""
        return self.quant_algo == W4A16


def read_model(path: Path) -> Model:
    """Read names and shapes of a checkpoint; its tensors are not read.

    Raises:
        MissingDependencyError: torch or safetensors is not importable.
        InputError: the checkpoint cannot be used.
    """
    try:
        from trtllm_b12x_fix.checkpoint.config import ModelConfig
        from trtllm_b12x_fix.checkpoint.discovery import discover
        from trtllm_b12x_fix.checkpoint.files import open_checkpoint
    except ImportError as error:
        raise MissingDependencyError(
            f"--model needs torch and safetensors ({error}): run this in the environment that "
            "serves the model, or leave --model out"
        ) from error
    checkpoint = open_checkpoint(path)
    layers = discover(checkpoint)
    top_k = ModelConfig(checkpoint.config).top_k()
    counted: Counter[LayerShape] = Counter()
    padding, displaced = set(), False
    for entry in layers.usable:
        if not entry.intermediate:
            continue  # its shard is missing
        size = tensor_intermediate(entry.intermediate, gated=entry.is_gated)
        if size != entry.intermediate:
            padding.add(entry.intermediate)
            displaced = displaced or entry.is_gated
        shape = LayerShape(entry.experts, entry.hidden, size, entry.is_gated, 1, top_k)
        counted[shape] += 1
    return Model(
        name=checkpoint.name,
        shapes=tuple(replace(shape, layers=count) for shape, count in counted.items()),
        changed_by_padding=tuple(sorted(padding)),
        displaced_halves=displaced,
        quant_algo=_quant_algo(path, checkpoint.config),
        unusable=tuple(f"{one.prefix}: {one.reason}" for one in layers.unusable),
    )


def tensor_intermediate(intermediate: int, *, gated: bool) -> int:
    """Intermediate size of TensorRT-LLM's tensors: FC1's rows are padded as a whole."""
    branches = 2 if gated else 1
    return padded(branches * intermediate, TILE) // branches


def _quant_algo(path: Path, config: dict[str, Any]) -> str | None:
    """From hf_quant_config.json, else from config.json."""
    folder = path if path.is_dir() else path.parent
    file = folder / "hf_quant_config.json"
    sections: list[Any] = [config.get("quantization_config")]
    if file.is_file():
        sections.insert(0, _object(file).get("quantization"))
    for section in sections:
        if isinstance(section, dict) and isinstance(section.get("quant_algo"), str):
            algorithm: str = section["quant_algo"]
            return algorithm
    return None


def _object(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > _MAX_JSON_BYTES:
            raise InputError(f"{file}: too large for a config")
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{file}: cannot be read as JSON: {error}") from error
    return content if isinstance(content, dict) else {}
