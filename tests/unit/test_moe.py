"""One launch as a whole: sharing, grouping by expert, refusals, laws."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.layers import make_inputs, make_layer
from trtllm_b12x_fix.emulator import moe, reference
from trtllm_b12x_fix.emulator.arithmetic import PUBLISHED, KernelFamily, OutputSum
from trtllm_b12x_fix.emulator.contract import Shape, contract_for
from trtllm_b12x_fix.errors import InputError, ShapeError
from trtllm_b12x_fix.formats import nvfp4
from trtllm_b12x_fix.layer import Activation
from trtllm_b12x_fix.metrics import distance


def setup(activation=Activation.RELU2, tokens=6, top_k=3):
    layer = make_layer(activation, experts=5, hidden=128, intermediate=256)
    x, routing = make_inputs(layer, tokens=tokens, top_k=top_k)
    s1, s2 = layer.fc1.input_scale.max(), layer.fc2.input_scale.max()
    return layer, reference.exact_launch(layer, s1, s2), x, routing


@pytest.mark.parametrize("activation", Activation)
def test_a_scalar_scale_and_the_same_scale_per_expert_agree(activation):
    layer, launch, x, routing = setup(activation)
    spread = replace(
        launch,
        input_global_scale=launch.input_global_scale.expand(layer.experts),
        fc2_input_scale=launch.fc2_input_scale.expand(layer.experts),
    )
    shared, per_route = (moe.run(one, x, routing, PUBLISHED) for one in (launch, spread))
    assert shared.input.codes.shape[0] == 6  # a token once
    assert per_route.input.codes.shape[0] == 18  # a token per route
    assert torch.equal(shared.input.codes.repeat_interleave(3, 0), per_route.input.codes)
    assert torch.equal(shared.output, per_route.output)


@pytest.mark.parametrize("activation", Activation)
def test_tokens_do_not_see_each_other(activation):
    _, launch, x, routing = setup(activation)
    whole = moe.run(launch, x, routing, PUBLISHED)
    for token in range(x.shape[0]):
        pick = slice(token, token + 1)
        one = moe.Routing(routing.expert_ids[pick], routing.weights[pick])
        alone = moe.run(launch, x[pick], one, PUBLISHED)
        assert torch.equal(alone.input.codes, whole.input.codes[pick])
        # Another GEMM shape may sum in another order: a last bf16 bit at most.
        assert distance(alone.output, whole.output[pick]).relative_rms < 2.0**-8


@pytest.mark.parametrize("activation", Activation)
def test_the_truth_is_the_plain_formula(activation):
    layer, _, x, routing = setup(activation)
    expected = torch.zeros(x.shape[0], layer.hidden, dtype=torch.float64)
    for token in range(x.shape[0]):
        for route in range(routing.expert_ids.shape[1]):
            e = int(routing.expert_ids[token, route])
            w1, w2 = (
                nvfp4.dequantize(
                    nvfp4.NVFP4Tensor(m.packed[e], m.block_scale[e], m.weight_scale_2[e]),
                    torch.float64,
                )
                for m in (layer.fc1, layer.fc2)
            )
            h = w1 @ x[token].double()
            if activation is Activation.RELU2:
                inner = torch.relu(h) ** 2
            else:
                up, gate = h[:256], h[256:]
                inner = gate / (1 + torch.exp(-gate)) * up
            expected[token] += float(routing.weights[token, route]) * (w2 @ inner)
    assert distance(reference.truth(layer, x, routing), expected).relative_rms < 1e-12


def test_every_arithmetic_is_near_the_truth_when_scales_are_exact():
    """No family may be off by a factor: 4-bit activations cost under 20%."""
    for activation in Activation:
        layer, launch, x, routing = setup(activation)
        truth = reference.truth(layer, x, routing)
        shape = Shape(6, 3, 128, 256, 5, activation)
        for version in ("0.6.16", "0.6.18", "0.7.2", "0.7.4"):
            for family in (KernelFamily.MICRO, KernelFamily.STATIC, KernelFamily.DYNAMIC):
                arithmetic = contract_for(version).arithmetic(family, shape)
                output = moe.run(launch, x, routing, arithmetic, 0).output
                assert distance(output, truth).relative_rms < 0.2


def test_slices_only_change_the_rounding():
    _, launch, x, routing = setup()
    base = contract_for("0.6.18").arithmetic(
        KernelFamily.STATIC, Shape(6, 3, 128, 256, 5, Activation.RELU2)
    )
    exact = moe.run(launch, x, routing, replace(base, output_sum=OutputSum.FP32)).output
    for kind, retained in ((OutputSum.BF16_ATOMICS, 1), (OutputSum.BF16_ATOMICS_RETAINED, 2)):
        rounded = replace(base, output_sum=kind, retained_slices=retained)
        output = moe.run(launch, x, routing, rounded).output
        assert 0 < distance(output, exact).relative_rms < 0.01


def test_experts_may_repeat_within_a_token():
    _, launch, x, _ = setup()
    ids = torch.tensor([[2, 2]]).expand(6, 2)
    halves = moe.run(launch, x, moe.Routing(ids, torch.full((6, 2), 0.5)), PUBLISHED).output
    whole = moe.run(launch, x, moe.Routing(ids[:, :1], torch.ones(6, 1)), PUBLISHED).output
    assert distance(halves, whole).relative_rms < 2.0**-8


@pytest.mark.parametrize(
    ("change", "error", "word"),
    [
        (lambda x, r: (x.half(), r), InputError, "bf16"),
        (lambda x, r: (x.float(), r), InputError, "bf16"),
        (lambda x, r: (x[:, :64], r), ShapeError, "128"),
        (lambda x, r: (x[:3], r), ShapeError, "3 tokens"),
        (lambda x, r: (x, moe.Routing(r.expert_ids, r.weights[:, :1])), ShapeError, "routing"),
        (lambda x, r: (x, moe.Routing(r.expert_ids + 3, r.weights)), InputError, "expert ids"),
        (lambda x, r: (x, moe.Routing(r.expert_ids - 3, r.weights)), InputError, "expert ids"),
    ],
)
def test_wrong_input_is_named(change, error, word):
    _, launch, x, routing = setup()
    with pytest.raises(error, match=word):
        moe.run(launch, *change(x, routing), PUBLISHED)
