"""The layer check with a defect planted in the fix's launch: the stage must be named, always.

The gate must fail too, except for a single scale one code off: that is below 1% of a whole layer,
which is why the stage comparison stands beside the gate.
"""

from __future__ import annotations

import pytest

from tests.layers import make_inputs, make_layer
from tests.planted.defects import CASES, IDS
from trtllm_b12x_fix.emulator.contract import contract_for
from trtllm_b12x_fix.layer import pad_to_tiles
from trtllm_b12x_fix.layer_check.arms import Arm
from trtllm_b12x_fix.layer_check.check import check
from trtllm_b12x_fix.layer_check.result import Gate, Verdict
from trtllm_b12x_fix.layer_check.run import LayerInput, Settings
from trtllm_b12x_fix.repair import InputScales, KernelArguments


@pytest.mark.parametrize("version", ["0.6.18", "0.7.4"])
@pytest.mark.parametrize(("defect", "activation"), CASES, ids=IDS)
def test_defect_is_named(monkeypatch, defect, activation, version):
    layer = pad_to_tiles(make_layer(activation, experts=4, hidden=128, intermediate=128))
    x, routing = make_inputs(layer, tokens=12, top_k=4)
    subject = LayerInput(layer, x, routing, "synthetic")
    chosen = Settings(contract_for(version), (Arm.FIX,), (12,), None, InputScales.LAYER, 0)

    sound = check(subject, chosen, (Gate(Arm.FIX),), lambda _: None)
    assert sound.verdict is Verdict.GOOD
    assert sound.results[0].first_divergence is None

    launch = KernelArguments.launch
    monkeypatch.setattr(KernelArguments, "launch", lambda self, of: defect.apply(launch(self, of)))
    broken = check(subject, chosen, (Gate(Arm.FIX),), lambda _: None)
    assert broken.results[0].first_divergence is defect.stage
    assert broken.results[0].fidelity.relative_rms > 0
    if "one code" not in defect.name:
        assert broken.verdict is Verdict.FINDING
