"""The live check of a repaired layer: what passes, what fails, and what says neither."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.layers import make_layer
from tests.trtllm_layers import (
    RELU2,
    SILU,
    THRESHOLD_OF_CLASS,
    VERSION,
    Bench,
    Layer,
    Misbehaviour,
    digest,
    make_bench,
    make_module,
    prepared,
    with_powers_of_two,
)
from trtllm_b12x_fix.emulator.contract import contract_for
from trtllm_b12x_fix.integrations.tensorrt_llm import VerificationError
from trtllm_b12x_fix.integrations.trtllm_decode import THRESHOLD
from trtllm_b12x_fix.integrations.trtllm_layer import repair_layer
from trtllm_b12x_fix.integrations.trtllm_verify import (
    FAILED_BEYOND,
    Verification,
    VerifyState,
    _state,
    verify_layer,
)
from trtllm_b12x_fix.layer import Activation, MoELayer
from trtllm_b12x_fix.repair import Strategy
from trtllm_b12x_fix.settings import Mode, OnUnknown, Verify

VERSIONS = ("0.6.16", "0.6.18", "0.7.2", "0.7.4")
GATED_ON_0_6_16 = ("0.6.16", Activation.SILU)
LAYERS = {Activation.RELU2: RELU2, Activation.SILU: SILU}
NAN, INF = float("nan"), float("inf")
PASSED, FAILED = VerifyState.PASSED, VerifyState.FAILED
UNSURE, NOT_VERIFIED = VerifyState.NOT_DISTINGUISHABLE, VerifyState.NOT_VERIFIED
UNABLE = (Misbehaviour.RAISES, Misbehaviour.OUT_OF_MEMORY)
WRONG = (Misbehaviour.BAKED, Misbehaviour.NAN, Misbehaviour.TOO_LARGE, Misbehaviour.ALL_ONES)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Small products, often on a busy machine: a second thread costs more than it brings."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def bench(monkeypatch, tmp_path) -> Bench:
    return make_bench(monkeypatch, tmp_path)


def verify(
    bench: Bench,
    layer: MoELayer = RELU2,
    version: str = "0.7.4",
    mode: Mode = Mode.AUTO,
    **options: Any,
) -> Verification:
    """Repair a layer as the fix does, and check it."""
    if version == "0.6.18":  # where direct micro is kept out of the dispatch
        bench.dispatch._DIRECT_MICRO_MAX_N = 0
    module = prepared(layer, version, **options)
    contract = contract_for(version)
    outcome = repair_layer(module, mode, contract, VERSION)
    before = digest(module), dict(module._b12x_weights)
    found = verify_layer(module, outcome, contract)
    assert digest(module) == before[0]
    assert all(module._b12x_weights[key] is value for key, value in before[1].items())
    assert found.failed == (found.state is FAILED)
    assert found.layer == "layer 3"
    return found


# ---- the judgement


@pytest.mark.parametrize(
    ("from_repaired", "from_baked", "apart", "noise", "state"),
    [
        (0.0, 0.7, 0.7, 0.0, PASSED),
        (FAILED_BEYOND, 0.7, 0.7, 0.0, PASSED),
        (FAILED_BEYOND + 1e-9, 0.7, 0.7, 0.0, FAILED),
        # Beyond the limit fails even where the arms cannot be told apart.
        (FAILED_BEYOND + 1e-9, 0.7, 0.0, 0.5, FAILED),
        # The arms are told apart by twice the noise.
        (0.05, 0.0, 0.02, 0.01, UNSURE),
        (0.05, 0.0, 0.02 + 1e-9, 0.01, FAILED),
        (0.0, 0.02, 0.02, 0.01, UNSURE),
        (0.0, 0.02, 0.02 + 1e-9, 0.01, PASSED),
        (0.0, 0.0, 0.0, 0.0, UNSURE),
        (0.0, 1e-9, 1e-9, 0.0, PASSED),
        # Nearer to the bake by a factor of two.
        (0.08, 0.04, 0.08, 0.0, PASSED),
        (0.08, 0.04 - 1e-9, 0.08, 0.0, FAILED),
        (0.08, 0.0, 0.08, 0.0, FAILED),
        # No figure, no verdict.
        (NAN, 0.1, 0.1, 0.0, NOT_VERIFIED),
        (NAN, NAN, NAN, NAN, NOT_VERIFIED),
        # A bake that is not finite is no arm to be near to.
        (0.01, NAN, NAN, 0.0, PASSED),
        (0.11, NAN, NAN, 0.0, FAILED),
    ],
)
def test_the_borders(from_repaired, from_baked, apart, noise, state):
    assert _state(from_repaired, from_baked, apart, noise) is state


GRID = (0.0, 0.01, 0.04, FAILED_BEYOND, 0.2, 0.7)


def test_the_judgement_is_what_its_sentences_say():
    for repaired, baked, apart, noise in itertools.product(GRID, repeat=4):
        state = _state(repaired, baked, apart, noise)
        case = (repaired, baked, apart, noise, state)
        told_apart = apart > 2 * noise
        if repaired > FAILED_BEYOND:
            assert state is FAILED, case
        elif not told_apart:
            assert state is UNSURE, case
        else:
            assert (state is FAILED) == (baked < repaired / 2), case
            assert state in (PASSED, FAILED), case


def test_a_better_output_is_judged_no_worse():
    for repaired, baked, apart, noise in itertools.product(GRID, repeat=4):
        if _state(repaired, baked, apart, noise) is PASSED:
            assert _state(repaired / 2, baked, apart, noise) is PASSED


# ---- right layers pass


@pytest.mark.parametrize(
    ("version", "activation"),
    # 0.6.16's gated layers go to CUTLASS: nothing of ours to check.
    [case for case in itertools.product(VERSIONS, Activation) if case != GATED_ON_0_6_16],
)
def test_a_repaired_layer_passes(bench, version, activation):
    found = verify(bench, LAYERS[activation], version)
    assert found.state is PASSED
    assert found.from_repaired <= 2 * found.noise
    assert found.from_baked > 0.4
    assert found.apart > 0.4
    assert "live output passed" in found.words
    assert "% from the emulated repair" in found.words


@pytest.mark.parametrize("version", ["0.6.18", "0.7.4"])
def test_another_order_of_adds_passes(bench, version):
    found = verify(bench, version=version, top_k=4)
    assert found.state is PASSED
    assert (found.noise > 0) == (version == "0.6.18")
    assert (found.from_repaired > 0) == (version == "0.6.18")


@pytest.mark.parametrize("version", VERSIONS)
def test_a_strategy_that_was_asked_for_passes(bench, version):
    assert verify(bench, version=version, mode=Mode.FP32_RESCALE).state is PASSED


def test_more_experts_than_are_used_pass(bench):
    layer = make_layer(Activation.RELU2, experts=12, hidden=128, intermediate=256, sigma=0.005)
    assert verify(bench, layer).state is PASSED


@pytest.mark.parametrize("sigma", [0.02, 2.0, 30.0])
def test_a_layer_of_any_magnitude_passes(bench, sigma):
    layer = make_layer(Activation.RELU2, experts=4, hidden=128, intermediate=128, sigma=sigma)
    assert verify(bench, layer).state is PASSED


def test_a_layer_made_in_inference_mode_passes(bench):
    assert verify(bench, inference=True).state is PASSED


def test_a_layer_that_keeps_weight_scale_2_passes(bench):
    assert verify(bench, dynamic=True).state is PASSED


def test_the_wrapper_is_called_as_the_forward_pass_calls_it(bench):
    modes = []
    module = prepared(flashinfer="0.7.4")
    run = module.b12x_wrapper.run

    def watched(**call):
        modes.append(torch.is_inference_mode_enabled())
        assert call["x"].dtype == torch.bfloat16
        assert call["token_selected_experts"].dtype == torch.int32
        assert call["token_final_scales"].dtype == torch.float32
        return run(**call)

    contract = contract_for("0.7.4")
    outcome = repair_layer(module, Mode.AUTO, contract, VERSION)
    module.b12x_wrapper.run = watched
    assert verify_layer(module, outcome, contract).state is PASSED
    assert modes == [True]


def test_the_check_repeats_itself(bench):
    assert verify(bench, version="0.6.18") == verify(bench, version="0.6.18")


# ---- wrong ones fail


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("misbehaviour", WRONG)
def test_a_wrong_output_fails(bench, version, misbehaviour):
    found = verify(bench, version=version, misbehaviour=misbehaviour)
    assert found.state is FAILED
    if misbehaviour is Misbehaviour.NAN:
        assert found.words == "the live output is not finite"
    else:
        assert "live output failed" in found.words


@pytest.mark.parametrize("misbehaviour", WRONG)
def test_a_wrong_gated_output_fails(bench, misbehaviour):
    assert verify(bench, SILU, misbehaviour=misbehaviour).state is FAILED


@pytest.mark.parametrize("version", ["0.6.16", "0.7.2", "0.7.4"])
def test_a_baked_output_is_the_emulated_bake(bench, version):
    """The fold of w1_alpha and the old arguments: the arm that it is compared with is the real."""
    found = verify(bench, version=version, misbehaviour=Misbehaviour.BAKED)
    assert found.from_baked == 0
    assert found.from_repaired == found.apart


def test_direct_micro_that_was_not_kept_out_fails(bench):
    """0.6.18's direct micro multiplies by the input scales: zeros come out."""
    contract = contract_for("0.6.18")
    module = prepared()
    outcome = repair_layer(module, Mode.AUTO, contract, VERSION)
    assert bench.dispatch._DIRECT_MICRO_MAX_N == 512
    assert verify_layer(module, outcome, contract).state is FAILED


@pytest.mark.parametrize(
    "key", ["w1_alpha", "w2_alpha", "input_global_scale", "fc2_input_scale", "w1_weight_sf"]
)
def test_a_wrong_argument_fails(bench, key):
    module = prepared(flashinfer="0.7.4")
    contract = contract_for("0.7.4")
    outcome = repair_layer(module, Mode.AUTO, contract, VERSION)
    entries = module._b12x_weights
    wrong = {
        "w1_weight_sf": lambda t: module._b12x_weights["w2_weight_sf"],
        "input_global_scale": lambda t: 1.0 / t,
        "fc2_input_scale": lambda t: 1.0 / t,
        "w1_alpha": lambda t: t * 1.2,
        "w2_alpha": lambda t: t * 1.2,
    }
    entries[key] = wrong[key](entries[key])
    assert verify_layer(module, outcome, contract).state is FAILED


# ---- nothing to tell


@pytest.mark.parametrize("misbehaviour", [Misbehaviour.NONE, Misbehaviour.BAKED])
def test_weights_so_large_that_baking_costs_nothing(bench, misbehaviour):
    """Every product is an E4M3 number: both arms are the same, whatever the wrapper runs."""
    found = verify(bench, with_powers_of_two(RELU2, -5), misbehaviour=misbehaviour)
    assert found.state is UNSURE
    assert found.apart == 0
    assert "live output not distinguishable" in found.words


@pytest.mark.parametrize("misbehaviour", [Misbehaviour.NONE, Misbehaviour.BAKED])
def test_noise_of_the_family_that_exceeds_the_damage(bench, misbehaviour):
    layer = with_powers_of_two(RELU2, -6)
    lossy = torch.full((4,), 2.0**-13)  # a few subnormal products in FC2 alone
    layer = replace(layer, fc2=replace(layer.fc2, weight_scale_2=lossy))
    found = verify(bench, layer, "0.6.18", top_k=4, misbehaviour=misbehaviour)
    assert found.state is UNSURE
    assert 0 < found.apart <= 2 * found.noise


def test_a_wrong_output_fails_where_baking_costs_nothing(bench):
    layer = with_powers_of_two(RELU2, -5)
    assert verify(bench, layer, misbehaviour=Misbehaviour.TOO_LARGE).state is FAILED


@pytest.mark.parametrize("misbehaviour", UNABLE)
def test_a_wrapper_that_raises_is_not_verified(bench, misbehaviour):
    found = verify(bench, misbehaviour=misbehaviour)
    assert found.state is NOT_VERIFIED
    assert found.from_repaired is None
    names = ("ValueError: micro MoE kernel", "OutOfMemoryError: CUDA out of memory")
    assert names[UNABLE.index(misbehaviour)] in found.words


def test_a_long_error_is_cut(bench):
    module = prepared(flashinfer="0.7.4")
    contract = contract_for("0.7.4")
    outcome = repair_layer(module, Mode.AUTO, contract, VERSION)

    def run(**call):
        raise RuntimeError("line\n" * 10_000)

    module.b12x_wrapper.run = run
    found = verify_layer(module, outcome, contract)
    assert found.state is NOT_VERIFIED
    assert len(found.words) < 400
    assert "\n" not in found.words


def test_an_output_where_there_should_be_none_fails(bench):
    nothing = replace(RELU2.fc2, packed=torch.zeros_like(RELU2.fc2.packed))
    found = verify(bench, replace(RELU2, fc2=nothing), misbehaviour=Misbehaviour.ALL_ONES)
    assert found.state is FAILED


# ---- which layers are checked


CHECKS = {Verify.FIRST: 1, Verify.ALL: 3, Verify.OFF: 0}


@pytest.mark.parametrize("wanted", Verify)
def test_so_many_layers_are_checked(bench, wanted):
    process = bench.process(verify=wanted)
    modules = [bench.prepare(make_module(index=index), process) for index in range(3)]
    calls = [len(module.b12x_wrapper.calls) for module in modules]
    assert sum(calls) == CHECKS[wanted]
    assert calls == sorted(calls, reverse=True)
    counts = bench.record()["checks"]["counts"]
    assert counts == ({"passed": CHECKS[wanted]} if CHECKS[wanted] else {})


def test_the_first_layer_is_the_first_that_was_repaired(bench):
    process = bench.process(verify=Verify.FIRST)
    bench.prepare(make_module(quant_algo="W4A16_NVFP4"), process)
    module = bench.prepare(make_module(index=7), process)
    assert len(module.b12x_wrapper.calls) == 1
    (check,) = bench.record()["checks"]["last"]
    assert check["layer"] == "layer 7"


def test_a_check_that_could_not_be_made_serves_on(bench):
    method = bench.method(misbehaviour=Misbehaviour.OUT_OF_MEMORY)
    module = bench.prepare(make_module(), method=method)
    assert module.decode() == "b12x"
    assert bench.record()["checks"]["counts"] == {"not verified": 1}
    assert any("OutOfMemoryError" in line for line in bench.log.warnings)


def test_a_passed_check_is_no_warning(bench):
    bench.prepare(make_module())
    assert bench.log.warnings == []
    assert "layer 3: live output passed: " in bench.line()


@pytest.mark.parametrize("misbehaviour", WRONG)
def test_a_failed_check_stops_the_start(bench, misbehaviour):
    with pytest.raises(VerificationError) as caught:
        bench.prepare(make_module(), method=bench.method(misbehaviour=misbehaviour))
    for text in ("layer 3", "live output", "TRTLLM_B12X_FIX_VERIFY=off", "=cutlass"):
        assert text in str(caught.value)
    assert bench.record()["checks"]["counts"] == {"failed": 1}


@pytest.mark.parametrize("misbehaviour", WRONG)
def test_a_failed_check_sends_decode_to_cutlass(bench, misbehaviour):
    process = bench.process(on_unknown=OnUnknown.CUTLASS, verify=Verify.ALL)
    bad = bench.prepare(make_module(), process, bench.method(misbehaviour=misbehaviour))
    good = bench.prepare(make_module(index=4), process)
    assert bad.decode() == "CUTLASS"
    assert vars(bad)[THRESHOLD] == 0
    assert getattr(Layer, THRESHOLD) == THRESHOLD_OF_CLASS
    assert bad._b12x_weights is None
    assert good.decode() == "b12x"
    assert bench.record()["checks"]["counts"] == {"failed": 1, "passed": 1}
    assert any("CUTLASS" in line for line in bench.log.warnings)


def test_a_layer_that_failed_is_not_counted_as_repaired(bench):
    process = bench.process(on_unknown=OnUnknown.CUTLASS)
    bench.prepare(make_module(), process, bench.method(misbehaviour=Misbehaviour.BAKED))
    assert Strategy.ALPHAS.value not in bench.record()["layers"]


# ---- a check that failed is not forgotten


@pytest.mark.parametrize("misbehaviour", WRONG)
def test_the_next_layers_do_not_run_on_a_kernel_proved_wrong(bench, misbehaviour):
    process = bench.process(on_unknown=OnUnknown.CUTLASS, verify=Verify.FIRST)
    wrong = bench.method(misbehaviour=misbehaviour)
    layers = [make_module(index=index) for index in range(3)]
    for walk in range(2):  # some versions walk twice over the layers
        for layer in layers:
            bench.prepare(layer, process, wrong)
            assert layer.decode() == "CUTLASS", walk
    assert bench.record()["layers"] == {"cutlass": 3}


def test_a_refused_start_is_refused_again(bench):
    process = bench.process(verify=Verify.FIRST)
    wrong = bench.method(misbehaviour=Misbehaviour.BAKED)
    for _ in range(2):
        with pytest.raises(VerificationError, match="live output failed"):
            bench.prepare(make_module(), process, wrong)


def test_an_output_of_zeros_is_no_evidence(bench):
    nothing = replace(RELU2.fc2, packed=torch.zeros_like(RELU2.fc2.packed))
    found = verify(bench, replace(RELU2, fc2=nothing))
    assert found.state is VerifyState.NOT_VERIFIED
    assert "output is zero" in found.words
