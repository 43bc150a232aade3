"""Which layers a checkpoint holds: the names that model families use, and choosing among them."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoints import (
    EXPERTS,
    GATED,
    HIDDEN,
    INTERMEDIATE,
    QWEN,
    UNGATED,
    experts,
    raw,
    save,
    write_index,
)
from tests.checkpoints import entry as entry_of
from trtllm_b12x_fix import cli
from trtllm_b12x_fix.checkpoint.assemble import load_experts
from trtllm_b12x_fix.checkpoint.discovery import discover
from trtllm_b12x_fix.checkpoint.files import open_checkpoint
from trtllm_b12x_fix.checkpoint.findings import Severity
from trtllm_b12x_fix.checkpoint.layers import (
    LayerEntry,
    Layers,
    Stack,
    Storage,
    UnusableLayer,
    choose,
)
from trtllm_b12x_fix.errors import InputError, ShapeError
from trtllm_b12x_fix.layer import Activation
from trtllm_b12x_fix.report import listing

MIXTRAL = ("w1", "w3", "w2")
NEMOTRON = "backbone.layers.{}.mixer.experts"
DEEPSEEK_MTP = QWEN.format(61)

#: prefix, projection names, block number, stack
FAMILIES = [
    (NEMOTRON.format(3), UNGATED, 3, Stack.MODEL),
    (QWEN.format(0), GATED, 0, Stack.MODEL),
    ("model.language_model.layers.7.mlp.experts", GATED, 7, Stack.MODEL),
    ("language_model.model.layers.12.feed_forward.experts", GATED, 12, Stack.MODEL),
    ("language_model.layers.5.mlp.experts", GATED, 5, Stack.MODEL),
    ("model.layers.2.block_sparse_moe.experts", MIXTRAL, 2, Stack.MODEL),
    ("transformer.h.4.moe.experts", GATED, 4, Stack.MODEL),
    ("mtp.layers.0.mlp.experts", GATED, 0, Stack.SIDE),
    ("mtp.layers.0.mixer.experts", UNGATED, 0, Stack.SIDE),
    ("model.mtp.layers.1.mlp.experts", GATED, 1, Stack.SIDE),
    (DEEPSEEK_MTP, GATED, 61, Stack.MODEL),
    ("vision_tower.blocks.3.mlp.experts", GATED, 3, Stack.SIDE),
    ("audio_tower.layers.3.mlp.experts", GATED, 3, Stack.SIDE),
    ("model.mtp_layers.0.mlp.experts", GATED, None, Stack.SIDE),
    ("mtp_block.layers.0.mlp.experts", GATED, 0, Stack.SIDE),
    ("eagle3.layers.0.mlp.experts", GATED, 0, Stack.SIDE),
    ("draft_model.layers.2.mlp.experts", GATED, 2, Stack.SIDE),
    ("model.nextn_predict_layers.0.mlp.experts", GATED, None, Stack.SIDE),
    ("experts", GATED, None, Stack.MODEL),
]


def found(folder: Path, tensors: dict[str, torch.Tensor]) -> list[LayerEntry]:
    layers = discover(open_checkpoint(save(folder, tensors)))
    assert not layers.unusable
    return layers.usable


def refused(folder: Path, tensors: dict[str, torch.Tensor]) -> str:
    """Why the checkpoint's only layer cannot be checked; choosing it says the same."""
    layers = discover(open_checkpoint(save(folder, tensors)))
    assert (layers.usable, len(layers.unusable)) == ([], 1)
    unusable = layers.unusable[0]
    with pytest.raises(InputError) as error:
        choose(layers, unusable.prefix, "name")
    assert str(error.value) == unusable.reason
    return unusable.reason


@pytest.mark.parametrize(("prefix", "names", "number", "stack"), FAMILIES)
def test_a_family_is_found(tmp_path, prefix, names, number, stack):
    (entry,) = found(tmp_path, experts(prefix, names))
    assert (entry.prefix, entry.number, entry.stack) == (prefix, number, stack)
    assert (entry.experts, entry.hidden, entry.intermediate) == (EXPERTS, HIDDEN, INTERMEDIATE)
    assert entry.is_gated == (names != UNGATED)
    assert (entry.storage, entry.present) == (Storage.SPLIT, True)
    gate, up, down = (None, *names) if names == UNGATED else names
    assert (entry.names.gate, entry.names.up, entry.names.down) == (gate, up, down)
    assert entry.matrix(1, up) == f"{prefix}.1.{up}"


@pytest.mark.parametrize(
    "other",
    [
        "shared_experts.{}",
        "shared_expert.{}",
        "shared_experts.0.{}",
        "{}",
        "gate.{}",
    ],
)
def test_other_linears_are_not_experts(tmp_path, other):
    """Shared experts and dense blocks run on other kernels."""
    base = "model.layers.0.mlp."
    alone = {}
    for name, tensor in experts("x", count=1).items():
        _, _, projection, short = name.split(".")
        alone[f"{base}{other.format(projection)}.{short}"] = tensor
    assert found(tmp_path / "alone", alone) == []
    (entry,) = found(tmp_path / "both", alone | experts(QWEN.format(0)))
    assert (entry.prefix, entry.experts) == (QWEN.format(0), EXPERTS)


def test_layers_come_in_order_of_their_numbers(tmp_path):
    tensors = {}
    for number in (10, 2, 0, 61):
        tensors |= experts(QWEN.format(number), count=1)
    tensors |= experts("mtp.layers.0.mlp.experts", count=1)
    entries = found(tmp_path, tensors)
    assert [(e.stack, e.number) for e in entries] == [
        *((Stack.MODEL, number) for number in (0, 2, 10, 61)),
        (Stack.SIDE, 0),
    ]


def test_shapes_are_each_layers_own(tmp_path):
    tensors = experts(QWEN.format(0), count=2) | experts(
        QWEN.format(1), count=3, hidden=32, intermediate=16
    )
    first, second = found(tmp_path, tensors)
    assert (first.experts, first.hidden, first.intermediate) == (2, HIDDEN, INTERMEDIATE)
    assert (second.experts, second.hidden, second.intermediate) == (3, 32, 16)


# ---- not NVFP4


def test_experts_in_bf16_are_left_out(tmp_path):
    plain = {f"{QWEN.format(0)}.{e}.{n}.weight": torch.zeros(4, 4) for e in range(2) for n in GATED}
    assert found(tmp_path, plain) == []
    (entry,) = found(tmp_path, plain | experts(QWEN.format(1)))
    assert entry.number == 1


def test_experts_in_fp8_are_left_out(tmp_path):
    """They have a weight and a weight_scale, as NVFP4's have."""
    fp8 = {}
    for expert in range(2):
        for name in GATED:
            base = f"{QWEN.format(0)}.{expert}.{name}"
            fp8[f"{base}.weight"] = torch.zeros(32, 64).to(torch.float8_e4m3fn)
            fp8[f"{base}.weight_scale"] = torch.tensor(0.1)
            fp8[f"{base}.input_scale"] = torch.tensor(0.1)
    assert found(tmp_path, fp8) == []
    (entry,) = found(tmp_path, fp8 | experts(QWEN.format(1)))
    assert entry.number == 1


@pytest.mark.parametrize("suffix", ["", ".weight"])
def test_fused_experts_in_bf16_are_left_out(tmp_path, suffix):
    prefix = QWEN.format(0)
    plain = {f"{prefix}.{n}{suffix}": torch.zeros(2, 4, 4) for n in ("gate_up_proj", "down_proj")}
    assert found(tmp_path, plain) == []


def test_one_expert_in_nvfp4_among_others_is_an_error(tmp_path):
    tensors = experts(QWEN.format(0))
    for name in GATED:
        tensors[f"{QWEN.format(0)}.0.{name}.weight"] = torch.zeros(4, 4)
    text = refused(tmp_path, tensors)
    assert re.search(r"experts\.0\.\w+_proj is not NVFP4, but .*experts\.[123]\.\w+_proj is", text)


# ---- incomplete


def test_a_missing_expert_is_named(tmp_path):
    tensors = {n: t for n, t in experts(QWEN.format(3)).items() if ".experts.2." not in n}
    reason = refused(tmp_path, tensors)
    for text in (tmp_path.name, QWEN.format(3), "expert 2 is missing", "expert 3 is there"):
        assert text in reason


@pytest.mark.parametrize("name", GATED)
def test_a_missing_projection_is_named(tmp_path, name):
    lost = f"{QWEN.format(3)}.1.{name}"
    tensors = {n: t for n, t in experts(QWEN.format(3)).items() if not n.startswith(f"{lost}.")}
    reason = refused(tmp_path, tensors)
    for text in (tmp_path.name, f"{QWEN.format(3)}.1", f"{name} is missing"):
        assert text in reason


def test_a_layer_without_any_down_projection_is_named(tmp_path):
    tensors = {n: t for n, t in experts(QWEN.format(3)).items() if "down_proj" not in n}
    assert f"{QWEN.format(3)}.0: down_proj is missing" in refused(tmp_path, tensors)


@pytest.mark.parametrize("shape", [(32,), (0, 32), (32, 0), (2, 16, 16), ()])
def test_codes_that_are_no_matrix_are_named(tmp_path, shape):
    name = f"{QWEN.format(0)}.0.up_proj.weight"
    tensors = experts(QWEN.format(0)) | {name: torch.zeros(shape, dtype=torch.uint8)}
    reason = refused(tmp_path, tensors)
    for text in ("model.safetensors", name, str(list(shape))):
        assert text in reason


def test_fused_experts_without_a_down_projection_are_named(tmp_path):
    base = f"{QWEN.format(0)}.gate_up_proj"
    tensors = {
        base: torch.zeros(2, 64, 32, dtype=torch.uint8),
        f"{base}_weight_scale": torch.zeros(2, 64, 4).to(torch.float8_e4m3fn),
    }
    assert "down_proj is missing" in refused(tmp_path, tensors)


# ---- choosing


def entries(*prefixes: str, folder: Path) -> Layers:
    tensors = {}
    for prefix in prefixes:
        tensors |= experts(prefix, count=1, hidden=16, intermediate=16)
    return Layers(found(folder, tensors), [])


@pytest.mark.parametrize(
    ("wanted", "prefix"),
    [
        ("0", QWEN.format(0)),
        ("00", QWEN.format(0)),
        ("12", QWEN.format(12)),
        (QWEN.format(1), QWEN.format(1)),
        (QWEN.format(1) + ".", QWEN.format(1)),
        ("model.layers.1", QWEN.format(1)),
        ("model.layers.1.", QWEN.format(1)),
        ("model.layers.1.mlp", QWEN.format(1)),
        ("mtp.layers.0", "mtp.layers.0.mlp.experts"),
        ("mtp", "mtp.layers.0.mlp.experts"),
    ],
)
def test_a_layer_is_chosen_by_number_or_prefix(tmp_path, wanted, prefix):
    """A number means the model's own block, whatever else has that number."""
    there = entries(
        *(QWEN.format(n) for n in (0, 1, 12)), "mtp.layers.0.mlp.experts", folder=tmp_path
    )
    assert choose(there, wanted, "name").prefix == prefix


def test_a_number_never_means_a_side_stack(tmp_path):
    """A model without experts in block 0, such as DeepSeek's, and a predictor 0 beside it."""
    there = entries(QWEN.format(1), "mtp.layers.0.mlp.experts", folder=tmp_path)
    with pytest.raises(InputError, match=r"no MoE layer 0; .*mtp\.layers\.0.*name the prefix"):
        choose(there, "0", "name")
    assert choose(there, "mtp.layers.0", "name").prefix == "mtp.layers.0.mlp.experts"


def test_deepseeks_mtp_layer_is_one_more_block(tmp_path):
    there = entries(QWEN.format(3), DEEPSEEK_MTP, folder=tmp_path)
    assert choose(there, "61", "name").prefix == DEEPSEEK_MTP


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ("model", ("model could be", QWEN.format(0), QWEN.format(1), "name one")),
        ("5", ("no MoE layer 5", QWEN.format(0), QWEN.format(1), "--list")),
        ("9" * 5000, ("no MoE layer 9",)),
        ("model.layers", ("could be",)),
        ("model.layers.11", ("no MoE layer model.layers.11",)),
        ("", ("no MoE layer",)),
        ("-1", ("no MoE layer -1",)),
        ("²", ("no MoE layer",)),
        ("٠", ("no MoE layer ٠; there are",)),
    ],
)
def test_what_is_nothing_or_several_is_named(tmp_path, wanted, words):
    there = entries(QWEN.format(0), QWEN.format(1), folder=tmp_path)
    with pytest.raises(InputError) as error:
        choose(there, wanted, "the-name")
    for word in ("the-name", *words):
        assert word in str(error.value)


def test_two_stacks_with_one_number_must_be_told_apart(tmp_path):
    there = entries("a.layers.0.mlp.experts", "b.layers.0.mlp.experts", folder=tmp_path)
    with pytest.raises(InputError, match=r"0 could be a\.layers.*b\.layers"):
        choose(there, "0", "name")
    assert choose(there, "b", "name").prefix == "b.layers.0.mlp.experts"


def test_many_layers_are_not_all_listed(tmp_path):
    there = entries(*(QWEN.format(n) for n in range(9)), folder=tmp_path)
    with pytest.raises(InputError, match="and 3 more"):
        choose(there, "99", "name")


def test_nothing_to_choose_from():
    with pytest.raises(InputError, match=r"name: no NVFP4 mixture-of-experts layer"):
        choose(Layers([], []), "0", "name")


# ---- the list


def test_the_list_names_side_stacks_and_missing_shards(tmp_path):
    tensors = experts(QWEN.format(0)) | experts("mtp.layers.0.mlp.experts", count=2)
    save(tmp_path, tensors)
    lost = f"{QWEN.format(0)}.3.down_proj.input_scale"
    weight_map = dict.fromkeys(tensors, "model.safetensors") | {lost: "gone.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    checkpoint = open_checkpoint(tmp_path)
    there = discover(checkpoint)
    text = listing.render(there, checkpoint)
    model, side = text.splitlines()[2:4]
    assert model.split()[:7] == ["0", "4", "64", "32", "silu", "modelopt", "split"]
    assert model.endswith(f"{QWEN.format(0)}  (a shard is missing)")
    assert side.startswith("0 (side stack)")
    assert "gone.safetensors" in text
    document = json.loads(listing.to_json(there, checkpoint))
    assert [(e["stack"], e["present"]) for e in document["layers"]] == [
        ("model", False),
        ("side", True),
    ]
    assert document["findings"][0]["code"] == "missing-shard"


def test_an_escape_sequence_in_a_name_does_not_reach_the_terminal(tmp_path):
    checkpoint = open_checkpoint(save(tmp_path, experts("\x1b[31m.layers.0.mlp.experts")))
    assert "\x1b" not in listing.render(discover(checkpoint), checkpoint)


def test_an_empty_list_says_so(tmp_path):
    checkpoint = open_checkpoint(save(tmp_path, {"a": torch.zeros(1)}))
    assert f"{tmp_path.name}: no NVFP4" in listing.render(Layers([], []), checkpoint)


def test_mxfp4_experts_are_not_nvfp4(tmp_path):
    """The same codes with an E8M0 byte for 32 of them: another format, nothing to check."""
    tensors = {}
    for expert in range(2):
        for name in ("up_proj", "down_proj"):
            base = f"model.layers.0.mlp.experts.{expert}.{name}"
            tensors[f"{base}.weight"] = torch.zeros(64, 32, dtype=torch.uint8)
            tensors[f"{base}.weight_scale"] = torch.zeros(64, 2, dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors")
    assert discover(open_checkpoint(tmp_path)) == Layers([], [])


def fused(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    """A fused gated layer of 4 experts, hidden 64, intermediate 32."""
    base = "model.layers.0.mlp.experts"
    tensors = {}
    for name, rows, columns in (("gate_up_proj", 64, 64), ("down_proj", 64, 32)):
        scales = torch.full((4, rows, columns // 16), 0x38, dtype=torch.uint8)
        tensors[f"{base}.{name}"] = torch.full((4, rows, columns // 2), 0x11, dtype=torch.uint8)
        tensors[f"{base}.{name}_weight_scale"] = scales.view(torch.float8_e4m3fn)
        tensors[f"{base}.{name}_weight_scale_2"] = torch.full((4,), 0.01)
        tensors[f"{base}.{name}_input_scale"] = torch.tensor(0.01)
    return tensors | {f"{base}.{name}": tensor for name, tensor in changes.items()}


def test_a_fused_layer_as_it_should_be(tmp_path):
    save_file(fused(), tmp_path / "model.safetensors")
    (entry,) = discover(open_checkpoint(tmp_path)).usable
    assert (entry.experts, entry.hidden, entry.intermediate, entry.is_gated) == (4, 64, 32, True)


def test_fused_gate_and_up_as_two_tensors_are_refused_not_taken_for_relu2(tmp_path):
    tensors = fused()
    base = "model.layers.0.mlp.experts"
    for suffix in ("", "_weight_scale", "_weight_scale_2", "_input_scale"):
        half = tensors.pop(f"{base}.gate_up_proj{suffix}")
        tensors[f"{base}.gate_proj{suffix}"] = half.clone()
        tensors[f"{base}.up_proj{suffix}"] = half.clone()
    assert "gate_proj and up_proj as two fused tensors" in refused(tmp_path, tensors)


@pytest.mark.parametrize("entries", [2, 6, 8])
@pytest.mark.parametrize("name", ["weight_scale_2", "input_scale"])
def test_fused_scales_of_another_length_are_refused(tmp_path, entries, name):
    scale = torch.full((entries,), 0.01)
    save_file(fused(**{f"gate_up_proj_{name}": scale}), tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    (entry,) = discover(checkpoint).usable
    with pytest.raises(ShapeError, match=f"gate_up_proj_{name} must have one entry"):
        load_experts(checkpoint, entry, range(4), Activation.SILU, "")


def test_fused_scales_of_more_experts_are_refused(tmp_path):
    scales = torch.full((8, 64, 4), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
    reason = refused(tmp_path, fused(gate_up_proj_weight_scale=scales))
    assert re.search(r"4 experts, .* has 8", reason)


# ---- what cannot be checked is listed, and stands in nobody's way


def test_fused_gate_and_up_of_an_odd_number_of_rows(tmp_path):
    tensors = fused(
        gate_up_proj=torch.full((4, 63, 32), 0x11, dtype=torch.uint8),
        gate_up_proj_weight_scale=torch.ones(4, 63, 4).to(torch.float8_e4m3fn),
    )
    assert "has 63 rows" in refused(tmp_path, tensors)


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("plain", GATED)
def test_one_projection_in_bf16_makes_the_layer_no_fused_kernels(tmp_path, plain, scaled):
    tensors = experts(QWEN.format(0))
    for expert in range(EXPERTS):
        base = f"{QWEN.format(0)}.{expert}.{plain}"
        tensors[f"{base}.weight"] = torch.zeros(8, 8, dtype=torch.bfloat16)
        if not scaled:
            del tensors[f"{base}.weight_scale"]
    words = "is not NVFP4" if scaled else "no NVFP4 weight at"
    reason = refused(tmp_path, tensors)
    assert words in reason
    assert f"experts.0.{plain}" in reason


def test_an_expert_spelled_with_a_leading_zero_is_no_other_expert(tmp_path):
    prefix = QWEN.format(0)
    twin = {n.replace(f"{prefix}.1.", f"{prefix}.01."): t for n, t in experts(prefix).items()}
    assert f"{prefix}.01: " in refused(tmp_path, experts(prefix) | twin)


def test_gate_and_up_fused_expert_by_expert_are_named(tmp_path):
    prefix = QWEN.format(0)
    tensors = {
        n.replace("gate_proj", "gate_up_proj"): t
        for n, t in experts(prefix).items()
        if ".up_proj" not in n
    }
    assert "gate_up_proj of single experts is not read here" in refused(tmp_path, tensors)


@pytest.mark.parametrize(
    "bias", ["0.up_proj.bias", "3.down_proj.bias", "up_proj_bias", "gate_up_proj_bias"]
)
def test_experts_with_a_bias_are_not_what_b12x_computes(tmp_path, bias):
    name = f"{QWEN.format(0)}.{bias}"
    reason = refused(tmp_path, experts(QWEN.format(0)) | {name: torch.zeros(32)})
    for text in ("model.safetensors", name, "biases"):
        assert text in reason


@pytest.mark.parametrize(
    ("suffix", "word"),
    [("pre_quant_scale", "AWQ"), ("weight_zero_point", "zero point"), ("weight_g_idx", "order")],
)
@pytest.mark.parametrize("where", ["3.up_proj.", "0.down_proj."])
def test_tensors_that_change_what_experts_compute_are_refused(tmp_path, where, suffix, word):
    name = f"{QWEN.format(0)}.{where}{suffix}"
    reason = refused(tmp_path, experts(QWEN.format(0)) | {name: torch.ones(4)})
    for text in ("model.safetensors", name, word):
        assert text in reason


@pytest.mark.parametrize("name", ["up_proj_pre_quant_scale", "down_proj_bias"])
def test_tensors_that_change_what_fused_experts_compute_are_refused(tmp_path, name):
    assert f"{QWEN.format(0)}.{name}: " in refused(tmp_path, fused(**{name: torch.ones(4)}))


@pytest.mark.parametrize("name", ["0.up_proj.strange", "3.down_proj.weight_shape", "1.up_proj_x"])
def test_unknown_tensors_of_experts_are_a_note(tmp_path, name):
    tensor = f"{QWEN.format(0)}.{name}"
    (entry,) = found(tmp_path, experts(QWEN.format(0)) | {tensor: torch.ones(4)})
    (finding,) = entry.findings
    assert (finding.code, finding.severity) == ("unknown-expert-tensor", Severity.NOTE)
    assert (finding.tensor, finding.file) == (tensor, "model.safetensors")


def test_unknown_tensors_of_fused_experts_are_a_note(tmp_path):
    (entry,) = found(tmp_path, fused(gate_up_proj_strange=torch.ones(4)))
    assert [finding.code for finding in entry.findings] == ["unknown-expert-tensor"]


# ---- parts that are lost, copies that contradict each other


@pytest.mark.parametrize("lost", [".3.up_proj.", ".gate_proj.", ".3.", "."])
def test_scales_without_their_codes_are_an_error(tmp_path, lost):
    """One matrix of the last expert, all gates, the last expert, all of the layer."""
    tensors = experts(QWEN.format(0))
    gone = [n for n in tensors if lost in n.removeprefix(QWEN.format(0)) and n.endswith(".weight")]
    reason = refused(tmp_path, {n: t for n, t in tensors.items() if n not in gone})
    assert f"{min(gone)} is missing" in reason
    assert f"and {len(gone) - 1} more" in reason or len(gone) == 1
    assert "is in model.safetensors" in reason


def test_codes_without_block_scales_are_an_error_though_all_lack_them(tmp_path):
    tensors = experts(QWEN.format(0))
    kept = {n: t for n, t in tensors.items() if not n.endswith(".weight_scale")}
    reason = refused(tmp_path, kept)
    name = f"{QWEN.format(0)}.0.down_proj"
    assert f"{name}.weight is in model.safetensors, {name}.weight_scale is missing" in reason


def test_an_expert_of_a_long_number_is_not_dropped(tmp_path):
    prefix = QWEN.format(0)
    for number in ("0000003", "1234567", "9" * 5000):
        spelled = {n.replace(f"{prefix}.3.", f"{prefix}.{number}."): t for n, t in sound().items()}
        assert f"{prefix}.{number[:80]}: " in refused(tmp_path, spelled)


def sound() -> dict[str, torch.Tensor]:
    return experts(QWEN.format(0))


def test_two_copies_of_one_matrix_are_refused(tmp_path):
    name = f"{QWEN.format(0)}.2.up_proj.weight"
    reason = refused(tmp_path, sound() | {f"{name}_packed": sound()[name]})
    assert f"{name} and {name}_packed are two copies" in reason


def test_split_and_fused_experts_of_one_layer_are_refused(tmp_path):
    reason = refused(tmp_path, sound() | fused())
    assert "two copies of one layer" in reason
    assert "down_proj for all experts" in reason


def test_two_sets_of_names_in_one_layer_are_refused(tmp_path):
    reason = refused(tmp_path, sound() | experts(QWEN.format(0), MIXTRAL))
    assert "down_proj and w1 are two copies of one layer" in reason


def test_experts_in_two_dialects_are_a_note(tmp_path):
    tensors = {}
    names = {".weight": ".weight_packed", "weight_scale_2": "weight_global_scale"}
    for name, tensor in sound().items():
        if ".1." in name.removeprefix("model.layers."):
            for old, new in {**names, "input_scale": "input_global_scale"}.items():
                name = name.removesuffix(old) + new if name.endswith(old) else name
        tensors[name] = tensor
    (entry,) = found(tmp_path, tensors)
    (finding,) = entry.findings
    assert (finding.code, finding.severity) == ("mixed-dialects", Severity.NOTE)


def test_fused_matrices_of_different_counts_are_refused(tmp_path):
    base = f"{QWEN.format(0)}.down_proj"
    tensors = fused()
    for name in (base, f"{base}_weight_scale"):
        tensors[name] = tensors[name][:3].clone()
    assert f"{base} has 3 experts" in refused(tmp_path, tensors)


# ---- other formats with the same names


def other_format(
    codes: torch.Tensor, scales: torch.Tensor, packed: str = "weight"
) -> dict[str, torch.Tensor]:
    return {
        f"{QWEN.format(0)}.{expert}.{name}.{short}": tensor.clone()
        for expert in range(2)
        for name in GATED
        for short, tensor in ((packed, codes), ("weight_scale", scales))
    }


@pytest.mark.parametrize(
    ("dtype", "scale", "packed"),
    [
        (torch.int8, torch.ones(32, 1), "weight"),
        (torch.int32, torch.ones(32, 4).bfloat16(), "weight_packed"),
        (torch.uint8, torch.ones(32, 4).bfloat16(), "weight"),
        (torch.uint8, torch.ones(32, 1), "weight"),
    ],
)
def test_int8_and_int4_experts_are_not_nvfp4(tmp_path, dtype, scale, packed):
    codes = torch.zeros(32, 32, dtype=dtype)
    assert found(tmp_path, other_format(codes, scale, packed)) == []


@pytest.mark.parametrize("dtype", [torch.int8, torch.float4_e2m1fn_x2])
def test_nvfp4_scales_over_codes_of_another_dtype_are_unusable(tmp_path, dtype):
    codes = torch.zeros(32, 32, dtype=torch.uint8).view(dtype)
    reason = refused(tmp_path, other_format(codes, torch.ones(32, 4).to(torch.float8_e4m3fn)))
    assert "experts.0.down_proj.weight must hold packed FP4 as U8, got " in reason


# ---- names


@pytest.mark.parametrize("name", ["a\nb.layers.0.mlp.experts", "layers.0.\nmlp.experts"])
def test_a_line_break_in_a_name_hides_no_layer(tmp_path, name):
    (entry,) = found(tmp_path, experts(name))
    assert (entry.prefix, entry.number) == (name, 0)


@pytest.mark.parametrize("tail", ["\n", ".0\n"])
def test_a_name_that_goes_on_after_a_line_break_is_another(tmp_path, tail):
    name = f"{QWEN.format(0)}.0.up_proj.weight{tail}"
    (entry,) = found(tmp_path, sound() | {name: torch.ones(4)})
    assert [finding.tensor for finding in entry.findings] == [name]


def test_digits_of_other_scripts_are_no_numbers(tmp_path):
    arabic = {n.replace(".experts.3.", ".experts.٣."): t for n, t in sound().items()}
    (entry,) = found(tmp_path, arabic)
    assert entry.experts == 3


def test_many_layers_take_no_time(tmp_path):
    """20,000 blocks, half of them predictors, all with a part in a missing shard."""
    sizes = {"weight": [16, 8], "weight_scale": [16, 1], "weight_scale_2": [], "input_scale": []}
    kinds = {"weight": ("U8", 128), "weight_scale": ("F8_E4M3", 16)}
    header, weight_map, end = {}, {}, 0
    for number in range(20_000):
        block = f"model.layers.{number}."
        for name in UNGATED:
            for short, shape in sizes.items():
                tensor = f"{block}mlp.experts.0.{name}.{short}"
                weight_map[tensor] = "gone.safetensors"
                if short != "input_scale":
                    dtype, size = kinds.get(short, ("F32", 4))
                    header[tensor] = entry_of(dtype, shape, end, end + size)
                    weight_map[tensor], end = "model.safetensors", end + size
        if number % 2:
            weight_map[f"{block}eh_proj.weight"] = "gone.safetensors"
    (tmp_path / "model.safetensors").write_bytes(raw(header, bytes(end)))
    write_index(tmp_path, weight_map)
    checkpoint = open_checkpoint(tmp_path)
    start = time.perf_counter()
    layers = discover(checkpoint)
    assert time.perf_counter() - start < 10
    assert len(layers.usable) == 20_000
    assert sum(one.stack is Stack.SIDE for one in layers.usable) == 10_000
    assert not any(one.present for one in layers.usable)


def test_biases_of_experts_in_bf16_are_nobodys_concern(tmp_path):
    plain = {f"{QWEN.format(0)}.0.{n}.weight": torch.zeros(4, 4) for n in GATED}
    assert found(tmp_path, plain | {f"{QWEN.format(0)}.0.up_proj.bias": torch.zeros(4)}) == []


def half_broken(folder: Path) -> Path:
    """Layer 0 sound, layer 1 without one matrix."""
    tensors = experts(QWEN.format(0)) | experts(QWEN.format(1))
    lost = f"{QWEN.format(1)}.1.up_proj."
    sound = {n: t for n, t in tensors.items() if not n.startswith(lost)}
    return save(folder, sound, config={"num_experts_per_tok": 2})


def test_one_broken_layer_does_not_stop_the_others(tmp_path):
    layers = discover(open_checkpoint(half_broken(tmp_path)))
    assert [entry.number for entry in layers.usable] == [0]
    assert choose(layers, "0", "name").number == 0
    with pytest.raises(InputError, match="up_proj is missing"):
        choose(layers, "1", "name")
    (unusable,) = layers.unusable
    assert (unusable.number, unusable.stack) == (1, Stack.MODEL)
    assert isinstance(unusable, UnusableLayer)


def test_a_broken_layer_is_a_finding_of_the_list(tmp_path, capsys):
    assert cli.main(["check-layer", "--checkpoint", str(half_broken(tmp_path)), "--list"]) == 1
    text = capsys.readouterr().out
    assert text.splitlines()[2].split()[0] == "0"
    assert f"{QWEN.format(1)} cannot be checked" in text
    arguments = ["check-layer", "--checkpoint", str(tmp_path), "--list", "--json", "-"]
    assert cli.main(arguments) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["verdict"], len(document["layers"])) == ("finding", 1)
    (finding,) = document["findings"]
    assert (finding["code"], finding["layer"]) == ("layer-cannot-be-checked", QWEN.format(1))


def test_a_list_without_findings_ends_well(tmp_path, capsys):
    folder = save(tmp_path, experts(QWEN.format(0)))
    assert cli.main(["check-layer", "--checkpoint", str(folder), "--list"]) == 0
    assert "cannot be checked" not in capsys.readouterr().out


@pytest.mark.parametrize("mark", ["eh_proj.weight", None])
def test_a_predictor_in_the_models_own_stack_is_told_by_its_projection(tmp_path, mark):
    """DeepSeek's layer 61: one more block, with a tensor that joins embedding and hidden state."""
    tensors = experts(QWEN.format(3)) | experts(DEEPSEEK_MTP)
    if mark:
        tensors[f"model.layers.61.{mark}"] = torch.zeros(4, 8)
    entries = found(tmp_path, tensors)
    assert [(e.number, e.stack) for e in entries] == [
        (3, Stack.MODEL),
        (61, Stack.SIDE if mark else Stack.MODEL),
    ]
    assert choose(Layers(entries, []), "61", "name").prefix == DEEPSEEK_MTP
