"""Safetensors headers, read and checked without touching a tensor.

Format: https://github.com/huggingface/safetensors#format (8 bytes of little-endian header length,
a JSON object, then the data). The data itself is read by the safetensors library.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_b12x_fix.errors import InputError

#: The library's own limit; a longer header is a lie or an attack.
MAX_HEADER_BYTES = 100_000_000
_LENGTH_BYTES = 8

#: A shard's header has eight of these for each tensor; as Python objects each can cost 100 bytes,
#: fifty times its text. The largest checkpoints have some thousand tensors a shard.
_STRUCTURE = (b"[", b"{", b",")
_MAX_STRUCTURE = 4_000_000
_METADATA = "__metadata__"

#: The format knows no limit; no weight has more dimensions than this, an attack may.
_MAX_DIMENSIONS = 16

#: Bits per element, by dtype name.
_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip

# First bytes of what torch.save and pickle write: a zip archive, or a pickle's protocol mark.
_PICKLE_MAGIC = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a header says of one tensor: dtype name, shape, byte range in the data."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Read and check one file's header.

    Raises:
        InputError: missing, truncated, a pickle, or a header that lies about sizes, offsets or
            repeats a tensor; the message names file and tensor.
    """
    name = shown(path.name)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(_LENGTH_BYTES)
            length = int.from_bytes(start, "little")
            if len(start) < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, MAX_HEADER_BYTES):
                # Only here: a header of 640 bytes starts as a pickle does, with 80 02.
                if start.startswith(_PICKLE_MAGIC):
                    raise InputError(
                        f"{name}: a pickle, refused unread (it could run code): convert the "
                        "checkpoint to safetensors"
                    )
                raise InputError(
                    f"{name}: not a safetensors file, or truncated: {size} bytes cannot hold "
                    f"a header of {length}"
                )
            raw = file.read(length)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    header = parse_object(f"{name}: header", raw)
    del raw  # it can be 100 MB
    return _check(name, header, size - _LENGTH_BYTES - length)


def parse_object(name: str, raw: bytes) -> dict[str, Any]:
    """A JSON object in which no key stands twice.

    Raises:
        InputError: not JSON, not an object, or a repeated key; ``name`` says where.
    """

    def no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            repeated, _ = Counter(key for key, _ in pairs).most_common(1)[0]
            raise InputError(f"{name}: names {repeated!r} twice")
        return made

    if (values := sum(raw.count(mark) for mark in _STRUCTURE)) > _MAX_STRUCTURE:
        raise InputError(
            f"{name}: {values} lists, objects and commas; no checkpoint needs more than "
            f"{_MAX_STRUCTURE}"
        )
    try:
        parsed = json.loads(raw.decode("utf-8"), object_pairs_hook=no_repeats)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name}: not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise InputError(f"{name}: not a JSON object")
    return parsed


def _check(name: str, header: dict[str, Any], data_bytes: int) -> dict[str, TensorInfo]:
    _require_metadata(name, header.get(_METADATA))
    # One entry goes as the other comes: half a million of both would not fit.
    tensors = {
        tensor: _info(name, tensor, header.pop(tensor))
        for tensor in [*header]
        if tensor != _METADATA
    }
    for tensor, info in tensors.items():
        if info.end > data_bytes:
            raise InputError(
                f"{name}: tensor {tensor} ends at byte {info.end} of {data_bytes} bytes of data: "
                "truncated, or a lying header"
            )
        if not _sizes_agree(info):
            raise InputError(
                f"{name}: tensor {tensor}: {info.dtype} {list(info.shape)} does not take the "
                f"{info.end - info.begin} bytes its offsets give it"
            )
    _require_covered(name, tensors, data_bytes)
    return tensors


def _require_metadata(name: str, metadata: Any) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise InputError(f"{name}: {_METADATA} must be an object of texts")


def _sizes_agree(info: TensorInfo) -> bool:
    given = (info.end - info.begin) * 8
    bits = _BITS.get(info.dtype)
    if bits is not None:
        return given == math.prod(info.shape) * bits
    # A dtype of the future: no element takes less than a bit, so shapes stay bounded by the file.
    return given >= math.prod(info.shape)


def _info(name: str, tensor: str, entry: Any) -> TensorInfo:
    require_text(name, tensor)
    try:
        shape = tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        dtype = entry["dtype"]
    except (TypeError, KeyError, ValueError) as error:
        raise InputError(
            f"{name}: tensor {tensor}: the header needs dtype, shape and data_offsets"
        ) from error
    numbers = (*shape, begin, end)
    # Not isinstance: a bool is an int, too.
    if not isinstance(dtype, str) or {*map(type, numbers)} != {int} or min(numbers) < 0:
        raise InputError(f"{name}: tensor {tensor}: dtype, shape or offsets are not what they say")
    if len(shape) > _MAX_DIMENSIONS or max(numbers) >= 2**63:
        raise InputError(f"{name}: tensor {tensor}: no tensor has such a shape or offsets")
    if begin > end:
        raise InputError(f"{name}: tensor {tensor}: offsets [{begin}, {end}] run backwards")
    # One text for each dtype: a checkpoint has hundreds of thousands of tensors.
    return TensorInfo(sys.intern(dtype), shape, begin, end)


def require_text(name: str, tensor: str) -> None:
    """A tensor's name must be text that can be written anywhere.

    Raises:
        InputError: JSON can spell half a character (a lone surrogate), which no file can hold.
    """
    if tensor.isascii():
        return
    try:
        tensor.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{name}: a tensor's name is not text: {tensor[:80]!a}") from error


def _require_covered(name: str, tensors: dict[str, TensorInfo], data_bytes: int) -> None:
    """Tensors lie one behind the other and take all of the data, as the library wants it."""
    end, before = 0, ""
    for tensor, info in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if info.begin < end:
            raise InputError(f"{name}: tensors {before} and {tensor} overlap in the file")
        if info.begin > end:
            raise InputError(
                f"{name}: {info.begin - end} bytes before tensor {tensor} belong to no tensor"
            )
        end, before = info.end, tensor
    if end != data_bytes:
        raise InputError(f"{name}: {data_bytes - end} bytes after the last tensor belong to none")


def shown(name: str) -> str:
    """A file name as text: bytes that are not UTF-8 are escaped, so that JSON can hold them."""
    return name.encode("utf-8", "backslashreplace").decode()
