"""The contract emulator against a second reading of the contract, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.parity import layers, oracle
from trtllm_b12x_fix.emulator.moe import Routing
from trtllm_b12x_fix.emulator.reference import truth
from trtllm_b12x_fix.errors import InputError, ShapeError, UnsupportedVersionError
from trtllm_b12x_fix.formats import nvfp4
from trtllm_b12x_fix.integrations.trtllm_gen import keywords
from trtllm_b12x_fix.layer import Activation
from trtllm_b12x_fix.metrics import distance
from trtllm_b12x_fix.parity import contract, kernel, routing
from trtllm_b12x_fix.parity.call import Path, from_arguments
from trtllm_b12x_fix.parity.contract import Options, Replay
from trtllm_b12x_fix.parity.routing import WeightRecovery
from trtllm_b12x_fix.parity.run import emulate

# bf16 terms and output, and codes that fp32 sums put on the other side of a tie.
_ROUNDING = 0.01


@pytest.mark.parametrize("path", list(Path))
@pytest.mark.parametrize("activation", list(Activation))
def test_the_emulator_reads_a_call_as_the_oracle_does(activation, path):
    case = layers.make_case(activation, 3)
    call = layers.make_call(case, Options(path=path))
    output = kernel.launch(call)
    wanted = oracle.launch(call, routing.expected(case.router))
    off = np.linalg.norm(output.double().numpy() - wanted) / np.linalg.norm(wanted)
    assert off < _ROUNDING
    assert torch.equal(output[:, layers.HIDDEN :], torch.zeros_like(output[:, layers.HIDDEN :]))


@pytest.mark.parametrize("activation", list(Activation))
def test_weights_are_read_back_exactly(activation):
    case = layers.make_case(activation, 1)
    call = layers.make_call(case)
    read = kernel.read_weights(call)
    gated = activation.is_gated
    for expert in (0, layers.EXPERTS - 1):
        wanted = oracle.decode(
            call.gemm1_weights[expert].numpy(),
            call.gemm1_weights_scale[expert].view(torch.uint8).numpy(),
            gated=gated,
        )
        got = nvfp4.operand(read.fc1_packed[expert], read.fc1_scale[expert], torch.float64)
        assert np.array_equal(got.numpy(), wanted)


@pytest.mark.parametrize("multiple", [128, 256, 512])
@pytest.mark.parametrize("activation", list(Activation))
def test_padding_changes_nothing(activation, multiple):
    case = layers.make_case(activation)
    call = layers.make_call(case, Options(hidden_multiple=multiple))
    routes = routing.unpack(call.topk_ids)
    tokens = contract.quantize(case.layer, case.x, layers.HIDDEN)
    plain = emulate(case.layer, tokens, routes)
    assert call.hidden % multiple == 0
    assert distance(kernel.launch(call)[:, : layers.HIDDEN], plain).relative_rms < 1e-3


@pytest.mark.parametrize("activation", list(Activation))
def test_the_output_is_as_true_as_nvfp4_allows(activation):
    case = layers.make_case(activation)
    routes = routing.expected(case.router)
    exact = truth(case.layer, case.x, Routing(routes.expert_ids, routes.weights))
    output = kernel.launch(layers.make_call(case))[:, : layers.HIDDEN]
    assert 0.05 < distance(output, exact).relative_rms < 0.2


def test_replay_holds_the_experts_and_changes_nothing():
    case = layers.make_case(Activation.RELU2)
    without = kernel.launch(layers.make_call(case, Options(path=Path.MONOLITHIC)))
    call = layers.make_call(case, Options(path=Path.MONOLITHIC, replay=Replay.GIVEN))
    assert torch.equal(kernel.launch(call), without)
    ids = routing.expected(case.router).expert_ids
    assert torch.equal(call.routing_replay_out.long().sort(dim=1).values, ids.sort(dim=1).values)


def test_how_weights_are_recovered_reaches_the_output():
    case = layers.make_case(Activation.RELU2)
    far = replace(case.router, logits=case.router.logits - 16, bias=case.router.bias + 11.2)
    call = layers.make_call(replace(case, router=far), Options(path=Path.MONOLITHIC))
    right = kernel.launch(call, WeightRecovery.RECOMPUTED)
    wrong = kernel.launch(call, WeightRecovery.SUBTRACTED)
    assert distance(wrong, right).relative_rms > 0.3


def arguments(**changes):
    case = layers.make_case(Activation.RELU2)
    call = layers.make_call(case, Options(path=Path.MONOLITHIC))
    return keywords(call) | changes


def test_the_keywords_of_a_call_make_the_same_call():
    case = layers.make_case(Activation.RELU2)
    ours = layers.make_call(case, Options(path=Path.MONOLITHIC))
    read = from_arguments(Path.MONOLITHIC, arguments())
    assert torch.equal(kernel.launch(read), kernel.launch(ours))


@pytest.mark.parametrize(
    "change",
    [
        {"per_token_scale": torch.ones(layers.TOKENS)},
        {"gemm1_bias": torch.ones(1)},
        {"gemm1_clamp_limit": torch.ones(1)},
        {"do_finalize": False},
        {"valid_hidden_size": 192},
        {"num_fused_shared_experts": 1},
        {"something_new": 3},
    ],
    ids=lambda change: next(iter(change)),
)
def test_an_argument_that_is_not_modelled_is_refused_by_name(change):
    with pytest.raises(UnsupportedVersionError, match=next(iter(change))):
        from_arguments(Path.MONOLITHIC, arguments(**change))


def test_a_missing_argument_is_refused_by_name():
    given = arguments()
    del given["output2_scale_scalar"]
    with pytest.raises(UnsupportedVersionError, match="output2_scale_scalar"):
        from_arguments(Path.MONOLITHIC, given)


@pytest.mark.parametrize("name", ["gemm1_weights", "gemm2_weights_scale", "output1_scale_scalar"])
def test_a_shape_that_does_not_fit_is_refused_by_name(name):
    given = arguments()
    with pytest.raises(ShapeError, match=name):
        from_arguments(Path.MONOLITHIC, given | {name: given[name][1:]})


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"routing_method_type": 1}, UnsupportedVersionError, "DeepSeekV3"),
        ({"n_group": 4}, UnsupportedVersionError, "n_group 4"),
        ({"routing_bias": None}, InputError, "routing_bias"),
    ],
    ids=["method", "groups", "bias"],
)
def test_routing_that_is_not_emulated_is_refused(change, error, words):
    call = from_arguments(Path.MONOLITHIC, arguments(**change))
    with pytest.raises(error, match=words):
        kernel.launch(call)


def test_an_activation_that_is_not_known_is_refused():
    with pytest.raises(UnsupportedVersionError, match="activation_type 9"):
        from_arguments(Path.MONOLITHIC, arguments(activation_type=9))
