"""JSON files of a checkpoint: its config, and the index that puts tensors into shards."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from trtllm_b12x_fix.checkpoint.header import parse_object, require_text, shown
from trtllm_b12x_fix.errors import InputError

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
PICKLE = "a pickle, refused unread (it could run code): convert the checkpoint to safetensors"
#: The index of a million tensors, and a config a hundred times the usual one, are smaller.
_MAX_INDEX_BYTES, _MAX_CONFIG_BYTES = 100_000_000, 16_000_000


def read_weight_map(index: Path) -> dict[str, str]:
    """An index's shard of every tensor.

    Raises:
        InputError: unreadable, empty, or a shard that is no plain file name or a pickle.
    """
    content = read_json(index, _MAX_INDEX_BYTES)
    weight_map = content.get("weight_map")
    name = shown(index.name)
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{name}: no weight_map")
    plain: dict[str, str] = {}
    for tensor, shard in weight_map.items():
        require_text(name, tensor)
        if isinstance(shard, str) and shard in plain:
            weight_map[tensor] = plain[shard]  # one text for each shard, not for each tensor
            continue
        # Only plain names: an index must not make us read outside its folder.
        if not isinstance(shard, str) or Path(shard).name != shard or shard in ("", ".", ".."):
            raise InputError(f"{name}: {tensor} is put in {shard!r}, not a plain file name")
        if shard.endswith(PICKLE_SUFFIXES):
            raise InputError(f"{name}: {tensor} is in {shard}, {PICKLE}")
        plain[shard] = shard
    return weight_map


def read_config(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """A config of a folder, or nothing.

    Raises:
        InputError: it is there and cannot be read; a link that leads nowhere is there, too.
    """
    path = folder / name
    if not os.path.lexists(path):
        return {}
    if not path.is_file():
        raise InputError(f"{path}: a folder, a pipe or a link that leads nowhere, not a config")
    return read_json(path)


def read_json(path: Path, most: int = _MAX_CONFIG_BYTES) -> dict[str, Any]:
    """A JSON object from a file of at most ``most`` bytes.

    Raises:
        InputError: unreadable, too large, or not a JSON object.
    """
    try:
        if (size := path.stat().st_size) > most:
            raise InputError(
                f"{shown(path.name)}: {size} bytes, more than any such file has ({most})"
            )
        raw = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    return parse_object(shown(path.name), raw)
