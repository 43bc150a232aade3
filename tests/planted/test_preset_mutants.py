"""Mutants of the presets: each must make the named test fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.unit import test_preset_command, test_presets
from trtllm_b12x_fix.formats import e4m3, nvfp4
from trtllm_b12x_fix.layer import Activation
from trtllm_b12x_fix.layer_check import from_preset
from trtllm_b12x_fix.presets import generate, published, quantize_rows
from trtllm_b12x_fix.presets.published import ScaleStatistics
from trtllm_b12x_fix.presets.shapes import WeightLaw


@dataclass(frozen=True)
class Mutant:
    name: str
    owner: Any
    attribute: str
    wrong: Any
    guard: Callable[[], None]


_stream, _tokens, _normals = generate.stream, generate.tokens, generate._normals
_closed_form, _quantize_torch = published.closed_form, quantize_rows.quantize_torch
_weight_scale_2 = quantize_rows.weight_scale_2


def _shared_generator(seed, purpose, index=0):
    return _stream(seed, purpose)


def _low_bits_only(seed, purpose, index=0):
    return torch.Generator().manual_seed((seed + index) % 2**32)


def _reciprocal(normals, factors, packed, block_scale):
    """Multiplies by a reciprocal where ModelOpt divides."""
    scale = _weight_scale_2(normals.abs().amax(dim=1), factors)
    blocks = (normals * factors.unsqueeze(1)).unflatten(1, (-1, 16))
    raw = blocks.abs().amax(dim=2) * (1 / (6 * scale))
    block_scale.copy_(e4m3.encode(raw.clamp(2**-9, 448)))
    inverse = 1 / (e4m3.decode(block_scale) * scale)
    codes = nvfp4.e2m1.encode(blocks * inverse.unsqueeze(2) + 0.0).flatten(1)
    packed.copy_(nvfp4.e2m1.pack(codes))
    return scale


def _piece_by_piece(normals, factors, packed, block_scale):
    """A global scale of its own for every row."""
    for row in range(normals.shape[0]):
        piece = slice(row, row + 1)
        scale = _quantize_torch(normals[piece], factors[piece], packed[piece], block_scale[piece])
    return scale


def _checked_tokens_calibrate(shape, seed, count, purpose="inputs"):
    return _tokens(shape, seed, count)


def _rows_alike(law, generator, out):
    return _normals(WeightLaw(law.sigma), generator, out)


def _up_is_gate(h, activation):
    if activation is Activation.RELU2:
        return h.clamp(min=0)
    gate, up = h.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def _zeros_cost_nothing(sigma, spread=0.0):
    sound = _closed_form(sigma, spread)
    return ScaleStatistics(sound.zero, sound.subnormal, sound.mean_error - sound.zero)


def _truncating(sigma, spread=0.0):
    return _closed_form(sigma * 0.97, spread)


def _limit_without_rounding(share):
    # A subnormal VALUE instead of a byte that rounds to one.
    per_weight = share ** (1 / 16)
    return 6 * 2**-6 / published.NormalDist().inv_cdf((1 + per_weight) / 2)


def _trapped_rows_count(quantity, fc1, results):
    if quantity is published.Quantity.LAYER_ERROR:
        seen = [r.fidelity.relative_rms for r in results if r.fidelity]
        return min(seen), max(seen)
    return _measured(quantity, fc1, results)


_measured = from_preset._measured

MUTANTS = (
    Mutant(
        "every expert is the first",
        generate,
        "stream",
        _shared_generator,
        test_presets.test_experts_differ_and_so_do_seeds,
    ),
    Mutant(
        "seeds cut to 32 bits",
        generate,
        "stream",
        _low_bits_only,
        test_presets.test_experts_differ_and_so_do_seeds,
    ),
    Mutant(
        "torch multiplies by a reciprocal",
        quantize_rows,
        "quantize_torch",
        _reciprocal,
        lambda: test_presets.test_torch_quantizes_by_the_formula("next to ties"),
    ),
    Mutant(
        "torch scales every piece by itself",
        quantize_rows,
        "quantize_torch",
        _piece_by_piece,
        lambda: test_presets.test_numba_gives_the_bits_of_torch("gaussian"),
    ),
    Mutant(
        "checked tokens calibrate",
        generate,
        "tokens",
        _checked_tokens_calibrate,
        test_presets.test_calibration_has_tokens_of_its_own,
    ),
    Mutant(
        "rows all alike",
        generate,
        "_normals",
        _rows_alike,
        test_presets.test_weights_follow_the_law,
    ),
    Mutant(
        "relu instead of relu2 in the calibration",
        generate,
        "_activate",
        _up_is_gate,
        lambda: test_presets.test_fc2_is_calibrated_on_what_fc1_gives(test_presets.SMALL),
    ),
    Mutant(
        "gate and up swapped in the calibration",
        generate,
        "_activate",
        _up_is_gate,
        lambda: test_presets.test_fc2_is_calibrated_on_what_fc1_gives(test_presets.GATED),
    ),
    Mutant(
        "a zero scale costs nothing",
        published,
        "closed_form",
        _zeros_cost_nothing,
        test_presets.test_the_closed_form_is_what_samples_give,
    ),
    Mutant(
        "sigma three percent off",
        published,
        "closed_form",
        _truncating,
        test_presets.test_the_closed_form_is_what_samples_give,
    ),
    Mutant(
        "subnormal before rounding",
        published,
        "sigma_from_subnormal_share",
        _limit_without_rounding,
        test_presets.test_one_figure_of_the_laguna_scan_predicts_a_second_but_not_the_third,
    ),
    Mutant(
        "trapped rows among the figures",
        from_preset,
        "_measured",
        _trapped_rows_count,
        test_preset_command.test_figures_come_from_rows_where_input_scales_are_read_right,
    ),
    Mutant(
        "zero means the preset's own",
        from_preset,
        "_or_own",
        lambda asked, own: asked or own,
        test_preset_command.test_a_size_of_zero_is_refused_and_not_replaced,
    ),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_guard_fails_on_its_mutant(monkeypatch, mutant):
    mutant.guard()  # sound as it stands
    monkeypatch.setattr(mutant.owner, mutant.attribute, mutant.wrong)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        mutant.guard()
