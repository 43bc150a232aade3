"""Routing: the model's, the kernel's in both versions, and what tells them apart."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from trtllm_b12x_fix.parity import routing
from trtllm_b12x_fix.parity.routing import Router, Routes, WeightRecovery


def make(count=50, experts=128, top_k=6, logits=(0.0, 1.0), bias=(0.0, 0.1)):
    generator = torch.Generator().manual_seed(1)
    return Router(
        torch.randn(count, experts, generator=generator) * logits[1] + logits[0],
        torch.randn(experts, generator=generator) * bias[1] + bias[0],
        top_k,
        2.5,
    )


def test_routing_is_that_of_transformers_nemotron_h():
    """Sigmoid, bias for the choice alone, weights normalized over the chosen, then scaled."""
    from transformers.models.nemotron_h import modeling_nemotron_h as theirs

    router = make()
    config = SimpleNamespace(
        num_experts_per_tok=router.top_k,
        num_local_experts=128,
        hidden_size=128,
        routed_scaling_factor=router.scale,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
    )
    gate = theirs.NemotronHTopkRouter(config)
    gate.weight.data = torch.eye(128)
    gate.e_score_correction_bias.copy_(router.bias)
    with torch.no_grad():
        _, weights, ids = gate(router.logits)
    ours = routing.expected(router)
    order, own = ids.argsort(dim=1), ours.expert_ids.argsort(dim=1)
    assert torch.equal(ids.gather(1, order), ours.expert_ids.gather(1, own))
    assert torch.allclose(weights.gather(1, order), ours.weights.gather(1, own), rtol=1e-5)


@pytest.mark.parametrize("recovery", list(WeightRecovery))
def test_near_biases_leave_the_kernel_right_in_both_versions(recovery):
    router = make()
    inside = routing.inside_kernel(router, recovery)
    assert routing.wrong_choices(router, inside) == 0
    assert 0 < routing.weight_error(router, inside) <= 2.0**-8
    assert inside.weights.dtype is torch.bfloat16


def test_far_biases_drown_the_weights_only_where_they_are_subtracted():
    router = make(logits=(-16.0, 1.0), bias=(11.2, 0.05))
    recomputed = routing.inside_kernel(router, WeightRecovery.RECOMPUTED)
    subtracted = routing.inside_kernel(router, WeightRecovery.SUBTRACTED)
    assert routing.weight_error(router, recomputed) <= 2.0**-8
    assert routing.weight_error(router, subtracted) > 0.5
    assert routing.wrong_choices(router, subtracted) == 0  # the choice is right, weights are not


def test_either_of_two_equal_keys_may_be_chosen():
    router = Router(torch.zeros(1, 4), torch.zeros(4), 2)
    for ids in ([0, 1], [3, 2], [1, 3]):
        assert routing.wrong_choices(router, Routes(torch.tensor([ids]), torch.ones(1, 2))) == 0


@pytest.mark.parametrize("ids", [[3, 2], [0, 0]], ids=["below the top", "twice the same"])
def test_a_wrong_choice_is_counted(ids):
    router = Router(torch.tensor([[3.0, 2.0, 1.0, 0.0]]), torch.zeros(4), 2)
    assert routing.wrong_choices(router, Routes(torch.tensor([ids]), torch.ones(1, 2))) == 1


def test_the_bias_chooses_but_does_not_weigh():
    router = Router(torch.tensor([[0.0, 0.0, 5.0]]), torch.tensor([9.0, 9.0, 0.0]), 2)
    routes = routing.expected(router)
    assert set(routes.expert_ids[0].tolist()) == {0, 1}
    assert routes.weights.tolist() == [[0.5, 0.5]]


def test_packing_is_flashinfers_documented_format():
    routes = Routes(torch.tensor([[0, 127], [5, 1]]), torch.tensor([[0.25, 1.0], [0.3, -0.5]]))
    packed = routing.pack(routes)
    bits = torch.tensor(0.25, dtype=torch.bfloat16).view(torch.int16)
    assert packed.dtype is torch.int32
    assert int(packed[0, 0]) == int(bits)
    assert int(packed[0, 1]) == (127 << 16) | 0x3F80
    back = routing.unpack(packed)
    assert torch.equal(back.expert_ids, routes.expert_ids)
    assert torch.equal(back.weights, routes.weights.to(torch.bfloat16))
