"""The repair on every family and version: what must be equal is equal, what must be close is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests import oracle
from tests.layers import make_inputs, make_layer
from trtllm_b12x_fix.emulator import moe, reference
from trtllm_b12x_fix.emulator.arithmetic import KernelFamily, ScaleConvention
from trtllm_b12x_fix.emulator.contract import (
    KNOWN_VERSIONS,
    DirectMicro,
    InputScaleArgument,
    Shape,
    contract_for,
)
from trtllm_b12x_fix.errors import NoExactFormError
from trtllm_b12x_fix.formats import e4m3
from trtllm_b12x_fix.layer import Activation
from trtllm_b12x_fix.metrics import distance
from trtllm_b12x_fix.repair import InputScales, Strategy, arguments, bake, input_scales, plan

TOKENS, TOP_K = 8, 4


class Run:
    """One layer on one family of one version, with its exact reference and the truth."""

    def __init__(self, activation, version, family, scales=InputScales.LAYER, **layer):
        self.layer = make_layer(activation, **layer)
        self.contract = contract_for(version)
        shape = Shape(TOKENS, TOP_K, 256, 256, 8, activation)
        self.arithmetic = self.contract.arithmetic(family, shape)
        self.x, self.routing = make_inputs(self.layer, tokens=TOKENS, top_k=TOP_K)
        self.scales = input_scales(self.layer, scales)
        correct = replace(self.arithmetic, convention=ScaleConvention.DIVISOR)
        exact = reference.exact_launch(self.layer, *self.scales)
        self.reference = moe.run(exact, self.x, self.routing, correct, 3)
        self.truth = reference.truth(self.layer, self.x, self.routing)

    def arm(self, strategy):
        args = arguments(strategy, self.layer, *self.scales, self.contract)
        return moe.run(args.launch(self.layer), self.x, self.routing, self.arithmetic, 3)

    def fidelity(self, trace):
        return distance(trace.unrounded, self.reference.unrounded).relative_rms

    def true_error(self, trace):
        return distance(trace.output, self.truth).relative_rms


def traps(version, family):
    multiplies = contract_for(version).direct_micro is DirectMicro.MULTIPLIES
    return multiplies and family is KernelFamily.DIRECT_MICRO


EVERYWHERE = [
    (activation, version, family)
    for activation in Activation
    for version in KNOWN_VERSIONS
    for family in KernelFamily
    if not traps(version, family)
    and not (version == "0.6.16" and family is KernelFamily.DIRECT_MICRO)
]
SEPARATE = [
    case for case in EVERYWHERE if contract_for(case[1]).input_scale is InputScaleArgument.SEPARATE
]
RELU2 = [case for case in EVERYWHERE if case[0] is Activation.RELU2]


@pytest.mark.parametrize("scales", InputScales)
@pytest.mark.parametrize(("activation", "version", "family"), SEPARATE)
def test_alphas_is_exact_code_for_code(activation, version, family, scales):
    run = Run(activation, version, family, scales)
    trace = run.arm(Strategy.ALPHAS)
    assert torch.equal(trace.input.codes, run.reference.input.codes)
    assert torch.equal(
        trace.intermediate_quantized.codes, run.reference.intermediate_quantized.codes
    )
    assert run.fidelity(trace) <= 1e-4
    assert run.true_error(trace) <= 1.02 * run.true_error(run.reference)


@pytest.mark.parametrize(("activation", "version", "family"), RELU2)
def test_fp32_rescale_is_close_and_as_true_as_the_reference(activation, version, family):
    run = Run(activation, version, family)
    trace = run.arm(Strategy.FP32_RESCALE)
    assert 0 < run.fidelity(trace) < 0.025
    assert abs(run.true_error(trace) / run.true_error(run.reference) - 1) < 0.02


@pytest.mark.parametrize(("activation", "version", "family"), EVERYWHERE)
def test_baking_costs_ten_times_what_the_repair_does(activation, version, family):
    run = Run(activation, version, family)
    baked = run.fidelity(run.arm(Strategy.BAKED))
    assert baked > 0.08
    chosen = plan(run.contract, activation)
    if chosen.strategy is Strategy.ALPHAS:
        assert baked >= 10 * run.fidelity(run.arm(Strategy.ALPHAS))


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("version", ["0.6.17", "0.6.18", "0.7.0"])
@pytest.mark.parametrize("strategy", [Strategy.BAKED, Strategy.ALPHAS])
def test_the_direct_micro_trap_is_garbage(activation, version, strategy):
    """Calibrated scales on a direct micro that multiplies: loudly wrong, baked or not."""
    run = Run(activation, version, KernelFamily.DIRECT_MICRO)
    assert run.fidelity(run.arm(strategy)) > 0.9


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("version", ["0.7.2", "0.7.4"])
def test_the_trap_is_gone_where_direct_micro_divides(activation, version):
    run = Run(activation, version, KernelFamily.DIRECT_MICRO)
    assert run.fidelity(run.arm(Strategy.ALPHAS)) <= 1e-4


@pytest.mark.parametrize("activation", Activation)
def test_the_plan_keeps_the_trap_out_and_only_there(activation):
    for version in KNOWN_VERSIONS:
        chosen = plan(contract_for(version), activation)
        multiplies = contract_for(version).direct_micro is DirectMicro.MULTIPLIES
        assert (KernelFamily.DIRECT_MICRO in chosen.keep_out) == multiplies


def test_plans_by_activation_without_input_global_scale():
    old = contract_for("0.6.16")
    assert plan(old, Activation.RELU2).strategy is Strategy.FP32_RESCALE
    assert plan(old, Activation.SILU).strategy is Strategy.CUTLASS


@pytest.mark.parametrize(
    ("strategy", "activation", "version", "word"),
    [
        (Strategy.ALPHAS, Activation.RELU2, "0.6.16", "input_global_scale"),
        (Strategy.UNIT, Activation.SILU, "0.6.16", "input_global_scale"),
        (Strategy.FP32_RESCALE, Activation.SILU, "0.6.18", "relu2"),
        (Strategy.CUTLASS, Activation.SILU, "0.6.16", "CUTLASS"),
    ],
)
def test_what_has_no_exact_form_is_refused(strategy, activation, version, word):
    layer = make_layer(activation, experts=2, hidden=64, intermediate=32)
    scales = input_scales(layer, InputScales.LAYER)
    with pytest.raises(NoExactFormError, match=word):
        arguments(strategy, layer, *scales, contract_for(version))


def test_the_arguments_are_the_formulas():
    layer = make_layer(Activation.RELU2, experts=2, hidden=64, intermediate=32)
    s1, s2 = input_scales(layer, InputScales.FILE)
    contract = contract_for("0.7.2")
    ws1, ws2 = layer.fc1.weight_scale_2, layer.fc2.weight_scale_2
    built = {s: arguments(s, layer, s1, s2, contract) for s in Strategy if s.value != "cutlass"}
    close = torch.testing.assert_close
    close(built[Strategy.ALPHAS].launch(layer).w1_alpha, ws1 * s1)
    close(built[Strategy.ALPHAS].w2_alpha, ws2 * s2)
    close(built[Strategy.FP32_RESCALE].fc2_input_scale.double(), s2.double() / ws1.double() ** 2)
    close(built[Strategy.BAKED].launch(layer).input_global_scale, s1)
    close(built[Strategy.UNIT].launch(layer).w1_alpha, ws1)
    for strategy, args in built.items():
        shares = args.w1_block_scale.data_ptr() == layer.fc1.block_scale.data_ptr()
        assert shares == (strategy is not Strategy.BAKED)  # intact scales need no second copy


@pytest.mark.parametrize("exponent", [-3, -15, -40])
def test_fp32_rescale_has_the_range_for_tiny_scales(exponent):
    """ws2 from 1e-1 down to 1e-12: 1/ws2^2 must not overflow or flush."""
    layer = make_layer(Activation.RELU2, experts=2, hidden=128, intermediate=128, sigma=1.0)
    tiny = replace(
        layer, fc1=replace(layer.fc1, weight_scale_2=layer.fc1.weight_scale_2 * 2.0**exponent)
    )
    # FC1's output shrinks with ws2 and relu2 squares it: the calibration follows.
    s2 = layer.fc2.input_scale * 2.0 ** (2 * exponent) * 2500
    tiny = replace(tiny, fc2=replace(tiny.fc2, input_scale=s2))
    x, routing = make_inputs(tiny, tokens=4, top_k=2)
    contract = contract_for("0.6.18")
    shape = Shape(4, 2, 128, 128, 2, Activation.RELU2)
    arithmetic = contract.arithmetic(KernelFamily.STATIC, shape)
    scales = input_scales(tiny, InputScales.FILE)
    exact = moe.run(reference.exact_launch(tiny, *scales), x, routing, arithmetic)
    args = arguments(Strategy.FP32_RESCALE, tiny, *scales, contract)
    trace = moe.run(args.launch(tiny), x, routing, arithmetic)
    assert distance(trace.output, exact.output).relative_rms < 0.03


def test_baking_is_one_multiplication_and_one_cast():
    layer = make_layer(Activation.SILU, experts=3, hidden=128, intermediate=64)
    exact = e4m3.decode(layer.fc1.block_scale) * layer.fc1.weight_scale_2[:, None, None]
    assert np.array_equal(bake(layer.fc1).numpy(), oracle.e4m3_bytes(exact.numpy()))


def test_the_closed_form_of_the_damage():
    """The baked value is block_amax / 6 whatever weight_scale_2 is: zero if amax <= 6 * 2^-10."""
    layer = make_layer(Activation.RELU2, experts=1, hidden=256, intermediate=256, sigma=0.0025)
    matrices = layer.fc1
    exact = e4m3.decode(matrices.block_scale).double() * matrices.weight_scale_2.double()
    baked = bake(matrices)
    assert torch.equal(baked == 0, exact <= 2.0**-10)
    assert torch.equal(baked < 8, exact < 2.0**-6 * (1 - 2.0**-4))
    assert 0.1 < float((baked == 0).double().mean()) < 0.9
