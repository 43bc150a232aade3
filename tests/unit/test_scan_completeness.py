"""Never clean where not everything was judged; nothing called broken that is sound."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.checkpoints import EXPERTS, entry, experts, linear, raw, save, shard_names, write_index
from tests.scan_cases import (
    CONFIG,
    LARGE,
    PREFIX,
    SMALL,
    codes,
    command,
    document,
    run,
    sound,
    tensor,
    with_dense,
)
from trtllm_b12x_fix.scan import histogram
from trtllm_b12x_fix.scan.result import ScanResult, Verdict

FLOAT8 = torch.float8_e4m3fn


def two_files(folder: Path, tensors: dict[str, Tensor], second: str) -> Path:
    """Tensors whose names end so in a second shard, with an index; returns the first shard."""
    names = shard_names(2)
    weight_map = {name: names[name.endswith(second)] for name in tensors}
    for file in names:
        save(folder, {n: t for n, t in tensors.items() if weight_map[n] == file})
        (folder / "model.safetensors").rename(folder / file)
    write_index(folder, weight_map)
    return folder / names[0]


def scan_of(folder: Path, tensors: dict[str, Tensor], *, weights: bool = False) -> ScanResult:
    return run(save(folder, tensors, config=CONFIG), weights=weights)


def damage(result: ScanResult) -> set[str]:
    return {finding.code for finding in result.findings if finding.severity.value == "damage"}


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "hf_quant_config.json", "a.index.json"]
)
def test_a_report_does_not_replace_the_checkpoint(tmp_path, name):
    save(tmp_path, sound(), config=CONFIG)
    (tmp_path / "hf_quant_config.json").write_text("{}")
    (tmp_path / "a.index.json").write_text("{}")
    target = tmp_path / name
    if name.startswith("a."):
        target = target.rename(tmp_path / "a.safetensors.index.json")
    before = target.read_bytes()
    other = save(tmp_path / "other", sound())
    for option in ("--html", "--json"):
        code, _, error = command(other, tmp_path, option, target, "--quiet")
        assert (code, target.read_bytes()) == (2, before)
        assert "which is read" in error


def test_two_reports_need_two_files(tmp_path):
    target = tmp_path / "report"
    (tmp_path / "link").symlink_to(target)
    code, _, error = command(save(tmp_path, sound()), "--html", target, "--json", tmp_path / "link")
    assert (code, target.exists()) == (2, False)
    assert "name two files" in error


def test_multipliers_in_another_file(tmp_path):
    shard = two_files(tmp_path, sound(scale=SMALL), "weight_scale_2")
    result = run(shard)
    assert result.verdict is Verdict.BROKEN
    assert "0 of 12 matrices of experts were judged" in result.reason
    found = [f for f in result.findings if f.code == "weight-scale-2-in-another-file"]
    assert [finding.count for finding in found] == [EXPERTS] * 3
    assert run(tmp_path).verdict is Verdict.AFFECTED
    _, made = document(shard)
    assert (made["totals"]["judged_matrices"], made["totals"]["unjudged_matrices"]) == (0, 12)


def test_some_multipliers_in_another_file(tmp_path):
    result = run(two_files(tmp_path, sound(), ".1.up_proj.weight_scale_2"))
    assert result.verdict is Verdict.BROKEN
    assert "incomplete: 11 of 12 matrices" in result.reason


def test_input_scales_in_another_file(tmp_path):
    result = run(two_files(tmp_path, sound(), "input_scale"))
    assert result.verdict is Verdict.CLEAN
    found = [f for f in result.findings if f.code == "input-scale-in-another-file"]
    assert [finding.count for finding in found] == [EXPERTS] * 3


def test_a_matrix_in_two_files(tmp_path):
    result = run(two_files(tmp_path, sound(), ".1.up_proj.weight"))
    assert result.verdict is Verdict.BROKEN
    assert "matrix-in-several-files" in codes(result)
    assert "incomplete: 11 of 12 matrices" in result.reason


def test_nothing_counted_is_not_clean(tmp_path):
    tensors = sound()
    for name, value in tensors.items():
        if name.endswith("weight_scale"):
            tensors[name] = torch.full(value.shape, 0x38, dtype=torch.uint8).view(FLOAT8)
    result = scan_of(tmp_path, tensors)
    assert result.totals.damage.blocks == 0
    assert result.verdict is Verdict.BROKEN
    assert "no block scale of the matrices of experts could be counted" in result.reason
    assert "--weights" in result.advice[0]


def test_missing_shards_without_an_index(tmp_path):
    save(tmp_path, sound())
    (tmp_path / "model.safetensors").rename(tmp_path / shard_names(2)[0])
    result = run(tmp_path)
    assert (result.verdict, codes(result)) == (Verdict.BROKEN, ["missing-shard"])


def test_one_shard_by_name_is_a_restriction(tmp_path):
    save(tmp_path, sound())
    shard = (tmp_path / "model.safetensors").rename(tmp_path / shard_names(2)[0])
    result = run(shard)
    assert (result.verdict, codes(result)) == (Verdict.CLEAN, ["one-shard-of-several"])
    assert "of this one shard of several" in result.reason


@pytest.mark.parametrize("short", ["weight", "weight_scale"])
@pytest.mark.parametrize("also", [False, True])
def test_codes_hide_no_damage(tmp_path, short, also):
    """All that is found without codes is found with them."""
    tensors = sound()
    for name in {tensor("up_proj", short), tensor("up_proj", "weight" if also else short)}:
        tensors[name] = torch.zeros_like(tensors[name].view(torch.uint8)).view(tensors[name].dtype)
    plain = scan_of(tmp_path, tensors)
    known = run(tmp_path, weights=True)
    assert damage(plain) <= damage(known)
    assert known.verdict is Verdict.BROKEN


def test_codes_lost(tmp_path):
    tensors = sound()
    name = tensor("up_proj", "weight")
    tensors[name] = torch.zeros_like(tensors[name])
    assert scan_of(tmp_path, tensors).verdict is Verdict.CLEAN
    result = run(tmp_path, weights=True)
    assert (result.verdict, codes(result)) == (Verdict.BROKEN, ["codes-lost"])


def test_every_nan_is_read(tmp_path):
    (nan,) = struct.unpack("<f", struct.pack("<I", 0x7FC0B12F))
    tensors = sound()
    for name in tensors:
        if name.endswith("weight_scale_2"):
            tensors[name] = torch.tensor(0x7FC0B12F, dtype=torch.int32).view(torch.float32)
    assert nan != nan
    result = scan_of(tmp_path, tensors)
    assert (result.verdict, codes(result)) == (Verdict.BROKEN, ["weight-scale-2-unusable"] * 3)


def test_powers_of_two_are_no_zero_blocks(tmp_path):
    generator = torch.Generator().manual_seed(0)
    tensors = sound(scale=2.0**-14, names=("up_proj", "down_proj"))
    bytes_of = torch.tensor([0x38, 0x68, 0x70, 0x78], dtype=torch.uint8)
    shares = torch.tensor([0.45, 0.25, 0.15, 0.15])
    for name, value in tensors.items():
        if name.endswith("weight_scale"):
            drawn = torch.multinomial(shares, value.numel(), True, generator=generator)
            tensors[name] = bytes_of[drawn].reshape(value.shape).view(FLOAT8)
        elif name.endswith("weight_scale_2"):
            tensors[name] = torch.tensor(2.0**-13)  # all but the ones are exact, baked
    plain = scan_of(tmp_path, tensors)
    known = run(tmp_path, weights=True)
    assert plain.verdict is known.verdict is Verdict.AFFECTED
    assert plain.totals.damage.zero_fraction == known.totals.damage.zero_fraction > 0.4
    assert "verdict-rests-on-assumed-zero-blocks" in codes(plain)
    assert "--weights" in plain.reason


def test_nothing_but_ones_is_undecided(tmp_path):
    tensors = sound()
    name = tensor("up_proj", "weight_scale")
    ones = torch.full(tensors[name].shape, 0x38, dtype=torch.uint8)
    tensors[name] = ones.view(FLOAT8)
    result = scan_of(tmp_path, tensors)
    assert (result.verdict, codes(result)) == (Verdict.CLEAN, ["block-scales-of-one"])
    assert "1 matrices of nothing but scales of 1.0 are undecided" in result.reason
    assert damage(run(tmp_path, weights=True)) == {"constant-block-scales"}
    tensors[tensor("up_proj", "weight")] *= 0
    known = scan_of(tmp_path, tensors, weights=True)
    assert (known.verdict, known.findings) == (Verdict.CLEAN, ())


def test_a_clean_reason_names_zeros(tmp_path):
    tensors = experts(PREFIX, intermediate=1024)
    for name in tensors:
        if name.endswith("weight_scale_2"):
            tensors[name] = torch.tensor(LARGE)
    scales = tensors[tensor("down_proj", "weight_scale")].view(torch.uint8)
    scales[:2, 0] = 0x10
    result = scan_of(tmp_path, tensors)
    assert result.verdict is Verdict.CLEAN
    assert "most become 0 in " + PREFIX + ".down_proj, expert 2: 0.05%" in result.reason


@pytest.mark.parametrize("said", ["router", "config"])
def test_the_last_expert_is_missing(tmp_path, said):
    tensors = {n: t for n, t in sound().items() if f".{EXPERTS - 1}." not in n}
    config = CONFIG
    if said == "config":
        tensors = {n: t for n, t in tensors.items() if "gate.weight" not in n}
        config = {**CONFIG, "num_experts": EXPERTS}
    result = run(save(tmp_path, tensors, config=config))
    assert result.verdict is Verdict.BROKEN
    assert "missing-experts" in codes(result)


@pytest.mark.parametrize(
    "prefix", ["mlp.routed_experts.{}", "moe.local_experts.{}", "mlp.expert.{}"]
)
@pytest.mark.parametrize("scale", [LARGE, SMALL])
def test_experts_under_other_names(tmp_path, prefix, scale):
    start = "model.layers.5." + prefix.removesuffix(".{}")
    result = scan_of(tmp_path, sound(start, scale=scale))
    assert set(codes(result)) == {"experts-of-unknown-names"}
    assert result.verdict is (Verdict.CLEAN if scale == LARGE else Verdict.AFFECTED)
    assert (result.dense, result.totals.matrices) == ((), 12)


@pytest.mark.parametrize("each", [False, True])
def test_stacks_under_other_names(tmp_path, each):
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, size in (("gate_proj", (32, 64)), ("up_proj", (32, 64)), ("down_proj", (64, 32))):
        base = f"model.layers.0.{'feed' if each else 'moe'}.{name}"
        parts = [linear(base, *size, generator) for _ in range(8)]
        for key in parts[0]:
            tensors[key] = torch.stack([part[key].view(torch.uint8) for part in parts]).view(
                parts[0][key].dtype
            ) if parts[0][key].ndim else parts[0][key].repeat(8 if each else 1)  # fmt: skip
    result = scan_of(tmp_path, tensors)
    assert set(codes(result)) - {"weight-scale-2-same-for-all-experts"} == {
        "experts-of-unknown-names"
    }
    # One stored number for all is no copy of one expert's.
    assert ("weight-scale-2-same-for-all-experts" in codes(result)) == each
    assert (result.verdict, result.totals.matrices) == (Verdict.AFFECTED, 24)


def test_a_layer_without_input_scales(tmp_path):
    other = sound("model.layers.6.mlp.experts")
    bare = {n: t for n, t in sound(scale=SMALL).items() if not n.endswith("input_scale")}
    alone = scan_of(tmp_path, bare)
    assert (alone.verdict, set(codes(alone))) == (Verdict.NOT_APPLICABLE, {"no-input-scales"})
    both = scan_of(tmp_path, bare | other)
    assert (both.verdict, both.totals.affected_matrices) == (Verdict.CLEAN, 0)
    assert "1 layers are not baked (W4A16" in both.reason


def test_w4a16_by_name_with_input_scales(tmp_path):
    save(tmp_path, sound(scale=SMALL))
    (tmp_path / "hf_quant_config.json").write_text(
        '{"quantization": {"quant_algo": "W4A16_NVFP4"}}'
    )
    assert run(tmp_path).verdict is Verdict.NOT_APPLICABLE


@pytest.mark.parametrize("suffix", ["bias", "pre_quant_scale"])
def test_layers_that_b12x_does_not_run(tmp_path, suffix):
    tensors = sound() | {tensor("up_proj", suffix): torch.zeros(64)}
    result = scan_of(tmp_path, tensors)
    assert (result.verdict, codes(result)) == (Verdict.NOT_APPLICABLE, ["not-run-by-b12x"])
    for short in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
        del tensors[tensor("down_proj", short)]
    assert scan_of(tmp_path, tensors).verdict is Verdict.BROKEN


@pytest.mark.parametrize("stray", [False, True])
def test_matrices_that_the_index_omits(tmp_path, stray):
    other = sound("model.layers.6.mlp.experts", scale=SMALL)
    save(tmp_path, sound() if stray else sound() | other)
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    if stray:
        save(tmp_path, other)
    write_index(tmp_path, dict.fromkeys(sound(), "a.safetensors"))
    result = run(tmp_path)
    assert (result.verdict, codes(result)) == (Verdict.CLEAN, ["matrices-not-in-the-index"])
    assert result.findings[0].count == 12


@pytest.mark.parametrize("sibling", ["weight.absmax", "absmax"])
def test_codes_of_other_formats(tmp_path, sibling):
    base = "model.layers.5.self_attn.q_proj"
    other = {
        f"{base}.weight": torch.zeros(64, 1, dtype=torch.uint8),
        f"{base}.{sibling}": torch.zeros(4),
    }
    result = scan_of(tmp_path, with_dense() | other)
    assert (result.verdict, result.findings) == (Verdict.CLEAN, ())


@pytest.mark.parametrize("error", [ImportError, AttributeError, SystemError])
def test_a_numba_that_cannot_be_imported(monkeypatch, error):
    class Broken:
        def find_spec(self, name, *_):
            if name.endswith("histogram_numba"):
                raise error("of another numpy")

    monkeypatch.delitem(sys.modules, "trtllm_b12x_fix.scan.histogram_numba", raising=False)
    import trtllm_b12x_fix.scan

    monkeypatch.delattr(trtllm_b12x_fix.scan, "histogram_numba", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    histogram._numba_module.cache_clear()
    try:
        assert histogram.best_backend() is histogram.CountingBackend.NUMPY
    finally:
        histogram._numba_module.cache_clear()


def test_json_has_no_lone_surrogate(tmp_path):
    save(tmp_path, sound())
    (tmp_path / "hf_quant_config.json").write_text(
        '{"quantization": {"quant_algo": "a\\ud800b"}}'
    )  # fmt: skip
    _, made = document(tmp_path, tmp_path / "none\udcff")
    json.dumps(made, ensure_ascii=False).encode()
    assert made["reports"][0]["quant_algo"] == "a\\ud800b"


def test_an_absurd_number_of_experts(tmp_path):
    base = "model.layers.0.mlp.experts.down_proj"
    count = (1 << 16) + 1
    shapes = {
        base: ("U8", [count, 1, 8], 8 * count),
        f"{base}_weight_scale": ("F8_E4M3", [count, 1, 1], count),
        f"{base}_weight_scale_2": ("F32", [], 4),
        f"{base}_input_scale": ("F32", [], 4),
    }
    header, end = {}, 0
    for name, (dtype, shape, size) in shapes.items():
        header[name] = entry(dtype, shape, end, end + size)
        end += size
    (tmp_path / "model.safetensors").write_bytes(raw(header, bytes(end)))
    result = run(tmp_path)
    assert result.verdict is Verdict.BROKEN
    assert any(f"{count} experts in one tensor" in f.message for f in result.findings)
