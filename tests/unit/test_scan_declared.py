"""What configs declare: lost input scales, weight-only that never had any, other formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoints import EXPERTS, GATED, save
from tests.scan_cases import CONFIG, DENSE, PREFIX, SMALL, codes, run, sound, tensor, with_dense
from trtllm_b12x_fix.checkpoint.declared import Activations, Declaration, Scheme
from trtllm_b12x_fix.checkpoint.findings import Severity
from trtllm_b12x_fix.errors import InputError
from trtllm_b12x_fix.scan.bake import Bake
from trtllm_b12x_fix.scan.result import ScanResult, Verdict

OTHER = "model.layers.6.mlp.experts"
NVFP4 = {"quant_algo": "NVFP4", "group_size": 16}
W4A16 = {"quant_algo": "W4A16_NVFP4", "group_size": 16}


def bare(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t for name, t in tensors.items() if not name.endswith("input_scale")}


def mixed(**layers: str) -> dict[str, Any]:
    """ModelOpt's config of layers of their own algorithm, by block number ("b5", "b6")."""
    names = {
        f"{PREFIX.replace('5', block[1:])}.{expert}.{projection}": {"quant_algo": algorithm}
        for block, algorithm in layers.items()
        for expert in range(EXPERTS)
        for projection in GATED
    }
    return {"quant_algo": "MIXED_PRECISION", "quantized_layers": names}


def groups(*activations: Any, targets: list[str] | None = None) -> dict[str, Any]:
    """compressed-tensors' config, a group for each."""
    weights = {"num_bits": 4, "type": "float", "group_size": 16}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {
            f"group_{place}": {
                "weights": weights,
                "input_activations": one,
                "targets": targets or ["Linear"],
            }
            for place, one in enumerate(activations)
        },
    }


FP4 = {"num_bits": 4, "type": "float", "dynamic": "local"}
FP8 = {"num_bits": 8, "type": "float"}


def scan_of(
    folder: Path,
    tensors: dict[str, Tensor],
    own: Any = None,
    shared: Any = None,
) -> ScanResult:
    """Scan tensors beside hf_quant_config.json and config.json's quantization_config."""
    config = CONFIG | ({} if shared is None else {"quantization_config": shared})
    save(folder, tensors, config=config)
    if own is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": own}))
    return run(folder)


def lost(result: ScanResult) -> dict[str, int]:
    found = [f for f in result.findings if f.code == "input-scales-lost"]
    assert all(f.severity is Severity.DAMAGE and "TensorRT-LLM leaves 1.0" in f.message
               for f in found)  # fmt: skip
    layers = {f.layer for f in found}
    return {layer: sum(f.count for f in found if f.layer == layer) for layer in layers}


@pytest.mark.parametrize(
    ("own", "shared"),
    [
        (NVFP4, None),
        ({"quant_algo": "nvfp4"}, None),
        ({"quant_algo": "NVFP4_AWQ"}, None),
        (None, NVFP4),
        (None, groups(FP4)),
        (None, groups(FP4, FP4)),
        (NVFP4, groups(None)),  # ModelOpt's own file counts
        (mixed(b5="NVFP4"), None),
        (None, groups(FP4, targets=[f"{PREFIX}.0.up_proj", f"{PREFIX}.1.up_proj"])),
    ],
)
def test_a_layer_that_declares_nvfp4_and_has_no_input_scales(tmp_path, own, shared):
    result = scan_of(tmp_path, bare(sound(scale=SMALL)), own, shared)
    assert lost(result) == {PREFIX: EXPERTS * len(GATED)}
    assert (result.verdict, set(codes(result))) == (Verdict.BROKEN, {"input-scales-lost"})
    # It is served as NVFP4, so it is baked.
    assert result.totals.affected_matrices == EXPERTS * len(GATED)
    assert "beside that, the b12x bake" in result.reason


def test_only_the_layer_that_lost_them_is_accused(tmp_path):
    result = scan_of(tmp_path, sound() | bare(sound(OTHER)), NVFP4)
    assert lost(result) == {OTHER: EXPERTS * len(GATED)}
    assert result.verdict is Verdict.BROKEN


def test_a_dense_linear_that_lost_its_input_scale(tmp_path):
    tensors = with_dense()
    del tensors[f"{DENSE}.input_scale"]
    assert set(lost(scan_of(tmp_path, tensors, NVFP4))) == {DENSE.rpartition(".")[0]}


@pytest.mark.parametrize(
    ("own", "shared"),
    [
        (W4A16, None),
        (None, W4A16),
        (None, groups(None)),
        (W4A16, groups(FP4)),
        (mixed(b5="W4A16_NVFP4"), None),
        (mixed(b5="W4A16_NVFP4", b6="NVFP4"), None),
    ],
)
def test_weight_only_is_not_accused(tmp_path, own, shared):
    alone = scan_of(tmp_path / "alone", bare(sound(scale=SMALL)), own, shared)
    assert (alone.verdict, alone.findings) == (Verdict.NOT_APPLICABLE, ())
    assert {one.bake for one in alone.projections} == {Bake.WEIGHT_ONLY}
    if own is not None and len(own.get("quantized_layers", ())) > EXPERTS * len(GATED):
        both = scan_of(tmp_path / "both", bare(sound(scale=SMALL)) | sound(OTHER), own, shared)
        assert (both.verdict, both.findings) == (Verdict.CLEAN, ())


def test_the_matrix_says_that_weight_only_is_not_rounded_twice(tmp_path):
    alone = scan_of(tmp_path / "alone", bare(sound()), W4A16)
    assert len(alone.matrix) == 12
    assert not any(row.bakes or row.versions for row in alone.matrix)
    both = mixed(b5="W4A16_NVFP4", b6="NVFP4")
    result = scan_of(tmp_path / "both", bare(sound()) | sound(OTHER), both)
    assert [row.bakes for row in result.matrix] == [True] * 4 + [False] * 8
    assert {row.shape.layers for row in result.matrix} == {1}


@pytest.mark.parametrize("shared", [None, groups(FP4, None), {"quant_algo": "FP8"}])
def test_what_nothing_declares_is_a_note(tmp_path, shared):
    result = scan_of(tmp_path, bare(sound(scale=SMALL)), None, shared)
    assert (result.verdict, set(codes(result))) == (Verdict.NOT_APPLICABLE, {"no-input-scales"})
    assert {finding.severity for finding in result.findings} == {Severity.NOTE}


def test_weight_only_with_input_scales_is_a_note(tmp_path):
    result = scan_of(tmp_path, sound(scale=SMALL), W4A16)
    assert result.verdict is Verdict.NOT_APPLICABLE
    assert set(codes(result)) == {"input-scales-of-weight-only"}


@pytest.mark.parametrize(
    ("own", "shared"), [({"quant_algo": "W4A8_NVFP4_FP8"}, None), (None, groups(FP8))]
)
def test_activations_that_b12x_does_not_take(tmp_path, own, shared):
    result = scan_of(tmp_path, sound(scale=SMALL), own, shared)
    assert (result.verdict, set(codes(result))) == (Verdict.NOT_APPLICABLE, {"not-run-by-b12x"})
    assert "do not run on it and nothing is baked" in result.reason


# ---- one block scale for 32 codes


def wide(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every second column of block scales left out."""
    return {
        name: t[..., ::2].contiguous() if name.endswith("weight_scale") else t
        for name, t in tensors.items()
    }


@pytest.mark.parametrize("own", [None, {"quant_algo": "W4A8_NVFP4_FP8", "group_size": 32}])
def test_other_formats_with_wide_blocks_are_sound(tmp_path, own):
    result = scan_of(tmp_path, wide(with_dense()), own)
    assert (result.verdict, set(codes(result))) == (Verdict.NOT_APPLICABLE, {"not-run-by-b12x"})
    assert (result.dense, result.totals.unjudged_matrices) == ((), 0)


def test_wide_blocks_in_nvfp4_are_damage(tmp_path):
    """Where the config says 16, a block scale of two is missing."""
    result = scan_of(tmp_path, wide(sound()), NVFP4)
    assert (result.verdict, codes(result)) == (Verdict.BROKEN, ["layer-cannot-be-used"])


def test_one_matrix_with_wide_blocks_is_damage(tmp_path):
    tensors = sound()
    name = tensor("up_proj", "weight_scale")
    result = scan_of(tmp_path, tensors | wide({name: tensors[name]}))
    assert (result.verdict, codes(result)) == (Verdict.BROKEN, ["block-scales-do-not-fit"])


def test_a_dense_linear_with_wide_blocks_in_nvfp4_is_damage(tmp_path):
    dense = {name: t for name, t in with_dense().items() if name.startswith(DENSE)}
    result = scan_of(tmp_path, sound() | wide(dense), NVFP4)
    assert (result.verdict, codes(result)) == (Verdict.BROKEN, ["block-scales-do-not-fit"])
    assert len(result.dense) == 1


@pytest.mark.parametrize("own", [None, NVFP4])
def test_wide_blocks_of_experts_under_unknown_names(tmp_path, own):
    result = scan_of(tmp_path, wide(sound("model.layers.5.mlp.routed_experts")), own)
    found = set(codes(result)) - {"experts-of-unknown-names"}
    if own is None:
        assert (result.verdict, found) == (Verdict.NOT_APPLICABLE, {"not-run-by-b12x"})
    else:
        assert (result.verdict, found) == (Verdict.BROKEN, {"block-scales-do-not-fit"})


# ---- the declaration itself


def test_strange_sections_declare_nothing():
    sections = [
        None, [], "x", {"quant_algo": 5}, {"quantized_layers": [1]}, {"config_groups": []},
        {"quantized_layers": {"a": 5}}, {"config_groups": {"a": None, "b": {"weights": []}}},
        {"group_size": -1}, {"group_size": True},
    ]  # fmt: skip
    assert Declaration(sections).of("a") == Scheme()
    assert Declaration([{"quant_algo": "NEW"}]).of("a") == Scheme("NEW")


def test_parts_that_disagree_declare_nothing():
    names = {"a.experts.0.up": {"quant_algo": "NVFP4"}, "a.experts.1.up": W4A16}
    declaration = Declaration([{"quant_algo": "MIXED_PRECISION", "quantized_layers": names}])
    assert declaration.of("a.experts") == Scheme()
    assert declaration.of("a.experts.0.up").activations is Activations.NVFP4
    assert declaration.of("a.experts.1.up").block == 16


def test_a_name_is_no_prefix_of_a_longer_one():
    names = {"layers.1.experts": W4A16, "layers.10.experts": NVFP4}
    declaration = Declaration([{"quantized_layers": names}])
    assert declaration.of("layers.1.experts").algorithm == "W4A16_NVFP4"
    assert declaration.of("layers.1") == Scheme("W4A16_NVFP4", Activations.NOT_QUANTIZED, 16)
    assert declaration.of("layers.2.experts") == Scheme()


def test_patterns_are_not_evaluated(tmp_path):
    """One that would run for ever is as good as any other."""
    evil = groups(None, targets=["re:(a+)+$"])
    evil["config_groups"]["b"] = groups(FP4)["config_groups"]["group_0"]
    result = scan_of(tmp_path, bare(sound(scale=SMALL)), None, evil)
    assert result.verdict is Verdict.NOT_APPLICABLE


@pytest.mark.parametrize("kind", ["folder", "link", "list"])
def test_a_quantization_config_that_is_none_is_not_called_absent(tmp_path, kind):
    save(tmp_path, sound())
    path = tmp_path / "hf_quant_config.json"
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to("nowhere")
    else:
        path.write_text("[]")
    with pytest.raises(InputError, match="hf_quant_config"):
        run(tmp_path)


def test_numbers_do_not_depend_on_the_declaration(tmp_path):
    plain = scan_of(tmp_path / "a", sound(scale=SMALL))
    declared = scan_of(tmp_path / "b", sound(scale=SMALL), NVFP4, groups(FP4))
    assert plain.projections == declared.projections
    assert torch.equal(*(torch.from_numpy(one.projections[0].baked) for one in (plain, declared)))
