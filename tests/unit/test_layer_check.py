"""The layer check on the embedded layer and on synthetic ones: figures, gates, stages."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.layers import make_inputs, make_layer
from trtllm_b12x_fix.emulator import moe, reference
from trtllm_b12x_fix.emulator.arithmetic import PUBLISHED, KernelFamily, OutputSum
from trtllm_b12x_fix.emulator.contract import Shape, contract_for
from trtllm_b12x_fix.errors import InputError
from trtllm_b12x_fix.formats import e2m1, e4m3, nvfp4
from trtllm_b12x_fix.layer import Activation, pad_to_tiles
from trtllm_b12x_fix.layer_check import gates
from trtllm_b12x_fix.layer_check.arms import Arm
from trtllm_b12x_fix.layer_check.check import check
from trtllm_b12x_fix.layer_check.embedded import load_inputs
from trtllm_b12x_fix.layer_check.result import ArmResult, Gate, Verdict
from trtllm_b12x_fix.layer_check.run import LayerInput, Settings
from trtllm_b12x_fix.layer_check.scales import damage
from trtllm_b12x_fix.layer_check.stages import Stage
from trtllm_b12x_fix.metrics import Distance, distance
from trtllm_b12x_fix.repair import InputScales, Strategy, bake, input_scales


def settings(version="0.6.18", rows=(8,), arms=tuple(Arm), forced=None, scales=InputScales.LAYER):
    return Settings(contract_for(version), tuple(arms), rows, forced, scales, 0)


def synthetic(activation=Activation.RELU2, tokens=16, top_k=4, **sizes) -> LayerInput:
    layer = make_layer(activation, **sizes)
    x, routing = make_inputs(layer, tokens=tokens, top_k=top_k)
    return LayerInput(layer, x, routing, "synthetic")


FIX_GATE = (Gate(Arm.FIX),)


def run(subject, chosen, limits=FIX_GATE):
    return check(subject, chosen, limits, lambda _: None)


def cell(result, arm, rows):
    return next(r for r in result.results if r.arm is arm and r.rows == rows)


@pytest.fixture(scope="module")
def embedded():
    return load_inputs()


def test_the_embedded_layer_shows_the_bug_and_the_repair(embedded):
    moved, own = embedded
    result = check(moved, settings(rows=(1, 8)), (Gate(Arm.FIX),), lambda _: None, own)
    assert result.verdict is Verdict.GOOD
    assert 1e-5 < result.fc1.weight_scale_2_min < 2.3e-5 < result.fc1.weight_scale_2_max < 4e-5
    assert 0.15 < result.fc1.mean_relative_error < 0.22
    assert 0 < result.fc1.zero_fraction < 0.01
    baked, fix = cell(result, Arm.BAKED, 8), cell(result, Arm.FIX, 8)
    exact = next(f for f in result.families if f.rows == 8)
    assert baked.true_error.relative_rms > 1.5 * exact.true_error.relative_rms
    assert fix.true_error.relative_rms <= 1.02 * exact.true_error.relative_rms
    assert baked.fidelity.relative_rms > 0.1 > 0.01 >= fix.fidelity.relative_rms
    assert baked.first_divergence is Stage.FC1
    assert fix.first_divergence is None
    # 24 routed rows at 1 to 4 tokens: the dispatch of 0.6.18 falls into its own trap.
    trapped = cell(result, Arm.ALPHAS, 1)
    assert trapped.family is KernelFamily.DIRECT_MICRO
    assert trapped.fidelity.relative_rms > 0.9
    assert trapped.first_divergence is Stage.INPUT_QUANTIZATION
    assert "multiplies" in trapped.trap
    assert cell(result, Arm.FIX, 1).family is KernelFamily.MICRO
    # At its own magnitude the same layer looks clean.
    assert result.own_magnitude.fc1.mean_relative_error < 0.03
    assert result.own_magnitude.baked.fidelity.relative_rms < 0.5 * baked.fidelity.relative_rms


@pytest.mark.parametrize("version", ["0.6.16", "0.6.18", "0.7.2", "0.7.4"])
def test_true_error_of_the_repair_is_the_references_at_every_row_count(version):
    # Large enough that a dozen flipped codes at one row are not a tenth of the result.
    subject = synthetic(top_k=8, hidden=1024, intermediate=1024)
    rows = (1, 2, 4, 8, 16)
    result = run(subject, settings(version, rows, (Arm.FIX, Arm.FP32_RESCALE, Arm.BAKED)))
    for count in rows:
        baked = cell(result, Arm.BAKED, count)
        for arm in (Arm.FIX, Arm.FP32_RESCALE):
            repaired = cell(result, arm, count)
            exact = next(
                f for f in result.families if (f.rows, f.family) == (count, repaired.family)
            )
            ratio = repaired.true_error.relative_rms / exact.true_error.relative_rms
            assert abs(ratio - 1) < 0.02
            assert baked.fidelity.relative_rms > 4 * repaired.fidelity.relative_rms


@pytest.mark.parametrize("version", ["0.6.16", "0.7.4"])
def test_fp32_rescale_costs_what_two_bf16_roundings_cost(version):
    """About 2.2%: 2% of block scales and 0.3% of codes flip. Half a million codes pin it down."""
    subject = synthetic(top_k=8, tokens=64, hidden=512, intermediate=1024)
    result = run(subject, settings(version, (64,), (Arm.FP32_RESCALE,)), ())
    assert 0.019 < cell(result, Arm.FP32_RESCALE, 64).fidelity.relative_rms < 0.025


def test_noise_is_the_kernels_and_never_the_arms():
    result = run(synthetic(), settings(arms=(Arm.ALPHAS,), forced=KernelFamily.STATIC), ())
    family = result.families[0]
    assert 0 < family.noise < 0.02
    assert cell(result, Arm.ALPHAS, 8).fidelity.relative_rms == 0
    fixed = run(synthetic(), settings("0.7.2", arms=(Arm.ALPHAS,), forced=KernelFamily.STATIC), ())
    assert fixed.families[0].noise == 0


def test_published_splits_into_order_and_summation():
    result = run(synthetic(), settings(arms=(Arm.ALPHAS,)), ())
    family, arm = result.families[0], cell(result, Arm.ALPHAS, 8)
    parts = math.hypot(family.evaluation_order, family.summation)
    assert arm.published.relative_rms == pytest.approx(parts, rel=0.35)


def test_layer_and_file_input_scales_differ_and_say_so():
    layer_wide = run(synthetic(), settings(arms=(Arm.ALPHAS,)), ())
    own = run(synthetic(), settings(arms=(Arm.ALPHAS,), scales=InputScales.FILE), ())
    assert layer_wide.families[0].input_scales == own.families[0].input_scales > 0.01
    for result in (layer_wide, own):
        assert cell(result, Arm.ALPHAS, 8).fidelity.relative_rms == 0


def test_swiglu_without_input_global_scale_has_no_exact_form():
    result = run(synthetic(Activation.SILU), settings("0.6.16"))
    fix = cell(result, Arm.FIX, 8)
    assert fix.family is None
    assert fix.strategy is Strategy.CUTLASS
    assert "CUTLASS" in fix.unavailable
    assert result.verdict is Verdict.FINDING
    assert not result.gates[0].passed


def test_a_forced_family_is_used_but_the_fix_keeps_the_trap_out():
    chosen = settings(arms=(Arm.FIX, Arm.ALPHAS), forced=KernelFamily.DIRECT_MICRO)
    result = run(synthetic(), chosen)
    assert cell(result, Arm.ALPHAS, 8).family is KernelFamily.DIRECT_MICRO
    assert cell(result, Arm.FIX, 8).family is KernelFamily.MICRO
    assert result.verdict is Verdict.GOOD


@pytest.mark.parametrize(
    ("version", "forced", "rows"),
    [
        ("0.6.16", KernelFamily.DIRECT_MICRO, 1),
        ("0.6.18", KernelFamily.DIRECT_MICRO, 16),
        ("0.6.18", KernelFamily.MICRO, 16),
    ],
)
def test_a_family_that_cannot_run_the_shape_is_refused(version, forced, rows):
    with pytest.raises(InputError, match="FlashInfer"):
        run(synthetic(), settings(version, (rows,), forced=forced))


@pytest.mark.parametrize("factor", [1e8, 1e-8])
@pytest.mark.parametrize("projection", ["fc1", "fc2"])
def test_scales_that_are_far_off_fail_though_the_fix_is_faithful(projection, factor):
    """Exact scales give the same garbage: fidelity is 0, and the gate must not believe it."""
    subject = synthetic(Activation.SILU)
    matrices = getattr(subject.layer, projection)
    broken = replace(matrices, input_scale=matrices.input_scale * factor)
    subject = replace(subject, layer=replace(subject.layer, **{projection: broken}))
    result = run(subject, settings("0.7.4"))
    assert cell(result, Arm.FIX, 8).fidelity.relative_rms == 0
    assert result.verdict is Verdict.FINDING


def test_inputs_without_an_output_are_refused():
    subject = synthetic()
    with pytest.raises(InputError, match="zero or not finite"):
        run(replace(subject, x=torch.zeros_like(subject.x)), settings())
    spoilt = subject.x.clone()
    spoilt[0, 0] = math.inf
    with pytest.raises(InputError, match=r"finite|infinity"):
        run(replace(subject, x=spoilt), settings())


def test_codes_that_differ_are_counted():
    result = run(synthetic(), settings("0.7.2", arms=(Arm.ALPHAS, Arm.BAKED, Arm.UNIT)), ())
    assert cell(result, Arm.ALPHAS, 8).codes_differing == 0
    total = 8 * 4 * (256 + 256)
    assert 0 < cell(result, Arm.BAKED, 8).codes_differing < total
    assert 0.05 * total < cell(result, Arm.UNIT, 8).codes_differing < total


def test_layer_input_scales_are_the_largest():
    layer = synthetic().layer
    first, second = input_scales(layer, InputScales.LAYER)
    assert float(first) == max(layer.fc1.input_scale.tolist())
    assert float(second) == max(layer.fc2.input_scale.tolist())
    some = replace(layer.fc1, layer_input_scale=torch.tensor(7.0))
    assert float(input_scales(replace(layer, fc1=some), InputScales.LAYER)[0]) == 7.0


def test_order_and_summation_are_what_they_say():
    """Computed apart: only the quantizer differs, or only the sum."""
    subject = synthetic()
    result = run(subject, settings(arms=(Arm.ALPHAS,)), ())
    x, routing = subject.head(8)
    launch = reference.exact_launch(subject.layer, *input_scales(subject.layer, InputScales.LAYER))
    family = result.families[0]
    arithmetic = contract_for("0.6.18").arithmetic(
        family.family, Shape(8, 4, 256, 256, 8, Activation.RELU2)
    )
    plain = replace(arithmetic, output_sum=OutputSum.FP32)
    outputs = {
        name: moe.run(launch, x, routing, math_, 0).output
        for name, math_ in (("own", arithmetic), ("plain", plain), ("published", PUBLISHED))
    }
    found = distance(outputs["plain"], outputs["published"]).relative_rms
    assert family.evaluation_order == found
    assert family.summation == distance(outputs["own"], outputs["plain"]).relative_rms > 0.002


def test_more_rows_than_there_are_is_refused():
    with pytest.raises(InputError, match="1 to 16"):
        run(synthetic(), settings(rows=(17,)))


class TestScales:
    def test_counts_are_the_direct_computation(self):
        matrices = make_layer(Activation.SILU, experts=3, sigma=0.004).fc1
        found = damage(matrices)
        codes = e2m1.unpack(matrices.packed).view(3, -1, 16) & 7
        counted = (codes != 0).any(-1)
        exact = (
            e4m3.decode(matrices.block_scale).double()
            * matrices.weight_scale_2.double()[:, None, None]
        ).view(3, -1)
        baked = e4m3.decode(bake(matrices)).double().view(3, -1)
        error = (baked - exact).abs() / exact
        assert found.blocks == int(counted.sum())
        assert found.zero_fraction == float((baked == 0)[counted].double().mean())
        small = (baked > 0) & (baked < 2.0**-6)
        assert found.subnormal_fraction == float(small[counted].double().mean())
        assert found.mean_relative_error == pytest.approx(float(error[counted].mean()))
        assert found.max_relative_error == float(error[counted].max()) == 1.0
        means = [float(error[e][counted[e]].mean()) for e in range(3)]
        assert found.worst_expert == means.index(max(means))
        assert found.worst_expert_error == pytest.approx(max(means))

    @pytest.mark.parametrize("activation", Activation)
    def test_padding_is_not_counted(self, activation):
        layer = make_layer(activation, experts=2, hidden=192, intermediate=80)
        padded = pad_to_tiles(layer)
        assert padded.fc1.block_scale.numel() > layer.fc1.block_scale.numel()
        assert damage(padded.fc1) == damage(layer.fc1)
        assert damage(padded.fc2) == damage(layer.fc2)

    def test_large_weights_lose_almost_nothing(self):
        found = damage(make_layer(Activation.RELU2, sigma=10.0).fc1)
        assert found.zero_fraction == found.subnormal_fraction == 0
        assert found.mean_relative_error < 0.04

    def test_a_scale_that_is_zero_in_the_file_is_not_the_bakes_doing(self):
        matrices = make_layer(Activation.RELU2, experts=1, sigma=10.0).fc1
        scales = matrices.block_scale.clone()
        scales[0, 0, 0] = 0
        found = damage(replace(matrices, block_scale=scales))
        assert found.blocks == damage(matrices).blocks - 1
        assert found.zero_fraction == 0
        assert found.max_relative_error < 0.1

    def test_a_layer_without_weights_has_no_damage(self):
        matrices = make_layer(Activation.RELU2, experts=1, hidden=64, intermediate=32).fc1
        empty = damage(replace(matrices, packed=torch.zeros_like(matrices.packed)))
        assert (empty.blocks, empty.mean_relative_error, empty.zero_fraction) == (0, 0, 0)


class TestGates:
    def result(self, error, strategy=Strategy.ALPHAS, rows=1, **more):
        fidelity = None if error is None else Distance(error, 1.0)
        true = {"true_error": Distance(0.13, 0.99), **more}
        return ArmResult(rows, Arm.FIX, strategy, KernelFamily.MICRO, fidelity=fidelity, **true)

    def test_the_worst_row_count_decides(self):
        outcome = gates.apply(
            Gate(Arm.FIX), (self.result(0.001), self.result(0.011, rows=4), self.result(0, rows=8))
        )
        assert (outcome.passed, outcome.worst, outcome.worst_rows) == (False, 0.011, 4)
        assert gates.verdict((outcome,)) is Verdict.FINDING

    def test_the_limit_itself_passes(self):
        assert gates.apply(Gate(Arm.FIX), (self.result(0.01),)).passed

    def test_defaults_follow_the_strategy(self):
        assert gates.apply(Gate(Arm.FIX), (self.result(0.0),)).limit == 0.01
        rescaled = self.result(0.02, Strategy.FP32_RESCALE)
        outcome = gates.apply(Gate(Arm.FIX), (rescaled,))
        assert (outcome.limit, outcome.passed) == (0.025, True)

    def test_not_finite_does_not_pass(self):
        outcome = gates.apply(Gate(Arm.FIX), (self.result(0.0), self.result(math.nan, rows=2)))
        assert not outcome.passed
        assert "finite" in outcome.reason

    @pytest.mark.parametrize("error", [0.5, 1.0, math.inf, math.nan])
    def test_an_output_unlike_the_truth_does_not_pass_however_faithful(self, error):
        lost = self.result(0.0, rows=2, true_error=Distance(error, 0.0))
        outcome = gates.apply(Gate(Arm.FIX), (self.result(0.0), lost))
        assert not outcome.passed
        assert "truth" in outcome.reason or "finite" in outcome.reason
        assert outcome.worst_rows == 2

    def test_no_figures_do_not_pass(self):
        outcome = gates.apply(Gate(Arm.FIX), (self.result(None, unavailable="no exact form"),))
        assert (outcome.passed, outcome.reason) == (False, "no exact form")
        assert not gates.apply(Gate(Arm.BAKED), (self.result(0.0),)).passed


def test_blocks_of_the_embedded_layer_are_what_the_file_holds(embedded):
    moved, _ = embedded
    layer = moved.layer
    assert layer.fc1.block_scale.shape == (6, 512, 40)
    assert layer.logical_hidden == 576
    nonzero = ~nvfp4.block_is_zero(layer.fc1.packed)
    assert int(nonzero.sum()) == damage(layer.fc1).blocks == 6 * 512 * 36
