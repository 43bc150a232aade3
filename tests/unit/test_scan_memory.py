"""Memory that does not grow with experts or shards, and the same numbers however it is cut."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.checkpoints import entry, raw, save
from tests.scan_cases import CONFIG, SMALL, run, sound, tensor
from tests.unit.test_scan_statistics import direct, same
from trtllm_b12x_fix.checkpoint.files import open_checkpoint
from trtllm_b12x_fix.scan import counting, inventory, multipliers, reading
from trtllm_b12x_fix.scan.findings import Notebook
from trtllm_b12x_fix.scan.reading import Shards, Span

FUSED = "model.layers.0.mlp.experts"
FLOAT8 = torch.float8_e4m3fn


def fused_files(folder: Path, experts: int) -> Path:
    """One layer of tiny fused experts, written without torch."""
    rng = np.random.default_rng(0)
    header, parts, at = {}, [], 0
    for name in ("up_proj", "down_proj"):
        for suffix, dtype, shape, data in (
            ("", "U8", [experts, 16, 8], rng.integers(0, 256, experts * 128).astype(np.uint8)),
            (
                "_weight_scale",
                "F8_E4M3",
                [experts, 16, 1],
                rng.integers(0x50, 0x7E, experts * 16).astype(np.uint8),
            ),
            ("_weight_scale_2", "F32", [experts], rng.uniform(1e-5, 3e-5, experts).astype("<f4")),
            ("_input_scale", "F32", [experts], np.full(experts, 2.0**-9, "<f4")),
        ):
            header[f"{FUSED}.{name}{suffix}"] = entry(dtype, shape, at, at + data.nbytes)
            parts.append(data.tobytes())
            at += data.nbytes
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(raw(header, b"".join(parts)))
    return folder


def peak_mb(folder: Path) -> float:
    """Largest sum of what Python and numpy hold at once, while scanning."""
    tracemalloc.start()
    try:
        run(folder, weights=True)
        return tracemalloc.get_traced_memory()[1] / 1e6
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_number_of_experts(tmp_path, monkeypatch):
    """3,000 more in each of two tensors: their counts would be 37 MB, what is made of them more."""
    counts, kinds = 256 * 8, 3
    assert counting._BUNDLE * counts * kinds < 30e6
    monkeypatch.setattr(counting, "_BUNDLE", 256)
    run(fused_files(tmp_path / "warm", 1), weights=True)
    few, many = (peak_mb(fused_files(tmp_path / str(n), n)) for n in (256, 3256))
    assert many - few < 5


@pytest.mark.parametrize("weights", [False, True])
def test_a_projection_in_parts_is_one_in_a_piece(tmp_path, monkeypatch, weights):
    fused_files(tmp_path, 23)
    whole = run(tmp_path, weights=weights)
    monkeypatch.setattr(counting, "_BUNDLE", 5)
    monkeypatch.setattr(multipliers, "_BATCH", 1)
    parts = run(tmp_path, weights=weights, threads=2)
    assert len(whole.projections) == 2
    for one, other in zip(whole.projections, parts.projections, strict=True):
        assert (one.counts == other.counts).all()
        assert (one.baked == other.baked).all()
        assert one == other
    assert (whole.totals, whole.findings) == (parts.totals, parts.findings)


@pytest.mark.parametrize("fault", [0x7F, 0x80, 0])
def test_findings_name_the_expert_wherever_the_parts_are_cut(tmp_path, monkeypatch, fault):
    monkeypatch.setattr(counting, "_BUNDLE", 5)
    fused_files(tmp_path, 23)
    checkpoint = open_checkpoint(tmp_path)
    name = f"{FUSED}.down_proj_weight_scale"
    with Shards(checkpoint) as shards:
        begin = shards.span(name, checkpoint.info(name)).begin
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek(begin + 17 * 16 + 3)
        file.write(bytes([fault]))
    (finding,) = [f for f in run(tmp_path).findings if f.expert is not None]
    assert (finding.tensor, finding.expert) == (name, 17)
    assert "expert 17: 1 of 16" in finding.message


def test_twins_in_different_parts_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(counting, "_BUNDLE", 1)
    tensors = sound()
    for short in ("weight", "weight_scale", "weight_scale_2"):
        tensors[tensor("down_proj", short, 3)] = tensors[tensor("down_proj", short, 0)].clone()
    (finding,) = run(save(tmp_path, tensors, config=CONFIG)).findings
    assert "experts 0 and 3" in finding.message


def test_the_worst_expert_of_another_part_leads(tmp_path, monkeypatch):
    monkeypatch.setattr(counting, "_BUNDLE", 2)
    tensors = sound()
    tensors[tensor("down_proj", "weight_scale_2", 3)] = torch.tensor(SMALL / 8)
    first = run(save(tmp_path, tensors, config=CONFIG)).projections[0]
    assert (first.projection, first.worst[0].expert, first.affected) == ("down_proj", 3, 1)
    assert len(first.worst) == 4


# ---- experts stored with rows last, in pieces of any size


def turned() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, rows, columns in (("up_proj", 48, 64), ("down_proj", 64, 48)):
        codes = torch.randint(0, 256, (3, columns // 2, rows), generator=generator)
        codes[:, :8, ::3] = 0  # blocks of zeros
        scales = torch.randint(0x50, 0x7E, (3, columns // 16, rows), generator=generator)
        base = f"{FUSED}.{name}"
        tensors[base] = codes.to(torch.uint8)
        tensors[f"{base}_weight_scale"] = scales.to(torch.uint8).view(FLOAT8)
        tensors[f"{base}_weight_scale_2"] = torch.tensor([1e-5, 2e-5, 3e-5])
        tensors[f"{base}_input_scale"] = torch.full((3,), 2.0**-9)
    return tensors


@pytest.mark.parametrize("piece", [7, 48, 64, 100, 1 << 17])
def test_turned_experts_are_read_in_pieces(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(counting, "_PIECE_WITH_CODES", piece)
    tensors = turned()
    result = run(save(tmp_path, tensors), weights=True)
    assert len(result.projections) == 2
    for projection in result.projections:
        base = f"{FUSED}.{projection.projection}"
        for one in projection.worst:
            scales = tensors[f"{base}_weight_scale"][one.expert].view(torch.uint8).T
            codes = tensors[base][one.expert].T.contiguous()
            expected = direct(
                scales.contiguous().numpy().ravel(), one.weight_scale_2, codes.numpy().ravel()
            )
            same(one.damage, expected)
            assert one.damage.blocks < scales.numel()


# ---- handles


def test_more_shards_than_handles(tmp_path, monkeypatch):
    """A thread closes its oldest file; nothing is left open."""
    monkeypatch.setattr(reading, "_HANDLES", 2)
    whole = run(save(tmp_path / "one", sound(), config=CONFIG))
    before = set(os.listdir("/proc/self/fd"))
    many = run(save(tmp_path / "many", sound(), shards=9, index=True, config=CONFIG), threads=3)
    assert many.projections == whole.projections
    assert set(os.listdir("/proc/self/fd")) == before


def test_headers_are_read_once(tmp_path, monkeypatch):
    from trtllm_b12x_fix.checkpoint import files

    save(tmp_path, sound(), shards=3, index=True, config=CONFIG)
    save(tmp_path / "other", sound("model.layers.6.mlp.experts"))
    (tmp_path / "other" / "model.safetensors").rename(tmp_path / "stray.safetensors")
    read, seen = files.read_header, []
    monkeypatch.setattr(files, "read_header", lambda path: seen.append(path.name) or read(path))
    result = run(tmp_path)
    assert sorted(seen) == sorted(set(seen))
    assert len(seen) == 4
    assert [f.code for f in result.findings] == ["matrices-not-in-the-index"]


def test_a_span_is_read_wherever_it_is(tmp_path):
    """Short reads are continued."""
    save(tmp_path, {"a": torch.arange(5000, dtype=torch.int32)})
    checkpoint = open_checkpoint(tmp_path)
    preadv = os.preadv
    with Shards(checkpoint) as shards, pytest.MonkeyPatch.context() as patch:
        span = shards.span("a", checkpoint.info("a"))
        patch.setattr(os, "preadv", lambda file, views, at: preadv(file, [views[0][:1000]], at))
        target = np.empty(span.size, np.uint8)
        shards.read(span, target)
        part = np.empty(8, np.uint8)
        shards.read(Span(span.file, span.begin + 8, 8), part)
    assert (target.view("<i4") == np.arange(5000)).all()
    assert part.view("<i4").tolist() == [2, 3]


def test_a_listing_keeps_fused_experts_as_one_record(tmp_path):
    checkpoint = open_checkpoint(fused_files(tmp_path, 5000))
    with Shards(checkpoint) as shards:
        groups = inventory.take(checkpoint, shards, Notebook()).groups
    assert [(len(group), len(group.stored)) for group in groups] == [(5000, 1)] * 2
    assert [unit.expert for unit in groups[0].units(4998)] == [4998, 4999]
