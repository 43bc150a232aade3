"""TRTLLM_B12X_FIX_ACT_SCALE's default is the one with the smaller true error, as emulated.

The full table is `python -m evals.act_scale`; here stands its smallest part, on the embedded real
layer with recorded inputs.
"""

from __future__ import annotations

import pytest

from evals.act_scale import measure, subjects
from trtllm_b12x_fix.emulator.contract import contract_for
from trtllm_b12x_fix.settings import ActScale, Settings

CALIBRATED, UNIT = ActScale.CALIBRATED, ActScale.UNIT


@pytest.fixture(scope="module")
def errors() -> dict[int, dict[ActScale, float]]:
    """True errors by the power of two that the recorded activations are multiplied with."""
    subject = subjects(presets=False, rows=8, seed=0)["SmolLM2 layer 1"]
    contract = contract_for("0.7.2.post1")
    found = {}
    for power in (-3, 0, 2):
        figure = measure("SmolLM2", subject, contract, 8, power)
        assert figure is not None
        found[power] = figure.errors
    return found


def test_as_calibrated_both_are_equally_true(errors):
    assert errors[0][CALIBRATED] == pytest.approx(errors[0][UNIT], rel=0.02)


def test_below_the_calibration_the_default_is_far_better(errors):
    assert Settings().act_scale is CALIBRATED
    assert errors[-3][CALIBRATED] < 0.15 < 0.5 < errors[-3][UNIT]


def test_above_the_calibration_it_is_worse(errors):
    """What the README has to say, too: calibrated scales saturate, 1.0 does not."""
    assert errors[2][UNIT] < 0.15 < 0.25 < errors[2][CALIBRATED]


def test_swiglu_without_input_global_scale_has_no_figure():
    subject = subjects(presets=False, rows=8, seed=0)["SmolLM2 layer 1"]
    assert measure("SmolLM2", subject, contract_for("0.6.16.post3"), 8, 0) is None
