"""Reading and counting the matrices of many projections with several threads."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from trtllm_b12x_fix.scan import histogram
from trtllm_b12x_fix.scan.groups import Group, Unit
from trtllm_b12x_fix.scan.histogram import CODE_BYTES, Counter, CountingBackend, Counts
from trtllm_b12x_fix.scan.reading import Bytes, Shards, Span

#: Scale bytes counted at once, of several matrices; with their codes, fewer: eight times as many
#: bytes go with them.
_PIECE, _PIECE_WITH_CODES = 1 << 20, 1 << 17
#: Scale bytes of one task of a thread.
_TASK = 1 << 21
#: Matrices whose counts are kept at once: 2 KiB each, three times that with codes, and about as
#: much again for what is computed from them. It bounds the memory of any checkpoint.
_BUNDLE = 4096
#: Seconds between two lines of progress.
_PAUSE = 0.1


@dataclass(frozen=True)
class Counted:
    """Counts of matrices of one projection, int64 [N, 256] each; the last two need codes.

    Attributes:
        first: place of the first of these matrices in the projection.
    """

    counts: Counts
    nonzero: Counts | None
    energy: Counts | None
    first: int = 0

    @property
    def end(self) -> int:
        return self.first + len(self.counts)


class _Part(NamedTuple):
    """Matrices ``first`` to ``end`` of one projection."""

    group: Group
    first: int
    end: int


class Meter:
    """Bytes done by all threads, told to a progress line by the calling one."""

    def __init__(self, total: int, progress: Callable[[str], None]) -> None:
        self._total, self._progress = total, progress
        self._began = self._told = time.monotonic()
        self._done = 0
        self._lock = threading.Lock()

    def add(self, size: int) -> None:
        """Some bytes more are done."""
        with self._lock:
            self._done += size

    def tell(self) -> None:
        """Say how far it is, but not all the time."""
        now = time.monotonic()
        if now - self._told < _PAUSE:
            return
        self._told = now
        rate = self._done / max(now - self._began, 1e-9)
        left = (self._total - self._done) / rate if rate else 0.0
        self._progress(
            f"{self._done / 1e9:.2f} of {self._total / 1e9:.2f} GB, {rate / 1e9:.2f} GB/s, "
            f"{left:.0f} s left"
        )


def bytes_of(groups: list[Group], *, weights: bool) -> tuple[int, int]:
    """Scale bytes and code bytes to read."""
    stored = [one for group in groups for one in group.stored]
    codes = sum(one.codes.size for one in stored if one.codes) if weights else 0
    return sum(one.scales.size for one in stored), codes


def count(
    shards: Shards,
    groups: list[Group],
    backend: CountingBackend,
    threads: int,
    meter: Meter,
    *,
    weights: bool,
) -> Iterator[tuple[Group, Counted]]:
    """Count every matrix; a projection is handed out in one or several parts, in order.

    Raises:
        InputError: a file cannot be read, or ends before a tensor does.
    """
    histogram.prepare(backend)
    for bundle in _bundles(groups):
        units = [unit for group, first, end in bundle for unit in group.units(first, end)]
        counts = np.zeros((len(units), 256), np.int64)
        nonzero = np.zeros_like(counts) if weights else None
        energy = np.zeros_like(counts) if weights else None
        tallies = Counted(counts, nonzero, energy)
        _share(shards, units, tallies, backend, threads, meter)
        start = 0
        for group, first, end in bundle:
            rows = slice(start, start + end - first)
            yield (
                group,
                Counted(
                    counts[rows],
                    None if nonzero is None else nonzero[rows],
                    None if energy is None else energy[rows],
                    first,
                ),
            )
            start = rows.stop


def _bundles(groups: list[Group]) -> Iterator[list[_Part]]:
    bundle: list[_Part] = []
    room = _BUNDLE
    for group in groups:
        first = 0
        while first < len(group):
            end = min(first + room, len(group))
            bundle.append(_Part(group, first, end))
            room -= end - first
            first = end
            if not room:
                yield bundle
                bundle, room = [], _BUNDLE
    if bundle:
        yield bundle


def _share(
    shards: Shards,
    units: list[Unit],
    tallies: Counted,
    backend: CountingBackend,
    threads: int,
    meter: Meter,
) -> None:
    """Do all tasks; this thread too takes one after the other.

    Raises:
        Exception: whatever a task raises, once every thread has stopped.
    """
    pending = deque(_tasks(units))

    def drain(*, tells: bool = False) -> None:
        worker = _Worker(shards, units, tallies, histogram.make_counter(backend))
        try:
            while pending:
                try:
                    task = pending.popleft()
                except IndexError:  # another thread was faster
                    return
                meter.add(worker.do(task))
                if tells:
                    meter.tell()
        finally:
            pending.clear()  # after an error nobody needs the rest

    helpers = min(threads, len(pending)) - 1
    if helpers < 1:
        drain(tells=True)
        return
    with ThreadPoolExecutor(helpers) as pool:
        running = [pool.submit(drain) for _ in range(helpers)]
        drain(tells=True)
        for one in running:
            one.result()


def _tasks(units: list[Unit]) -> list[list[int]]:
    """Places of units in file order, about :data:`_TASK` bytes together."""
    order = sorted(range(len(units)), key=lambda i: units[i].scales)
    tasks: list[list[int]] = []
    size = _TASK
    for place in order:
        if size >= _TASK:
            tasks.append([])
            size = 0
        tasks[-1].append(place)
        size += units[place].scales.size
    return tasks


class _Worker:
    """One thread's buffers and counter."""

    def __init__(
        self, shards: Shards, units: list[Unit], tallies: Counted, counter: Counter
    ) -> None:
        self._shards, self._units, self._tallies = shards, units, tallies
        self._counter = counter
        self._scales = np.empty(_PIECE, np.uint8)
        self._filled = 0
        self._reads: list[Span] = []
        self._ends: list[int] = []
        self._rows: list[int] = []

    def do(self, places: list[int]) -> int:
        """Count some matrices; returns how many bytes were read."""
        done = 0
        for place in places:
            unit = self._units[place]
            if self._tallies.nonzero is None or unit.codes is None:
                self._collect(unit.scales, place)
                done += unit.scales.size
            else:
                self._weigh(unit, unit.codes, place)
                done += unit.scales.size + unit.codes.size
        self._count_collected()
        if self._tallies.nonzero is not None:
            for place in places:
                if self._units[place].codes is None:
                    # Without codes that fit, every block counts as one with weights.
                    self._tallies.nonzero[place] = self._tallies.counts[place]
        return done

    def _collect(self, span: Span, place: int) -> None:
        """Scales of one matrix: to be read together with what lies beside them, and counted with
        what fits into the buffer."""
        file, begin, left = span
        while left:
            size = min(_PIECE - self._filled, left)
            last = self._reads[-1] if self._reads else None
            if last is not None and last.file == file and last.end == begin:
                self._reads[-1] = Span(file, last.begin, last.size + size)
            else:
                self._reads.append(Span(file, begin, size))
            self._filled += size
            self._ends.append(self._filled)
            self._rows.append(place)
            begin, left = begin + size, left - size
            if self._filled == _PIECE:
                self._count_collected()

    def _count_collected(self) -> None:
        at = 0
        for span in self._reads:
            self._shards.read(span, self._scales[at : at + span.size])
            at += span.size
        if at:
            self._count(self._scales[:at], self._ends, self._rows)
        self._filled = 0
        self._reads, self._ends, self._rows = [], [], []

    def _count(self, scales: Bytes, ends: list[int], rows: list[int]) -> None:
        places = np.array(ends, np.int64), np.array(rows, np.int64)
        self._counter.count(scales, *places, self._tallies.counts)

    def _weigh(self, unit: Unit, codes: Span, place: int) -> None:
        assert self._tallies.nonzero is not None
        assert self._tallies.energy is not None
        nonzero, energy = self._tallies.nonzero[place], self._tallies.energy[place]
        pieces = self._turned_pieces if unit.turned else self._pieces
        for scales, packed in pieces(unit, codes):
            self._count(scales, [scales.size], [place])
            self._counter.weigh(scales, packed, nonzero, energy)

    def _pieces(self, unit: Unit, codes: Span) -> Iterator[tuple[Bytes, Bytes]]:
        """Scales of a matrix, and the codes they stand over."""
        for start in range(0, unit.scales.size, _PIECE_WITH_CODES):
            size = min(_PIECE_WITH_CODES, unit.scales.size - start)
            yield (
                self._read(unit.scales, start, size),
                self._read(codes, start * CODE_BYTES, size * CODE_BYTES),
            )

    def _turned_pieces(self, unit: Unit, codes: Span) -> Iterator[tuple[Bytes, Bytes]]:
        """The same of a matrix stored with rows last: there, a block's codes are 8 bytes below each
        other, and a byte's two codes are neighbours in both layouts."""
        assert unit.shape is not None
        rows, columns = unit.shape
        wide = min(rows, _PIECE_WITH_CODES)
        deep = max(1, _PIECE_WITH_CODES // rows)
        for column in range(0, columns, deep):
            many = min(deep, columns - column)
            for row in range(0, rows, wide):
                part = slice(row, min(row + wide, rows))
                scales = self._read_part(unit.scales, rows, column, many, part)
                packed = self._read_part(codes, rows, column * CODE_BYTES, many * CODE_BYTES, part)
                blocks = packed.reshape(many, CODE_BYTES, -1).transpose(0, 2, 1)
                yield scales.reshape(-1), np.ascontiguousarray(blocks).reshape(-1)

    def _read_part(self, span: Span, width: int, first: int, many: int, part: slice) -> Bytes:
        """uint8 [many, part]: of lines of ``width`` bytes, ``many`` from ``first`` on."""
        if part == slice(0, width):
            return self._read(span, first * width, many * width)
        size = part.stop - part.start
        lines = [self._read(span, (first + i) * width + part.start, size) for i in range(many)]
        return np.concatenate(lines)

    def _read(self, span: Span, start: int, size: int) -> Bytes:
        target = np.empty(size, np.uint8)
        self._shards.read(Span(span.file, span.begin + start, size), target)
        return target
