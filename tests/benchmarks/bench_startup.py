"""What the start-up file costs each start of Python: 40 pairs of starts, with it and without.

Both starts of a pair are of one environment with the wheel installed, one after the other, in
turns which is first; the file is moved away for one of them. "Ours" is the start with the file,
"peer" the start without it. Beside the time on the clock stands the processor's, which a busy
machine disturbs less.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.result import BenchResult
from tests.environments import PTH, Build, Environment, build, clean_environ

PAIRS, WARMUPS = 40, 3


def run() -> BenchResult:
    with tempfile.TemporaryDirectory() as folder:
        environment = Environment.make(Path(folder) / "venv")
        environment.install(build(Build.WHEEL, Path(folder)))
        pairs = measure(environment)
    clock = statistics.median(ours.clock - peer.clock for ours, peer in pairs) * 1e3
    processor = processor_cost(pairs) * 1e3
    return BenchResult(
        name=f"start of Python, {PAIRS} pairs",
        ours_s=statistics.median(ours.clock for ours, _ in pairs),
        peer_s=statistics.median(peer.clock for _, peer in pairs),
        peer="the same environment without the start-up file",
        note=f"median difference of a pair: {clock:.2f} ms on the clock, {processor:.2f} ms of "
        "processor time; byte code cached",
    )


@dataclass(frozen=True)
class Seconds:
    """One start."""

    clock: float
    processor: float


def measure(environment: Environment) -> list[tuple[Seconds, Seconds]]:
    """Pairs of starts, with the file and without; the first few fill caches and do not count."""
    return [_pair(environment, number) for number in range(WARMUPS + PAIRS)][WARMUPS:]


def processor_cost(pairs: list[tuple[Seconds, Seconds]]) -> float:
    """Median of what the file adds to a start, in seconds of processor time."""
    return statistics.median(ours.processor - peer.processor for ours, peer in pairs)


def _pair(environment: Environment, number: int) -> tuple[Seconds, Seconds]:
    there, away = environment.site / PTH, environment.root / "away"
    seconds = {}
    for with_file in (True, False) if number % 2 else (False, True):
        if not with_file:
            there.rename(away)
        seconds[with_file] = _start(environment.python)
        if not with_file:
            away.rename(there)
    return seconds[True], seconds[False]


def _start(python: str) -> Seconds:
    environ = clean_environ()
    began = time.perf_counter()
    child = os.posix_spawn(python, [python, "-c", "pass"], environ)
    _, status, used = os.wait4(child, 0)
    clock = time.perf_counter() - began
    if status:
        raise RuntimeError(f"{python} ended with status {status}")
    return Seconds(clock, used.ru_utime + used.ru_stime)


if __name__ == "__main__":
    result = run()
    print(result.line())
    print(result.note)
