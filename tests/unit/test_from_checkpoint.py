"""A layer of a checkpoint as input of a check: whose router, which inputs, how little is read."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

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
    router,
    save,
)
from tests.layers import make_inputs, make_layer
from trtllm_b12x_fix import cli
from trtllm_b12x_fix.checkpoint.safetensors_source import SafetensorsSource
from trtllm_b12x_fix.emulator.reference import intermediate_amax
from trtllm_b12x_fix.errors import B12xFixError, InputError, ShapeError
from trtllm_b12x_fix.formats.nvfp4 import CALIBRATION_MAX
from trtllm_b12x_fix.layer import Activation
from trtllm_b12x_fix.layer_check.from_checkpoint import (
    Loaded,
    Request,
    _fit_intermediate,
    load,
)

CONFIG = {"model_type": "qwen3_moe", "num_experts_per_tok": 2, "hidden_act": "silu"}
UNGATED_CONFIG = {"model_type": "qwen3_moe", "num_experts_per_tok": 2}
PREFIX = QWEN.format(0)
GATE = f"{PREFIX.removesuffix('experts')}gate.weight"
BIAS = f"{PREFIX.removesuffix('experts')}gate.e_score_correction_bias"


def loaded(path: Path, layer: str = "0", tokens: int = 4, **more: Any) -> Loaded:
    return load(Request(path, layer, tokens=tokens, seed=0, **more))


def refused(path: Path, *words: str, **more: Any) -> None:
    with pytest.raises(B12xFixError) as error:
        loaded(path, **more)
    for word in words:
        assert word in str(error.value)


# ---- routing


def test_the_files_router_is_used(tmp_path):
    save(tmp_path, experts(PREFIX) | router(PREFIX), config=CONFIG)
    assert "the layer's own router (softmax)" in loaded(tmp_path).subject.inputs


def test_without_a_router_routing_is_random(tmp_path):
    save(tmp_path, experts(PREFIX), config=CONFIG)
    assert "random routing (the file has no router)" in loaded(tmp_path).subject.inputs


@pytest.mark.parametrize("name", ["router.weight", "router.layer.weight"])
def test_routers_of_other_names(tmp_path, name):
    base = PREFIX.removesuffix("experts")
    save(tmp_path, experts(PREFIX) | {base + name: router(PREFIX)[GATE]}, config=CONFIG)
    assert "own router" in loaded(tmp_path).subject.inputs


SIGMOID = CONFIG | {"model_type": "glm4_moe"}


@pytest.mark.parametrize("where", ["gate.", ""])
def test_a_bias_changes_the_choice_and_not_the_weights(tmp_path, where):
    """MiniMax-M2 keeps it beside the router."""
    base = PREFIX.removesuffix("experts")
    bias = torch.tensor([9.0, 0.0, 0.0, 9.0])
    tensors = experts(PREFIX) | router(PREFIX)
    tensors[f"{base}{where}e_score_correction_bias"] = bias
    save(tmp_path, tensors, config=CONFIG | {"model_type": "minimax_m2"})
    subject = loaded(tmp_path).subject
    assert "(sigmoid)" in subject.inputs
    assert "2 of 4 experts read" in subject.layer.source
    torch.testing.assert_close(subject.routing.weights.sum(dim=1), torch.ones(4))


@pytest.mark.parametrize("model_type", ["deepseek_v3", "nemotron_h", "glm4_moe", "dots1"])
def test_model_types_whose_router_is_a_sigmoid(tmp_path, model_type):
    config = CONFIG | {"model_type": model_type, "n_group": 1, "topk_group": 1}
    save(tmp_path, experts(PREFIX) | router(PREFIX), config=config)
    assert "(sigmoid)" in loaded(tmp_path).subject.inputs


def routed_at_random(folder: Path, tensors: dict[str, torch.Tensor], config: Any, why: str) -> None:
    save(folder, experts(PREFIX) | router(PREFIX) | tensors, config=config)
    assert re.search(rf"random routing \(.*{why}", loaded(folder, top_k=2).subject.inputs)


@pytest.mark.parametrize(
    "model_type",
    ["phimoe", "lfm2_moe", "ernie4_5_moe", "jamba", "afmoe", "bailing_moe", "kimi_linear", "x"],
)
def test_a_model_whose_router_was_not_compared_is_routed_at_random(tmp_path, model_type):
    config = CONFIG | {"model_type": model_type}
    routed_at_random(tmp_path, {}, config, f"the routing of '{model_type}' is not emulated")


@pytest.mark.parametrize("config", [None, {}, {"num_experts_per_tok": 2}])
def test_without_a_model_type_routing_is_random(tmp_path, config):
    routed_at_random(tmp_path, {}, config, "no config.json names the model_type")


@pytest.mark.parametrize(
    "name",
    [
        "expert_bias",
        "moe_statics.e_score_correction_bias",
        "gate.expert_bias",
        "gate.bias",
        "gate.e_score_correction_bias",
        "gate.weight_scale",
        "router.scale",
    ],
)
def test_a_router_with_another_tensor_is_not_emulated(tmp_path, name):
    tensor = f"{PREFIX.removesuffix('experts')}{name}"
    routed_at_random(tmp_path, {tensor: torch.zeros(4)}, CONFIG, f"{re.escape(tensor)} beside")


@pytest.mark.parametrize("name", ["shared_experts.up_proj.bias", "shared_expert_gate.weight"])
def test_tensors_of_shared_experts_are_no_routers(tmp_path, name):
    tensor = f"{PREFIX.removesuffix('experts')}{name}"
    save(tmp_path, experts(PREFIX) | router(PREFIX) | {tensor: torch.zeros(4)}, config=CONFIG)
    assert "own router" in loaded(tmp_path).subject.inputs


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_expert_group": 1}, "num_expert_group"),
        ({"moe_renormalize": True}, "moe_renormalize"),
        ({"moe_router_activation_func": "sigmoid"}, "moe_router_activation_func"),
        ({"scoring_func": "sigmoid"}, "scoring_func sigmoid"),
        ({"n_group": 2}, "limits or scales"),
        ({"routed_scaling_factor": 2.5}, "limits or scales"),
        ({"topk_method": "greedy"}, "topk_method"),
    ],
)
def test_rules_that_the_model_does_not_have_are_not_guessed_at(tmp_path, changes, why):
    routed_at_random(tmp_path, {}, CONFIG | changes, why)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn])
def test_a_quantized_router_is_not_read_as_it_is(tmp_path, dtype):
    routed_at_random(tmp_path, {GATE: torch.zeros(4, HIDDEN).to(dtype)}, CONFIG, "quantized")


def test_a_scoring_that_is_not_known_leaves_a_sample_to_check(tmp_path):
    config = CONFIG | {"scoring_func": "sqrtsoftplus"}
    save(tmp_path, experts(PREFIX) | router(PREFIX), config=config)
    refused(tmp_path, "config.json", "sqrtsoftplus", "--experts")
    assert loaded(tmp_path, experts=(0, 1)).subject.layer.experts == 2


def test_a_sample_that_is_all_experts_goes_through_the_router(tmp_path):
    save(tmp_path, experts(PREFIX) | router(PREFIX), config=CONFIG)
    assert "own router" in loaded(tmp_path, experts=(0, 1, 2, 3)).subject.inputs
    sample = loaded(tmp_path, experts=(1, 3)).subject
    assert "random routing (a sample of experts was asked for)" in sample.inputs
    assert sample.layer.experts == 2


@pytest.mark.parametrize(
    ("prefix", "mark", "words"),
    [
        (QWEN.format(61), "model.layers.61.eh_proj.weight", "one more block"),
        ("mtp.layers.0.mlp.experts", None, "side stack"),
        (PREFIX, None, ""),
    ],
)
def test_the_report_says_that_a_layer_is_beside_the_models_own(tmp_path, prefix, mark, words):
    tensors = experts(prefix) | ({mark: torch.zeros(4, 8)} if mark else {})
    save(tmp_path, tensors, config=CONFIG)
    layer = "61" if mark else prefix
    source = loaded(tmp_path, layer=layer).subject.layer.source
    assert words in source
    assert bool(words) == ("stack" in source or "one more" in source)


def test_a_sampled_expert_that_is_not_there_is_named(tmp_path):
    save(tmp_path, experts(PREFIX), config=CONFIG)
    refused(tmp_path, PREFIX, "experts 0 to 3, not 4", experts=(0, 4))


def test_more_experts_per_token_than_take_part_are_named(tmp_path):
    save(tmp_path, experts(PREFIX), config=CONFIG)
    refused(tmp_path, "top-k is 2, but only 1", experts=(0,))
    refused(tmp_path, "top-k is 9, but only 4", top_k=9)


@pytest.mark.parametrize("said", ["config", "file", "nowhere"])
def test_a_latent_moe_routes_at_random_and_says_why(tmp_path, said):
    """As in Nemotron 3 Super: the router sees 4096, the experts work at 1024."""
    prefix = "backbone.layers.1.mixer.experts"
    gate = "backbone.layers.1.mixer.gate.weight"
    sizes = {"hidden": 1024, "intermediate": 32}
    config = {"model_type": "nemotron_h", "num_experts_per_tok": 2, "mlp_hidden_act": "relu2"}
    config |= {"hidden_size": 4096, "moe_intermediate_size": 32, "n_routed_experts": EXPERTS}
    tensors = experts(prefix, UNGATED, **sizes) | router(prefix, hidden=4096)
    save(tmp_path, tensors, config=config | ({"moe_latent_size": 1024} if said == "config" else {}))
    if said == "nowhere":
        refused(tmp_path, "model.safetensors", gate, "does not fit", layer="1")
        return
    if said == "file":
        base = prefix.removesuffix("experts")
        projections = {f"{base}fc{i}_latent_proj.weight": torch.zeros(4, 4) for i in (1, 2)}
        save(tmp_path, tensors | projections, config=config)
    result = loaded(tmp_path, layer="1")
    reason = "random routing (the router works on 4096, the experts on 1024: a latent MoE)"
    assert reason in result.subject.inputs
    assert (result.subject.layer.hidden, result.subject.layer.activation) == (
        1024,
        Activation.RELU2,
    )
    (finding,) = result.findings
    assert "hidden size 4096" in finding.message


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        (GATE, torch.zeros(3, HIDDEN), ("[4, hidden]", "(3, 64)")),
        (GATE, torch.zeros(4 * HIDDEN), ("[4, hidden]", "(256,)")),
        (GATE, torch.zeros(4, HIDDEN, dtype=torch.int64), ("floating", "int64")),
        (GATE, torch.full((4, HIDDEN), float("nan")), ("NaN",)),
        (GATE, torch.full((4, HIDDEN), float("inf")), ("infinity",)),
        (BIAS, torch.zeros(3), ("[4]", "(3,)")),
        (BIAS, torch.zeros(4, 1), ("[4]", "(4, 1)")),
        (BIAS, torch.zeros(4, dtype=torch.int64), ("floating", "int64")),
        (BIAS, torch.full((4,), float("nan")), ("NaN",)),
    ],
)
def test_a_router_that_cannot_be_used_is_named(tmp_path, name, tensor, words):
    save(tmp_path, experts(PREFIX) | router(PREFIX) | {name: tensor}, config=SIGMOID)
    refused(tmp_path, "model.safetensors", name, *words)


# ---- the config


def test_sizes_that_the_config_has_otherwise_are_findings(tmp_path):
    claims = {"hidden_size": 4096, "moe_intermediate_size": 768, "num_experts": 3}
    save(tmp_path, experts(PREFIX) | router(PREFIX), config=CONFIG | claims)
    findings = loaded(tmp_path).findings
    assert {finding.code for finding in findings} == {"config-contradicts-tensors"}
    assert {finding.severity.value for finding in findings} == {"note"}
    assert {(finding.file, finding.layer) for finding in findings} == {("config.json", PREFIX)}
    messages = " ".join(finding.message for finding in findings)
    for claimed, there in ((4096, HIDDEN), (768, INTERMEDIATE), (3, EXPERTS)):
        assert f" {claimed}, the experts' tensors have {there}" in messages
    assert [f.message for f in findings if "latent" in f.message] == [findings[-1].message]


@pytest.mark.parametrize("key", ["num_experts", "n_routed_experts", "num_local_experts"])
def test_a_whole_missing_last_expert_is_damage(tmp_path, key, capsys):
    save(tmp_path, experts(PREFIX, count=3) | router(PREFIX, count=3), config=CONFIG | {key: 4})
    (finding,) = loaded(tmp_path).findings
    assert (finding.code, finding.severity.value) == ("experts-missing", "damage")
    assert "says experts 4" in finding.message
    assert "latent" not in finding.message
    assert cli.main(["check-layer", "--checkpoint", str(tmp_path), "--list", "--json", "-"]) == 1
    (listed,) = json.loads(capsys.readouterr().out)["findings"]
    assert (listed["code"], listed["layer"]) == ("experts-missing", PREFIX)


def test_sizes_that_agree_are_none(tmp_path):
    claims = {"hidden_size": HIDDEN, "moe_intermediate_size": INTERMEDIATE, "num_experts": EXPERTS}
    save(tmp_path, experts(PREFIX), config=CONFIG | claims | {"intermediate_size": 9999})
    assert loaded(tmp_path).findings == ()


@pytest.mark.parametrize("section", ["text_config", "llm_config", "language_config"])
def test_a_vision_wrapper_keeps_its_text_section_one_level_down(tmp_path, section):
    prefix = "model.language_model.layers.0.mlp.experts"
    inner = {"model_type": "glm4_moe", "num_experts_per_tok": 3, "routed_scaling_factor": 2.5}
    config = {"model_type": "glm4v_moe", "vision_config": {"num_experts_per_tok": 1}}
    config |= {section: inner, "num_experts_per_tok": None, "hidden_act": "silu"}
    save(tmp_path, experts(prefix) | router(prefix), config=config)
    subject = loaded(tmp_path).subject
    assert "(sigmoid)" in subject.inputs
    assert subject.routing.expert_ids.shape == (4, 3)
    torch.testing.assert_close(subject.routing.weights.sum(dim=1), torch.full((4,), 2.5))


def test_an_activation_that_contradicts_the_tensors_is_named(tmp_path):
    save(tmp_path, experts(PREFIX, UNGATED), config=CONFIG)
    refused(tmp_path, "config.json says silu", PREFIX, "no gate projection")


@pytest.mark.parametrize(
    ("names", "activation"), [(GATED, Activation.SILU), (UNGATED, Activation.RELU2)]
)
def test_without_an_activation_in_the_config_the_tensors_say_it(tmp_path, names, activation):
    save(tmp_path, experts(PREFIX, names), config={"num_experts_per_tok": 2})
    assert loaded(tmp_path).subject.layer.activation is activation


# ---- inputs


def test_recorded_inputs_that_cannot_be_used_are_named(tmp_path):
    save(tmp_path / "c", experts(PREFIX) | router(PREFIX), config=CONFIG)
    file = tmp_path / "x.safetensors"
    good = torch.ones(4, HIDDEN, dtype=torch.bfloat16)
    bad = {
        "short": good[:3].clone(),
        "wide": torch.ones(4, HIDDEN + 16),
        "vector": torch.ones(HIDDEN),
        "codes": torch.ones(4, HIDDEN, dtype=torch.uint8),
        "nan": good * float("nan"),
        "huge": torch.full((4, HIDDEN), 1e300, dtype=torch.float64),
    }
    save_file(bad | {"good": good}, file)
    assert "x.safetensors: good" in loaded(tmp_path / "c", inputs=f"{file}:good").subject.inputs
    for name in (*bad, "absent"):
        with pytest.raises(InputError) as error:
            loaded(tmp_path / "c", inputs=f"{file}:{name}")
        if name != "wide":
            assert "x.safetensors" in str(error.value)
            assert name in str(error.value)
    with pytest.raises(ShapeError, match=rf"\[4, {HIDDEN + 16}\].*{PREFIX} works on {HIDDEN}"):
        loaded(tmp_path / "c", inputs=f"{file}:wide")
    with pytest.raises(InputError, match="hidden_states"):
        loaded(tmp_path / "c", inputs=str(file))


def test_inputs_of_another_kind_are_named(tmp_path):
    save(tmp_path / "c", experts(PREFIX) | router(PREFIX), config=CONFIG)
    file = tmp_path / "x.safetensors"
    save_file({"x": torch.ones(4, HIDDEN), "XYZ": torch.ones(4, HIDDEN)}, file)
    (tmp_path / "config.json").write_text("{ broken")
    assert "x.safetensors: x" in loaded(tmp_path / "c", inputs=str(file)).subject.inputs
    for where in ("acts", "acts.npy", f"{file}XYZ", f"{file}:", str(tmp_path)):
        with pytest.raises(InputError, match=re.escape(f"--inputs {where}: write FILE")):
            loaded(tmp_path / "c", inputs=where)


def test_inputs_beyond_bf16_are_not_called_nan(tmp_path):
    save(tmp_path / "c", experts(PREFIX) | router(PREFIX), config=CONFIG)
    file = tmp_path / "x.safetensors"
    save_file({"x": torch.full((4, HIDDEN), 1e300, dtype=torch.float64)}, file)
    with pytest.raises(InputError, match="x holds values beyond bf16"):
        loaded(tmp_path / "c", inputs=str(file))


def test_random_inputs_are_repeatable(tmp_path):
    save(tmp_path, experts(PREFIX) | router(PREFIX), config=CONFIG)
    one, two = loaded(tmp_path).subject, loaded(tmp_path).subject
    assert torch.equal(one.x, two.x)
    assert torch.equal(one.routing.expert_ids, two.routing.expert_ids)


# ---- laziness


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each tensor was read, rows of fused ones as NAME[ROW]."""
    seen: Counter[str] = Counter()
    get, get_row = SafetensorsSource.get, SafetensorsSource.get_row

    def counted(self: SafetensorsSource, tensor: str) -> torch.Tensor:
        seen[tensor] += 1
        return get(self, tensor)

    def counted_row(self: SafetensorsSource, tensor: str, index: int) -> torch.Tensor:
        seen[f"{tensor}[{index}]"] += 1
        return get_row(self, tensor, index)

    monkeypatch.setattr(SafetensorsSource, "get", counted)
    monkeypatch.setattr(SafetensorsSource, "get_row", counted_row)
    return seen


def test_only_the_routed_experts_are_read(tmp_path, reads):
    tensors = {}
    for number in range(3):
        tensors |= experts(QWEN.format(number), count=16) | router(QWEN.format(number), count=16)
    save(tmp_path, tensors, shards=2, index=True, config=CONFIG)
    prefix = QWEN.format(1)
    subject = loaded(tmp_path, layer="1", tokens=1).subject
    assert subject.layer.experts == 2
    matrices = Counter({n: c for n, c in reads.items() if n.endswith((".weight", "_scale"))})
    routed = {name.split(".")[5] for name in reads if name.endswith(".weight_scale")}
    assert len(routed) == 2
    expected = {
        f"{prefix}.{expert}.{name}.{short}"
        for expert in routed
        for name in GATED
        for short in ("weight", "weight_scale")
    }
    scalars = {f"{prefix}.{e}.{n}.input_scale" for e in range(16) for n in GATED}
    others = {f"{prefix}.{e}.{n}.weight_scale_2" for e in routed for n in GATED}
    gate = f"{prefix.removesuffix('experts')}gate.weight"
    assert set(reads) == expected | scalars | others | {gate}
    assert all(matrices[name] == 1 for name in (*expected, gate)), "each once"


def test_only_the_routed_rows_of_fused_experts_are_read(tmp_path, reads):
    count = 16
    split = experts(PREFIX, UNGATED, count=count)
    fused = {}
    for name in UNGATED:
        for suffix, short in (("", "weight"), ("_weight_scale", "weight_scale")):
            parts = [split[f"{PREFIX}.{e}.{name}.{short}"] for e in range(count)]
            fused[f"{PREFIX}.{name}{suffix}"] = torch.stack(parts)
        for short in ("weight_scale_2", "input_scale"):
            fused[f"{PREFIX}.{name}_{short}"] = torch.full((count,), 2.0**-9)
    save(tmp_path, fused | router(PREFIX, count=count), config=UNGATED_CONFIG)
    assert loaded(tmp_path, tokens=1).subject.layer.experts == 2
    whole = {name for name in reads if not name.endswith("]")}
    assert whole == {GATE, *(n for n in fused if n.endswith(("_scale_2", "input_scale")))}
    rows = {name for name in reads if name.endswith("]")}
    assert len(rows) == 2 * len(UNGATED) * 2
    assert all(reads[name] == 1 for name in rows)


MEASURE = """
import sys
from pathlib import Path
import torch
from trtllm_b12x_fix.layer_check.from_checkpoint import Request, load
torch.set_num_threads(1)

def status(key):
    line = next(l for l in open("/proc/self/status") if l.startswith(key + ":"))
    return int(line.split()[1]) * 1024

def run(layer):
    return load(Request(Path(sys.argv[1]), layer, tokens=1, seed=0))

load(Request(Path(sys.argv[2]), "0", tokens=1, seed=0))  # imports and thread pools
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # resets the peak
before = status("VmRSS")
run("5")
print(status("VmHWM") - before)
"""


def test_memory_is_bounded_by_the_routed_experts(tmp_path):
    """One layer of a 100 MB checkpoint; file pages that were mapped count as memory here."""
    hidden, intermediate, count = 768, 512, 16
    tensors = {}
    for number in range(10):
        prefix = QWEN.format(number)
        sizes = {"count": count, "hidden": hidden, "intermediate": intermediate}
        tensors |= experts(prefix, **sizes) | router(prefix, count=count, hidden=hidden)
    save(tmp_path / "big", tensors, config=CONFIG)
    save(tmp_path / "small", experts(PREFIX) | router(PREFIX), config=CONFIG)
    file = tmp_path / "big" / "model.safetensors"
    assert file.stat().st_size > 100e6
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, tmp_path / "big", tmp_path / "small"],
        capture_output=True,
        text=True,
        check=False,
    )
    file.unlink()
    assert done.returncode == 0, done.stderr
    matrix = hidden * intermediate // 2 * 9 // 8
    routed = 2 * 3 * matrix
    assert int(done.stdout) < routed + matrix + 30e6


@pytest.mark.parametrize("factor", [1.0, 4.0, 64.0])
def test_made_up_inputs_never_saturate_a_sound_layer(tmp_path, factor):
    """A calibrated amax set by an outlier channel: N(0,1) there would overflow FC2's scale."""
    layer = make_layer(Activation.RELU2, experts=4, hidden=128, intermediate=128)
    layer = replace(layer, fc1=replace(layer.fc1, input_scale=layer.fc1.input_scale * factor))
    x, routing = make_inputs(layer, tokens=8, top_k=2)
    loud = x * factor
    if factor > 1:
        loud[-1] *= 2  # the loudest token is the last: none may be left out
    fitted, words = _fit_intermediate(layer, loud, routing)
    limit = CALIBRATION_MAX * float(layer.fc2.largest_input_scale)
    assert intermediate_amax(layer, fitted, routing) <= limit
    assert bool(words) == (factor > 1)
    ratio = loud.float().norm() / fitted.float().norm()
    assert float(ratio) in [2.0**k for k in range(8)]
