"""Time and memory of calls on a CUDA device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


class CudaMeter:
    """Clock and memory counter of one device; tests put another in its place."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0

    def now(self) -> float:
        """Host time in seconds."""
        return time.perf_counter()

    def synchronize(self) -> None:
        """Wait for the device; raises what earlier launches left behind."""
        torch.cuda.synchronize(self._device)

    def times(self, call: Callable[[], object], count: int) -> list[float]:
        """Seconds between two CUDA events around each of ``count`` calls, back to back.

        Caches are warm, and host time shows where the device has to wait for the next launch.
        """
        stream = torch.cuda.current_stream(self._device)
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for start, end in marks:
            start.record(stream)
            call()
            end.record(stream)
        self.synchronize()
        return [start.elapsed_time(end) / 1000 for start, end in marks]

    def start_peak(self) -> None:
        """Count memory from here on."""
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)

    def peak_bytes(self) -> int | None:
        """Most bytes that torch had allocated since, above what it had then."""
        return torch.cuda.max_memory_allocated(self._device) - self._before
