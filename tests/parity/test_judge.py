"""Every planted fault is caught and named; a right call has none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.parity import faults, layers
from trtllm_b12x_fix.layer import Activation
from trtllm_b12x_fix.parity import judge, judge_weights, kernel
from trtllm_b12x_fix.parity.call import Path
from trtllm_b12x_fix.parity.contract import Options, Replay
from trtllm_b12x_fix.parity.suspects import Suspect


def judged(call, case):
    return (*judge_weights.judge_weights(call, case.layer), *judge.judge_call(call, case))


@pytest.mark.parametrize("multiple", [128, 256, 512])
@pytest.mark.parametrize("path", list(Path))
@pytest.mark.parametrize("activation", list(Activation))
def test_a_right_call_has_no_fault(activation, path, multiple):
    case = layers.make_case(activation)
    replay = Replay.GIVEN if path is Path.MONOLITHIC else Replay.ABSENT
    call = layers.make_call(case, Options(path=path, hidden_multiple=multiple, replay=replay))
    assert judged(call, case) == ()
    kernel.launch(call)
    assert judge.judge_replay(call, case) == ()


@pytest.mark.parametrize(("fault", "activation"), faults.CASES, ids=faults.IDS)
def test_a_planted_fault_is_named(fault, activation):
    case = layers.make_case(activation)
    right = layers.make_call(case, fault.options)
    found = judged(fault.plant(right, case), case)
    assert {one.suspect for one in found} == {fault.suspect}
    assert any(fault.words in one.detail for one in found), found


def test_two_faults_are_both_named():
    case = layers.make_case(Activation.RELU2)
    call = layers.make_call(case)
    for name in ("rows not shuffled", "output1_scale_scalar inverted"):
        call = next(one for one in faults.FAULTS if one.name == name).plant(call, case)
    suspects = {one.suspect for one in judged(call, case)}
    assert suspects == {Suspect.ROW_SHUFFLE, Suspect.RECIPROCALS}


def test_a_fault_in_the_last_expert_alone_is_found():
    case = layers.make_case(Activation.RELU2)
    large = judge.Case(layers.make_layer(Activation.RELU2, experts=18), case.x, case.router)
    call = layers.make_call(judge.Case(large.layer, case.x, layers.make_router(experts=18)))
    call.gemm2_weights[17, 0, 0] ^= 0x07
    found = judge_weights.judge_weights(call, large.layer)
    assert [one.suspect for one in found] == [Suspect.WEIGHTS]


def test_codes_under_a_zero_scale_in_the_padding_cost_nothing():
    case = layers.make_case(Activation.RELU2)
    call = layers.make_call(case)
    stored = call.gemm1_weights.clone()
    stored[:, :, layers.HIDDEN // 2 :] = 0x77
    assert judge_weights.judge_weights(replace(call, gemm1_weights=stored), case.layer) == ()


def test_a_kernel_that_leaves_the_replay_buffer_alone_is_caught():
    case = layers.make_case(Activation.RELU2)
    call = layers.make_call(case, Options(path=Path.MONOLITHIC, replay=Replay.GIVEN))
    (fault,) = judge.judge_replay(call, case)
    assert fault.suspect is Suspect.ROUTING_REPLAY
    call.routing_replay_out.copy_(torch.zeros_like(call.routing_replay_out))
    assert judge.judge_replay(call, case) != ()


def test_sizes_below_the_layers_are_padding_faults():
    case = layers.make_case(Activation.RELU2)
    larger = layers.make_layer(Activation.RELU2, hidden=512)
    (fault,) = judge_weights.judge_weights(layers.make_call(case), larger)
    assert fault.suspect is Suspect.PADDING
