"""What a benchmark returns, and the two measurements that most of them need."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class BenchResult:
    """Our time against a peer's on the same input; a benchmark without a peer has no ratio."""

    name: str
    ours_s: float
    peer_s: float | None = None
    peer: str = "peer"
    """Who the peer is, with its version; the printed line keeps to the word `peer`."""
    peak_mb: float | None = None
    """Peak resident memory of a process that ran ours once, its imports included."""
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """How many times faster ours is."""
        return None if self.peer_s is None else self.peer_s / self.ours_s

    def line(self) -> str:
        timing = f"ours {_duration(self.ours_s)}"
        if self.peer_s is not None:
            timing += f", peer {_duration(self.peer_s)}"
        if self.peak_mb is not None:
            timing += f"; peak {self.peak_mb:.0f} MB"
        if self.ratio is None:
            return f"{self.name}: {timing}"
        return f"{self.name}: {self.ratio:.1f}x ({timing})"

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio}


def _duration(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            value = seconds / scale
            return f"{value:.0f} {unit}" if value >= 10 else f"{value:.1f} {unit}"
    return f"{seconds * 1e6:.1f} us"


def median_seconds(function: Callable[[], object], repeats: int = 5, warmups: int = 1) -> float:
    """Median wall-clock time of a call; the warm-ups pay for compilation and page faults."""
    for _ in range(warmups):
        function()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def peak_rss_mb(function: Callable[..., object], *arguments: object) -> float:
    """Peak resident memory of a fresh process that calls `function` (of module level) once."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=spawn) as pool:
        return pool.submit(_call_and_read_peak, function, arguments).result()


def _call_and_read_peak(function: Callable[..., object], arguments: tuple[object, ...]) -> float:
    function(*arguments)
    # Not getrusage: its maximum survives exec, so it can be the parent's.
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError("this kernel does not report VmHWM")
