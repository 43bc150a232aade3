"""Bytes of tensors straight from the files: by offset, bounded by the file, no float in between.

``pread`` and not ``mmap``: a file that is truncated while it is mapped ends the process with a
signal, a short read is an error that can be named.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trtllm_b12x_fix.checkpoint.files import Checkpoint
from trtllm_b12x_fix.checkpoint.header import TensorInfo, shown
from trtllm_b12x_fix.errors import InputError

Bytes = npt.NDArray[np.uint8]

_LENGTH_BYTES = 8
#: Files that a thread keeps open: scales and codes of a matrix, and a few shards before.
_HANDLES = 8
#: Reads this close to each other are made as one, up to this size.
_GAP, _MOST = 4096, 1 << 20
#: IEEE formats that a scale of one whole matrix may have, by header dtype.
FLOATS: dict[str, np.dtype[Any] | None] = {
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "F16": np.dtype("<f2"),
    "BF16": None,
}


class Span(NamedTuple):
    """A range of bytes in one of the files; in order of files, then of places."""

    file: int
    begin: int
    size: int

    @property
    def end(self) -> int:
        return self.begin + self.size


class Shards:
    """Files by number; reads are positioned, and every thread has its own handles.

    Leaving the ``with`` block closes all.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._numbers: dict[Path, int] = {}
        self._paths: list[Path] = []
        self._starts: list[int] = []
        self._open: set[int] = set()
        self._mine = threading.local()
        self._lock = threading.Lock()

    def __enter__(self) -> Shards:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._open:
            with suppress(OSError):
                os.close(handle)
        self._open.clear()
        self._mine = threading.local()

    def span(self, tensor: str, info: TensorInfo) -> Span:
        """Where a tensor's bytes are.

        Raises:
            InputError: the file cannot be read.
        """
        path = self._checkpoint.path_of(tensor)
        if path not in self._numbers:
            number = len(self._paths)
            self._paths.append(path)
            self._starts.append(self._data_start(number))
            self._numbers[path] = number
        number = self._numbers[path]
        return Span(number, self._starts[number] + info.begin, info.end - info.begin)

    def read(self, span: Span, target: Bytes) -> None:
        """Fill ``target`` (uint8, ``span.size`` long) from a span.

        Raises:
            InputError: the file cannot be read, or ends before the span does.
        """
        file, begin, size = span
        handle, done = self._handle(file), 0
        while done < size:
            try:
                got = os.preadv(handle, [target.data[done:]], begin + done)
            except OSError as error:
                raise InputError(f"{self._name(file)}: cannot be read: {error.strerror}") from error
            if not got:
                raise InputError(
                    f"{self._name(file)}: ends at byte {begin + done}, where its header "
                    f"promised {span.end}: truncated while it was read?"
                )
            done += got

    def _data_start(self, number: int) -> int:
        start = np.empty(_LENGTH_BYTES, np.uint8)
        self.read(Span(number, 0, _LENGTH_BYTES), start)
        return _LENGTH_BYTES + int.from_bytes(start.tobytes(), "little")

    def _handle(self, number: int) -> int:
        """This thread's handle; the oldest is closed, so that a thousand shards can be read."""
        mine: dict[int, int] = self._mine.__dict__.setdefault("handles", {})
        if number not in mine:
            if len(mine) >= _HANDLES:
                oldest = mine.pop(next(iter(mine)))
                with self._lock:
                    self._open.discard(oldest)
                    os.close(oldest)
            try:
                handle = os.open(self._paths[number], os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise InputError(
                    f"{self._name(number)}: cannot be read: {error.strerror}"
                ) from error
            with self._lock:
                self._open.add(handle)
            mine[number] = handle
        return mine[number]

    def _name(self, number: int) -> str:
        return shown(self._paths[number].name)


def read_many(shards: Shards, spans: Iterable[Span]) -> Iterator[tuple[Span, bytes]]:
    """Small spans (scales of whole matrices) in file order; neighbours share a read.

    Raises:
        InputError: as :meth:`Shards.read`.
    """
    waiting: list[Span] = []
    for span in sorted(spans):
        if waiting and not _close(waiting, span):
            yield from _read_together(shards, waiting)
            waiting = []
        waiting.append(span)
    if waiting:
        yield from _read_together(shards, waiting)


def _close(waiting: list[Span], span: Span) -> bool:
    first, last = waiting[0], waiting[-1]
    return (
        span.file == first.file
        and span.begin - last.end <= _GAP
        and span.end - first.begin <= _MOST
    )


def _read_together(shards: Shards, spans: list[Span]) -> Iterator[tuple[Span, bytes]]:
    begin = spans[0].begin
    whole = Span(spans[0].file, begin, max(span.end for span in spans) - begin)
    target = np.empty(whole.size, np.uint8)
    shards.read(whole, target)
    raw = target.tobytes()
    for span in spans:
        yield span, raw[span.begin - begin : span.end - begin]


def to_floats(raw: bytes, dtype: str) -> npt.NDArray[np.float32]:
    """fp32 values of little-endian bytes of one of :data:`FLOATS`."""
    layout = FLOATS[dtype]
    if layout is None:  # bf16 is the upper half of an fp32 number
        wide = np.frombuffer(raw, "<u2").astype(np.uint32) << np.uint32(16)
        return wide.view(np.float32)
    stored = np.frombuffer(raw, layout)
    if layout.itemsize <= np.dtype(np.float32).itemsize:
        return stored.astype(np.float32)
    with np.errstate(over="ignore"):
        return stored.astype(np.float32)
