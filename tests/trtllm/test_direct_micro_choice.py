"""Why direct micro is kept out on FlashInfer 0.6.17 to 0.7.1, rather than fed scales of 1.

There direct micro multiplies by the input scales. Scales of exactly 1 read the same both ways, so
they would let it run, uncalibrated; keeping it out leaves its calls to micro and static, which
divide as they should. What is compared is the true error of each way, the emulator's on shapes
that direct micro would take.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import Tensor

from tests.layers import make_layer
from tests.trtllm.stand_in import Era, write_stand_in
from tests.trtllm.test_stand_in import LAYERS, TOP_K, make_job, run_worker
from trtllm_b12x_fix.emulator import moe, reference
from trtllm_b12x_fix.emulator.arithmetic import KernelFamily
from trtllm_b12x_fix.emulator.contract import InputQuantization, Shape, contract_for
from trtllm_b12x_fix.formats.nvfp4 import CALIBRATION_MAX
from trtllm_b12x_fix.layer import Activation, MoELayer
from trtllm_b12x_fix.metrics import distance
from trtllm_b12x_fix.repair import InputScales, Strategy, arguments, input_scales, plan

VERSION = "0.6.18"
TOKENS = (1, 2, 4, 7)
HIDDEN, EXPERTS = 256, 8
#: Weights of a trained layer are near 0.02; outliers are a few channels this much larger.
SIGMAS = (0.002, 0.005, 0.02, 0.1)
OUTLIERS = (1, 30, 300)
#: Unit scales are clearly better where their error is below this much of the other's: over all
#: layers, and over the eight of one magnitude, where a single draw of tokens moves it by 10%.
CLEARLY, CLEARLY_OF_FEW = 0.98, 0.9


@dataclass(frozen=True)
class Case:
    """One layer, one kind of activations, one token count."""

    activation: Activation
    intermediate: int
    sigma: float
    outlier: int
    tokens: int


CASES = [
    Case(activation, intermediate, sigma, outlier, tokens)
    for activation in Activation
    for intermediate in (256, 512)
    for sigma in SIGMAS
    for outlier in OUTLIERS
    for tokens in TOKENS
]


def activations(tokens: int, outlier: int, seed: int) -> Tensor:
    """bf16 N(0, 1); three channels in 256 are ``outlier`` times larger."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=generator)
    x[:, ::96] *= outlier
    return x.to(torch.bfloat16)


@cache
def calibrated(activation: Activation, intermediate: int, sigma: float, outlier: int) -> MoELayer:
    """Input scales as a calibration on 64 tokens of the same kind would set them."""
    layer = make_layer(
        activation, experts=EXPERTS, hidden=HIDDEN, intermediate=intermediate, sigma=sigma
    )
    x = activations(64, outlier, seed=99)
    ids = torch.arange(64 * TOP_K).view(64, TOP_K) % EXPERTS
    routing = moe.Routing(ids, torch.full((64, TOP_K), 1 / TOP_K))
    inner = reference.intermediate_amax(layer, x, routing)
    scales = [float(x.abs().max()) / CALIBRATION_MAX, float(inner) / CALIBRATION_MAX]
    fc1, fc2 = (
        replace(part, input_scale=torch.full((EXPERTS,), scale), layer_input_scale=None)
        for part, scale in zip((layer.fc1, layer.fc2), scales, strict=True)
    )
    return replace(layer, fc1=fc1, fc2=fc2)


@cache
def true_errors(case: Case) -> tuple[float, float]:
    """Of the alphas on micro or static, and of unit scales on direct micro."""
    layer = calibrated(case.activation, case.intermediate, case.sigma, case.outlier)
    seed = 1000 + CASES.index(case)
    x = activations(case.tokens, case.outlier, seed)
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(case.tokens, EXPERTS, generator=generator)
    weights, ids = scores.topk(TOP_K, dim=1)
    routing = moe.Routing(ids, weights / weights.sum(dim=1, keepdim=True))
    truth = reference.truth(layer, x, routing)
    contract = contract_for(VERSION)
    shape = Shape(
        tokens=case.tokens,
        top_k=TOP_K,
        hidden=HIDDEN,
        intermediate=case.intermediate,
        experts=EXPERTS,
        activation=case.activation,
        sharing=InputQuantization.SHARED,
    )
    assert contract.select(shape) is KernelFamily.DIRECT_MICRO
    planned = plan(contract, case.activation)
    assert planned.strategy is Strategy.ALPHAS
    errors = []
    for strategy, family in (
        (planned.strategy, contract.without(*planned.keep_out).select(shape)),
        (Strategy.UNIT, KernelFamily.DIRECT_MICRO),
    ):
        args = arguments(strategy, layer, *input_scales(layer, InputScales.LAYER), contract)
        ran = moe.run(args.launch(layer), x, routing, contract.arithmetic(family, shape), 0)
        errors.append(distance(ran.output, truth).relative_rms)
    return errors[0], errors[1]


def medians(cases: list[Case]) -> tuple[float, float, float]:
    """Median true errors of both ways, and of their ratio, unit over alphas."""
    errors = [true_errors(case) for case in cases]
    return (
        statistics.median(alphas for alphas, _ in errors),
        statistics.median(unit for _, unit in errors),
        statistics.median(unit / alphas for alphas, unit in errors),
    )


@pytest.mark.parametrize("activation", Activation)
def test_keeping_direct_micro_out_has_no_more_true_error_than_unit_scales(activation):
    mine = [case for case in CASES if case.activation is activation]
    for sigma in SIGMAS:
        for outlier in OUTLIERS:
            some = [case for case in mine if (case.sigma, case.outlier) == (sigma, outlier)]
            alphas, unit, ratio = medians(some)
            print(
                f"{activation.value}, sigma {sigma}, outliers {outlier}x: kept out {alphas:.4f}, "
                f"unit scales {unit:.4f}, ratio {ratio:.3f}"
            )
            assert ratio > CLEARLY_OF_FEW, (sigma, outlier)
    alphas, unit, ratio = medians(mine)
    print(f"{activation.value}: kept out {alphas:.4f}, unit scales {unit:.4f}, ratio {ratio:.3f}")
    assert ratio > CLEARLY


@pytest.mark.parametrize(
    ("sigma", "outlier"), [(SIGMAS[0], 1), (SIGMAS[-1], 300)], ids=["lost", "saturated"]
)
@pytest.mark.parametrize("activation", Activation)
def test_unit_scales_break_at_both_ends_of_the_range(activation, sigma, outlier):
    """A block near 6 * 2^-10 has no block scale left, and one beyond 2688 is cut off."""
    some = [
        case
        for case in CASES
        if (case.activation, case.sigma, case.outlier) == (activation, sigma, outlier)
    ]
    alphas, unit, _ = medians(some)
    assert alphas < 0.2
    assert unit > 0.4


@pytest.mark.slow
@pytest.mark.parametrize("switch", ["off", "on"])
def test_direct_micro_is_launched_without_the_fix_and_never_with_it(
    oracle_dir, tmp_path, monkeypatch, switch
):
    oracle_dir(f"flashinfer-{VERSION}")
    oracle_dir("flashinfer-deps")
    monkeypatch.setenv("TRTLLM_B12X_FIX", "auto" if switch == "on" else "off")
    monkeypatch.setenv("TRTLLM_B12X_FIX_LEDGER", str(tmp_path / "ledger"))
    (tmp_path / "stand-in").mkdir()
    write_stand_in(tmp_path / "stand-in", Era.MOE_TRANSFORM)
    tokens = tuple(range(1, 9))
    jobs = [
        make_job(layer, tokens, use_cuda_graph=graph)
        for layer in LAYERS.values()
        for graph in (False, True)
    ]
    part = {"era": Era.MOE_TRANSFORM.name, "stand_in": str(tmp_path / "stand-in"), "jobs": jobs}
    setups = ["tests.trtllm.fixed:install"] if switch == "on" else []
    (records,) = run_worker(VERSION, [part], tmp_path, *setups)
    for record in records:
        assert "error" not in record, record["error"]
        families = [case["family"] for case in record["cases"]]
        if switch == "on":
            assert set(families) <= {"micro", "static"}
        else:  # to 28 routed rows; 8 tokens have 32
            assert families == ["direct-micro"] * 7 + ["micro"]
