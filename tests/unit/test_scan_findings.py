"""Each finding: its code, severity, place, count and advice; and no finding where all is well."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.checkpoints import GATED, UNGATED, save, shard_names
from tests.scan_cases import (
    CONFIG,
    DENSE,
    EXPERT,
    FLOAT8,
    LARGE,
    PREFIX,
    SMALL,
    codes,
    only,
    run,
    sound,
    tensor,
    with_dense,
)
from trtllm_b12x_fix.checkpoint import embedded
from trtllm_b12x_fix.checkpoint.findings import Severity
from trtllm_b12x_fix.formats.scale_layout import swizzle
from trtllm_b12x_fix.scan import run as scanning
from trtllm_b12x_fix.scan.findings import RULES, Code
from trtllm_b12x_fix.scan.result import FailOn, Kind, Verdict


def with_bytes(tensors: dict[str, Tensor], name: str, values: dict[int, int]) -> None:
    """Scale bytes of one tensor by flat place."""
    raw = tensors[name].view(torch.uint8).clone()
    for place, byte in values.items():
        raw.view(-1)[place] = byte
    tensors[name] = raw.view(FLOAT8)


def filled(tensors: dict[str, Tensor], name: str, byte: int) -> None:
    tensors[name] = torch.full_like(tensors[name].view(torch.uint8), byte).view(FLOAT8)


def scan_of(tmp_path: Path, tensors: dict[str, Tensor], *, weights: bool = False):
    return run(save(tmp_path, tensors, config=CONFIG), weights=weights)


def test_every_code_has_a_rule_with_advice():
    assert set(RULES) == set(Code)
    assert all(rule.text and rule.advice for rule in RULES.values())


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("names", [GATED, UNGATED, ("w1", "w3", "w2")])
def test_a_sound_checkpoint_is_clean_and_has_no_findings(tmp_path, names, weights):
    result = scan_of(tmp_path, sound(names=names), weights=weights)
    assert (result.verdict, result.findings) == (Verdict.CLEAN, ())
    assert result.totals.affected_matrices == 0


@pytest.mark.parametrize("projection", GATED)
@pytest.mark.parametrize(
    ("byte", "code"),
    [(0x7F, "nan-block-scales"), (0xFF, "nan-block-scales"), (0x80, "negative-block-scales"),
     (0xC1, "negative-block-scales")],
)  # fmt: skip
def test_bytes_that_no_block_scale_has(tmp_path, projection, byte, code):
    tensors = sound()
    name = tensor(projection, "weight_scale")
    with_bytes(tensors, name, {5: byte, 77: byte})
    result = scan_of(tmp_path, tensors)
    finding = only(result, code)
    assert (result.verdict, finding.severity) == (Verdict.BROKEN, Severity.DAMAGE)
    assert (finding.tensor, finding.expert, finding.layer) == (name, EXPERT, PREFIX)
    assert "2 of 128" in finding.message
    assert finding.advice


def test_zero_scales_need_codes_to_be_judged(tmp_path):
    tensors = sound()
    name = tensor("up_proj", "weight_scale")
    with_bytes(tensors, name, {5: 0})
    blind = scan_of(tmp_path, tensors)
    assert only(blind, "zero-block-scales").severity is Severity.NOTE
    assert "--weights" in only(blind, "zero-block-scales").advice
    seeing = run(tmp_path, weights=True)
    assert only(seeing, "zero-scale-over-weights").tensor == name
    assert seeing.verdict is Verdict.BROKEN


def test_zero_scales_over_zeros_are_sound(tmp_path):
    tensors = sound()
    with_bytes(tensors, tensor("up_proj", "weight_scale"), {0: 0})
    tensors[tensor("up_proj", "weight")][0, :8] = 0x80
    assert scan_of(tmp_path, tensors, weights=True).findings == ()


def test_all_scales_zero(tmp_path):
    tensors = sound()
    filled(tensors, tensor("down_proj", "weight_scale"), 0)
    assert only(scan_of(tmp_path, tensors), "all-block-scales-zero").count == 1


@pytest.mark.parametrize("byte", [0x60, 0x7E, 0x01])
def test_one_byte_everywhere(tmp_path, byte):
    tensors = sound()
    filled(tensors, tensor("down_proj", "weight_scale"), byte)
    result = scan_of(tmp_path, tensors)
    assert "constant-block-scales" in codes(result)
    assert result.verdict is Verdict.BROKEN


@pytest.mark.parametrize(("many", "found"), [(15, False), (16, True)])
def test_saturated_blocks(tmp_path, many, found):
    tensors = sound()
    with_bytes(tensors, tensor("up_proj", "weight_scale"), dict.fromkeys(range(many), 0x7E))
    result = scan_of(tmp_path, tensors)
    assert codes(result) == (["saturated-block-scales"] if found else [])
    assert result.verdict is Verdict.CLEAN
    (projection,) = [p for p in result.projections if p.projection == "up_proj"]
    assert projection.saturated_fraction == many / 512


def test_mostly_ones(tmp_path):
    tensors = sound()
    with_bytes(tensors, tensor("up_proj", "weight_scale"), dict.fromkeys(range(90), 0x38))
    assert "block-scales-of-one" in codes(scan_of(tmp_path, tensors))


USELESS = {"nan": float("nan"), "inf": float("inf"), "0.0": 0.0, "-1.5": -1.5}


@pytest.mark.parametrize("short", ["weight_scale_2", "input_scale"])
@pytest.mark.parametrize(("word", "value"), USELESS.items())
def test_scales_that_no_kernel_can_use(tmp_path, short, word, value):
    tensors = sound()
    name = tensor("down_proj", short)
    tensors[name] = torch.tensor(value)
    result = scan_of(tmp_path, tensors)
    finding = only(result, f"{short.replace('_', '-')}-unusable")
    assert (finding.tensor, finding.expert) == (name, EXPERT)
    assert f"it is {word}" in finding.message
    assert result.verdict is Verdict.BROKEN


@pytest.mark.parametrize("short", ["weight_scale_2", "input_scale"])
def test_missing_scales_of_whole_matrices(tmp_path, short):
    tensors = sound()
    del tensors[tensor("down_proj", short)]
    assert only(scan_of(tmp_path, tensors), "missing-tensor").tensor == tensor("down_proj", short)


def test_w4a16_needs_no_input_scale_and_is_not_baked(tmp_path):
    tensors = {n: t for n, t in sound(scale=SMALL).items() if not n.endswith("input_scale")}
    save(tmp_path, tensors)
    quantization = {"quantization": {"quant_algo": "W4A16_NVFP4"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(quantization))
    result = run(tmp_path)
    assert (result.verdict, result.findings) == (Verdict.NOT_APPLICABLE, ())


@pytest.mark.parametrize("ratio", [3.0, 1.001])
def test_gate_and_up_that_differ(tmp_path, ratio):
    tensors = sound()
    name = tensor("gate_proj", "weight_scale_2")
    tensors[name] = tensors[name] / ratio
    finding = only(scan_of(tmp_path, tensors), "gate-up-scales-differ")
    assert finding.tensor == tensor("gate_proj", "weight_scale")
    assert f"gate_proj becomes {ratio:g} times too large" in finding.message
    assert "TensorRT-LLM uses the larger" in finding.message


def test_gate_and_up_that_differ_by_a_rounding(tmp_path):
    tensors = sound()
    name = tensor("up_proj", "weight_scale_2")
    tensors[name] = torch.nextafter(tensors[name], torch.tensor(1.0))
    result = scan_of(tmp_path, tensors)
    assert only(result, "gate-up-scales-rounded-apart").severity is Severity.NOTE


def test_input_scales_of_gate_and_up(tmp_path):
    tensors = sound()
    tensors[tensor("gate_proj", "input_scale")] *= 1.5
    assert only(scan_of(tmp_path, tensors), "input-scales-differ").severity is Severity.NOTE


def test_a_reciprocal(tmp_path):
    tensors = sound()
    for name in ("gate_proj", "up_proj"):
        tensors[tensor(name, "weight_scale_2")] = 1 / tensors[tensor(name, "weight_scale_2")]
    result = scan_of(tmp_path, tensors)
    assert "weight-scale-2-looks-reciprocal" in codes(result)
    assert "weight-scale-2-far-from-others" in codes(result)
    assert result.verdict is Verdict.BROKEN


@pytest.mark.parametrize("scale", [1e-12, 0.9])
def test_weights_of_a_magnitude_that_cannot_be_true(tmp_path, scale):
    tensors = sound()
    tensors[tensor("down_proj", "weight_scale_2")] = torch.tensor(scale)
    result = scan_of(tmp_path, tensors)
    assert "implausible-weight-magnitude" in codes(result)
    assert result.verdict is Verdict.BROKEN


def test_one_weight_scale_for_all_experts(tmp_path):
    tensors = sound()
    for expert in range(4):
        tensors[tensor("down_proj", "weight_scale_2", expert)] = torch.tensor(LARGE)
    assert codes(scan_of(tmp_path, tensors)) == ["weight-scale-2-same-for-all-experts"]


def test_an_expert_written_twice(tmp_path):
    tensors = sound()
    for short in ("weight", "weight_scale", "weight_scale_2"):
        tensors[tensor("down_proj", short, 3)] = tensors[tensor("down_proj", short, 1)].clone()
    finding = only(scan_of(tmp_path, tensors), "experts-look-identical")
    assert "experts 1 and 3" in finding.message


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (1.0, ["input-scale-far-above-others", "input-scale-of-one"]),
        (2.0**-9 * 101, ["input-scale-far-above-others"]),
        (2.0**-9 * 99, []),
        (2.0**-9 / 101, ["input-scale-far-below-others"]),
        (50.0, ["input-scale-far-above-others", "implausible-input-scale"]),
    ],
)
def test_experts_that_were_never_calibrated(tmp_path, value, found):
    tensors = sound()
    tensors[tensor("down_proj", "input_scale")] = torch.tensor(value)
    assert codes(scan_of(tmp_path, tensors)) == found


def test_a_layer_never_calibrated(tmp_path):
    tensors = sound()
    for name in tensors:
        if name.endswith("input_scale"):
            tensors[name] = torch.tensor(1.0)
    result = scan_of(tmp_path, tensors)
    assert set(codes(result)) == {"input-scale-of-one"}
    assert [finding.count for finding in result.findings] == [4, 4, 4]


@pytest.mark.parametrize("short", ["weight", "weight_scale"])
def test_codes_and_scales_that_do_not_fit(tmp_path, short):
    tensors = sound()
    name = tensor("down_proj", short)
    tensors[name] = tensors[name][:-1].clone()
    result = scan_of(tmp_path, tensors)
    assert "block-scales-do-not-fit" in codes(result)
    assert result.verdict is Verdict.BROKEN


@pytest.mark.parametrize("projection", GATED)
def test_an_expert_of_another_size(tmp_path, projection):
    """Codes and scales fit each other, and not the layer."""
    tensors = sound()
    for short in ("weight", "weight_scale"):
        tensors[tensor(projection, short)] = tensors[tensor(projection, short)][:16].clone()
    result = scan_of(tmp_path, tensors)
    finding = only(result, "expert-shapes-differ")
    assert (finding.expert, finding.tensor) == (EXPERT, tensor(projection, "weight_scale"))
    assert (result.verdict, finding.severity) == (Verdict.BROKEN, Severity.DAMAGE)
    assert "block scales [16, " in finding.message


def test_swizzled_scales_of_another_size_are_named(tmp_path):
    tensors = sound()
    name = tensor("down_proj", "weight_scale")
    tensors[name] = swizzle(tensors[name])
    findings = {finding.code: finding for finding in scan_of(tmp_path, tensors).findings}
    assert set(findings) == {"block-scales-do-not-fit", "zero-block-scales"}
    assert "already swizzled into 128x4 tiles" in findings["block-scales-do-not-fit"].message


@pytest.mark.parametrize("few", [True, False])
def test_swizzled_scales_of_the_same_size(tmp_path, monkeypatch, few):
    tensors = load_file(embedded.PATH)
    names = [n for n in tensors if n.endswith("gate_proj.weight_scale")]
    swizzled = names if not few else names[3:4]
    for name in swizzled:
        tensors[name] = swizzle(tensors[name])
    if not few:
        monkeypatch.setattr(scanning, "_FEW", 2)
    result = run(save(tmp_path, tensors))
    finding = only(result, "scales-look-swizzled")
    assert result.verdict is Verdict.BROKEN
    assert ("1 of 6 matrices was looked at" in finding.message) == (not few)


def test_missing_matrices_make_a_layer_unusable_and_are_still_scanned(tmp_path):
    tensors = sound()
    del tensors[tensor("down_proj", "weight")]
    with_bytes(tensors, tensor("up_proj", "weight_scale", 0), {3: 0x7F})
    result = scan_of(tmp_path, tensors)
    assert {"layer-cannot-be-used", "nan-block-scales"} <= set(codes(result))
    assert {projection.kind for projection in result.projections} == {Kind.UNUSABLE}
    assert result.verdict is Verdict.BROKEN


def test_a_missing_shard(tmp_path):
    save(tmp_path, sound(), shards=3, index=True)
    (tmp_path / shard_names(3)[1]).unlink()
    result = run(tmp_path)
    assert result.verdict is Verdict.BROKEN
    assert codes(result).count("missing-shard") > 1
    assert any(finding.advice == "download those files" for finding in result.findings)


def test_one_shard_of_several_is_judged_for_what_is_in_it(tmp_path):
    tensors = sound() | sound("model.layers.6.mlp.experts")
    first = {n: t for n, t in tensors.items() if "layers.5" in n}
    names = shard_names(2)
    second = {n: t for n, t in tensors.items() if n not in first}
    for name, part in zip(names, (first, second), strict=True):
        save(tmp_path, part)
        (tmp_path / "model.safetensors").rename(tmp_path / name)
    weight_map = {n: names[n not in first] for n in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    result = run(tmp_path / names[0])
    assert result.verdict is Verdict.CLEAN
    assert "of this one shard of several" in result.reason
    assert codes(result) == ["one-shard-of-several"]


def test_a_config_of_another_model(tmp_path):
    config = {**CONFIG, "num_experts": 8, "text_config": {"hidden_size": 96}}
    result = run(save(tmp_path, sound(), config=config))
    assert codes(result) == ["config-contradicts-tensors"] * 2
    assert "hidden size: config 96, tensors 64" in result.findings[1].message
    assert "experts: config 8, tensors 4" in result.findings[0].message


@pytest.mark.parametrize("scale", [LARGE, SMALL])
def test_experts_of_unknown_names_are_no_dense_linears(tmp_path, scale):
    known = {"up_proj": "linear_fc1", "down_proj": "linear_fc2"}
    tensors = {}
    for name, value in sound(names=UNGATED, scale=scale).items():
        for old, new in known.items():
            name = name.replace(old, new)
        tensors[name] = value
    result = scan_of(tmp_path, tensors)
    assert set(codes(result)) == {"experts-of-unknown-names"}
    assert [finding.count for finding in result.findings] == [4, 4]
    assert result.verdict is (Verdict.CLEAN if scale == LARGE else Verdict.AFFECTED)
    assert (result.dense, result.totals.matrices) == ((), 8)


def test_a_shared_expert_is_a_dense_linear(tmp_path):
    shared = {n.replace(DENSE, "model.layers.5.mlp.shared_experts.up_proj"): t
              for n, t in with_dense().items()}  # fmt: skip
    result = scan_of(tmp_path, shared)
    assert (result.findings, len(result.dense)) == ((), 1)


def test_a_dense_linear_of_stacked_matrices(tmp_path):
    tensors = with_dense()
    for short in ("weight", "weight_scale"):
        old = tensors[f"{DENSE}.{short}"]
        tensors[f"{DENSE}.{short}"] = old.reshape(4, 8, -1)
    for weights in (False, True):
        result = scan_of(tmp_path, tensors, weights=weights)
        assert (result.findings, result.dense[0].damage.blocks) == ((), 128)


def test_dense_linears_stand_apart(tmp_path):
    tensors = with_dense()
    tensors[f"{DENSE}.weight_scale_2"] = torch.tensor(SMALL)
    result = scan_of(tmp_path, tensors)
    assert result.verdict is Verdict.CLEAN
    assert [one.projection for one in result.dense] == ["o_proj"]
    assert result.dense[0].affected == 1
    assert result.totals.dense_matrices == 1
    assert result.totals.affected_matrices == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e5m2])
def test_a_dense_linear_whose_block_scales_are_none(tmp_path, dtype):
    tensors = with_dense()
    tensors[f"{DENSE}.weight_scale"] = tensors[f"{DENSE}.weight_scale"].float().to(dtype)
    result = scan_of(tmp_path, tensors)
    finding = only(result, "tensor-cannot-be-used")
    assert finding.tensor == f"{DENSE}.weight_scale"
    assert result.verdict is Verdict.BROKEN


def test_a_dense_linear_in_another_format_is_none_of_ours(tmp_path):
    """FP8 has weight_scale and input_scale as well, but no scale of the scales."""
    other = {
        f"{DENSE}.weight": torch.zeros(32, 64).to(FLOAT8),
        f"{DENSE}.weight_scale": torch.tensor(0.5),
        f"{DENSE}.input_scale": torch.tensor(0.5),
    }
    result = scan_of(tmp_path, sound() | other)
    assert (result.findings, result.dense) == ((), ())


def test_dense_linears_alone_are_not_applicable(tmp_path):
    tensors = {n: t for n, t in with_dense().items() if n.startswith(DENSE)}
    result = scan_of(tmp_path, tensors)
    assert result.verdict is Verdict.NOT_APPLICABLE
    assert "dense NVFP4 linears (1)" in result.reason


def test_an_unquantized_checkpoint_is_not_applicable(tmp_path):
    result = scan_of(tmp_path, {"model.norm.weight": torch.zeros(4)})
    assert (result.verdict, result.projections) == (Verdict.NOT_APPLICABLE, ())


@pytest.mark.parametrize("expert", [0, 63])
def test_one_destroyed_expert_among_64_leads(tmp_path, expert):
    """Large weights everywhere, one matrix with small ones: every mean hides it."""
    tensors: dict[str, Tensor] = {}
    for number in range(4):
        prefix = f"model.layers.{number}.mlp.experts"
        tensors |= sound(prefix)
    base = sound("model.layers.9.mlp.experts")
    for number in range(64):
        for name, value in base.items():
            old = "experts.2."
            if old in name:
                tensors[name.replace(old, f"experts.{number}.")] = value.clone()
    for name in tensors:
        if name.endswith("weight_scale_2") and "layers.9" in name:
            number = int(name.split("experts.")[1].split(".")[0])
            tensors[name] = tensors[name] * (1 + number / 100)
            if number == expert and "down" in name:
                tensors[name] = torch.tensor(SMALL / 8)
    result = scan_of(tmp_path, tensors)
    assert result.verdict is Verdict.AFFECTED
    first = result.projections[0]
    assert (first.layer, first.projection) == ("model.layers.9.mlp.experts", "down_proj")
    assert (first.worst[0].expert, first.affected) == (expert, 1)
    assert result.layers[0].layer == first.layer
    assert result.layers[0].worst_expert == expert
    assert f"down_proj, expert {expert}" in result.reason
    assert first.damage.rms_error < first.worst[0].damage.rms_error / 4


def test_exit_codes(tmp_path):
    clean = scan_of(tmp_path / "a", sound())
    tensors = sound()
    tensors[tensor("gate_proj", "input_scale")] *= 1.5
    noted = scan_of(tmp_path / "b", tensors)
    affected = scan_of(tmp_path / "c", sound(scale=SMALL))
    broken = sound()
    del broken[tensor("down_proj", "weight_scale_2")]
    broken_one = scan_of(tmp_path / "d", broken)
    expected = {
        FailOn.NEVER: [0, 0, 0, 0],
        FailOn.DAMAGE: [0, 0, 1, 1],
        FailOn.FINDINGS: [0, 1, 1, 1],
    }
    for fail_on, exits in expected.items():
        results = (clean, noted, affected, broken_one)
        assert [result.exit_code(fail_on) for result in results] == exits
