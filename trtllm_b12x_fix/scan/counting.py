"""Reading and counting the matrices of many projections with several threads."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from trtllm_b12x_fix.scan import histogram
from trtllm_b12x_fix.scan.histogram import CODE_BYTES, Counter, CountingBackend, Counts
from trtllm_b12x_fix.scan.inventory import Group, Unit
from trtllm_b12x_fix.scan.reading import Bytes, Shards, Span

#: Scale bytes read at once, with their codes eight times as many: both stay in a core's cache.
_PIECE = 1 << 18
#: Scale bytes of one task of a thread.
_TASK = 1 << 21
#: Matrices whose counts are kept at once: 2 KiB each, three times that with codes.
_BUNDLE = 4096
#: Seconds between two lines of progress.
_PAUSE = 0.1


@dataclass(frozen=True)
class Counted:
    """Counts of one projection's matrices, int64 [N, 256] each; the last two need codes."""

    counts: Counts
    nonzero: Counts | None
    energy: Counts | None


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
    units = [unit for group in groups for unit in group.units]
    codes = sum(unit.codes.size for unit in units if unit.codes) if weights else 0
    return sum(unit.scales.size for unit in units), codes


def count(
    shards: Shards,
    groups: list[Group],
    backend: CountingBackend,
    threads: int,
    meter: Meter,
    *,
    weights: bool,
) -> Iterator[tuple[Group, Counted]]:
    """Count every matrix; a projection is handed out once it is done, in the order given.

    Raises:
        InputError: a file cannot be read, or ends before a tensor does.
    """
    histogram.prepare(backend)
    for bundle in _bundles(groups):
        units = [unit for group in bundle for unit in group.units]
        counts = np.zeros((len(units), 256), np.int64)
        nonzero = np.zeros_like(counts) if weights else None
        energy = np.zeros_like(counts) if weights else None
        tallies = Counted(counts, nonzero, energy)
        _share(shards, units, tallies, backend, threads, meter)
        start = 0
        for group in bundle:
            part = slice(start, start + len(group.units))
            yield (
                group,
                Counted(
                    counts[part],
                    None if nonzero is None else nonzero[part],
                    None if energy is None else energy[part],
                ),
            )
            start = part.stop


def _bundles(groups: list[Group]) -> Iterator[list[Group]]:
    bundle: list[Group] = []
    size = 0
    for group in groups:
        if bundle and size + len(group.units) > _BUNDLE:
            yield bundle
            bundle, size = [], 0
        bundle.append(group)
        size += len(group.units)
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
    order = sorted(range(len(units)), key=lambda i: (units[i].scales.file, units[i].scales.begin))
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
        self._codes = np.empty(0, np.uint8)

    def do(self, places: list[int]) -> int:
        """Count some matrices; returns how many bytes were read."""
        done = 0
        for place in places:
            unit = self._units[place]
            if self._tallies.nonzero is None or unit.codes is None:
                self._count(unit.scales, place)
                done += unit.scales.size
                if self._tallies.nonzero is not None:
                    # Without codes that fit, every block counts as one with weights.
                    self._tallies.nonzero[place] = self._tallies.counts[place]
            else:
                self._weigh(unit, unit.codes, place)
                done += unit.scales.size + unit.codes.size
        return done

    def _count(self, span: Span, place: int) -> None:
        counts = self._tallies.counts[place]
        for start in range(0, span.size, _PIECE):
            size = min(_PIECE, span.size - start)
            piece = self._scales[:size]
            self._shards.read(Span(span.file, span.begin + start, size), piece)
            self._counter.count(piece, counts)

    def _weigh(self, unit: Unit, codes: Span, place: int) -> None:
        assert self._tallies.nonzero is not None
        assert self._tallies.energy is not None
        counts, nonzero = self._tallies.counts[place], self._tallies.nonzero[place]
        energy = self._tallies.energy[place]
        if unit.turned:
            scales, packed = self._turned(unit, codes)
            self._counter.count(scales, counts)
            self._counter.weigh(scales, packed, nonzero, energy)
            return
        if not self._codes.size:
            self._codes = np.empty(_PIECE * CODE_BYTES, np.uint8)
        for start in range(0, unit.scales.size, _PIECE):
            size = min(_PIECE, unit.scales.size - start)
            piece, part = self._scales[:size], self._codes[: size * CODE_BYTES]
            begin = codes.begin + start * CODE_BYTES
            self._shards.read(Span(unit.scales.file, unit.scales.begin + start, size), piece)
            self._shards.read(Span(codes.file, begin, size * CODE_BYTES), part)
            self._counter.count(piece, counts)
            self._counter.weigh(piece, part, nonzero, energy)

    def _turned(self, unit: Unit, codes: Span) -> tuple[Bytes, Bytes]:
        """Scales and codes with rows first: a byte's two codes are neighbours in both layouts."""
        assert unit.shape is not None
        rows, columns = unit.shape
        scales, packed = np.empty(unit.scales.size, np.uint8), np.empty(codes.size, np.uint8)
        self._shards.read(unit.scales, scales)
        self._shards.read(codes, packed)
        return (
            np.ascontiguousarray(scales.reshape(columns, rows).T).reshape(-1),
            np.ascontiguousarray(packed.reshape(columns * CODE_BYTES, rows).T).reshape(-1),
        )
