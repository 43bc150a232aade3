"""The fix inside every state of TensorRT-LLM, on FlashInfer's real wheels.

Stand-in, wrapper and dispatch run as they are; the emulator takes the kernel's place. What decode
returns must be the emulated repaired arm bit for bit, and CUTLASS must see what it always saw.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from tests.kernel_backend import ORDER_SEED
from tests.layers import make_inputs
from tests.trtllm.layers import Damage, as_loaded
from tests.trtllm.stand_in import Era, write_stand_in
from tests.trtllm.test_stand_in import (
    DECODE,
    LAYERS,
    MOVED,
    PADDED,
    TOKENS,
    TOP_K,
    VERSIONS,
    jobs,
    needs_flashinfer,
    run_worker,
)
from trtllm_b12x_fix import cli
from trtllm_b12x_fix.emulator import moe
from trtllm_b12x_fix.emulator.arithmetic import KernelFamily
from trtllm_b12x_fix.emulator.contract import (
    InputQuantization,
    InputScaleArgument,
    Shape,
    contract_for,
)
from trtllm_b12x_fix.layer import Activation, MoELayer, pad_to_tiles
from trtllm_b12x_fix.repair import InputScales, Strategy, arguments, input_scales, plan

SETUP = "tests.trtllm.fixed:install"
BAKING = [era for era in Era if era.value.bakes]
#: Where decode leaves b12x, or the layer was never baked: nothing of ours to compare.
ERAS = {"0.6.16": BAKING}


@dataclass
class FixedRun:
    """Records of one wheel with decode of what cannot be repaired sent to CUTLASS."""

    version: str
    records: dict[tuple[Era, str], dict]

    @property
    def eras(self) -> list[Era]:
        return ERAS.get(self.version, list(Era))


def run(
    version: str,
    folder: Path,
    eras: list[Era],
    everything: dict[str, dict],
    setup: str = SETUP,
) -> FixedRun:
    parts = []
    for era in eras:
        stand_in = folder / era.name
        stand_in.mkdir()
        write_stand_in(stand_in, era)
        part = {"era": era.name, "stand_in": str(stand_in), "jobs": list(everything.values())}
        parts.append(part)
    results = run_worker(version, parts, folder, setup)
    return FixedRun(
        version,
        {
            (era, name): record
            for era, result in zip(eras, results, strict=True)
            for name, record in zip(everything, result, strict=True)
        },
    )


@pytest.fixture(scope="module", params=VERSIONS)
def fixed(request, oracle_dir, tmp_path_factory) -> FixedRun:
    version = request.param
    oracle_dir(f"flashinfer-{version}")
    oracle_dir("flashinfer-deps")
    folder = tmp_path_factory.mktemp(f"fixed-{version}")
    variables = {
        "TRTLLM_B12X_FIX": "auto",
        "TRTLLM_B12X_FIX_ON_UNKNOWN": "cutlass",
        "TRTLLM_B12X_FIX_LEDGER": str(folder / "ledger"),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        return run(version, folder, ERAS.get(version, list(Era)), jobs())


def expected(
    fixed: FixedRun, record: dict, layer: MoELayer, tokens: int, exact: bool = False, **shape
):
    """Family and output of the repaired arm for TensorRT-LLM's parameters; None for CUTLASS.

    ``exact`` takes FC1's weight_scale_2 from the checkpoint: with dynamic quantization the layer
    keeps it.
    """
    contract = contract_for(fixed.version)
    planned = plan(contract, layer.activation)
    if planned.strategy is Strategy.CUTLASS:
        return None, None
    seen = as_loaded(layer)
    if exact:
        seen = replace(seen, fc1=replace(seen.fc1, weight_scale_2=layer.fc1.weight_scale_2))
    scales = input_scales(seen, InputScales.LAYER)
    args = arguments(planned.strategy, seen, *scales, contract)
    args = replace(args, w2_alpha=record["parameters"]["fc2_alpha"])
    shared = contract.input_scale is InputScaleArgument.SEPARATE
    where = Shape(
        tokens=tokens,
        top_k=TOP_K,
        hidden=layer.hidden,
        intermediate=layer.intermediate,
        experts=layer.experts,
        activation=layer.activation,
        sharing=InputQuantization.SHARED if shared else InputQuantization.PER_ROUTE,
        **shape,
    )
    family = contract.without(*planned.keep_out).select(where)
    x, routing = make_inputs(layer, tokens=tokens, top_k=TOP_K, seed=tokens)
    arithmetic = contract.arithmetic(family, where)
    return family, moe.run(args.launch(seen), x, routing, arithmetic, ORDER_SEED).output


def check(fixed: FixedRun, name: str, layer: MoELayer, tokens: int, place: int = 0, **shape):
    for era in BAKING:
        record = fixed.records[era, name]
        assert "error" not in record, (era, record["error"])
        case = record["cases"][place]
        family, output = expected(fixed, record, layer, tokens, **shape)
        if family is None:
            assert case["family"] is None, (era, tokens)
            continue
        assert KernelFamily(case["family"]) is family, (era, tokens)
        assert torch.equal(case["output"], output), (era, tokens)


@needs_flashinfer
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("tokens", DECODE)
def test_decode_is_the_repaired_arm_bit_for_bit(fixed, activation, tokens):
    check(fixed, activation.value, LAYERS[activation], tokens, TOKENS.index(tokens))


@needs_flashinfer
def test_other_ways_of_loading_end_the_same(fixed):
    relu2 = LAYERS[Activation.RELU2]
    check(fixed, "inference", relu2, 8)
    check(fixed, "twice", relu2, 8)
    check(fixed, "dynamic", relu2, 8, exact=True)
    check(fixed, "in parts", MOVED, 8)
    check(fixed, "reloaded", MOVED, 8)
    for name in ("graph", "graph, again"):
        check(fixed, name, LAYERS[Activation.SILU], 8, graph_capacity=64)


@needs_flashinfer
def test_padded_layers_run_where_the_wrapper_is_told_the_size_of_the_tensors(fixed):
    padded = pad_to_tiles(PADDED)
    for era in BAKING:
        record = fixed.records[era, "padded"]
        case = record["cases"][0]
        if era.value.tensor_sizes:
            family, output = expected(fixed, record, padded, 8)
            assert KernelFamily(case["family"]) is family
            assert torch.equal(case["output"], output)
        else:  # upstream raises at the first call; here decode goes to CUTLASS, and it is said
            assert case["family"] is None
            assert any("intermediate size 144" in line for _, line in record["log"])


@needs_flashinfer
def test_prefill_and_parameters_are_untouched(fixed):
    for (era, name), record in fixed.records.items():
        before, after = record["loaded"]
        assert before == after, (era, name)
    for activation in Activation:
        outputs = [
            record["cases"][-1]["output"]
            for (_, name), record in fixed.records.items()
            if name == activation.value
        ]
        assert all(torch.equal(outputs[0], other) for other in outputs)


@needs_flashinfer
def test_the_wrapper_reads_the_parameters_own_storage(fixed):
    for era in BAKING:
        found = fixed.records[era, "relu2"]["weights"]
        assert found["w1_weight_sf"]["shares"] == "w3_w1_weight_scale"
        assert found["w2_weight_sf"]["shares"] == "w2_weight_scale"
        # The alphas are copies: dynamic quantization changes the parameters in place.
        assert found["w1_alpha"]["shares"] is found["w2_alpha"]["shares"] is None
        assert ("input_global_scale" in found) == (fixed.version != "0.6.16")


@needs_flashinfer
def test_no_tensor_of_ours_is_an_inference_tensor(fixed):
    """FlashInfer asks for the version of what it folds."""
    for era in BAKING:
        found = fixed.records[era, "inference"]["weights"]
        for name in ("w1_alpha", "w2_alpha", "fc2_input_scale", "input_global_scale"):
            assert not found.get(name, {"inference": False})["inference"], (era, name)


@needs_flashinfer
def test_w4a16_and_an_upstream_that_does_not_bake_are_left_alone(fixed):
    for era in fixed.eras:
        record = fixed.records[era, "w4a16"]
        if era.value.tensor_sizes and era.value.bakes:
            assert record["weights"]["fc2_input_scale"] is None
            assert "input_global_scale" not in record["weights"]
    if Era.FIXED in fixed.eras:
        assert "error" not in fixed.records[Era.FIXED, "relu2"]
        (line,) = info_lines(fixed, Era.FIXED)
        assert re.search(r"unchanged in \d+ layers \(upstream keeps block scales intact\)", line)


def info_lines(fixed: FixedRun, era: Era) -> list[str]:
    """What the fix said at severity info in all jobs of a stand-in."""
    return [
        line
        for (one, _), record in fixed.records.items()
        if one is era
        for severity, line in record["log"]
        if severity == "info" and line.startswith("trtllm-b12x-fix")
    ]


@needs_flashinfer
def test_damage_is_named_and_its_decode_leaves_b12x(fixed):
    silu_on_b12x = fixed.version != "0.6.16"
    words = {
        Damage.NAN_BLOCK_SCALE: "expert 0: FC1 has a block scale that is NaN",
        Damage.NEGATIVE_BLOCK_SCALE: "expert 0: FC2 has a block scale that is negative",
        Damage.NO_INPUT_SCALE: "the FC1 input_scale was never loaded",
        Damage.NO_WEIGHT_SCALE_2: "expert 0: FC1's weight_scale_2 was never loaded",
        Damage.ZERO_INPUT_SCALE: "the reciprocal of the FC1 input_scale is inf",
        Damage.NAN_WEIGHT_SCALE_2: "expert 0: FC2's weight_scale_2 * input_scale is nan",
    }
    for era in BAKING:
        for damage, text in words.items():
            record = fixed.records[era, damage.name]
            warnings = [line for severity, line in record["log"] if severity == "warning"]
            assert any(text in line and "CUTLASS" in line for line in warnings), (era, damage)
            assert record["weights"] == {}
        record = fixed.records[era, Damage.DIFFERING_WEIGHT_SCALE_2.name]
        assert bool(record["weights"]) == silu_on_b12x
        warnings = [line for severity, line in record["log"] if severity == "warning"]
        assert any("6 of 6 experts" in line and "weight_scale_2" in line for line in warnings), era


@needs_flashinfer
def test_one_line_tells_of_all_layers_and_of_the_check(fixed):
    for era in fixed.eras:
        (line,) = info_lines(fixed, era)
        planned = plan(contract_for(fixed.version), Activation.RELU2)
        strategy = planned.strategy.value if era.value.bakes else "unchanged"
        for text in (strategy, era.value.version, fixed.version, "MiB", "emulated repair"):
            assert text in line, era
        counts = re.findall(r" in (\d+) layers? \(", line)
        # Also those that an older state prepares twice, and the reloaded one, count once.
        assert sum(map(int, counts)) == len(jobs())
        assert "live output passed" in line or "live output not distinguishable" in line
        # Said at the end, though nothing but the relu2 layer of the first job was checked.
        assert not any("trtllm-b12x-fix" in text for _, text in fixed.records[era, "relu2"]["log"])


@needs_flashinfer
def test_the_fold_is_there_before_a_capture_could_be(fixed):
    """With CUDA graphs the wrapper's alphas are folded when the layer is prepared; never later."""
    for era in fixed.eras:
        for name in ("graph", "graph, again"):
            record = fixed.records[era, name]
            if fixed.version == "0.6.16":  # which has nothing to fold
                continue
            assert record["fold"] == (True, True), (era, name)
        # Without graphs there is no capture: the control.
        if fixed.version != "0.6.16":
            assert fixed.records[era, "silu"]["fold"] == (False, False), era


@needs_flashinfer
def test_without_the_call_that_primes_the_fold_would_be_made_by_the_first_one(
    oracle_dir, tmp_path, monkeypatch
):
    """The planted defect of the test above."""
    version = "0.7.4"
    oracle_dir(f"flashinfer-{version}")
    oracle_dir("flashinfer-deps")
    monkeypatch.setenv("TRTLLM_B12X_FIX", "auto")
    monkeypatch.setenv("TRTLLM_B12X_FIX_VERIFY", "off")
    monkeypatch.setenv("TRTLLM_B12X_FIX_LEDGER", str(tmp_path / "ledger"))
    some = {"graph": jobs()["graph"]}
    setup = "tests.trtllm.fixed:install_without_prime"
    ran = run(version, tmp_path, [Era.MOE_TRANSFORM], some, setup)
    assert ran.records[Era.MOE_TRANSFORM, "graph"]["fold"] == (False, False)


# ---- the policy for what cannot be repaired: stop the start


@needs_flashinfer
def test_what_cannot_be_repaired_stops_the_start(oracle_dir, tmp_path, monkeypatch):
    version = "0.6.18"
    oracle_dir(f"flashinfer-{version}")
    oracle_dir("flashinfer-deps")
    monkeypatch.setenv("TRTLLM_B12X_FIX", "auto")
    monkeypatch.setenv("TRTLLM_B12X_FIX_LEDGER", str(tmp_path / "ledger"))
    wanted = (Damage.NAN_BLOCK_SCALE.name, Damage.NO_INPUT_SCALE.name, "relu2")
    some = {name: job for name, job in jobs().items() if name in wanted}
    ran = run(version, tmp_path, [Era.MOE_TRANSFORM], some)
    for name in wanted[:2]:
        error = ran.records[Era.MOE_TRANSFORM, name]["error"]
        assert error.startswith("ScaleError: ")
        assert "TRTLLM_B12X_FIX=off" in error
        assert "TRTLLM_B12X_FIX_ON_UNKNOWN=cutlass" in error
    assert "error" not in ran.records[Era.MOE_TRANSFORM, "relu2"]


@needs_flashinfer
@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"FLASHINFER_B12X_FORCE_MOE_W4A16": "1"}, "FLASHINFER_B12X_FORCE_MOE_W4A16=1"),
        ({"TRTLLM_B12X_FIX": "fp32-rescale"}, "TRTLLM_B12X_FIX=fp32-rescale needs relu2"),
    ],
    ids=["forced W4A16", "no exact form"],
)
def test_what_the_environment_makes_impossible_is_refused(
    oracle_dir, tmp_path, monkeypatch, variables, words
):
    version = "0.6.18"
    oracle_dir(f"flashinfer-{version}")
    oracle_dir("flashinfer-deps")
    everything = {"TRTLLM_B12X_FIX": "auto", "TRTLLM_B12X_FIX_LEDGER": str(tmp_path / "ledger")}
    for name, value in (everything | variables).items():
        monkeypatch.setenv(name, value)
    ran = run(version, tmp_path, [Era.MODULES_TRANSFORM], {"silu": jobs()["silu"]})
    assert words in ran.records[Era.MODULES_TRANSFORM, "silu"]["error"]


# ---- as a user switches it on


@needs_flashinfer
@pytest.mark.parametrize("era", [Era.MOE_LEAVES, Era.MODULES_POST_LOAD])
def test_the_import_hook_leads_to_the_same_repair(oracle_dir, tmp_path, monkeypatch, capsys, era):
    """apply() before anything of TensorRT-LLM is imported; status tells what was done."""
    version = "0.7.4"
    oracle_dir(f"flashinfer-{version}")
    oracle_dir("flashinfer-deps")
    monkeypatch.delenv("TRTLLM_B12X_FIX", raising=False)
    monkeypatch.setenv("TRTLLM_B12X_FIX_LEDGER", str(tmp_path / "ledger"))
    some = {name: jobs()[name] for name in ("relu2", "silu", "w4a16")}
    ran = run(version, tmp_path, [era], some, "tests.trtllm.fixed:hook")
    for activation in Activation:
        record = ran.records[era, activation.value]
        for place, tokens in enumerate(DECODE):
            _, output = expected(ran, record, LAYERS[activation], tokens)
            assert torch.equal(record["cases"][place]["output"], output)
    (line,) = info_lines(ran, era)  # by the timer, where emulation took long, or at the end
    assert "alphas in " in line
    assert cli.main(["status", "--json", "-"]) == 0  # it has ended, so nothing can be wrong
    (process,) = json.loads(capsys.readouterr().out)["processes"]
    record = process["record"]
    baked_w4a16 = not era.value.tensor_sizes  # older versions know no W4A16 and bake it, too
    assert record["layers"] == ({"alphas": 3} if baked_w4a16 else {"alphas": 2, "unchanged": 1})
    assert record["checks"]["counts"] == {"passed": 1}
    assert record["bytes_freed"] > 0


@needs_flashinfer
def test_on_cuda_12_the_error_is_flashinfers_own(oracle_dir, tmp_path, monkeypatch):
    """The wrapper cannot be made, fix or no fix: nothing of ours stands before that."""
    version = "0.7.4"
    oracle_dir(f"flashinfer-{version}")
    oracle_dir("flashinfer-deps")
    monkeypatch.delenv("TRTLLM_B12X_FIX", raising=False)
    monkeypatch.setenv("TRTLLM_B12X_FIX_LEDGER", str(tmp_path / "ledger"))
    setup = "tests.trtllm.fixed:hook_on_cuda_12"
    ran = run(version, tmp_path, [Era.MOE_TRANSFORM], {"relu2": jobs()["relu2"]}, setup)
    record = ran.records[Era.MOE_TRANSFORM, "relu2"]
    assert "CUDA 13" in record["error"]
    assert "12.9" in record["error"]
    assert "trtllm-b12x-fix" not in str(record["log"])
    (path,) = (tmp_path / "ledger").glob("*.json")
    left = json.loads(path.read_text(encoding="utf-8"))
    assert (left["state"], left["layers"], left["checks"]["counts"]) == ("active", {}, {})
