"""Counting bytes: both backends, every size and byte, and bytes straight from files."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoints import save
from tests.scan_cases import PREFIX, sound
from trtllm_b12x_fix.checkpoint.files import open_checkpoint
from trtllm_b12x_fix.errors import InputError
from trtllm_b12x_fix.formats import e2m1
from trtllm_b12x_fix.scan import counting, histogram
from trtllm_b12x_fix.scan.findings import Notebook
from trtllm_b12x_fix.scan.histogram import CountingBackend
from trtllm_b12x_fix.scan.inventory import take
from trtllm_b12x_fix.scan.reading import Shards, Span, read_many, to_floats

BACKENDS = tuple(CountingBackend)


def counted(backend: CountingBackend, scales: np.ndarray) -> np.ndarray:
    counts = np.zeros((1, 256), np.int64)
    whole = np.array([scales.size]), np.array([0])
    histogram.make_counter(backend).count(scales, *whole, counts)
    return counts[0]


def weighed(backend: CountingBackend, scales, codes) -> tuple[np.ndarray, np.ndarray]:
    nonzero, energy = np.zeros(256, np.int64), np.zeros(256, np.int64)
    histogram.make_counter(backend).weigh(scales, codes, nonzero, energy)
    return nonzero, energy


def by_torch(scales: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same sums with the project's own decoder, one block at a time."""
    values = e2m1.decode_packed(torch.from_numpy(codes.reshape(-1, 8)), torch.float64)
    sums = (values.square().sum(dim=1) * 4).round().long().numpy()
    nonzero, energy = np.zeros(256, np.int64), np.zeros(256, np.int64)
    for scale, total in zip(scales, sums, strict=True):
        energy[scale] += total
        nonzero[scale] += total > 0
    return nonzero, energy


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 15, 16, 255, 4099, 300_001])
@pytest.mark.parametrize("below", [1, 127, 128, 256])
def test_counts_are_numpys(backend, size, below):
    scales = np.random.default_rng(size).integers(0, below, size).astype(np.uint8)
    expected = np.array([(scales == byte).sum() for byte in range(256)])
    assert (counted(backend, scales) == expected).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("place", range(8))
def test_one_high_byte_in_a_word_changes_no_other_count(backend, place):
    scales = np.arange(1, 17, dtype=np.uint8)
    scales[place] = 0xC3
    counts = counted(backend, scales)
    assert counts[0xC3] == 1
    assert counts.sum() == 16
    assert counts[[b for b in range(1, 17) if b != place + 1]].tolist() == [1] * 15


@pytest.mark.parametrize("backend", BACKENDS)
def test_counting_adds_up(backend):
    counter, counts = histogram.make_counter(backend), np.zeros((3, 256), np.int64)
    for _ in range(3):
        counter.count(np.full(1000, 7, np.uint8), np.array([1000]), np.array([1]), counts)
    assert counts[1, 7] == counts.sum() == 3000


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("below", [127, 256])
def test_pieces_go_to_their_rows(backend, below):
    """Pieces that start and end anywhere, few and many bytes, two of one matrix, an empty one."""
    rng = np.random.default_rng(below)
    ends = np.cumsum([3, 9000, 0, 13, 4095, 4096, 7, 20_001, 5])
    rows = np.array([4, 0, 1, 2, 0, 3, 6, 5, 4])
    scales = rng.integers(0, below, ends[-1]).astype(np.uint8)
    counts = np.zeros((7, 256), np.int64)
    histogram.make_counter(backend).count(scales, ends, rows, counts)
    expected = np.zeros_like(counts)
    for begin, end, row in zip([0, *ends], ends, rows, strict=False):
        expected[row] += np.bincount(scales[begin:end], minlength=256)
    assert (counts == expected).all()


@settings(max_examples=60)
@given(blocks=st.integers(1, 300), seed=st.integers(0, 1000))
def test_energies_are_those_of_the_decoded_codes(blocks, seed):
    rng = np.random.default_rng(seed)
    scales = rng.integers(0, 256, blocks).astype(np.uint8)
    codes = rng.integers(0, 256, blocks * 8).astype(np.uint8)
    codes.reshape(-1, 8)[: blocks // 3] = rng.choice([0x00, 0x08, 0x80, 0x88], blocks // 3)[:, None]
    expected = by_torch(scales, codes)
    for backend in BACKENDS:
        got = weighed(backend, scales, codes)
        assert all((one == two).all() for one, two in zip(got, expected, strict=True))


def test_negative_zero_is_zero():
    codes = np.full(8, 0x88, np.uint8)
    for backend in BACKENDS:
        nonzero, energy = weighed(backend, np.array([5], np.uint8), codes)
        assert nonzero.sum() == energy.sum() == 0


def test_without_numba_numpy_counts(monkeypatch):
    monkeypatch.setattr(histogram, "_numba_module", lambda: None)
    assert histogram.best_backend() is CountingBackend.NUMPY


def test_a_cache_that_cannot_be_written_is_no_error(monkeypatch):
    from trtllm_b12x_fix.scan import histogram_numba

    compiled = histogram_numba._compiled

    def refuse(*, cache: bool):
        if cache:
            raise RuntimeError("no locator available")
        return compiled(cache=False)

    monkeypatch.setattr(histogram_numba, "_compiled", refuse)
    histogram_numba._kernels.cache_clear()
    try:
        scales = np.arange(100, dtype=np.uint8)
        assert counted(CountingBackend.NUMBA, scales).sum() == 100
    finally:
        histogram_numba._kernels.cache_clear()


# ---- from files


def all_counts(folder, backend, threads, *, weights):
    checkpoint = open_checkpoint(folder)
    with Shards(checkpoint) as shards:
        groups = take(checkpoint, shards, Notebook()).groups
        meter = counting.Meter(1, lambda _: None)
        found = counting.count(shards, groups, backend, threads, meter, weights=weights)
        parts = defaultdict(list)
        for group, counted in found:
            assert counted.first == sum(len(part.counts) for part in parts[group.projection])
            parts[group.projection].append(counted)
        return {projection: joined(counts) for projection, counts in parts.items()}


def joined(parts: list[counting.Counted]) -> counting.Counted:
    """All matrices of a projection, whatever parts they were counted in."""
    names = ("counts", "nonzero", "energy")
    columns = [[getattr(part, name) for part in parts] for name in names]
    whole = [None if one[0] is None else np.concatenate(one) for one in columns]
    return counting.Counted(*whole)


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
def test_files_are_counted_like_tensors(tmp_path, monkeypatch, threads, weights):
    # Small pieces and bundles, so that every seam is crossed.
    monkeypatch.setattr(counting, "_PIECE", 24)
    monkeypatch.setattr(counting, "_PIECE_WITH_CODES", 24)
    monkeypatch.setattr(counting, "_TASK", 200)
    monkeypatch.setattr(counting, "_BUNDLE", 5)
    tensors = sound()
    save(tmp_path, tensors, shards=3, index=True)
    for backend in BACKENDS:
        found = all_counts(tmp_path, backend, threads, weights=weights)
        assert len(found) == 3
        for projection, got in found.items():
            for expert in range(4):
                base = f"{PREFIX}.{expert}.{projection}"
                scales = tensors[f"{base}.weight_scale"].view(torch.uint8).numpy().ravel()
                assert (got.counts[expert] == np.bincount(scales, minlength=256)).all()
                if weights:
                    nonzero, energy = by_torch(scales, tensors[f"{base}.weight"].numpy().ravel())
                    assert (got.nonzero[expert] == nonzero).all()
                    assert (got.energy[expert] == energy).all()
                else:
                    assert got.nonzero is None


def test_an_error_in_a_thread_ends_all_and_is_raised(tmp_path, monkeypatch):
    save(tmp_path, sound(), shards=1)
    monkeypatch.setattr(counting, "_TASK", 1)
    read, calls = Shards.read, []

    def fail(self, span, target):
        calls.append(span)
        if len(calls) > 3:
            raise InputError("gone")
        read(self, span, target)

    checkpoint = open_checkpoint(tmp_path)
    with Shards(checkpoint) as shards:
        groups = take(checkpoint, shards, Notebook()).groups
        monkeypatch.setattr(Shards, "read", fail)
        meter = counting.Meter(1, lambda _: None)
        with pytest.raises(InputError, match="gone"):
            list(counting.count(shards, groups, CountingBackend.NUMPY, 2, meter, weights=False))
    assert len(calls) < 12


def test_near_spans_share_a_read_and_far_ones_do_not(tmp_path, monkeypatch):
    save(tmp_path, {"a": torch.arange(30_000, dtype=torch.int32).to(torch.int32)})
    checkpoint = open_checkpoint(tmp_path)
    reads = []
    read = Shards.read

    def note(self, span, target):
        reads.append(span)
        read(self, span, target)

    with Shards(checkpoint) as shards:
        start = shards.span("a", checkpoint.info("a")).begin
        monkeypatch.setattr(Shards, "read", note)
        wanted = [Span(0, start + at, 4) for at in (80_000, 0, 4, 100)]
        got = dict(read_many(shards, wanted))
    assert [np.frombuffer(got[span], "<i4")[0] * 4 + start for span in wanted] == [
        span.begin for span in wanted
    ]
    assert len(reads) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_scales_of_every_float_dtype(dtype):
    names = {
        torch.float32: "F32",
        torch.float64: "F64",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
    }
    values = torch.tensor([1.5, -0.25, float("inf"), float("nan"), 3e-5]).to(dtype)
    raw = values.view(torch.uint8).numpy().tobytes()
    expected = values.float().numpy()
    assert np.array_equal(to_floats(raw, names[dtype]), expected, equal_nan=True)
