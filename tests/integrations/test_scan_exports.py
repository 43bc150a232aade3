"""Real exports of ModelOpt through the scan: sound, the same numbers however they are stored."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.exports import EXPERTS, FAMILIES, VOCABULARY, Export, qwen3_moe
from tests.scan_cases import codes, document, run
from tests.unit.test_scan_statistics import direct, same
from trtllm_b12x_fix.checkpoint.findings import Severity
from trtllm_b12x_fix.scan.result import Kind, Verdict

pytestmark = [
    # ModelOpt warns about every transformers release newer than itself.
    pytest.mark.filterwarnings("ignore::Warning"),
    pytest.mark.xdist_group("modelopt"),
]

ModelOptExport = Callable[[str], Export]


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def export(family: str, modelopt_export: ModelOptExport) -> Export:
    return modelopt_export(family)


def scales_of(tensors: dict[str, Tensor], base: str):
    return tensors[f"{base}.weight_scale"].view(torch.uint8).numpy().ravel()


@pytest.mark.parametrize("weights", [False, True])
def test_an_export_is_sound_and_in_the_damaged_range(family, export, weights):
    result = run(export.folder, weights=weights)
    assert result.verdict is Verdict.AFFECTED
    assert not [f for f in result.findings if f.severity is Severity.DAMAGE]
    expected = {"config-contradicts-tensors"} if family == "latent_nemotron_h" else set()
    # ModelOpt 0.47 gives all experts of a layer one input_scale, each its own weight_scale_2.
    assert set(codes(result)) == expected
    layers, projections = 2, 3 if FAMILIES[family].gated else 2
    assert result.totals.layers == layers
    assert result.totals.matrices == layers * projections * EXPERTS
    assert result.totals.affected_matrices == result.totals.matrices
    assert {one.kind for one in result.projections} == {Kind.EXPERTS}


@pytest.mark.parametrize("weights", [False, True])
def test_every_expert_is_what_block_by_block_computation_gives(family, export, weights):
    result = run(export.folder, weights=weights)
    seen = 0
    for projection in result.projections:
        assert len(projection.worst) == EXPERTS
        for one in projection.worst:
            base = f"{projection.layer}.{one.expert}.{projection.projection}"
            assert one.weight_scale_2 == float(export.tensors[f"{base}.weight_scale_2"])
            packed = export.tensors[f"{base}.weight"].view(torch.uint8).numpy().ravel()
            scales = scales_of(export.tensors, base)
            same(one.damage, direct(scales, one.weight_scale_2, packed if weights else None))
            seen += 1
    assert seen == result.totals.matrices


def test_dense_linears_of_an_export_are_kept_apart(family, export):
    dense = run(export.folder).dense
    stored = {n.removesuffix(".weight_scale") for n in export.tensors if n.endswith("weight_scale")}
    assert {f"{one.layer}.{one.projection}" for one in dense} == {
        name for name in stored if ".experts." not in name
    }


def exact(export: Export) -> dict[str, Tensor]:
    """Global scales moved to powers of two, whose reciprocals fp32 holds."""
    return {
        name: torch.exp2(tensor.log2().floor())
        if name.endswith((".weight_scale_2", ".input_scale"))
        else tensor
        for name, tensor in export.tensors.items()
    }


def compressed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same in compressed-tensors' names, global scales as reciprocals of shape [1]."""
    names = {
        ".weight_scale_2": ".weight_global_scale",
        ".input_scale": ".input_global_scale",
        ".weight": ".weight_packed",
    }
    quantized = {n.removesuffix(".weight_scale") for n in tensors if n.endswith(".weight_scale")}
    result = {}
    for name, tensor in tensors.items():
        base, _, short = name.rpartition(".")
        new = names.get(f".{short}")
        if base in quantized and new:
            value = tensor if short == "weight" else (1 / tensor).reshape(1)
            result[base + new] = value.clone()
        else:
            result[name] = tensor
    return result


def numbers(folder: Path, *arguments: str) -> dict:
    _, report = document(folder, *arguments)
    for name in ("source", "dialects", "advice", "reason", "counting"):
        report.pop(name)
    for finding in report["findings"]:
        finding.pop("tensor")
        finding.pop("message")
    return report


@pytest.mark.parametrize("weights", [False, True])
def test_both_dialects_give_the_same_numbers(family, export, tmp_path, weights):
    arguments = ["--weights"] if weights else []
    ours = exact(export)
    reports = []
    for name, tensors in (("modelopt", ours), ("compressed", compressed(ours))):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
        reports.append(numbers(tmp_path / name, *arguments))
    assert reports[0] == reports[1]
    assert run(tmp_path / "compressed").dialects == ("compressed-tensors",)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("weights", [False, True])
def test_fused_experts_give_the_same_numbers(family, export, tmp_path, turned, weights):
    """Down alone is the same matrix in both; gate_up is gate and up together."""
    prefix = FAMILIES[family].exported.format(FAMILIES[family].moe_layers[0])
    first = ("gate_proj", "up_proj") if FAMILIES[family].gated else ("up_proj",)
    fused = {}
    for name, parts in (("gate_up_proj" if len(first) > 1 else "up_proj", first),
                        ("down_proj", ("down_proj",))):  # fmt: skip
        for suffix, short in (("", "weight"), ("_weight_scale", "weight_scale")):
            rows = [
                torch.cat([export.tensors[f"{prefix}.{e}.{p}.{short}"].view(torch.uint8)
                           for p in parts])
                for e in range(EXPERTS)
            ]  # fmt: skip
            stacked = torch.stack(rows)
            stacked = stacked.transpose(1, 2).contiguous() if turned else stacked
            fused[f"{prefix}.{name}{suffix}"] = (
                stacked if short == "weight" else stacked.view(torch.float8_e4m3fn)
            )
        for short in ("weight_scale_2", "input_scale"):
            values = [export.tensors[f"{prefix}.{e}.{parts[0]}.{short}"] for e in range(EXPERTS)]
            fused[f"{prefix}.{name}_{short}"] = torch.stack(values)
    save_file(fused, tmp_path / "model.safetensors")
    split = [p for p in run(export.folder, weights=weights).projections if p.layer == prefix]
    whole = run(tmp_path, weights=weights).projections
    for one in whole:
        parts = [p for p in split if p.projection == one.projection] or [
            p for p in split if p.projection in first
        ]
        blocks = sum(p.damage.blocks for p in parts)
        assert one.damage.blocks == blocks
        assert (one.baked == sum(p.baked for p in parts)).all()
        mean = sum(p.damage.mean_error * p.damage.blocks for p in parts) / blocks
        assert one.damage.mean_error == pytest.approx(mean, rel=1e-12)
        if len(parts) == 1:
            assert one.damage == parts[0].damage
            assert one.worst == parts[0].worst


# ---- recipes that are no NVFP4 of 16 codes with quantized activations

#: Verdicts of healthy exports; none may be accused of anything.
RECIPES = {
    "NVFP4_EXPERTS_ONLY_CFG": Verdict.AFFECTED,
    "W4A16_NVFP4_CFG": Verdict.NOT_APPLICABLE,
    "NVFP4_MLP_WEIGHT_ONLY_CFG": Verdict.NOT_APPLICABLE,  # one block scale for 32 codes
    "W4A8_NVFP4_FP8_CFG": Verdict.NOT_APPLICABLE,  # the same, and FP8 activations
    "FP8_DEFAULT_CFG": Verdict.NOT_APPLICABLE,
    "MXFP4_DEFAULT_CFG": Verdict.NOT_APPLICABLE,
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_other_recipes_are_not_accused(tmp_path, recipe):
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    def calibrate(model: torch.nn.Module) -> None:
        generator = torch.Generator().manual_seed(1)
        model(input_ids=torch.randint(VOCABULARY, (2, 32), generator=generator))

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = qwen3_moe()
        mtq.quantize(model, copy.deepcopy(getattr(mtq, recipe)), calibrate)
        export_hf_checkpoint(model, export_dir=tmp_path)
    for weights in (False, True):
        result = run(tmp_path, weights=weights)
        assert result.verdict is RECIPES[recipe]
        assert not [f for f in result.findings if f.severity is Severity.DAMAGE]
        assert set(codes(result)) <= {"not-run-by-b12x"}


def test_an_export_that_lost_its_input_scales(export, tmp_path):
    for file in export.folder.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    kept = {n: t for n, t in export.tensors.items() if not n.endswith("input_scale")}
    save_file(kept, tmp_path / "model.safetensors")
    result = run(tmp_path)
    assert result.verdict is Verdict.BROKEN
    assert "input-scales-lost" in codes(result)
    assert result.totals.affected_matrices == result.totals.matrices


def test_the_quantization_config_is_read(export):
    algorithm = json.loads((export.folder / "hf_quant_config.json").read_text())
    assert run(export.folder).quant_algo == algorithm["quantization"]["quant_algo"] == "NVFP4"
