"""The plugin in vLLM's real classes, both pinned pairs, FlashInfer's real wrapper, on a CPU.

The emulator takes the kernel's place. One process for each wheel and capability does all its jobs
(tests/vllm/worker.py); the tests look at what it recorded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.oracle_moe import Launch
from tests.oracle_moe import run as run_oracle
from tests.vllm import checks, harness
from tests.vllm.scenarios import (
    FEW,
    LOST,
    TOKENS,
    UNKNOWN,
    jobs,
    run_worker,
    scales_of,
    selections,
)
from trtllm_b12x_fix.emulator import moe, reference
from trtllm_b12x_fix.formats import nvfp4
from trtllm_b12x_fix.layer import pad_to_tiles
from trtllm_b12x_fix.metrics import distance

pytestmark = [
    pytest.mark.oracle(*{name for version in harness.PAIRS for name in harness.oracles(version)}),
    # ModelOpt warns about every transformers release newer than itself.
    pytest.mark.filterwarnings("ignore::Warning"),
]


@dataclass(frozen=True)
class Ran:
    """What one wheel did."""

    version: str
    records: dict[str, dict[str, Any]]

    def __getitem__(self, name: str) -> dict[str, Any]:
        return self.records[name]


@pytest.fixture(scope="module", params=tuple(harness.PAIRS))
def ran(request, subjects, tmp_path_factory) -> Ran:
    """Everything of one wheel."""
    version = request.param
    wanted = jobs(subjects["relu2"], subjects["silu"], subjects["padded"]) | selections()
    return Ran(version, run_worker(version, wanted, tmp_path_factory.mktemp(version)))


@pytest.mark.parametrize("name", ["relu2", "silu"])
@pytest.mark.parametrize("unit", [False, True], ids=["calibrated", "unit"])
def test_a_layer_runs_the_repaired_arm_bit_for_bit(ran, subjects, name, unit):
    subject = subjects[name]
    record, tokens = (ran[f"{name}, unit"], FEW) if unit else (ran[name], TOKENS)
    if not checks.has_exact_form(ran.version, subject):
        pytest.skip("no exact form: see the test of CUTLASS")
    checks.repaired(record, ran.version, subject, tokens, unit=unit)
    assert unit or {case["family"] for case in record["cases"]} >= {"static", "dynamic"}
    checks.said(record, f"vLLM {ran.version}", "TRTLLM_B12X_FIX=off", "live output passed")


@pytest.mark.parametrize("name", ["relu2", "silu"])
def test_off_leaves_vllm_as_it_is(ran, subjects, name):
    record = ran[f"{name}, off"]
    checks.baked(record, ran.version, subjects[name], FEW)
    assert record["state"] == "off"
    assert not record["log"]
    assert record["calls_while_loading"] == 0


@pytest.mark.parametrize("name", ["relu2", "silu"])
def test_true_error_falls_to_what_fp4_costs(ran, subjects, name):
    """In the report's range of weights the bake costs more than all of FP4."""
    subject = subjects[name]
    if not checks.has_exact_form(ran.version, subject):
        pytest.skip("no exact form: see the test of CUTLASS")
    for place, count in enumerate(FEW):
        x, ids, weights = subject.case(count)
        truth = reference.truth(subject.layer, x, moe.Routing(ids, weights))

        def error(record: str, place: int = place, truth: torch.Tensor = truth) -> float:
            output = ran[record]["cases"][place]["output"]
            return distance(output.double(), truth).relative_rms

        assert error(name) < 0.18, count
        assert error(f"{name}, off") > 1.25 * error(name), count


@pytest.mark.parametrize("name", ["relu2", "silu"])
def test_against_a_launch_written_a_second_time(ran, subjects, name):
    """tests/oracle_moe.py knows nothing of the package: alphas and scales stand here once more."""
    subject = subjects[name]
    if not checks.has_exact_form(ran.version, subject):
        pytest.skip("no exact form: see the test of CUTLASS")
    layer = pad_to_tiles(subject.layer)
    x, ids, weights = subject.case(4)
    (s1, s2), w1, w2 = scales_of(layer), layer.fc1.weight_scale_2, layer.fc2.weight_scale_2
    rescale = ran.version == "0.27.0"
    launch = Launch(
        nvfp4.operand(layer.fc1.packed, layer.fc1.block_scale).numpy(),
        nvfp4.operand(layer.fc2.packed, layer.fc2.block_scale).numpy(),
        (s1.expand_as(w1) if rescale else w1 * s1).numpy(),
        (w2 * s2).numpy(),
        s1.expand_as(w1).numpy(),
        (s2 / w1 / w1 if rescale else s2.expand_as(w1)).numpy(),
        layer.activation.is_gated,
    )
    case = ran[name]["cases"][TOKENS.index(4)]
    flashinfer = checks.flashinfer_of(ran.version).rpartition(".post")[0]
    theirs = run_oracle(
        launch, flashinfer, case["family"], x.float().numpy(), ids.numpy(), weights.numpy()
    )
    ours = case["output"].float().numpy()
    # fp32 order in the products may flip a last bit of a term; a wrong rounding moves most rows.
    assert (ours != theirs).mean() < 0.02
    assert abs(ours - theirs).max() <= abs(theirs).max() * 2.0**-8


def test_swiglu_without_input_global_scale_runs_on_cutlass(ran, subjects):
    if ran.version != "0.27.0":
        pytest.skip("FlashInfer has input_global_scale")
    record = ran["silu"]
    native = ran["silu, cutlass backend"]
    assert torch.equal(
        record["after"]["w13_weight_scale"].view(torch.uint8),
        native["after"]["w13_weight_scale"].view(torch.uint8),
    )
    # The cases differ in number: what one token's call got is compared in the relu2 jobs.
    assert record["class"] == checks.CUTLASS
    for name, value in native["after"].items():
        assert torch.equal(record["after"][name].view(torch.uint8), value.view(torch.uint8)), name
    checks.said(record, "input_global_scale", "FLASHINFER_CUTLASS", "TRTLLM_B12X_FIX=off")
    assert record["ledger"]["layers"] == {"cutlass": 1}
    assert record["good"]


def test_block_scales_are_views_of_what_vllm_loaded(ran):
    checks.shares_memory(ran["relu2"])
    if ran.version != "0.27.0":
        checks.shares_memory(ran["silu"])


@pytest.mark.parametrize("name", checks.ALSO_REPAIRED)
def test_however_it_comes_the_layer_is_repaired_once(ran, subjects, name):
    record = ran[name]
    if name == "undone":
        record = {**record, "state": "active", "good": True}
        assert ran[name]["state"] in ("removed", "not waiting: no hook"), ran[name]["state"]
    checks.repaired(record, ran.version, subjects["relu2"], (4,))
    assert sum(record["ledger"]["layers"].values()) == 1


def test_the_live_check_can_be_switched_off_and_leaves_no_wrapper(ran, subjects):
    checks.repaired(ran["no check"], ran.version, subjects["relu2"], (4,))
    assert ran["no check"]["calls_while_loading"] == 0
    assert ran["relu2"]["calls_while_loading"] == 1


def test_a_weight_only_checkpoint_has_no_input_scales(ran, subjects):
    checks.repaired(ran["a16"], ran.version, subjects["relu2"], (4,), unit=True)


def test_a_mode_that_has_no_exact_form_is_refused(ran, subjects):
    if ran.version == "0.27.0":
        checks.refused(ran["alphas"], "FlashInfer 0.6.17", "TRTLLM_B12X_FIX=auto")
    else:
        checks.repaired(ran["alphas"], ran.version, subjects["relu2"], (4,))
    strategy = checks.Strategy.FP32_RESCALE
    checks.repaired(ran["fp32-rescale"], ran.version, subjects["relu2"], (4,), strategy=strategy)


def test_a_value_nobody_knows_stops_the_choice_of_b12x(ran):
    checks.refused(ran["bad value"], "TRTLLM_B12X_FIX_ACT_SCALE", "'half'", "calibrated, unit")
    assert ran["bad value"]["state"] == "failed"


def test_a_kernel_that_is_wrong_stops_the_start_or_leaves_b12x(ran):
    checks.refused(ran["wrong kernel"], "from the emulated repair")
    assert ran["wrong kernel"]["ledger"]["checks"]["counts"] == {"failed": 1}
    record = ran["wrong kernel, cutlass"]
    checks.on_cutlass(record, ran["relu2, cutlass backend"])
    checks.said(record, "this layer runs on FLASHINFER_CUTLASS")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("half", ("float16", "--moe-backend")),
        ("padded", ("vLLM", "intermediate size 64", "128 (padded)")),
        ("nan", ("expert 1", "FC1", "NaN")),
        ("no input scale", ("FC2", "input_scale", "TRTLLM_B12X_FIX_ACT_SCALE=unit")),
    ],
)
def test_what_no_kernel_can_use_is_refused_by_name(ran, name, words):
    checks.refused(ran[name], "model.layers.3.mlp.experts", *words)
    assert ran[name]["ledger"]["checks"]["counts"] == {"failed": 1}


def test_unit_scales_do_without_a_calibration(ran, subjects):
    checks.repaired(ran["no input scale, unit"], ran.version, subjects["relu2"], (4,), unit=True)


def test_a_padded_layer_can_run_on_cutlass(ran):
    record = ran["padded, cutlass"]
    checks.ran(record)
    assert record["class"] == checks.CUTLASS
    checks.said(record, "this layer runs on FLASHINFER_CUTLASS")


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_state_of_the_class_is_refused_or_sent_to_cutlass(ran, name):
    checks.refused(ran[name], "vLLM", ran.version, UNKNOWN[name])
    assert ran[name]["ledger"]["checks"]["counts"] == {"failed": 1}
    record = ran[f"{name}, cutlass"]
    if name in LOST:
        checks.refused(record, "cannot be put back")
        return
    checks.on_cutlass(record, ran["relu2, cutlass backend"])
    checks.said(record, UNKNOWN[name], "FLASHINFER_CUTLASS")


def test_a_missing_class_is_an_error_that_names_it(ran):
    checks.refused(ran["no class"], "vLLM", ran.version, "no class FlashInferB12xExperts")
    assert ran["no class"]["state"] == "failed"


def test_a_call_by_other_names_is_an_error_not_a_guess(ran):
    checks.refused(ran["other names at the call"], "vLLM", "w1_alpha", "B12xMoEWrapper.run")


def test_a_vllm_that_ships_the_repair_is_left_alone(ran, subjects):
    if ran.version == "0.27.0":
        # Its FlashInfer takes no input_global_scale, so such a vLLM cannot run there; the layer
        # was recognised before that.
        assert "input_global_scale" in ran["repaired"]["error"]
        assert ran["repaired"]["ledger"]["layers"] == {"unchanged": 1}
        return
    checks.left_alone(ran["repaired"], ran.version, subjects["relu2"])


def test_status_names_the_symbol_and_looks_at_it(ran):
    b12x = ran["relu2"]["targets"][checks.B12X_MODULE]
    (symbol,) = b12x["symbols"]
    assert symbol["symbol"].endswith("FlashInferB12xExperts.process_weights_after_loading")
    assert symbol["state"] == "active"
    record = ran["relu2"]["ledger"]
    assert record["versions"]["vllm"] == ran.version
    assert record["versions"]["flashinfer"] == checks.flashinfer_of(ran.version)
    assert record["mode"] == "auto"


@pytest.mark.parametrize("name", ["guarded", "guarded three times"])
def test_on_sm100_a_layer_without_gate_ends_at_cutlass(ran, name):
    checks.guarded(ran[name])


def test_what_cutlass_does_not_take_stays_where_it_was_with_a_warning(ran):
    """vLLM 0.33.0 needs trtllm-gen for global scales of single tokens: refusing would stop it."""
    record = ran["guarded, per token"]
    if ran.version == "0.27.0":
        pytest.skip("this vLLM has no such quantization")
    (chosen,) = record["chosen"]
    assert chosen["backend"] == "FLASHINFER_TRTLLM"
    checks.said(record, "vllm#52308", "FLASHINFER_CUTLASS does not take them")


def test_off_leaves_the_choice_to_vllm(ran):
    checks.unguarded(ran["guarded, off"])


@pytest.mark.parametrize("name", ["asks without a config", "answers with an object"])
def test_a_guard_that_cannot_tell_layers_apart_says_so(ran, name):
    plain, lenient = ran[name], ran[f"{name}, cutlass"]
    if name == "answers with an object":  # of no GPU in particular: nobody is stopped
        checks.said(plain, ran.version, "answers in another way", "--moe-backend")
        return
    relu2, silu = plain["chosen"]
    for one in (relu2, silu):
        assert "UnsupportedVersionError" in one["error"]
        assert ran.version in one["error"]
        assert "TRTLLM_B12X_FIX=off" in one["error"]
    assert all(one["backend"] == "FLASHINFER_CUTLASS" for one in lenient["chosen"])
    checks.said(lenient, "is not chosen for any layer")


def test_a_guarded_module_without_its_classes_is_told_of(ran):
    checks.not_guarded_and_said(ran["no guarded class"])


def test_a_gpu_that_is_not_concerned_sees_nothing_of_it(ran):
    checks.ran(ran["hopper"])
    assert ran["hopper"]["chosen"] == ran["hopper, off"]["chosen"]
    assert ran["hopper"]["log"] == []
    assert any(one.get("backend") for one in ran["hopper"]["chosen"])


def test_a_fault_of_ours_stops_nobody_who_did_not_ask(ran):
    record = ran["hopper, a fault of ours"]
    checks.ran(record)
    assert record["chosen"] == ran["hopper, off"]["chosen"]
    checks.said(record, "a fault of ours", "is left as it is", "TRTLLM_B12X_FIX=off")
    assert not record["good"]
    asked = ran["hopper, a fault of ours, asked for"]["chosen"]
    assert any("a fault of ours" in one.get("error", "") for one in asked)
