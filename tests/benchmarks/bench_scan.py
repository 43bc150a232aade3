"""The scan of a checkpoint of 120B shape against one thread's plain read of the same bytes, and the
memory that it takes for many experts and for many tensors.

Codes are holes in sparse files; the scale bytes are real and come from the page cache. The size is
1 GB of scale bytes, or what SCAN_BENCH_GB says. Both sides of a ratio are timed in turn, and the
best of each counts: other people's work on the machine slows either down, and speeds up neither. By
itself: python -m tests.benchmarks.bench_scan 4
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.result import BenchResult, peak_rss_mb
from trtllm_b12x_fix.checkpoint.conventions import spelling_of
from trtllm_b12x_fix.checkpoint.files import open_checkpoint
from trtllm_b12x_fix.checkpoint.layers import Stack
from trtllm_b12x_fix.scan import counting, histogram
from trtllm_b12x_fix.scan.findings import Notebook
from trtllm_b12x_fix.scan.groups import Group, Stored, Width
from trtllm_b12x_fix.scan.inventory import take
from trtllm_b12x_fix.scan.reading import Shards, Span
from trtllm_b12x_fix.scan.result import Kind
from trtllm_b12x_fix.scan.run import ScanSettings, scan

HIDDEN, INTERMEDIATE, EXPERTS = 1024, 2688, 512
SCALES = HIDDEN * INTERMEDIATE // 16
LAYER = EXPERTS * 2 * SCALES
BUFFER = 8 << 20
THREADS = 2
#: The most experts that are taken for possible in one tensor, nearly; and DeepSeek-V3's tensors.
FUSED_EXPERTS, MANY_LAYERS, MANY_EXPERTS = 60_000, 59, 256


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

    def has(self, tensor: str) -> bool:
        """Any tensor: there are no names."""
        return True


def write_together(path: Path, size: int) -> list[Group]:
    """As many bytes in one piece, and the matrices they could be."""
    pool = realistic_scales(1 << 22).tobytes()
    with path.open("wb") as file:
        for _ in range(-(-size // len(pool))):
            file.write(pool)
        file.truncate(size)
    group = Group("", 0, Stack.MODEL, "", Kind.EXPERTS)
    count = size // SCALES
    spelling = spelling_of(PlainFile(path), "")
    span = Span(0, 0, count * SCALES)
    group.add(Stored(spelling, "", None, True, count, span, None, None, False, Width.UNKNOWN))
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
    for span in sorted(unit.scales for group in groups for unit in group.units()):
        at = 0 if at + span.size > BUFFER else at
        shards.read(span, buffer[at : at + span.size])
        at += span.size


def count(shards: Any, groups: list[Group]) -> None:
    """Read and count all scale bytes."""
    meter = counting.Meter(1, lambda _: None)
    backend = histogram.best_backend()
    for _ in counting.count(shards, groups, backend, THREADS, meter, weights=False):
        pass


def best_in_turn(
    ours: Callable[[], object], peer: Callable[[], object], repeats: int = 9
) -> tuple[float, float]:
    """Seconds of each, the best of some runs in turn after one of each that does not count."""
    best = [float("inf"), float("inf")]
    for turn in range(repeats + 1):
        for place, function in enumerate((ours, peer)):
            began = time.perf_counter()
            function()
            if turn:
                best[place] = min(best[place], time.perf_counter() - began)
    return best[0], best[1]


def histograms(folder: Path, size: int) -> list[BenchResult]:
    """Counting against reading: bytes that lie together, and those of the checkpoint."""
    together = folder / "together.bin"
    groups = write_together(together, size)
    file = PlainFile(together)
    counted, read = best_in_turn(lambda: count(file, groups), lambda: plain_read(together))
    together.unlink()
    checkpoint = open_checkpoint(folder)
    with Shards(checkpoint) as shards:
        groups = take(checkpoint, shards, Notebook()).groups
        counted_there, read_there = best_in_turn(
            lambda: count(shards, groups), lambda: scattered_read(shards, groups)
        )
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


def commanded(folder: Path, size: int) -> BenchResult:
    """The whole command against one thread's read, and its peak."""
    checkpoint = open_checkpoint(folder)
    with Shards(checkpoint) as shards:
        groups = take(checkpoint, shards, Notebook()).groups
        ours, peer = best_in_turn(
            lambda: command(folder), lambda: scattered_read(shards, groups), repeats=3
        )
    return _result("scan, whole command", size, ours, peer, peak_rss_mb(whole, folder))


# ---- memory


def write_fused(folder: Path) -> None:
    """One layer of very many experts in one tensor for each projection."""
    experts, rows, columns = FUSED_EXPERTS, 16, 64
    rng = np.random.default_rng(0)
    entries: dict[str, object] = {}
    parts, at = [], 0
    for name, first, second in (("gate_up_proj", 2 * rows, columns), ("down_proj", columns, rows)):
        codes = rng.integers(0, 256, experts * first * second // 2).astype(np.uint8)
        scales = rng.integers(0x50, 0x7E, experts * first * second // 16).astype(np.uint8)
        magnitudes = rng.uniform(1e-5, 3e-5, experts).astype("<f4")
        for suffix, dtype, shape, data in (
            ("", "U8", [experts, first, second // 2], codes),
            ("_weight_scale", "F8_E4M3", [experts, first, second // 16], scales),
            ("_weight_scale_2", "F32", [experts], magnitudes),
            ("_input_scale", "F32", [experts], np.full(experts, 2.0**-9, "<f4")),
        ):
            name_of = f"model.layers.0.mlp.experts.{name}{suffix}"
            entries[name_of] = _entry(dtype, shape, at, at + data.nbytes)
            parts.append(data.tobytes())
            at += data.nbytes
    text = json.dumps(entries).encode()
    content = struct.pack("<Q", len(text)) + text + b"".join(parts)
    (folder / "model.safetensors").write_bytes(content)


def write_many(folder: Path) -> None:
    """As many tensors as DeepSeek-V3 has, tiny ones: 181,248 in 59 shards."""
    rng = np.random.default_rng(0)
    index = {}
    for layer in range(MANY_LAYERS):
        entries: dict[str, object] = {}
        parts, at = [], 0
        for name, dtype, shape, data in _tiny_layer(layer, rng):
            entries[name] = _entry(dtype, shape, at, at + len(data))
            parts.append(data)
            at += len(data)
        text = json.dumps(entries).encode()
        file = f"model-{layer + 1:05}-of-{MANY_LAYERS:05}.safetensors"
        (folder / file).write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))
        index |= dict.fromkeys(entries, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def _tiny_layer(
    layer: int, rng: np.random.Generator
) -> Iterator[tuple[str, str, list[int], bytes]]:
    for expert in range(MANY_EXPERTS):
        for projection in ("gate_proj", "up_proj", "down_proj"):
            base = f"model.layers.{layer + 3}.mlp.experts.{expert}.{projection}"
            rows, columns = (64, 32) if projection == "down_proj" else (32, 64)
            codes = rng.integers(0, 256, rows * columns // 2).astype(np.uint8)
            scales = rng.integers(0x50, 0x7E, rows * columns // 16).astype(np.uint8)
            yield f"{base}.input_scale", "F32", [], np.float32(2.0**-9).tobytes()
            yield f"{base}.weight", "U8", [rows, columns // 2], codes.tobytes()
            yield f"{base}.weight_scale", "F8_E4M3", [rows, columns // 16], scales.tobytes()
            yield f"{base}.weight_scale_2", "F32", [], np.float32(2e-5 + expert / 1e8).tobytes()


def with_codes(folder: Path) -> None:
    """The same with --weights."""
    scan(folder, ScanSettings(THREADS, weights=True), lambda _: None)


def memory(name: str, write_case: Callable[[Path], None]) -> list[BenchResult]:
    """Peaks of a scan with and without codes, and how long each takes."""
    folder = Path(tempfile.mkdtemp(prefix="scan-bench-"))
    try:
        write_case(folder)
        results = []
        for title, function in ((name, whole), (f"{name}, --weights", with_codes)):
            began = time.perf_counter()
            peak = peak_rss_mb(function, folder)
            results.append(BenchResult(title, time.perf_counter() - began, peak_mb=peak))
        return results
    finally:
        shutil.rmtree(folder)


def run(gigabytes: float | None = None) -> list[BenchResult]:
    wanted = gigabytes or float(os.environ.get("SCAN_BENCH_GB", "1"))
    folder = Path(tempfile.mkdtemp(prefix="scan-bench-"))
    try:
        size = write(folder, wanted)
        results = [*histograms(folder, size), commanded(folder, size)]
    finally:
        shutil.rmtree(folder)
    tensors = MANY_LAYERS * MANY_EXPERTS * 12
    return [
        *results,
        *memory(f"scan, {FUSED_EXPERTS:,} fused experts", write_fused),
        *memory(f"scan, {tensors:,} tensors in {MANY_LAYERS} shards", write_many),
    ]


if __name__ == "__main__":
    for result in run(float(sys.argv[1]) if len(sys.argv) > 1 else None):
        print(result.line())
