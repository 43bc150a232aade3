"""The scan of a checkpoint of 120B shape against one thread's plain read of the same bytes.

Codes are holes in sparse files; the scale bytes are real and come from the page cache. The size is
1 GB of scale bytes, or what SCAN_BENCH_GB says. By itself: python -m tests.benchmarks.bench_scan 4
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.result import BenchResult, median_seconds, peak_rss_mb
from trtllm_b12x_fix.checkpoint.files import open_checkpoint
from trtllm_b12x_fix.checkpoint.layers import Stack
from trtllm_b12x_fix.scan import counting, histogram
from trtllm_b12x_fix.scan.findings import Notebook
from trtllm_b12x_fix.scan.inventory import Group, Unit, take
from trtllm_b12x_fix.scan.reading import Shards, Span
from trtllm_b12x_fix.scan.result import Kind
from trtllm_b12x_fix.scan.run import ScanSettings, scan

HIDDEN, INTERMEDIATE, EXPERTS = 1024, 2688, 512
SCALES = HIDDEN * INTERMEDIATE // 16
LAYER = EXPERTS * 2 * SCALES
BUFFER = 8 << 20
THREADS = 2


def layer_header(layer: int) -> tuple[bytes, list[int], int]:
    """Header bytes, where each matrix's scales begin in the data, and the data's size."""
    entries: dict[str, object] = {}
    at = 0
    prefix = f"backbone.layers.{layer}.mixer.experts"
    names = [f"{prefix}.{e}.{n}" for e in range(EXPERTS) for n in ("down_proj", "up_proj")]
    for name in names:
        for suffix in ("input_scale", "weight_scale_2"):
            entries[f"{name}.{suffix}"] = _entry("F32", [], at, at + 4)
            at += 4
    begins = []
    for place, name in enumerate(names):
        rows, columns = (HIDDEN, INTERMEDIATE) if place % 2 == 0 else (INTERMEDIATE, HIDDEN)
        size = rows * columns // 2
        entries[f"{name}.weight"] = _entry("U8", [rows, columns // 2], at, at + size)
        at += size
        begins.append(at)
        shape = [rows, columns // 16]
        entries[f"{name}.weight_scale"] = _entry("F8_E4M3", shape, at, at + SCALES)
        at += SCALES
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text, begins, at


def _entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def realistic_scales(count: int) -> np.ndarray:
    """uint8 [count]: scales of Gaussian weights as ModelOpt stores them."""
    from trtllm_b12x_fix.scan.statistics import encode

    generator = np.random.default_rng(0)
    amax = np.abs(generator.standard_normal((count, 16), np.float32)).max(axis=1)
    return encode((amax / amax.max() * np.float32(448)).astype(np.float32))


def write(folder: Path, gigabytes: float) -> int:
    """Write the checkpoint; returns how many scale bytes it has."""
    layers = max(1, round(gigabytes * 1e9 / LAYER))
    pool = realistic_scales(SCALES * 3)
    index = {}
    for layer in range(layers):
        header, begins, size = layer_header(layer)
        name = f"model-{layer + 1:05}-of-{layers:05}.safetensors"
        index |= dict.fromkeys(json.loads(header[8:]), name)
        rng = np.random.default_rng(layer)
        with (folder / name).open("wb") as file:
            file.write(header)
            magnitudes = rng.uniform(1e-5, 3e-5, 2 * len(begins)).astype("<f4")
            file.write(magnitudes.tobytes())
            file.truncate(len(header) + size)
            for begin in begins:
                start = int(rng.integers(0, 2 * SCALES))
                file.seek(len(header) + begin)
                file.write(pool[start : start + SCALES].tobytes())
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    return layers * LAYER


class PlainFile:
    """A file as :class:`Shards` would read it, without a header."""

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_RDONLY)

    def read(self, span: Span, target: np.ndarray) -> None:
        assert os.preadv(self._handle, [target.data], span.begin) == span.size


def write_together(path: Path, size: int) -> list[Group]:
    """As many bytes in one piece, and the matrices they could be."""
    pool = realistic_scales(1 << 22).tobytes()
    with path.open("wb") as file:
        for _ in range(-(-size // len(pool))):
            file.write(pool)
        file.truncate(size)
    group = Group("", 0, Stack.MODEL, "", Kind.EXPERTS)
    for number, begin in enumerate(range(0, size, SCALES)):
        group.units.append(Unit(number, "", "", Span(0, begin, SCALES), None, None))
    return [group]


def plain_read(path: Path) -> None:
    """All bytes of a file in buffers of 8 MiB, with one thread."""
    buffer = memoryview(bytearray(BUFFER))
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def scattered_read(shards: Shards, groups: list[Group]) -> None:
    """Scale bytes of a checkpoint, where they are, into a buffer of 8 MiB, with one thread."""
    buffer, at = np.empty(BUFFER, np.uint8), 0
    for span in sorted(unit.scales for group in groups for unit in group.units):
        at = 0 if at + span.size > BUFFER else at
        shards.read(span, buffer[at : at + span.size])
        at += span.size


def count(shards: Any, groups: list[Group]) -> None:
    """Read and count all scale bytes."""
    meter = counting.Meter(1, lambda _: None)
    backend = histogram.best_backend()
    for _ in counting.count(shards, groups, backend, THREADS, meter, weights=False):
        pass


def histograms(folder: Path, size: int) -> list[BenchResult]:
    """Counting against reading: bytes that lie together, and those of the checkpoint."""
    together = folder / "together.bin"
    groups = write_together(together, size)
    file = PlainFile(together)
    read = median_seconds(lambda: plain_read(together))
    counted = median_seconds(lambda: count(file, groups))
    together.unlink()
    checkpoint = open_checkpoint(folder)
    with Shards(checkpoint) as shards:
        groups = take(checkpoint, shards, Notebook()).groups
        read_there = median_seconds(lambda: scattered_read(shards, groups))
        counted_there = median_seconds(lambda: count(shards, groups))
    return [
        _result("histogram, bytes in one piece", size, counted, read),
        _result("histogram, bytes of the checkpoint", size, counted_there, read_there),
    ]


def _result(
    name: str, size: int, ours: float, peer: float, peak: float | None = None
) -> BenchResult:
    told = (
        f"{size / 1e9:.2f} GB, {THREADS} threads, {size / ours / 1e9:.2f} GB/s, {peer / ours:.2f}"
    )
    title = f"{name} ({told} of one thread's read)"
    return BenchResult(title, ours, peer, "one thread's read in 8 MiB buffers, page cache", peak)


def whole(folder: Path) -> None:
    """What the command does, without printing."""
    scan(folder, ScanSettings(THREADS), lambda _: None)


def command(folder: Path) -> None:
    """The command itself in a process of its own, imports included."""
    arguments = ["scan", str(folder), "--quiet", "--threads", str(THREADS), "--fail-on", "never"]
    subprocess.run(
        [sys.executable, "-m", "trtllm_b12x_fix", *arguments],
        check=True,
        stdout=subprocess.DEVNULL,
    )


def run(gigabytes: float | None = None) -> list[BenchResult]:
    wanted = gigabytes or float(os.environ.get("SCAN_BENCH_GB", "1"))
    folder = Path(tempfile.mkdtemp(prefix="scan-bench-"))
    try:
        size = write(folder, wanted)
        results = histograms(folder, size)
        commanded = median_seconds(lambda: command(folder), repeats=3)
        read = results[0].peer_s or 0.0
        peak = peak_rss_mb(whole, folder)
        return [*results, _result("scan, whole command", size, commanded, read, peak)]
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    for result in run(float(sys.argv[1]) if len(sys.argv) > 1 else None):
        print(result.line())
