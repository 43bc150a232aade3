"""Every family of every version against a launch written a second time in plain numpy.

tests/oracle_moe.py imports nothing of the package and has its own table of versions, so a wrong
slice width, rounding, weighting, quantizer or convention in either shows here.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests import oracle_moe
from tests.layers import make_inputs, make_layer
from trtllm_b12x_fix.emulator import moe, reference
from trtllm_b12x_fix.emulator.arithmetic import KernelFamily
from trtllm_b12x_fix.emulator.contract import InputQuantization, Shape, contract_for
from trtllm_b12x_fix.formats import nvfp4
from trtllm_b12x_fix.layer import Activation
from trtllm_b12x_fix.repair import Strategy, arguments

TOKENS, TOP_K, EXPERTS = 4, 3, 4

CASES = [
    (version, family, activation)
    for version, family in oracle_moe.SUMS
    for activation in Activation
    if family != "gated-dynamic" or activation.is_gated
]


def setup(activation: Activation, intermediate: int):
    layer = make_layer(activation, experts=EXPERTS, hidden=128, intermediate=intermediate)
    x, routing = make_inputs(layer, tokens=TOKENS, top_k=TOP_K)
    return layer, x, routing


def shape_of(family: str, activation: Activation, intermediate: int) -> Shape:
    # A CUDA-graph wrapper of a large capacity has the 128-row tile that the gated kernel needs.
    capacity = 8192 if family == "gated-dynamic" else None
    return Shape(TOKENS, TOP_K, 128, intermediate, EXPERTS, activation, capacity)


def decoded(launch: moe.LaunchTensors) -> oracle_moe.Launch:
    def per_expert(scale: torch.Tensor) -> np.ndarray:
        return scale.expand(EXPERTS).numpy() if scale.dim() == 0 else scale.numpy()

    return oracle_moe.Launch(
        nvfp4.operand(launch.w1_packed, launch.w1_block_scale).numpy(),
        nvfp4.operand(launch.w2_packed, launch.w2_block_scale).numpy(),
        launch.w1_alpha.numpy(),
        launch.w2_alpha.numpy(),
        per_expert(launch.input_global_scale),
        per_expert(launch.fc2_input_scale),
        launch.activation.is_gated,
    )


def compare(launch: moe.LaunchTensors, version, family, x, routing, intermediate) -> None:
    arithmetic = contract_for(version).arithmetic(
        KernelFamily(family.removeprefix("gated-")),
        shape_of(family, launch.activation, intermediate),
    )
    ours = moe.run(launch, x, routing, arithmetic).output.float().numpy()
    theirs = oracle_moe.run(
        decoded(launch),
        version,
        family,
        x.float().numpy(),
        routing.expert_ids.numpy(),
        routing.weights.numpy(),
    )
    # fp32 order in the products may flip a last bit of a term; a wrong rounding moves most rows.
    different = ours != theirs
    assert different.mean() < 0.02, different.mean()
    assert np.abs(ours - theirs).max() <= np.abs(theirs).max() * 2.0**-8


@pytest.mark.parametrize("intermediate", [256, 384])
@pytest.mark.parametrize(("version", "family", "activation"), CASES)
def test_exact_scales(version, family, activation, intermediate):
    layer, x, routing = setup(activation, intermediate)
    scales = layer.fc1.input_scale, layer.fc2.input_scale
    launch = reference.exact_launch(layer, *scales)
    if (version, family) == ("0.6.18", "direct-micro"):
        # It multiplies by what it gets: reciprocals keep the comparison away from all zeros.
        launch = replace(
            launch,
            input_global_scale=1 / launch.input_global_scale,
            fc2_input_scale=1 / launch.fc2_input_scale,
        )
    compare(launch, version, family, x, routing, intermediate)


@pytest.mark.parametrize(
    ("version", "family"), [("0.6.16", "static"), ("0.6.18", "micro"), ("0.7.4", "static")]
)
def test_baked_and_rescaled_arguments(version, family):
    layer, x, routing = setup(Activation.RELU2, 256)
    scales = layer.fc1.input_scale.max(), layer.fc2.input_scale.max()
    for strategy in (Strategy.BAKED, Strategy.FP32_RESCALE):
        args = arguments(strategy, layer, *scales, contract_for(version))
        compare(args.launch(layer), version, family, x, routing, 256)


def test_the_merged_static_of_0_7_4_keeps_three_slices():
    contract = contract_for("0.7.4")
    few = Shape(60, 32, 256, 384, 512, Activation.RELU2)
    assert few.routed_rows == 1920
    assert contract.select(few) is KernelFamily.STATIC
    assert contract.arithmetic(KernelFamily.STATIC, few).retained_slices == 3
    for other in (
        replace(few, tokens=59),
        replace(few, intermediate=256),
        replace(few, intermediate=512),
        replace(few, top_k=1, tokens=1920),
    ):
        assert contract.arithmetic(KernelFamily.STATIC, other).retained_slices == 2
    older = contract_for("0.7.2").arithmetic(KernelFamily.STATIC, few)
    assert older.retained_slices == 2


def test_gated_dynamic_retains_two_slices_up_to_256_tokens_and_all_of_them_above():
    contract = contract_for("0.6.18")
    for tokens, slices in ((256, 2), (257, 4), (8192, 4)):
        shape = Shape(tokens, 4, 256, 512, 4, Activation.SILU)
        assert contract.arithmetic(KernelFamily.DYNAMIC, shape).retained_slices == slices


@pytest.mark.parametrize("sharing", InputQuantization)
def test_gated_dynamic_takes_more_experts_per_token_where_the_scale_is_shared(sharing):
    shape = Shape(128, 20, 256, 256, 20, Activation.SILU, sharing=sharing)
    retains = contract_for("0.6.18").retains_slices(shape)
    assert retains == (sharing is InputQuantization.SHARED)


def test_direct_micro_has_limits_of_its_own():
    contract = contract_for("0.7.4")
    base = Shape(1, 8, 2048, 512, 64, Activation.SILU)
    assert contract.select(base) is KernelFamily.DIRECT_MICRO
    for other in (
        replace(base, top_k=32),  # 32 routed rows
        replace(base, hidden=6272),
        replace(base, hidden=2048 + 64),
        replace(base, intermediate=640),
        replace(base, tokens=9, top_k=1),
    ):
        assert contract.select(other) is not KernelFamily.DIRECT_MICRO
    assert not contract.supports_direct_micro(replace(base, top_k=33))
