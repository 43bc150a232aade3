"""A checkpoint on disk: one file or a folder of shards, with or without an index.

Headers are read up front (kilobytes); tensors are read one at a time, when asked for.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtllm_b12x_fix.checkpoint.findings import Finding, Severity
from trtllm_b12x_fix.checkpoint.header import TensorInfo, parse_object, read_header, require_text
from trtllm_b12x_fix.checkpoint.safetensors_source import SafetensorsSource
from trtllm_b12x_fix.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

_INDEX_SUFFIX = ".safetensors.index.json"
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_PICKLE = "a pickle, refused unread (it could run code): convert the checkpoint to safetensors"
#: The index of a million tensors, and a config a hundred times the usual one, are smaller.
_MAX_INDEX_BYTES, _MAX_CONFIG_BYTES = 100_000_000, 16_000_000


@dataclass
class Checkpoint:
    """Tensors of a checkpoint by name, whatever file they are in.

    Attributes:
        path: what the user named.
        tensors: header information of every tensor whose shard is there.
        config: ``config.json``, empty where there is none.
        findings: what opening it brought to light.
    """

    path: Path
    tensors: dict[str, TensorInfo]
    config: dict[str, Any]
    findings: list[Finding]
    _files: dict[str, Path] = field(repr=False)
    _missing: dict[str, str] = field(repr=False)
    _open: dict[Path, SafetensorsSource] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        """What to call the checkpoint in messages."""
        return self.path.name or str(self.path)

    def names(self) -> list[str]:
        """Every tensor name, those of missing shards included."""
        return [*self.tensors, *self._missing]

    def has(self, tensor: str) -> bool:
        """Whether the checkpoint has the tensor, in a shard that may be missing here."""
        return tensor in self.tensors or tensor in self._missing

    def lacks_part_of(self, prefix: str) -> bool:
        """Whether a tensor whose name starts with ``prefix`` is in a shard that is missing."""
        return any(tensor.startswith(prefix) for tensor in self._missing)

    def file_of(self, tensor: str) -> str:
        """Name of the file a tensor is in, for messages."""
        path = self._files.get(tensor)
        return path.name if path else self._missing.get(tensor, self.name)

    def info(self, tensor: str) -> TensorInfo:
        """Header information of one tensor.

        Raises:
            InputError: it is not there, or its shard is not.
        """
        self._require(tensor)
        return self.tensors[tensor]

    def get(self, tensor: str) -> Tensor:
        """Read one tensor.

        Raises:
            InputError: it is not there, its shard is not, or it cannot be read.
        """
        return self._source(tensor).get(tensor)

    def get_row(self, tensor: str, index: int) -> Tensor:
        """Read ``tensor[index]`` alone: one expert of a fused tensor.

        Raises:
            InputError: as :meth:`get`, or the index is out of range.
        """
        return self._source(tensor).get_row(tensor, index)

    def _require(self, tensor: str) -> None:
        if tensor in self._missing:
            raise InputError(
                f"{self.name}: tensor {tensor} is in {self._missing[tensor]}, which is missing: "
                "download that shard"
            )
        if tensor not in self.tensors:
            raise InputError(f"{self.name}: tensor {tensor} is missing")

    def _source(self, tensor: str) -> SafetensorsSource:
        self._require(tensor)
        path = self._files[tensor]
        if path not in self._open:
            self._open[path] = SafetensorsSource(path)
        return self._open[path]


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a safetensors file, an index, or a folder (a hub snapshot of links included).

    Raises:
        InputError: nothing readable there, a pickle, a header or index that lies, or one tensor in
            two files.
    """
    _require_there(path)
    if path.suffix in _PICKLE_SUFFIXES and path.is_file():
        raise InputError(f"{path}: {_PICKLE}")
    if path.is_file() and not path.name.endswith(_INDEX_SUFFIX):
        return _from_shards(path, path.parent, [path])
    folder = path if path.is_dir() else path.parent
    indexes = [path] if path.is_file() else _regular(folder, f"*{_INDEX_SUFFIX}")
    if len(indexes) > 1:
        names = ", ".join(index.name for index in indexes)
        raise InputError(f"{path}: several indexes ({names}): name one of them")
    if indexes:
        return _from_index(path, folder, indexes[0])
    shards = _regular(folder, "*.safetensors")
    if not shards:
        raise InputError(f"{path}: {_why_empty(folder)}")
    return _from_shards(path, folder, shards)


def _require_there(path: Path) -> None:
    try:
        mode = os.stat(path).st_mode
    except PermissionError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except (OSError, ValueError):  # ValueError: a name with a NUL
        mode = 0
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise InputError(
            f"{path}: no such file or folder (nothing is downloaded here: a hub id has to be "
            "fetched first, then name its folder)"
        )


def _regular(folder: Path, pattern: str) -> list[Path]:
    """Files by name, in order; what is no file (a folder, a broken link) fails when opened.

    Raises:
        InputError: the folder cannot be read, or a pipe or device bears such a name: opening one
            could block forever.
    """
    try:
        names = sorted(folder.iterdir())
    except OSError as error:
        raise InputError(f"{folder}: cannot be read: {error.strerror}") from error
    found = [name for name in names if name.match(pattern)]
    for name in found:
        if os.path.exists(name) and not (os.path.isfile(name) or os.path.isdir(name)):
            raise InputError(f"{name}: not a regular file")
    return found


def _why_empty(folder: Path) -> str:
    pickles = sorted(f.name for f in folder.iterdir() if f.suffix in _PICKLE_SUFFIXES)
    if pickles:
        return f"no safetensors file; {pickles[0]} is {_PICKLE}"
    return "no safetensors file in this folder"


def _from_shards(path: Path, folder: Path, shards: list[Path]) -> Checkpoint:
    tensors: dict[str, TensorInfo] = {}
    files: dict[str, Path] = {}
    for shard in shards:
        for tensor, info in read_header(shard).items():
            if tensor in files:
                raise InputError(
                    f"{path}: tensor {tensor} is in both {files[tensor].name} and {shard.name}, "
                    "and no index says which counts"
                )
            tensors[tensor], files[tensor] = info, shard
    return Checkpoint(path, tensors, read_config(folder), [], files, {})


def _from_index(path: Path, folder: Path, index: Path) -> Checkpoint:
    weight_map = _weight_map(index)
    tensors: dict[str, TensorInfo] = {}
    files: dict[str, Path] = {}
    missing: dict[str, str] = {}
    findings: list[Finding] = []
    by_shard: dict[str, list[str]] = {}
    for tensor, name in weight_map.items():
        by_shard.setdefault(name, []).append(tensor)
    for name, wanted in sorted(by_shard.items()):
        shard = folder / name
        if not os.path.isfile(shard):
            missing |= dict.fromkeys(wanted, name)
            findings.append(_missing_shard(index.name, name, len(wanted)))
            continue
        header = read_header(shard)
        for tensor in wanted:
            if tensor not in header:
                raise InputError(f"{index.name}: says {tensor} is in {name}, but it is not")
            tensors[tensor], files[tensor] = header[tensor], shard
    return Checkpoint(path, tensors, read_config(folder), findings, files, missing)


def _missing_shard(index: str, shard: str, tensors: int) -> Finding:
    return Finding(
        Severity.NOTE,
        "missing-shard",
        f"{index} puts {tensors} tensors in {shard}, which is not there; layers in it cannot be "
        "checked",
        file=shard,
    )


def _weight_map(index: Path) -> dict[str, str]:
    content = read_json(index, _MAX_INDEX_BYTES)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index.name}: no weight_map")
    for tensor, shard in weight_map.items():
        require_text(index.name, tensor)
        # Only plain names: an index must not make us read outside its folder.
        if not isinstance(shard, str) or Path(shard).name != shard or shard in ("", ".", ".."):
            raise InputError(f"{index.name}: {tensor} is put in {shard!r}, not a plain file name")
        if shard.endswith(_PICKLE_SUFFIXES):
            raise InputError(f"{index.name}: {tensor} is in {shard}, {_PICKLE}")
    return weight_map


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of a folder, or nothing.

    Raises:
        InputError: it is there and cannot be read.
    """
    path = folder / "config.json"
    return read_json(path) if path.is_file() else {}


def read_json(path: Path, most: int = _MAX_CONFIG_BYTES) -> dict[str, Any]:
    """A JSON object from a file of at most ``most`` bytes.

    Raises:
        InputError: unreadable, too large, or not a JSON object.
    """
    try:
        if (size := path.stat().st_size) > most:
            raise InputError(f"{path.name}: {size} bytes, more than any such file has ({most})")
        raw = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    return parse_object(path.name, raw)
