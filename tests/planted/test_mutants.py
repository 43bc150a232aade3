"""Mutants of the package: each must make the named test fail.

A mutant replaces one function of the package by a plausible wrong one, then the very test that
guards it is called. A test that still passes guards nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit import (
    test_accumulate,
    test_e2m1,
    test_e4m3,
    test_layer,
    test_layer_check,
    test_metrics,
    test_moe,
    test_nvfp4,
    test_quantize,
    test_repair,
    test_scale_layout,
)
from trtllm_b12x_fix import layer as layer_module
from trtllm_b12x_fix import metrics, repair
from trtllm_b12x_fix.emulator import accumulate, moe, quantize, reference
from trtllm_b12x_fix.emulator.arithmetic import KernelFamily, OutputSum
from trtllm_b12x_fix.formats import e2m1, e4m3, nvfp4, scale_layout
from trtllm_b12x_fix.layer import Activation
from trtllm_b12x_fix.layer_check import scales
from trtllm_b12x_fix.metrics import Distance


@dataclass(frozen=True)
class Mutant:
    name: str
    owner: Any
    attribute: str
    wrong: Any
    guard: Any


def _half_up(values):
    steps = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    codes = (values.abs().unsqueeze(-1) >= steps).sum(-1).to(torch.uint8)
    return codes | (torch.signbit(values).to(torch.uint8) << 3)


def _truncating_e4m3(values):
    table = torch.tensor(e4m3.E4M3_VALUES[:127])
    index = torch.bucketize(values.abs().float(), table, right=True) - 1
    return index.to(torch.uint8) | (torch.signbit(values).to(torch.uint8) << 7)


def _no_clamp(values):
    saturated = values.float().abs() > 464
    bytes_ = values.float().clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(saturated, torch.full_like(bytes_, 0x7F), bytes_)


def _high_nibble_first(codes):
    pairs = codes.reshape(*codes.shape[:-1], -1, 2)
    return (pairs[..., 1] | (pairs[..., 0] << 4)).contiguous()


def _linear_is_swizzled(linear):
    rows, columns = scale_layout.padded_shape(*linear.shape[-2:])
    padded = linear.new_zeros(*linear.shape[:-2], rows, columns)
    padded[..., : linear.shape[-2], : linear.shape[-1]] = linear
    return padded


_read_back = quantize._read_back
_fast, _precise = quantize._fast, quantize._precise
_terms, _atomic = accumulate._terms, accumulate._atomic_sum
_activate, _bake = moe._activate, repair.bake
_alphas, _fp32_rescale = repair._alphas, repair._fp32_rescale


def _swap_sums(partials, alpha, weight, output_sum):
    return _terms(partials, alpha, weight, OutputSum.FP32)


def _unrounded_adds(terms, order_seed):
    return terms.sum(dim=1)


def _gate_is_up(fc1, activation, sigmoid):
    if activation is Activation.SILU:
        fc1 = fc1.roll(fc1.shape[-1] // 2, -1)
    return _activate(fc1, activation, sigmoid)


def _no_square(fc1, activation, sigmoid):
    if activation is Activation.RELU2:
        return fc1.clamp(min=0)
    return _activate(fc1, activation, sigmoid)


def _flattering_distance(value, reference_):
    error = float((value.double() - reference_.double()).norm())
    norm = float(reference_.double().norm()) or 1.0
    return Distance(min(error / norm, 1.0), 1.0)


def _all_blocks_count(packed):
    return torch.zeros(*packed.shape[:-1], packed.shape[-1] // 8, dtype=torch.bool)


def _sign_is_no_zero(packed):
    return (packed.unflatten(-1, (-1, 8)) == 0).all(dim=-1)


def _lost_s1(layer, s1, s2):
    return replace(_alphas(layer, s1, s2), input_global_scale=torch.ones_like(s1))


def _once_divided(layer, s1, s2):
    args = _fp32_rescale(layer, s1, s2)
    return replace(args, fc2_input_scale=args.fc2_input_scale * layer.fc1.weight_scale_2)


MUTANTS = (
    Mutant(
        "E2M1 rounds half up",
        e2m1,
        "encode",
        _half_up,
        test_e2m1.test_encode_agrees_at_every_tie_and_its_neighbours,
    ),
    Mutant(
        "high nibble first", e2m1, "pack", _high_nibble_first, test_e2m1.test_low_nibble_comes_first
    ),
    Mutant(
        "E4M3 truncates",
        e4m3,
        "encode",
        _truncating_e4m3,
        test_e4m3.test_encode_agrees_at_every_tie_and_its_neighbours,
    ),
    Mutant(
        "E4M3 overflows to NaN",
        e4m3,
        "encode",
        _no_clamp,
        test_e4m3.test_encode_saturates_whatever_the_installed_torch_does,
    ),
    Mutant(
        "global scale over 6 * 256",
        nvfp4,
        "CALIBRATION_MAX",
        6.0 * 256,
        lambda: test_nvfp4.test_quantize_is_the_formula(0),
    ),
    Mutant(
        "negative zero is a weight",
        nvfp4,
        "block_is_zero",
        _sign_is_no_zero,
        test_nvfp4.test_zero_blocks_are_found_whatever_their_signs,
    ),
    Mutant(
        "no swizzle at all",
        scale_layout,
        "swizzle",
        _linear_is_swizzled,
        lambda: test_scale_layout.test_swizzle_is_the_formula(256, 12),
    ),
    Mutant(
        "precise quantizer takes the fast order",
        quantize,
        "_precise",
        _fast,
        test_quantize.test_the_orders_really_differ_on_bf16_gaussians,
    ),
    Mutant(
        "subnormals always read right",
        quantize,
        "_read_back",
        lambda block_scale, decode: e4m3.decode(block_scale),
        test_quantize.test_hidden_one_misreads_k_times_2_to_minus_9,
    ),
    Mutant(
        "direct micro always divides",
        quantize,
        "_direct_micro",
        _precise,
        test_quantize.test_multiplying_by_a_calibrated_scale_loses_every_block,
    ),
    Mutant(
        "adds do not round",
        accumulate,
        "_atomic_sum",
        _unrounded_adds,
        test_accumulate.test_bf16_atomics_lose_what_the_guide_says,
    ),
    Mutant(
        "every add in slot order",
        accumulate,
        "_atomic_sum",
        lambda terms, order_seed: _atomic(terms, None),
        lambda: test_accumulate.test_only_atomics_depend_on_the_order(
            _sum_terms(), OutputSum.BF16_ATOMICS
        ),
    ),
    Mutant(
        "terms are not rounded",
        accumulate,
        "_terms",
        _swap_sums,
        lambda: test_accumulate.test_retained_slices_weigh_in_bf16(_sum_terms()),
    ),
    Mutant(
        "gate and up swapped in the activation",
        moe,
        "_activate",
        _gate_is_up,
        test_moe.test_every_arithmetic_is_near_the_truth_when_scales_are_exact,
    ),
    Mutant(
        "relu instead of relu2",
        moe,
        "_activate",
        _no_square,
        test_moe.test_every_arithmetic_is_near_the_truth_when_scales_are_exact,
    ),
    Mutant(
        "truth without the square",
        reference,
        "_activate",
        lambda h, activation: h.clamp(min=0),
        lambda: test_moe.test_the_truth_is_the_plain_formula(Activation.RELU2),
    ),
    Mutant(
        "distance capped at 1",
        metrics,
        "distance",
        _flattering_distance,
        test_metrics.test_a_negative_reference_is_no_excuse,
    ),
    Mutant(
        "alphas without the input scale",
        repair,
        "_alphas",
        _lost_s1,
        lambda: test_repair.test_alphas_is_exact_code_for_code(
            Activation.RELU2, "0.7.2", KernelFamily.STATIC, repair.InputScales.LAYER
        ),
    ),
    Mutant(
        "fp32-rescale divides once",
        repair,
        "_fp32_rescale",
        _once_divided,
        lambda: test_repair.test_fp32_rescale_is_close_and_as_true_as_the_reference(
            Activation.RELU2, "0.6.18", KernelFamily.STATIC
        ),
    ),
    Mutant(
        "baking that loses nothing",
        repair,
        "bake",
        lambda matrices: matrices.block_scale,
        test_repair.test_the_closed_form_of_the_damage,
    ),
    Mutant(
        "padding counted as damage",
        scales,
        "block_is_zero",
        _all_blocks_count,
        lambda: test_layer_check.TestScales().test_a_layer_without_weights_has_no_damage(),
    ),
    Mutant(
        "zero scales accepted",
        layer_module,
        "validate",
        lambda layer: None,
        lambda: test_layer.test_a_bad_scale_is_named_with_its_expert("fc1", "input_scale", 0.0),
    ),
)


def _sum_terms():
    rng = np.random.default_rng(0)
    return (
        rng.normal(size=(3, 4, 5, 32)).astype(np.float32),
        np.exp(rng.normal(size=(3, 4))).astype(np.float32),
        rng.uniform(size=(3, 4)).astype(np.float32),
    )


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_guard_fails_on_its_mutant(monkeypatch, mutant):
    mutant.guard()  # sound as it stands
    monkeypatch.setattr(mutant.owner, mutant.attribute, mutant.wrong)
    _patch_imported_names(monkeypatch, mutant)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        mutant.guard()


def _patch_imported_names(monkeypatch, mutant: Mutant) -> None:
    """Tests that imported the function by name must see the mutant too."""
    for module in (
        test_accumulate,
        test_layer,
        test_layer_check,
        test_metrics,
        test_moe,
        test_quantize,
        test_repair,
    ):
        if hasattr(module, mutant.attribute) and not mutant.attribute.startswith("_"):
            monkeypatch.setattr(module, mutant.attribute, mutant.wrong)
