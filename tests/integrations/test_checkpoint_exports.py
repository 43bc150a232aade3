"""Real exports of ModelOpt through the whole reader, in every way a checkpoint can be stored.

The same layer must give the same result, number for number, as one file, as shards, through links,
in compressed-tensors' dialect (converted by that project's own code), and fused.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.exports import EXPERTS, FAMILIES, Export
from trtllm_b12x_fix import cli
from trtllm_b12x_fix.checkpoint import embedded
from trtllm_b12x_fix.checkpoint.assemble import LoadedLayer, load_experts
from trtllm_b12x_fix.checkpoint.conventions import Dialect
from trtllm_b12x_fix.checkpoint.discovery import discover
from trtllm_b12x_fix.checkpoint.files import open_checkpoint
from trtllm_b12x_fix.checkpoint.layers import LayerEntry, Stack, Storage
from trtllm_b12x_fix.layer import Activation
from trtllm_b12x_fix.layer_check.from_checkpoint import Request, load

pytestmark = [
    # ModelOpt warns about every transformers release newer than itself.
    pytest.mark.filterwarnings("ignore::Warning"),
    pytest.mark.xdist_group("modelopt"),
]

#: Hidden and intermediate size of the experts, and whether tokens go through the file's router.
SIZES = {
    "qwen3_moe": (128, 64, "the layer's own router (softmax)"),
    "nemotron_h": (128, 64, "the layer's own router (sigmoid)"),
    "latent_nemotron_h": (64, 64, "random routing (the router works on 128, the experts on 64"),
}
ModelOptExport = Callable[[str], Export]


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Small products: a second thread costs more than it brings."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def export(family: str, modelopt_export: ModelOptExport) -> Export:
    return modelopt_export(family)


def activation_of(family: str) -> Activation:
    return Activation.SILU if FAMILIES[family].gated else Activation.RELU2


def call(*arguments: object) -> tuple[int, str]:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = cli.main([str(argument) for argument in arguments])
    return code, out.getvalue() + err.getvalue()


def check_layer(path: Path, layer: object, *more: object) -> dict[str, Any]:
    """The JSON of a check that ends well."""
    common = ("--device", "cpu", "--flashinfer", "0.6.18", "--rows", "1,8", "--json", "-")
    code, out = call("check-layer", "--checkpoint", path, "--layer", layer, *common, *more)
    assert code == 0, out
    return json.loads(out)


def result(path: Path, layer: object, *more: object) -> dict[str, Any]:
    """The JSON without the names that say where the layer came from."""
    document = check_layer(path, layer, *more)
    document.pop("source")
    return document


def read(path: Path, layer: int, family: str) -> tuple[LayerEntry, LoadedLayer]:
    checkpoint = open_checkpoint(path)
    (entry,) = [e for e in discover(checkpoint).usable if e.number == layer]
    loaded = load_experts(checkpoint, entry, range(EXPERTS), activation_of(family), "")
    return entry, loaded


def same_layer(one: LoadedLayer, two: LoadedLayer) -> bool:
    pairs = [(one.layer.fc1, two.layer.fc1), (one.layer.fc2, two.layer.fc2)]
    names = ("packed", "block_scale", "weight_scale_2", "input_scale", "layer_input_scale")
    return all(torch.equal(getattr(a, n), getattr(b, n)) for a, b in pairs for n in names)


# ---- as ModelOpt writes it


def test_the_layers_are_found(family, export):
    hidden, intermediate, _ = SIZES[family]
    found = discover(open_checkpoint(export.folder)).usable
    assert [entry.number for entry in found] == list(FAMILIES[family].moe_layers)
    for entry in found:
        assert entry.prefix == FAMILIES[family].exported.format(entry.number)
        assert (entry.experts, entry.hidden, entry.intermediate) == (EXPERTS, hidden, intermediate)
        assert entry.is_gated == FAMILIES[family].gated
        assert (entry.stack, entry.storage) == (Stack.MODEL, Storage.SPLIT)
        assert (entry.dialect, entry.present) == (Dialect.MODELOPT, True)


def test_the_list_shows_them(family, export):
    code, out = call("check-layer", "--checkpoint", export.folder, "--list", "--json", "-")
    document = json.loads(out)
    hidden, intermediate, _ = SIZES[family]
    assert (code, document["schema"]) == (0, "trtllm-b12x-fix/list-layers/1")
    assert document["layers"] == [
        {
            "number": number,
            "prefix": FAMILIES[family].exported.format(number),
            "stack": "model",
            "experts": EXPERTS,
            "hidden": hidden,
            "intermediate": intermediate,
            "gated": FAMILIES[family].gated,
            "activation": "silu" if FAMILIES[family].gated else "relu2",
            "dialect": "modelopt",
            "storage": "split",
            "present": True,
        }
        for number in FAMILIES[family].moe_layers
    ]
    code, out = call("check-layer", "--checkpoint", export.folder, "--list")
    assert code == 0
    for number in FAMILIES[family].moe_layers:
        assert FAMILIES[family].exported.format(number) in out


def test_the_scales_are_what_modelopt_wrote(family, export):
    fc1 = ("up_proj", "gate_proj") if FAMILIES[family].gated else ("up_proj",)
    for number in FAMILIES[family].moe_layers:
        entry, loaded = read(export.folder, number, family)
        assert loaded.findings == ()
        for expert in range(EXPERTS):
            for matrices, names in ((loaded.layer.fc1, fc1), (loaded.layer.fc2, ("down_proj",))):
                bases = [f"{entry.prefix}.{expert}.{name}" for name in names]
                for ours, theirs in (("packed", "weight"), ("block_scale", "weight_scale")):
                    parts = [export.tensors[f"{b}.{theirs}"].view(torch.uint8) for b in bases]
                    assert torch.equal(getattr(matrices, ours)[expert], torch.cat(parts))
                for name in ("weight_scale_2", "input_scale"):
                    largest = max(float(export.tensors[f"{base}.{name}"]) for base in bases)
                    assert float(getattr(matrices, name)[expert]) == largest


def test_the_check_runs_end_to_end(family, export):
    hidden, intermediate, routing = SIZES[family]
    for number in FAMILIES[family].moe_layers:
        document = check_layer(export.folder, number)
        assert document["verdict"] == "good"
        layer = document["layer"]
        assert routing in layer["inputs"]
        assert "2688 * input_scale" in layer["inputs"]
        assert (layer["logical_hidden"], layer["logical_intermediate"]) == (hidden, intermediate)
        assert (layer["experts"], layer["top_k"]) == (EXPERTS, 2)
        assert layer["activation"] == activation_of(family).value
        assert FAMILIES[family].exported.format(number) in document["source"]
        by_cell = {(r["rows"], r["arm"]): r for r in document["results"]}
        assert by_cell[8, "fix"]["fidelity"]["relative_rms"] == 0
        assert by_cell[8, "baked"]["fidelity"]["relative_rms"] > 0.05
        assert ((8, "fp32-rescale") in by_cell) == (not FAMILIES[family].gated)


def test_only_the_latent_layer_contradicts_its_config(family, export):
    findings = check_layer(export.folder, 0)["findings"]
    if family != "latent_nemotron_h":
        assert findings == []
        return
    (finding,) = findings
    assert (finding["code"], finding["severity"]) == ("config-contradicts-tensors", "note")
    assert finding["file"] == "config.json"
    for text in ("hidden size 128", "have 64", "latent"):
        assert text in finding["message"]


def test_a_sample_of_experts(family, export):
    document = check_layer(export.folder, 0, "--experts", "0-1", "--top-k", "2")
    assert "random routing (a sample of experts was asked for)" in document["layer"]["inputs"]
    assert document["layer"]["experts_read"] == 2
    assert f"2 of {EXPERTS} experts read" in document["source"]
    assert document["verdict"] == "good"


def test_a_layer_may_be_named_by_its_prefix(export, family):
    prefix = FAMILIES[family].exported.format(0)
    for name in (prefix, prefix.removesuffix(".experts"), prefix.partition(".experts")[0] + "."):
        assert check_layer(export.folder, name) == check_layer(export.folder, 0)


@pytest.mark.parametrize("build", ["qwen3_moe", "nemotron_h"])
def test_tokens_go_where_the_models_own_router_sends_them(build, modelopt_export):
    """The router module of transformers, with the exported weights, on the same inputs."""
    from transformers import AutoConfig
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHTopkRouter
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    export = modelopt_export(build)
    number = FAMILIES[build].moe_layers[-1]
    base = FAMILIES[build].exported.format(number).removesuffix("experts") + "gate."
    modules = {"qwen3_moe": Qwen3MoeTopKRouter, "nemotron_h": NemotronHTopkRouter}
    module = modules[build](AutoConfig.from_pretrained(export.folder)).float()
    prefixed = {n.removeprefix(base): t for n, t in export.tensors.items() if n.startswith(base)}
    module.load_state_dict({name: tensor.float() for name, tensor in prefixed.items()})

    subject = load(Request(export.folder, str(number), tokens=64, seed=0)).subject
    with torch.no_grad():
        _, weights, ids = module(subject.x.float())
    used = ids.unique()
    assert len(used) > 2
    ours = torch.zeros(64, len(used)).scatter(
        1, subject.routing.expert_ids, subject.routing.weights
    )
    theirs = torch.zeros(64, EXPERTS).scatter(1, ids, weights)[:, used]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_inputs_have_the_calibrated_amax(family, export):
    prefix = FAMILIES[family].exported.format(0)
    subject = load(Request(export.folder, "0", tokens=8, seed=0)).subject
    scales = [
        float(tensor)
        for name, tensor in export.tensors.items()
        if name.startswith(f"{prefix}.")
        and name.endswith(".input_scale")
        and "down_proj" not in name
    ]
    assert float(subject.x.abs().max()) == pytest.approx(2688 * max(scales), rel=2**-8)


def test_recorded_inputs(family, export, tmp_path):
    hidden = SIZES[family][0]
    recorded = load(Request(export.folder, "0", tokens=8, seed=1)).subject.x[:, :hidden] / 2
    save_file({"hidden_states": recorded, "other": -recorded}, tmp_path / "x.safetensors")
    path = tmp_path / "x.safetensors"
    subject = load(Request(export.folder, "0", tokens=8, seed=0, inputs=str(path))).subject
    assert torch.equal(subject.x[:, :hidden], recorded)
    document = check_layer(export.folder, 0, "--inputs", f"{path}:other")
    assert "recorded (x.safetensors: other)" in document["layer"]["inputs"]
    save_file({"x": torch.zeros(8, hidden + 16)}, path)
    code, out = call(
        "check-layer", "--checkpoint", export.folder, "--layer", 0, "--inputs", path, "--rows", 1
    )
    assert code == 2
    assert f"[1, {hidden + 16}]" in out
    assert f"works on {hidden}" in out


# ---- stored otherwise


def resave(export: Export, folder: Path, shards: int, index: bool) -> Path:
    folder.mkdir()
    shutil.copy(export.folder / "config.json", folder)
    weight_map = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(export.tensors.items())[shard::shards])
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    if index:
        content = json.dumps({"metadata": {}, "weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(content)
    return folder


def linked(folder: Path, cache: Path) -> Path:
    """The folder as a snapshot in a hub cache: links to blobs named by hashes."""
    snapshot, blobs = cache / "snapshots" / "abc", cache / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / f"{number:064x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:064x}")
    return snapshot


def test_however_it_is_stored_the_result_is_the_same(family, export, tmp_path):
    expected = result(export.folder, 0)
    sharded = resave(export, tmp_path / "sharded", 3, index=True)
    assert result(sharded, 0) == expected
    assert result(sharded / "model.safetensors.index.json", 0) == expected
    assert result(resave(export, tmp_path / "bare", 3, index=False), 0) == expected
    assert result(export.folder / "model.safetensors", 0) == expected
    assert result(linked(sharded, tmp_path / "cache"), 0) == expected


#: Runs in a process of its own: the oracle's folder must not stay on this one's path.
CONVERT = """
import site, sys
site.addsitedir(sys.argv[1])
from compressed_tensors.entrypoints.convert import ModelOptNvfp4Converter
from safetensors.torch import load_file, save_file
converter = ModelOptNvfp4Converter(targets=[r"re:.*\\.experts\\..*"])
for folder in sys.argv[2:]:
    tensors = load_file(f"{folder}/modelopt/m.safetensors")
    for name in ("once", "twice"):
        tensors = converter.process(tensors)
        save_file(tensors, f"{folder}/{name}/m.safetensors")
"""


@pytest.fixture(scope="module")
def conversions(
    modelopt_export: ModelOptExport,
    oracle_dir: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """FAMILY-real and FAMILY-exact, each with the checkpoints modelopt, once and twice.

    In the exact ones all global scales are powers of two, whose reciprocals fp32 holds.
    """
    root = tmp_path_factory.mktemp("conversions")
    for name in FAMILIES:
        export = modelopt_export(name)
        exact = {
            name: power_of_two(name, tensor) if is_global(name) else tensor
            for name, tensor in export.tensors.items()
        }
        for kind, tensors in (("real", export.tensors), ("exact", exact)):
            for stage in ("modelopt", "once", "twice"):
                (root / f"{name}-{kind}" / stage).mkdir(parents=True)
                shutil.copy(export.folder / "config.json", root / f"{name}-{kind}" / stage)
            save_file(tensors, root / f"{name}-{kind}" / "modelopt" / "m.safetensors")
    command = [sys.executable, "-c", CONVERT, oracle_dir("compressed-tensors"), *root.iterdir()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return root


def bits(tensors: dict[str, Tensor]) -> dict[str, tuple[torch.dtype, list[int]]]:
    return {n: (t.dtype, t.reshape(-1).view(torch.uint8).tolist()) for n, t in tensors.items()}


@pytest.mark.oracle("compressed-tensors")
def test_the_dialect_of_compressed_tensors(family, conversions):
    folder = conversions / f"{family}-real"
    converted = load_file(folder / "once" / "m.safetensors")
    assert any(name.endswith(".weight_global_scale") for name in converted)
    assert not any(".experts." in n and n.endswith(".weight_scale_2") for n in converted)
    for number in FAMILIES[family].moe_layers:
        entry, theirs = read(folder / "once", number, family)
        assert (entry.dialect, entry.present) == (Dialect.COMPRESSED_TENSORS, True)
        _, ours = read(folder / "modelopt", number, family)
        for which in ("fc1", "fc2"):
            a, b = getattr(ours.layer, which), getattr(theirs.layer, which)
            assert torch.equal(a.packed, b.packed)
            assert torch.equal(a.block_scale, b.block_scale)
            # 1 / (1 / x) in fp32 is x or its neighbour: the dialect itself loses that much.
            for name in ("weight_scale_2", "input_scale"):
                torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=2**-23, atol=0)


@pytest.mark.oracle("compressed-tensors")
@pytest.mark.parametrize("kind", ["real", "exact"])
def test_converting_twice_changes_nothing(family, conversions, kind):
    once, twice = (conversions / f"{family}-{kind}" / name for name in ("once", "twice"))
    assert bits(load_file(once / "m.safetensors")) == bits(load_file(twice / "m.safetensors"))
    assert result(once, 0) == result(twice, 0)


@pytest.mark.oracle("compressed-tensors")
def test_both_dialects_of_one_layer_give_identical_results(family, conversions):
    ours, theirs = (conversions / f"{family}-exact" / name for name in ("modelopt", "once"))
    for number in FAMILIES[family].moe_layers:
        assert result(ours, number) == result(theirs, number)


def power_of_two(name: str, scale: Tensor) -> Tensor:
    """The next one in the direction that keeps FC2's inputs inside its calibrated range."""
    exponent = scale.log2()
    return torch.exp2(
        exponent.ceil() if name.endswith("down_proj.input_scale") else exponent.floor()
    )


def is_global(name: str) -> bool:
    return ".experts." in name and name.endswith((".weight_scale_2", ".input_scale"))


def fused(export: Export, family: str, number: int, *, turned: bool, scalar: bool) -> dict:
    """One layer's experts as one tensor per projection, rows [gate; up].

    Args:
        turned: stored [E, C/2, R], as ModelOpt exports batched matrix products.
        scalar: one global scale for all experts, instead of one each.
    """
    prefix = FAMILIES[family].exported.format(number)
    first = ("gate_proj", "up_proj") if FAMILIES[family].gated else ("up_proj",)
    result: dict[str, Tensor] = {}
    name = "gate_up_proj" if FAMILIES[family].gated else "up_proj"
    for fused_name, names in ((name, first), ("down_proj", ("down_proj",))):

        def gather(short: str, names: tuple[str, ...] = names) -> list[list[Tensor]]:
            return [
                [export.tensors[f"{prefix}.{e}.{n}.{short}"] for n in names] for e in range(EXPERTS)
            ]

        base = f"{prefix}.{fused_name}"
        for suffix, short in (("", "weight"), ("_weight_scale", "weight_scale")):
            parts = [torch.cat([t.view(torch.uint8) for t in per]) for per in gather(short)]
            stacked = torch.stack(parts)
            stacked = stacked.transpose(1, 2).contiguous() if turned else stacked
            result[base + suffix] = stacked.view(
                torch.uint8 if short == "weight" else torch.float8_e4m3fn
            )
        for short in ("weight_scale_2", "input_scale"):
            values = torch.stack([torch.stack(per).max() for per in gather(short)])
            result[f"{base}_{short}"] = values.max() if scalar else values
    return result


def with_one_scale(export: Export) -> Export:
    """The export with the same global scales for every expert of a layer."""
    tensors = dict(export.tensors)
    for name in tensors:
        if is_global(name):
            _, _, short = name.rpartition(".")
            group = "down" if "down_proj" in name else "first"
            same = [
                tensors[n]
                for n in export.tensors
                if is_global(n) and n.endswith(short) and (("down_proj" in n) == (group == "down"))
            ]
            tensors[name] = torch.stack(same).max()
    return Export(export.projections, tensors, export.folder)


@pytest.mark.parametrize("scalar", [False, True], ids=["per-expert", "one-scale"])
@pytest.mark.parametrize("turned", [False, True], ids=["straight", "transposed"])
def test_fused_experts(family, export, tmp_path, turned, scalar):
    export = with_one_scale(export) if scalar else export
    split = resave(export, tmp_path / "split", 1, index=False)
    number = FAMILIES[family].moe_layers[0]
    prefix = FAMILIES[family].exported.format(number)
    others = {n: t for n, t in export.tensors.items() if not n.startswith(f"{prefix}.")}
    folder = tmp_path / "fused"
    folder.mkdir()
    shutil.copy(export.folder / "config.json", folder)
    layer = fused(export, family, number, turned=turned, scalar=scalar)
    save_file(others | layer, folder / "model.safetensors")

    (entry, ours), (split_entry, theirs) = (read(path, number, family) for path in (folder, split))
    assert (entry.storage, split_entry.storage) == (Storage.FUSED, Storage.SPLIT)
    assert (entry.experts, entry.hidden, entry.intermediate, entry.is_gated) == (
        EXPERTS,
        split_entry.hidden,
        split_entry.intermediate,
        split_entry.is_gated,
    )
    assert same_layer(ours, theirs)
    assert ours.findings == ()
    assert result(folder, number) == result(split, number)


def test_the_embedded_layer_is_a_checkpoint_too():
    (entry,) = discover(open_checkpoint(embedded.PATH)).usable
    document = check_layer(embedded.PATH, entry.prefix, "--top-k", "2")
    assert document["verdict"] == "good"
    assert document["findings"] == []
