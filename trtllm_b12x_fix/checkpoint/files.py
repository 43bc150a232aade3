"""A checkpoint on disk: one file or a folder of shards, with or without an index.

Headers are read up front (kilobytes); tensors are read one at a time, when asked for.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Container
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtllm_b12x_fix.checkpoint import shards
from trtllm_b12x_fix.checkpoint.findings import Finding
from trtllm_b12x_fix.checkpoint.header import TensorInfo, read_header, shown
from trtllm_b12x_fix.checkpoint.json_files import (
    PICKLE,
    PICKLE_SUFFIXES,
    read_config,
    read_weight_map,
)
from trtllm_b12x_fix.checkpoint.safetensors_source import SafetensorsSource
from trtllm_b12x_fix.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

_INDEX_SUFFIX = ".safetensors.index.json"


@dataclass
class Checkpoint:
    """Tensors of a checkpoint by name, whatever file they are in.

    Attributes:
        path: what the user named.
        tensors: header information of every tensor whose shard is there.
        config: ``config.json``, empty where there is none.
        findings: what opening it brought to light.
        partial: whether it is one shard of several, the others of which were not asked for.
        unindexed: by file, names of tensors that no index puts anywhere, so that nobody loads them.
    """

    path: Path
    tensors: dict[str, TensorInfo]
    config: dict[str, Any]
    findings: list[Finding]
    _files: dict[str, Path] = field(repr=False)
    _missing: dict[str, str] = field(repr=False)
    partial: bool = False
    unindexed: dict[str, list[str]] = field(default_factory=dict, repr=False)
    _open: dict[Path, SafetensorsSource] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        """What to call the checkpoint in messages."""
        return shown(self.path.name or str(self.path))

    def names(self) -> list[str]:
        """Every tensor name, those of missing shards included."""
        return [*self.tensors, *self._missing]

    def has(self, tensor: str) -> bool:
        """Whether the checkpoint has the tensor, in a shard that may be missing here."""
        return tensor in self.tensors or tensor in self._missing

    def names_below(self, prefix: str) -> list[str]:
        """Names that start with ``prefix``."""
        return [name for name in self.names() if name.startswith(prefix)]

    def require_whole(self, prefix: str) -> None:
        """Of one shard of several, only what is wholly in it can be used.

        Raises:
            InputError: a tensor whose name starts with ``prefix`` is in another shard.
        """
        lost = next((tensor for tensor in self._missing if tensor.startswith(prefix)), None)
        if self.partial and lost is not None:
            self._require(lost)

    def file_of(self, tensor: str) -> str:
        """Name of the file a tensor is in, for messages."""
        path = self._files.get(tensor)
        return shown(path.name if path else self._missing.get(tensor, self.name))

    def path_of(self, tensor: str) -> Path:
        """The file a tensor is in.

        Raises:
            InputError: it is not there, or its shard is not.
        """
        self._require(tensor)
        return self._files[tensor]

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
            what = (
                "which was not asked for: name the folder or its index instead of one shard"
                if self.partial
                else "which is missing: download that shard"
            )
            raise InputError(f"{self.name}: tensor {tensor} is in {self._missing[tensor]}, {what}")
        if tensor not in self.tensors:
            raise InputError(f"{self.name}: tensor {tensor} is missing")

    def _source(self, tensor: str) -> SafetensorsSource:
        path = self.path_of(tensor)
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
    if path.is_file() and not path.name.endswith(_INDEX_SUFFIX):
        return _from_file(path)
    folder = path if path.is_dir() else path.parent
    indexes = [path] if path.is_file() else _regular(folder, f"*{_INDEX_SUFFIX}")
    if len(indexes) > 1:
        names = ", ".join(index.name for index in indexes)
        raise InputError(f"{path}: several indexes ({names}): name one of them")
    if indexes:
        return _from_index(path, folder, indexes[0])
    files = _regular(folder, "*.safetensors")
    if not files:
        raise InputError(f"{path}: {_why_empty(folder)}")
    tensors, owners = _read(path, files)
    findings = shards.absent_by_name([file.name for file in files])
    return Checkpoint(path, tensors, read_config(folder), findings, owners, {})


def open_file(path: Path) -> Checkpoint:
    """Open one safetensors file by itself, whatever is beside it.

    Raises:
        InputError: not there, a pickle, or a header that lies.
    """
    _require_there(path)
    tensors, owners = _read(path, [path])
    return Checkpoint(path, tensors, {}, [], owners, {})


def _require_there(path: Path) -> None:
    try:
        mode = os.stat(path).st_mode
    except PermissionError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except (OSError, ValueError):  # ValueError: a name with a NUL
        mode = 0
    if path.suffix in PICKLE_SUFFIXES and stat.S_ISREG(mode):
        raise InputError(f"{path}: {PICKLE}")
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
    # macOS leaves "._NAME" beside every file that it copies to a foreign disk.
    found = [name for name in names if name.match(pattern) and not name.name.startswith("._")]
    for name in found:
        if os.path.exists(name) and not (os.path.isfile(name) or os.path.isdir(name)):
            raise InputError(f"{name}: not a regular file")
    return found


def _why_empty(folder: Path) -> str:
    if (folder / "snapshots").is_dir():
        return "a folder of the hub's cache: name one of the folders in its snapshots"
    pickles = sorted(f.name for f in folder.iterdir() if f.suffix in PICKLE_SUFFIXES)
    if pickles:
        return f"no safetensors file; {pickles[0]} is {PICKLE}"
    return "no safetensors file in this folder"


def _read(path: Path, files: list[Path]) -> tuple[dict[str, TensorInfo], dict[str, Path]]:
    """Tensors of files without an index, and the file that each is in."""
    tensors: dict[str, TensorInfo] = {}
    owners: dict[str, Path] = {}
    for file in files:
        for tensor, info in read_header(file).items():
            if tensor in owners:
                raise InputError(
                    f"{path}: tensor {tensor} is in both {owners[tensor].name} and {file.name}, "
                    "and no index says which counts"
                )
            tensors[tensor], owners[tensor] = info, file
    return tensors, owners


def _from_file(path: Path) -> Checkpoint:
    """One file; where an index beside it makes it a shard of several, the rest is missing."""
    tensors, owners = _read(path, [path])
    for index in _regular(path.parent, f"*{_INDEX_SUFFIX}"):
        weight_map = read_weight_map(index)
        others = {t: file for t, file in weight_map.items() if file != path.name}
        if len(others) == len(weight_map):
            continue  # of other files
        missing = {t: file for t, file in others.items() if t not in tensors}
        for tensor, file in weight_map.items():
            if file == path.name and tensor not in tensors:
                raise InputError(f"{shown(index.name)}: says {tensor} is in {file}, but it is not")
        findings = [shards.one_of_several(index.name, path.name, len(missing))] if missing else []
        config = read_config(path.parent)
        return Checkpoint(path, tensors, config, findings, owners, missing, bool(missing))
    findings = shards.absent_by_name([path.name])
    return Checkpoint(path, tensors, read_config(path.parent), findings, owners, {})


def _from_index(path: Path, folder: Path, index: Path) -> Checkpoint:
    weight_map = read_weight_map(index)
    tensors: dict[str, TensorInfo] = {}
    owners: dict[str, Path] = {}
    missing: dict[str, str] = {}
    findings: list[Finding] = []
    elsewhere: dict[str, list[str]] = {}
    by_shard: dict[str, list[str]] = {}
    for tensor, name in weight_map.items():
        by_shard.setdefault(name, []).append(tensor)
    for name, wanted in sorted(by_shard.items()):
        shard = folder / name
        if not os.path.isfile(shard):
            missing |= dict.fromkeys(wanted, name)
            findings.append(shards.missing_shard(index.name, name, len(wanted)))
            continue
        header = read_header(shard)
        for tensor in wanted:
            if tensor not in header:
                raise InputError(f"{shown(index.name)}: says {tensor} is in {name}, but it is not")
            tensors[tensor], owners[tensor] = header.pop(tensor), shard
        elsewhere[name] = list(header)
    elsewhere |= _strays(folder, by_shard)
    findings += shards.copies(index.name, weight_map, elsewhere)
    unindexed = {
        name: [tensor for tensor in found if tensor not in weight_map]
        for name, found in elsewhere.items()
    }
    return Checkpoint(
        path, tensors, read_config(folder), findings, owners, missing, unindexed=unindexed
    )


def _strays(folder: Path, named: Container[str]) -> dict[str, list[str]]:
    """Names in files that the index does not name; what cannot be read is nobody's concern."""
    found = {}
    with contextlib.suppress(OSError):  # an index may be named in a folder that cannot be listed
        for file in sorted(folder.iterdir()):
            if file.suffix == ".safetensors" and file.name not in named and file.is_file():
                with contextlib.suppress(InputError):
                    found[file.name] = list(read_header(file))
    return found
