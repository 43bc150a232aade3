"""Routers against transformers' own modules: the same experts with the same weights.

The modules run in fp32 with random weights and, where they have one, a bias that changes the
choice. Experts come in no particular order from either side, so both are sorted by id.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trtllm_b12x_fix.checkpoint.config import ModelConfig
from trtllm_b12x_fix.checkpoint.conventions import ROUTING
from trtllm_b12x_fix.checkpoint.router import (
    Renormalize,
    Router,
    RouterSpec,
    Scoring,
    random_routing,
)
from trtllm_b12x_fix.errors import InputError, ShapeError

EXPERTS, HIDDEN, TOP_K, TOKENS = 16, 48, 4, 200


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


#: Where a model type's router is, and what its configuration calls the number of experts.
ROUTERS = {
    "qwen2_moe": ("Qwen2MoeTopKRouter", "num_experts"),
    "qwen3_moe": ("Qwen3MoeTopKRouter", "num_experts"),
    "qwen3_next": ("Qwen3NextTopKRouter", "num_experts"),
    "qwen3_5_moe_text": ("Qwen3_5MoeTopKRouter", "num_experts"),
    "qwen3_vl_moe_text": ("Qwen3VLMoeTextTopKRouter", "num_experts"),
    "olmoe": ("OlmoeTopKRouter", "num_experts"),
    "mixtral": ("MixtralTopKRouter", "num_local_experts"),
    "minimax": ("MiniMaxTopKRouter", "num_local_experts"),
    "minimax_m2": ("MiniMaxM2TopKRouter", "num_local_experts"),
    "deepseek_v3": ("DeepseekV3TopkRouter", "n_routed_experts"),
    "glm4_moe": ("Glm4MoeTopkRouter", "n_routed_experts"),
    "glm4_moe_lite": ("Glm4MoeLiteTopkRouter", "n_routed_experts"),
    "glm_moe_dsa": ("GlmMoeDsaTopkRouter", "n_routed_experts"),
    "nemotron_h": ("NemotronHTopkRouter", "n_routed_experts"),
    "exaone_moe": ("ExaoneMoeTopkRouter", "num_experts"),
    "solar_open": ("SolarOpenTopkRouter", "n_routed_experts"),
    "dots1": ("Dots1TopkRouter", "n_routed_experts"),
    "mistral4": ("Mistral4TopkRouter", "n_routed_experts"),
}
#: A wrapper's own type, where its text section has none.
WRAPPERS = {"qwen3_5_moe": "qwen3_5_moe_text", "qwen3_vl_moe": "qwen3_vl_moe_text"}


def built(model_type: str, **settings: Any) -> tuple[nn.Module, dict[str, Any]]:
    """A model type's router of transformers, and its configuration as a dict."""
    from transformers import CONFIG_MAPPING

    name, experts = ROUTERS[model_type]
    sizes = {"hidden_size": HIDDEN, experts: EXPERTS, "num_experts_per_tok": TOP_K}
    config = CONFIG_MAPPING[model_type](**sizes | settings)
    package = model_type.removesuffix("_text")
    module = f"transformers.models.{package}.modeling_{package}"
    return getattr(importlib.import_module(module), name)(config), config.to_dict()


def qwen3_moe(**settings: Any) -> tuple[nn.Module, dict[str, Any]]:
    return built("qwen3_moe", **settings)


def nemotron_h(**settings: Any) -> tuple[nn.Module, dict[str, Any]]:
    return built("nemotron_h", **settings)


def deepseek_v3(**settings: Any) -> tuple[nn.Module, dict[str, Any]]:
    return built("deepseek_v3", **{"n_group": 1, "topk_group": 1} | settings)


CASES: list[tuple[Callable[..., tuple[nn.Module, dict[str, Any]]], dict[str, Any]]] = [
    (qwen3_moe, {"norm_topk_prob": True}),
    (qwen3_moe, {"norm_topk_prob": False}),
    *(
        (build, {"norm_topk_prob": norm, "routed_scaling_factor": scaling, **groups})
        for build in (nemotron_h, deepseek_v3)
        for norm in (True, False)
        for scaling in (1.0, 2.5)
        for groups in ({}, {"n_group": 4, "topk_group": 2}, {"n_group": 8, "topk_group": 3})
    ),
]
IDS = [f"{build.__name__}-{'-'.join(map(str, made.values()))}" for build, made in CASES]


def prepared(module: nn.Module) -> tuple[nn.Module, Tensor, Tensor | None]:
    """The module with random weights, its weight, and its bias if it has one."""
    random = generator()
    with torch.no_grad():
        weight = module.weight.normal_(0, 0.3, generator=random)
        bias = getattr(module, "e_score_correction_bias", None)
        if bias is not None:
            bias.normal_(0, 0.2, generator=random)
    return module.eval(), weight.detach(), bias


def by_id(ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    order = ids.argsort(dim=-1)
    return ids.gather(1, order), weights.gather(1, order)


@pytest.mark.parametrize(("build", "made"), CASES, ids=IDS)
def test_the_same_experts_with_the_same_weights(build, made):
    module, config = build(**made)
    module, weight, bias = prepared(module)
    x = torch.randn(TOKENS, HIDDEN, generator=generator())
    with torch.no_grad():
        _, expected_weights, expected_ids = module(x)
    spec = ModelConfig(config).router_spec(TOP_K)
    ids, weights = by_id(*Router(weight, bias, spec).route(x))
    wanted_ids, wanted_weights = by_id(expected_ids, expected_weights)
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(weights, wanted_weights, rtol=1e-6, atol=1e-7)
    assert (ids.dtype, weights.dtype) == (torch.int64, torch.float32)


@pytest.mark.parametrize(("build", "made"), CASES, ids=IDS)
def test_the_config_says_how_the_router_works(build, made):
    _, config = build(**made)
    model = ModelConfig(config)
    assert model.top_k() == TOP_K
    assert model.router_spec(TOP_K) == RouterSpec(
        top_k=TOP_K,
        scoring=Scoring.SOFTMAX if build is qwen3_moe else Scoring.SIGMOID,
        renormalize=Renormalize.YES if made["norm_topk_prob"] else Renormalize.NO,
        groups=made.get("n_group", 1),
        top_groups=made.get("topk_group", 1),
        scaling=made.get("routed_scaling_factor", 1.0),
    )


def test_every_model_type_that_is_routed_was_compared():
    assert {*ROUTERS, *WRAPPERS} == {*ROUTING}
    assert all(ROUTING[wrapper] == ROUTING[text] for wrapper, text in WRAPPERS.items())


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("model_type", ROUTERS)
def test_each_model_type_routes_as_transformers_does(model_type, silent):
    """Also where the config says nothing, so that the model's own rules hold."""
    module, config = built(model_type)
    module, weight, bias = prepared(module)
    rules = ("norm_topk_prob", "n_group", "topk_group", "routed_scaling_factor", "scoring_func")
    if silent:
        config = {key: value for key, value in config.items() if key not in rules}
    if model_type == "minimax_m2":  # its bias is beside the router, not inside
        bias = torch.randn(EXPERTS, generator=generator()) * 0.2
    arguments = (bias,) if model_type == "minimax_m2" else ()
    x = torch.randn(TOKENS, HIDDEN, generator=generator())
    with torch.no_grad():
        _, expected_weights, expected_ids = module(x, *arguments)
    model = ModelConfig(config)
    assert model.unknown_routing() == ""
    assert model.takes_correction_bias() == (bias is not None)
    ids, weights = by_id(*Router(weight, bias, model.router_spec(TOP_K)).route(x))
    wanted_ids, wanted_weights = by_id(expected_ids, expected_weights)
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(weights, wanted_weights, rtol=1e-6, atol=1e-7)


def test_the_cases_reach_what_they_are_for():
    """Bias and groups change the choice, and the module without them would choose differently."""
    module, config = deepseek_v3(n_group=4, topk_group=2, norm_topk_prob=True)
    _, weight, bias = prepared(module)
    x = torch.randn(TOKENS, HIDDEN, generator=generator())
    spec = ModelConfig(config).router_spec(TOP_K)

    def chosen(bias: Tensor | None, spec: RouterSpec) -> Tensor:
        return Router(weight, bias, spec).route(x)[0].sort(dim=-1).values

    ids = chosen(bias, spec)
    assert not torch.equal(ids, chosen(None, spec))
    assert not torch.equal(ids, chosen(bias, dataclasses.replace(spec, groups=1, top_groups=1)))
    assert all(len(set((row // 4).tolist())) <= 2 for row in ids)


def test_weights_may_be_bf16():
    module, config = qwen3_moe(norm_topk_prob=True)
    _, weight, _ = prepared(module)
    weight = weight.bfloat16()
    x = torch.randn(TOKENS, HIDDEN, generator=generator()).bfloat16()
    spec = ModelConfig(config).router_spec(TOP_K)
    ids, weights = Router(weight, None, spec).route(x)
    exact_ids, exact_weights = Router(weight.float(), None, spec).route(x.float())
    assert torch.equal(ids, exact_ids)
    assert torch.equal(weights, exact_weights)


def test_scores_that_all_vanish_do_not_become_nan():
    weight = torch.full((EXPERTS, HIDDEN), -100.0)
    spec = RouterSpec(TOP_K, Scoring.SIGMOID, Renormalize.YES)
    _, weights = Router(weight, None, spec).route(torch.ones(1, HIDDEN))
    assert bool(torch.isfinite(weights).all())


def test_ids_are_distinct():
    _, weight, _ = prepared(qwen3_moe()[0])
    spec = RouterSpec(EXPERTS, Scoring.SOFTMAX, Renormalize.YES)
    ids, weights = Router(weight, None, spec).route(torch.randn(TOKENS, HIDDEN))
    assert all(len(set(row.tolist())) == EXPERTS for row in ids)
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(TOKENS))


# ---- what cannot be


SOUND = RouterSpec(TOP_K, Scoring.SIGMOID, Renormalize.YES)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"top_k": 0}, ("top-k", "16", "0")),
        ({"top_k": -1}, ("top-k", "-1")),
        ({"top_k": 17}, ("top-k", "16", "17")),
        ({"groups": 0}, ("16 experts", "0 groups")),
        ({"groups": 3}, ("16 experts", "3 groups")),
        ({"groups": 32}, ("16 experts", "32 groups")),
        ({"groups": 4, "top_groups": 0}, ("4 groups", "0 taking part")),
        ({"groups": 4, "top_groups": 5}, ("4 groups", "5 taking part")),
        ({"groups": 8, "top_groups": 1}, ("top-k is 4", "1 of 8 groups", "2 of 16 experts")),
    ],
)
def test_a_spec_that_does_not_fit_is_named(changes, words):
    router = Router(torch.zeros(EXPERTS, HIDDEN), None, dataclasses.replace(SOUND, **changes))
    with pytest.raises(InputError) as error:
        router.route(torch.zeros(2, HIDDEN))
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("shape", [(HIDDEN,), (2, HIDDEN + 1), (2, 2, HIDDEN), ()])
def test_inputs_of_another_shape_are_named(shape):
    with pytest.raises(ShapeError) as error:
        Router(torch.zeros(EXPERTS, HIDDEN), None, SOUND).route(torch.zeros(shape))
    assert str(HIDDEN) in str(error.value)
    assert str(shape) in str(error.value)


# ---- random routing


def test_random_routing_is_distinct_normalized_and_repeatable():
    ids, weights = random_routing(TOKENS, EXPERTS, TOP_K, generator())
    assert ids.shape == weights.shape == (TOKENS, TOP_K)
    assert all(len(set(row.tolist())) == TOP_K for row in ids)
    assert set(ids.unique().tolist()) == set(range(EXPERTS))
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(TOKENS))
    again = random_routing(TOKENS, EXPERTS, TOP_K, generator())
    assert torch.equal(ids, again[0])
    assert torch.equal(weights, again[1])


@pytest.mark.parametrize("top_k", [0, -1, EXPERTS + 1])
def test_random_routing_refuses_a_top_k_that_does_not_fit(top_k):
    with pytest.raises(InputError, match=f"top-k must be 1 to {EXPERTS}, got {top_k}"):
        random_routing(1, EXPERTS, top_k, generator())
