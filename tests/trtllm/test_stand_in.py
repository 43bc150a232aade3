"""The stand-in is what it claims to be: eras, loading, baked scales, and who reads what.

Each FlashInfer wheel runs every era in a process of its own. What b12x returns there must be the
emulated baked arm bit for bit: stand-in, wrapper, dispatch and emulator then agree.
"""

from __future__ import annotations

import ast
import os
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
import torch

from tests import warm
from tests.kernel_backend import ORDER_SEED
from tests.layers import make_inputs, make_layer
from tests.trtllm.layers import Damage, as_loaded, damaged, to_checkpoint
from tests.trtllm.stand_in import Era, write_stand_in
from trtllm_b12x_fix.emulator import moe, reference
from trtllm_b12x_fix.emulator.arithmetic import PUBLISHED, KernelFamily
from trtllm_b12x_fix.emulator.contract import Shape, contract_for
from trtllm_b12x_fix.formats import scale_layout
from trtllm_b12x_fix.layer import Activation, MoELayer
from trtllm_b12x_fix.metrics import distance
from trtllm_b12x_fix.repair import InputScales, Strategy, arguments, input_scales

ROOT = Path(__file__).parents[2]
VERSIONS = ("0.6.16", "0.6.18", "0.7.2", "0.7.4")
METHOD = "NVFP4CuteDslB12xFusedMoEMethod"
TOKENS = (1, 8, 17, 64)
DECODE = TOKENS[:-1]
TOP_K = 4
# Weights this small leave most baked scales subnormal.
LAYERS = {
    activation: make_layer(activation, experts=6, hidden=128, intermediate=256, sigma=0.005)
    for activation in Activation
}
needs_flashinfer = pytest.mark.slow


# ---------------------------------------------------------------------------
# On disk
# ---------------------------------------------------------------------------
@pytest.mark.parametrize("era", Era)
def test_the_distribution_answers_its_version(tmp_path, era):
    write_stand_in(tmp_path, era)
    (found,) = metadata.distributions(name="tensorrt_llm", path=[str(tmp_path)])
    assert found.version == era.value.version
    text = (tmp_path / "tensorrt_llm" / "version.py").read_text()
    assert f'"{era.value.version}"' in text


@pytest.mark.parametrize("era", Era)
def test_the_hook_is_where_the_era_has_it(tmp_path, era):
    write_stand_in(tmp_path, era)
    source = tmp_path.joinpath(*era.value.quantization_module.split(".")).with_suffix(".py")
    (method,) = (
        node
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == METHOD
    )
    hooks = [node.name for node in method.body if isinstance(node, ast.FunctionDef)]
    assert hooks == [era.value.hook]


def test_writing_twice_into_one_folder_is_refused(tmp_path):
    write_stand_in(tmp_path, Era.MOE_TRANSFORM)
    with pytest.raises(FileExistsError):
        write_stand_in(tmp_path, Era.MOE_TRANSFORM)


# ---------------------------------------------------------------------------
# Through FlashInfer
# ---------------------------------------------------------------------------
def make_job(layer: MoELayer, tokens: tuple[int, ...] = (), **more) -> dict:
    cases = []
    for count in tokens:
        x, routing = make_inputs(layer, tokens=count, top_k=TOP_K, seed=count)
        cases.append({"x": x, "expert_ids": routing.expert_ids, "expert_weights": routing.weights})
    return {
        "checkpoint": to_checkpoint(layer),
        "activation": layer.activation.value,
        "top_k": TOP_K,
        "hidden": layer.hidden,
        "intermediate": layer.intermediate,
        "experts": layer.experts,
        "cases": cases,
        **more,
    }


def run_worker(version: str, parts: list[dict], folder: Path, *setups: str) -> list[list[dict]]:
    job, out = folder / "job.pt", folder / "out.pt"
    torch.save(parts, job)
    arguments = ["--version", version, "--job", str(job), "--out", str(out)]
    for setup in setups:
        arguments += ["--setup", setup]
    # Matrices this small only lose time to a second thread.
    env = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if not setups:
        # Upstream as it is: the start-up file of an installed package reaches this process, too.
        env["TRTLLM_B12X_FIX"] = "off"
    done = warm.run(version, "tests.trtllm.worker", arguments, env)
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(out, weights_only=True)


#: Jobs of every era, by name.
PADDED = make_layer(Activation.RELU2, experts=4, hidden=128, intermediate=144)
MOVED = make_layer(Activation.RELU2, experts=6, hidden=128, intermediate=256, seed=7)


def jobs() -> dict[str, dict]:
    relu2, silu = LAYERS[Activation.RELU2], LAYERS[Activation.SILU]
    halves = [{}, {}]
    for key, tensor in to_checkpoint(MOVED).items():
        halves[int(key.split(".")[0]) % 2][key] = tensor
    everything = {
        "relu2": make_job(relu2, TOKENS),
        "silu": make_job(silu, TOKENS),
        "inference": make_job(relu2, (8,), inference_mode=True),
        "graph": make_job(silu, (8,), use_cuda_graph=True),
        "graph, again": make_job(silu, (8,), use_cuda_graph=True),
        "padded": make_job(PADDED, (8, 64)),
        "reloaded": make_job(relu2, (8, 64), reload=to_checkpoint(MOVED)),
        "twice": make_job(relu2, (8,), walks=2),
        "in parts": make_job(relu2, (8,), checkpoint=halves),
        "w4a16": make_job(relu2, quant_algo="W4A16_NVFP4"),
        "dynamic": make_job(relu2, (8,), dynamic=True),
    }
    for damage in Damage:
        checkpoint = damaged(to_checkpoint(silu), damage)
        everything[damage.name] = make_job(silu, checkpoint=checkpoint)
    return everything


@dataclass
class VersionRun:
    version: str
    records: dict[tuple[Era, str], dict]


@pytest.fixture(scope="module", params=VERSIONS)
def ran(request, oracle_dir, tmp_path_factory) -> VersionRun:
    version = request.param
    oracle_dir(f"flashinfer-{version}")
    oracle_dir("flashinfer-deps")
    folder = tmp_path_factory.mktemp(f"flashinfer-{version}")
    eras = [era for era in Era if version != "0.6.16" or era is not Era.FIXED]
    everything = jobs()
    parts = []
    for era in eras:
        stand_in = folder / era.name
        stand_in.mkdir()
        write_stand_in(stand_in, era)
        part = {"era": era.name, "stand_in": str(stand_in), "jobs": list(everything.values())}
        parts.append(part)
    results = run_worker(version, parts, folder)
    records = {
        (era, name): record
        for era, result in zip(eras, results, strict=True)
        for name, record in zip(everything, result, strict=True)
    }
    return VersionRun(version, records)


def of_name(ran: VersionRun, name: str, *, baked: bool = True) -> list[tuple[Era, dict]]:
    found = [
        (era, record)
        for (era, one), record in ran.records.items()
        if one == name and (era.value.bakes or not baked)
    ]
    assert len(found) >= 5
    return found


def emulated(version: str, layer: MoELayer, tokens: int, strategy: Strategy, **shape):
    """Family and output that the emulator gives for TensorRT-LLM's parameters."""
    seen = as_loaded(layer)
    contract = contract_for(version)
    args = arguments(strategy, seen, *input_scales(seen, InputScales.LAYER), contract)
    x, routing = make_inputs(layer, tokens=tokens, top_k=TOP_K, seed=tokens)
    where = Shape(
        tokens=tokens,
        top_k=TOP_K,
        hidden=layer.hidden,
        intermediate=layer.intermediate,
        experts=layer.experts,
        activation=layer.activation,
        **shape,
    )
    family = contract.select(where)
    arithmetic = contract.arithmetic(family, where)
    return family, moe.run(args.launch(seen), x, routing, arithmetic, ORDER_SEED).output


@needs_flashinfer
@pytest.mark.parametrize("activation", Activation)
def test_decode_is_the_emulated_baked_arm_bit_for_bit(ran, activation):
    for era, record in of_name(ran, activation.value):
        assert "error" not in record, (era, record["error"])
        for tokens, case in zip(TOKENS, record["cases"], strict=True):
            if tokens not in DECODE:
                continue
            family, output = emulated(ran.version, LAYERS[activation], tokens, Strategy.BAKED)
            assert KernelFamily(case["family"]) is family, (era, tokens)
            assert torch.equal(case["output"], output), (era, tokens)


@needs_flashinfer
@pytest.mark.parametrize("activation", Activation)
def test_baking_damages_and_the_fixed_era_does_not(ran, activation):
    layer = LAYERS[activation]
    tokens = 17
    x, routing = make_inputs(layer, tokens=tokens, top_k=TOP_K, seed=tokens)
    truth = reference.truth(layer, x, routing)
    errors = {
        era: distance(record["cases"][TOKENS.index(tokens)]["output"], truth).relative_rms
        for era, record in of_name(ran, activation.value, baked=False)
    }
    assert len({error for era, error in errors.items() if era.value.bakes}) == 1
    if Era.FIXED in errors:
        assert errors[Era.FIXED] < 0.2 < 0.25 < errors[Era.MOE_TRANSFORM]
        cases = ran.records[Era.FIXED, activation.value]["cases"]
        for count, case in zip(TOKENS, cases, strict=True):
            if count in DECODE:
                family, output = emulated(ran.version, layer, count, Strategy.ALPHAS)
                assert KernelFamily(case["family"]) is family
                assert torch.equal(case["output"], output), count


@needs_flashinfer
@pytest.mark.parametrize("activation", Activation)
def test_prefill_goes_to_cutlass_with_exact_scales(ran, activation):
    """The stand-in's CUTLASS and the published arithmetic differ by one bf16 rounding."""
    layer = as_loaded(LAYERS[activation])
    x, routing = make_inputs(layer, tokens=64, top_k=TOP_K, seed=64)
    exact = reference.exact_launch(layer, *input_scales(layer, InputScales.LAYER))
    expected = moe.run(exact, x, routing, PUBLISHED).output
    outputs = []
    for _, record in of_name(ran, activation.value, baked=False):
        case = record["cases"][-1]
        assert case["family"] is None
        outputs.append(case["output"])
    assert all(torch.equal(outputs[0], other) for other in outputs)
    assert distance(outputs[0], expected).relative_rms < 0.03


@needs_flashinfer
def test_nothing_touches_the_loaded_parameters(ran):
    for (era, name), record in ran.records.items():
        before, after = record["loaded"]
        assert before == after, (era, name)


@needs_flashinfer
def test_parameters_are_what_the_table_says(ran):
    for activation, layer in (*LAYERS.items(), (None, PADDED)):
        name = "padded" if activation is None else activation.value
        rows = -(-layer.fc1.rows // 128) * 128
        inner = rows // (2 if layer.activation.is_gated else 1)
        experts, hidden = layer.experts, layer.hidden
        seen = as_loaded(layer)
        for _, record in of_name(ran, name, baked=False):
            found = record["parameters"]
            assert {key: (value.dtype, tuple(value.shape)) for key, value in found.items()} == {
                "w3_w1_weight": (torch.int64, (experts, rows, hidden // 16)),
                "w2_weight": (torch.int64, (experts, hidden, inner // 16)),
                "w3_w1_weight_scale": (torch.int32, (experts, rows, hidden // 64)),
                "w2_weight_scale": (torch.int32, (experts, hidden, inner // 64)),
                "fc31_alpha": (torch.float32, (experts,)),
                "fc2_alpha": (torch.float32, (experts,)),
                "fc31_input_scale": (torch.float32, ()),
                "fc2_input_scale": (torch.float32, ()),
            }
            for scale, blocks, size in (
                (found["w3_w1_weight_scale"], layer.fc1.block_scale, (rows, hidden // 16)),
                (found["w2_weight_scale"], layer.fc2.block_scale, (hidden, inner // 16)),
            ):
                padding = (0, size[1] - blocks.shape[2], 0, size[0] - blocks.shape[1])
                linear = torch.nn.functional.pad(blocks, padding)
                swizzled = scale_layout.swizzle(linear)
                assert torch.equal(scale.view(torch.uint8), swizzled)
            for alpha, scale, matrices in (
                (found["fc31_alpha"], found["fc31_input_scale"], seen.fc1),
                (found["fc2_alpha"], found["fc2_input_scale"], seen.fc2),
            ):
                assert torch.equal(alpha * scale, matrices.weight_scale_2)
                assert torch.equal((1.0 / scale).expand(experts), matrices.input_scale)


KEYS = [
    "w1_weight",
    "w1_weight_sf",
    "w1_alpha",
    "w2_weight",
    "w2_weight_sf",
    "w2_alpha",
    "fc2_input_scale",
]


@needs_flashinfer
def test_b12x_weights_are_the_wrappers_keywords(ran):
    for era, record in of_name(ran, "relu2", baked=False):
        found = record["weights"]
        more = [] if era.value.bakes else ["input_global_scale"]
        assert list(found) == KEYS + more
        assert found["w1_weight"]["shares"] == "w3_w1_weight"
        assert found["w2_weight"]["shares"] == "w2_weight"
        shared = None if era.value.bakes else "w3_w1_weight_scale"
        assert found["w1_weight_sf"]["shares"] == shared
        assert found["w1_weight_sf"]["dtype"] == "torch.float8_e4m3fn"
        assert len(found["w1_weight_sf"]["shape"]) == 6
        assert found["w1_alpha"]["shape"] == (6,)
        assert found["fc2_input_scale"]["shape"] == ()


@needs_flashinfer
def test_the_log_says_which_sizes_the_wrapper_was_told(ran):
    for era, record in of_name(ran, "relu2", baked=False):
        ((severity, line),) = record["log"]
        assert severity == "info"
        assert line.startswith(f"{METHOD} active: hidden=128, intermediate=256, experts=6, top_k=4")
        assert ("quant_mode=nvfp4" in line) == era.value.tensor_sizes
        # Once per process, not once per layer.
        assert ran.records[era, "silu"]["log"] == []


@needs_flashinfer
def test_padded_layers_need_the_size_of_the_tensors(ran):
    for era, record in of_name(ran, "padded", baked=False):
        if not era.value.tensor_sizes:
            assert "error" in record, era
            continue
        assert record["cases"][0]["family"] is not None
        assert "error" not in record, (era, record["error"])


@needs_flashinfer
def test_inference_tensors(ran):
    """Baked weights made under inference mode stay usable; folding intact ones raises to 0.7.2."""
    for era, record in of_name(ran, "inference", baked=False):
        assert record["weights"]["w1_alpha"]["inference"]
        if era.value.bakes:
            _, output = emulated(ran.version, LAYERS[Activation.RELU2], 8, Strategy.BAKED)
            assert torch.equal(record["cases"][0]["output"], output), era
        else:
            assert ("error" in record) == (ran.version != "0.7.4")
            assert "version counter" in record.get("error", "version counter")


@needs_flashinfer
def test_graph_wrappers_share_one_output(ran):
    for era, record in of_name(ran, "graph"):
        capacity = {"graph_capacity": 64}
        family, output = emulated(
            ran.version, LAYERS[Activation.SILU], 8, Strategy.BAKED, **capacity
        )
        for one in (record, ran.records[era, "graph, again"]):
            assert KernelFamily(one["cases"][0]["family"]) is family
            assert torch.equal(one["cases"][0]["output"], output)


@needs_flashinfer
def test_a_reload_prepares_b12x_again(ran):
    for era, record in of_name(ran, "reloaded"):
        _, output = emulated(ran.version, MOVED, 8, Strategy.BAKED)
        assert torch.equal(record["cases"][0]["output"], output), era


@needs_flashinfer
def test_a_second_walk_changes_no_number(ran):
    """Before the hook was split, every walk bakes anew, from parameters that are still intact."""
    for era, record in of_name(ran, "twice"):
        _, output = emulated(ran.version, LAYERS[Activation.RELU2], 8, Strategy.BAKED)
        assert torch.equal(record["cases"][0]["output"], output), era
        assert record["rebuilt"] == (era.value.hook == "post_load_weights")


@needs_flashinfer
def test_loading_in_parts_is_loading_at_once(ran):
    for era, record in of_name(ran, "in parts"):
        _, output = emulated(ran.version, MOVED, 8, Strategy.BAKED)
        assert torch.equal(record["cases"][0]["output"], output), era


@needs_flashinfer
def test_w4a16_is_not_baked(ran):
    for era, record in of_name(ran, "w4a16", baked=False):
        if not era.value.tensor_sizes or not era.value.bakes:
            continue
        assert record["weights"]["fc2_input_scale"] is None
        assert record["weights"]["w1_weight_sf"]["shares"] == "w3_w1_weight_scale"
        seen = as_loaded(LAYERS[Activation.RELU2])
        assert torch.equal(record["weights"]["w1_alpha"]["values"], seen.fc1.weight_scale_2)


@needs_flashinfer
def test_damage_loads_without_an_error(ran):
    """Nothing upstream notices, but for a warning where w1 and w3 differ."""
    for damage in Damage:
        for era, record in of_name(ran, damage.name):
            assert "error" not in record, (era, damage)
            warnings = [line for severity, line in record["log"] if severity == "warning"]
            assert bool(warnings) == (damage is Damage.DIFFERING_WEIGHT_SCALE_2), (era, damage)


@needs_flashinfer
def test_what_damage_leaves_in_the_parameters(ran):
    intact = as_loaded(LAYERS[Activation.SILU])
    for _, record in of_name(ran, Damage.NO_INPUT_SCALE.name):
        found = record["parameters"]
        assert found["fc31_input_scale"] == found["fc2_input_scale"] == 1
        assert torch.allclose(found["fc31_alpha"], intact.fc1.weight_scale_2)
    for _, record in of_name(ran, Damage.NO_WEIGHT_SCALE_2.name):
        found = record["parameters"]
        assert found["fc31_alpha"][0] == found["fc2_alpha"][0] == 1
        assert bool((found["fc31_alpha"][1:] < 1e-3).all())
    for _, record in of_name(ran, Damage.ZERO_INPUT_SCALE.name):
        found = record["parameters"]
        assert bool(torch.isnan(found["fc31_alpha"] * found["fc31_input_scale"]).all())
    for _, record in of_name(ran, Damage.DIFFERING_WEIGHT_SCALE_2.name):
        found = record["parameters"]
        recovered = found["fc31_alpha"] * found["fc31_input_scale"]
        assert torch.allclose(recovered, 2 * intact.fc1.weight_scale_2)
