"""The CPU half's loop: what is run, what is judged, what a report holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.parity import faults, layers, stand_in
from trtllm_b12x_fix.errors import InputError
from trtllm_b12x_fix.layer import Activation
from trtllm_b12x_fix.parity import run as parity_run
from trtllm_b12x_fix.parity.call import Path
from trtllm_b12x_fix.parity.contract import Replay
from trtllm_b12x_fix.parity.result import FAR, NEAR, Verdict
from trtllm_b12x_fix.parity.routing import WeightRecovery
from trtllm_b12x_fix.parity.run import Grid
from trtllm_b12x_fix.parity.suspects import Suspect


def grid(**changes) -> Grid:
    whole = Grid(
        tuple(Activation),
        (layers.HIDDEN,),
        (80,),
        (1, layers.TOKENS),
        tuple(Path),
        layers.EXPERTS,
        layers.TOP_K,
        0,
    )
    return replace(whole, **changes)


def run(preparation=None, **changes):
    preparation = preparation or stand_in.Preparation()
    return parity_run.run(grid(**changes), stand_in.source, preparation)


def test_a_right_preparation_is_good_everywhere():
    report = run()
    assert report.verdict is Verdict.GOOD
    for case in report.cases:
        assert case.faults == ()
        assert case.fidelity.relative_rms < parity_run.FIDELITY_LIMIT
        assert 0.05 < case.true_error.relative_rms < 0.3
        assert (case.padded_hidden, case.hidden) == (256, layers.HIDDEN)
    ran = {(case.path, case.replay, case.regime) for case in report.cases}
    assert ran == {
        (Path.MONOLITHIC, Replay.ABSENT, NEAR),
        (Path.MONOLITHIC, Replay.GIVEN, NEAR),
        (Path.MONOLITHIC, Replay.ABSENT, FAR),
        (Path.MODULAR, Replay.ABSENT, NEAR),
        (Path.MODULAR, Replay.ABSENT, FAR),
    }


def test_the_same_on_the_same_seed():
    first, second = run(), run()
    assert first == second


def test_a_routing_that_subtracts_is_named_only_where_biases_are_far():
    preparation = stand_in.Preparation()
    preparation.recovery = WeightRecovery.SUBTRACTED
    report = run(preparation, activations=(Activation.RELU2,))
    assert report.verdict is Verdict.FINDING
    wrong = [case for case in report.cases if case.faults]
    assert {(case.path, case.regime) for case in wrong} == {(Path.MONOLITHIC, FAR)}
    assert {fault.suspect for case in wrong for fault in case.faults} == {Suspect.ROUTING}
    assert all(case.fidelity.relative_rms > 0.3 for case in wrong)


@pytest.mark.parametrize("name", ["rows not shuffled", "scale groups padded in front"])
def test_a_fault_of_the_weights_is_named_in_every_case_and_spoils_the_output(name):
    fault = next(one for one in faults.FAULTS if one.name == name)
    report = run(stand_in.Preparation(fault.plant), activations=(Activation.RELU2,))
    for case in report.cases:
        assert {one.suspect for one in case.faults} == {fault.suspect}
        assert case.fidelity.relative_rms > parity_run.FIDELITY_LIMIT


def test_an_output_that_no_argument_explains_is_named():
    class Spoiled(stand_in.Preparation):
        def prepare(self, layer, path, top_k):
            prepared = super().prepare(layer, path, top_k)
            sound = prepared.run

            def spoiled(*args):
                ran = sound(*args)
                return replace(ran, output=ran.output * 1.05)

            prepared.run = spoiled
            return prepared

    report = run(Spoiled(), activations=(Activation.RELU2,))
    assert {fault.suspect for case in report.cases for fault in case.faults} == {Suspect.KERNEL}


def test_a_preparation_that_refuses_everything_concludes_nothing():
    report = run(stand_in.Preparation(error=InputError("vLLM 0.0.0 refused: too large")))
    assert report.verdict is Verdict.INCONCLUSIVE
    assert all(case.refused and case.fidelity is None for case in report.cases)


def test_fewer_tokens_are_the_head_of_more():
    few = parity_run.make_router(NEAR, grid(), 3)
    many = parity_run.make_router(NEAR, grid(), 9)
    assert few.logits.equal(many.logits[:3])
    assert few.bias.equal(many.bias)
