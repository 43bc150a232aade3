"""Small synthetic NVFP4 checkpoints for the tests, and files with headers that nobody would write.

Names are ModelOpt's; values are random but sound: block scales near 200, so that neither zero nor
NaN occurs by chance, and one ``weight_scale_2`` for gate and up.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

QWEN = "model.layers.{}.mlp.experts"
GATED = ("gate_proj", "up_proj", "down_proj")
UNGATED = ("up_proj", "down_proj")
EXPERTS, HIDDEN, INTERMEDIATE = 4, 64, 32


def linear(base: str, rows: int, columns: int, generator: torch.Generator) -> dict[str, Tensor]:
    """The four tensors of one quantized matrix [rows, columns]."""
    scales = torch.randint(0x50, 0x7E, (rows, columns // 16), generator=generator)
    codes = torch.randint(0, 256, (rows, columns // 2), generator=generator)
    return {
        f"{base}.weight": codes.to(torch.uint8),
        f"{base}.weight_scale": scales.to(torch.uint8).view(torch.float8_e4m3fn),
        f"{base}.weight_scale_2": torch.tensor(2.0**-15),
        f"{base}.input_scale": torch.tensor(2.0**-9),
    }


def experts(
    prefix: str,
    names: Iterable[str] = GATED,
    *,
    count: int = EXPERTS,
    hidden: int = HIDDEN,
    intermediate: int = INTERMEDIATE,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Split experts under ``prefix``; the last of ``names`` is the down projection's.

    Mixtral's order is w1, w3, w2.
    """
    generator = torch.Generator().manual_seed(seed)
    names = tuple(names)
    tensors: dict[str, Tensor] = {}
    for expert in range(count):
        for name in names:
            size = (hidden, intermediate) if name == names[-1] else (intermediate, hidden)
            tensors |= linear(f"{prefix}.{expert}.{name}", *size, generator)
    return tensors


def router(prefix: str, *, count: int = EXPERTS, hidden: int = HIDDEN) -> dict[str, Tensor]:
    """A router beside the experts at ``prefix``."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(count, hidden, generator=generator).to(torch.bfloat16)
    return {f"{prefix.removesuffix('experts')}gate.weight": weight}


def save(
    folder: Path,
    tensors: dict[str, Tensor],
    *,
    shards: int = 1,
    index: bool = False,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint folder; tensors go to the shards in turn."""
    folder.mkdir(exist_ok=True)
    parts: list[dict[str, Tensor]] = [{} for _ in range(shards)]
    for place, (name, tensor) in enumerate(tensors.items()):
        parts[place % shards][name] = tensor.contiguous()
    names = shard_names(shards)
    for name, part in zip(names, parts, strict=True):
        save_file(part, folder / name)
    if index:
        weight_map = {t: name for name, part in zip(names, parts, strict=True) for t in part}
        write_index(folder, weight_map)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def shard_names(shards: int) -> list[str]:
    """File names as the hub has them."""
    if shards == 1:
        return ["model.safetensors"]
    return [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]


def write_index(folder: Path, weight_map: Any, name: str = "model.safetensors.index.json") -> Path:
    """Write an index with this weight map."""
    (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder / name


def raw(header: Any, data: bytes = b"") -> bytes:
    """A file of this header (an object, or its bytes) and data, sound or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: str, shape: list[Any], begin: Any, end: Any) -> dict[str, Any]:
    """What a header says of one tensor."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
