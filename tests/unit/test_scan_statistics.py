"""The algebra of histograms: against direct computation, the layer check, and published figures."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoints import save
from tests.scan_cases import PREFIX, SMALL, run, sound
from trtllm_b12x_fix.checkpoint import embedded
from trtllm_b12x_fix.formats import e4m3, nvfp4
from trtllm_b12x_fix.layer_check.scales import damage
from trtllm_b12x_fix.presets.published import (
    LAGUNA_SCAN,
    laguna_prediction,
    sigma_from_subnormal_share,
)
from trtllm_b12x_fix.scan import statistics
from trtllm_b12x_fix.scan.statistics import ONE, VALUES, assumed_zero_blocks, encode, tally

# ml-dtypes is another author's E4M3.
FLOAT8 = ml_dtypes.float8_e4m3fn


def test_values_are_the_formats():
    assert np.array_equal(VALUES, np.array(e4m3.E4M3_VALUES[:128], np.float32), equal_nan=True)


def test_every_midpoint_and_its_neighbours_round_as_ml_dtypes_does():
    middle = ((VALUES[1:127].astype(np.float64) + VALUES[:126]) / 2).astype(np.float32)
    around = [np.nextafter(middle, np.float32(to)) for to in (-1, 1)]
    values = np.concatenate([VALUES[:127], middle, *around, np.float32([1e-40, 2.0**-10, 450.0])])
    expected = np.minimum(values, np.float32(448)).astype(FLOAT8).view(np.uint8)
    assert (encode(values) == expected).all()


@settings(max_examples=200)
@given(st.lists(st.floats(0, 1000, width=32), min_size=1, max_size=50))
def test_rounding_is_ml_dtypes(values):
    array = np.array(values, np.float32)
    expected = np.minimum(array, np.float32(448)).astype(FLOAT8).view(np.uint8)
    assert (encode(array) == expected).all()


def direct(scales: np.ndarray, scale: float, codes: np.ndarray | None = None) -> dict[str, float]:
    """Each block by itself: multiply, round with ml-dtypes, compare in fp64."""
    stored = scales.view(FLOAT8).astype(np.float32)
    baked = np.minimum(stored * np.float32(scale), np.float32(448)).astype(FLOAT8)
    exact = stored.astype(np.float64) * float(np.float32(scale))
    keep = scales > 0
    energy = None
    if codes is not None:
        values = codes.astype(np.uint8).reshape(-1, 8)
        halves = np.stack([values & 15, values >> 4], -1).reshape(len(values), 16)
        decoded = halves.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
        energy = (decoded**2).sum(axis=1)
        keep &= energy > 0
    value, true = baked.astype(np.float64)[keep], exact[keep]
    error = np.abs(value - true) / true
    result = {
        "blocks": int(keep.sum()),
        "zero_fraction": float((value == 0).mean()),
        "subnormal_fraction": float(((value > 0) & (value < 2.0**-6)).mean()),
        "mean_error": float(error.mean()),
        "rms_error": float(np.sqrt((error**2).mean())),
        "max_error": float(error.max()),
    }
    if energy is not None:
        weight = energy[keep]
        moved = (weight * (value - true) ** 2).sum() / (weight * true**2).sum()
        result["weight_error"] = math.sqrt(moved)
    return result


def same(got: statistics.BakeDamage, expected: dict[str, float]) -> None:
    for name, value in expected.items():
        assert getattr(got, name) == pytest.approx(value, rel=1e-12, abs=1e-15), name


@settings(max_examples=100)
@given(exponent=st.floats(-30, 1), seed=st.integers(0, 1000))
def test_a_histogram_gives_what_every_block_by_itself_gives(exponent, seed):
    rng = np.random.default_rng(seed)
    scales = rng.integers(0, 0x7F, 3000).astype(np.uint8)
    scale = np.float32(2.0**exponent)
    counts = np.bincount(scales, minlength=256)[None]
    same(tally(counts, np.array([scale])).one(0), direct(scales, float(scale)))


@pytest.mark.parametrize("scale", [2.0**-9, 3e-5, 1e-6])
def test_files_with_codes_give_what_every_block_by_itself_gives(tmp_path, scale):
    tensors = sound(scale=scale)
    blocks = tensors[f"{PREFIX}.1.up_proj.weight"]
    blocks[:4] = 0  # 16 all-zero blocks
    save(tmp_path, tensors)
    for weights in (False, True):
        result = run(tmp_path, weights=weights)
        for projection in result.projections:
            for worst in projection.worst:
                base = f"{PREFIX}.{worst.expert}.{projection.projection}"
                scales = tensors[f"{base}.weight_scale"].view(torch.uint8).numpy().ravel()
                codes = tensors[f"{base}.weight"].numpy().ravel() if weights else None
                same(worst.damage, direct(scales, worst.weight_scale_2, codes))


@pytest.mark.parametrize("shift", [0, 5])
def test_the_layer_check_counts_the_same(tmp_path, shift):
    """The embedded real layer at both magnitudes; FC1 there is gate and up together."""
    layer, _ = embedded.load()
    from safetensors.torch import load_file, save_file

    tensors = load_file(embedded.PATH)
    for name in tensors:
        if name.endswith("weight_scale_2"):
            tensors[name] = tensors[name] / 2**shift
    save_file(tensors, tmp_path / "model.safetensors")
    result = run(tmp_path, weights=True)
    for matrices, names in ((layer.fc1, {"gate_proj", "up_proj"}), (layer.fc2, {"down_proj"})):
        moved = type(matrices)(
            matrices.packed,
            matrices.block_scale,
            matrices.weight_scale_2 / 2**shift,
            matrices.input_scale,
        )
        theirs = damage(moved)
        ours = [p.damage for p in result.projections if p.projection in names]
        blocks = sum(one.blocks for one in ours)
        assert blocks == theirs.blocks
        for mine, name in (
            ("zero_fraction", "zero_fraction"),
            ("subnormal_fraction", "subnormal_fraction"),
            ("mean_error", "mean_relative_error"),
        ):
            mean = sum(getattr(one, mine) * one.blocks for one in ours) / blocks
            assert mean == pytest.approx(getattr(theirs, name), rel=1e-6, abs=1e-12)
        assert max(one.max_error for one in ours) == pytest.approx(theirs.max_relative_error)


def test_the_published_scan_of_laguna(tmp_path):
    """sglang#32119: 89.1% subnormal fixes sigma; mean error 4.57% has to come out, zeros do not."""
    sigma = sigma_from_subnormal_share(LAGUNA_SCAN.subnormal)
    generator = torch.Generator().manual_seed(0)
    counts, scales = [], []
    for _ in range(64):  # matrices, each with its own amax and so its own weight_scale_2
        weights = torch.randn(128, 1024, generator=generator) * sigma
        quantized = nvfp4.quantize(weights)
        counts.append(np.bincount(quantized.block_scale.numpy().ravel(), minlength=256))
        scales.append(float(quantized.global_scale))
    got = tally(np.array(counts), np.array(scales, np.float32)).all()
    assert got.subnormal_fraction == pytest.approx(LAGUNA_SCAN.subnormal, abs=0.005)
    assert got.mean_error == pytest.approx(LAGUNA_SCAN.mean_error, rel=0.02)
    assert got.mean_error == pytest.approx(laguna_prediction().mean_error, rel=0.02)
    assert got.rms_error > statistics.LIMIT
    assert got.zero_fraction == 0 < LAGUNA_SCAN.zero


def test_rounding_normal_numbers_once_more_never_reaches_the_limit():
    weights = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0))
    scales = nvfp4.quantize(weights).block_scale.numpy().ravel()
    counts = np.repeat(np.bincount(scales, minlength=256)[None], 200, axis=0)
    rms = tally(counts, (2.0**-8 * np.linspace(1, 2, 200)).astype(np.float32)).rms()
    assert 0.02 < rms.max() < 0.8 * statistics.LIMIT


@pytest.mark.parametrize("scale", [1e-38, 1e-20, 1.0, 1e30])
def test_no_magnitude_makes_numbers_that_are_not(scale):
    counts = np.zeros((1, 256), np.int64)
    counts[0, 1:0x7F] = 1
    energy = counts * 100
    got = tally(counts, np.array([scale], np.float32), energy).all()
    assert got.blocks == 126
    assert all(math.isfinite(v) for v in (got.mean_error, got.rms_error, got.max_error))
    assert got.weight_error is not None
    assert got.zero_fraction == (1 if scale < 1e-10 else 0)


def spike(ones: int, beside: int, rest: int) -> np.ndarray:
    counts = np.zeros((1, 256), np.int64)
    counts[0, ONE - 1 : ONE + 2] = beside, ones, beside
    counts[0, 0x63] = rest
    return counts


@pytest.mark.parametrize(
    ("ones", "beside", "rest", "assumed"),
    [
        (500, 10, 2000, 490),  # a spike
        (39, 10, 2000, 0),  # no spike
        (15, 0, 2000, 0),  # too few to say
        (500, 10, 100, 0),  # most of the matrix: not padding
        (1000, 0, 0, 0),  # nothing but ones
    ],
)
def test_zero_blocks_are_assumed_from_a_spike_at_one(ones, beside, rest, assumed):
    assert assumed_zero_blocks(spike(ones, beside, rest)).tolist() == [assumed]


def test_scales_that_are_powers_of_two_have_no_spike():
    counts = np.zeros((1, 256), np.int64)
    counts[0, [ONE, 0x68, 0x70, 0x78]] = 450, 250, 150, 150
    assert assumed_zero_blocks(counts).tolist() == [0]


def test_zero_blocks_of_modelopt_do_not_count_as_damage(tmp_path):
    """A third of the blocks are zero: assumed without codes, known with them."""
    weights = torch.randn(96, 512, generator=torch.Generator().manual_seed(3)) * 0.5
    weights[::3] = 0
    quantized = nvfp4.quantize(weights)
    assert int((quantized.block_scale == ONE).sum()) >= 32 * 32
    tensors = {}
    for expert in range(4):
        for name in ("up_proj", "down_proj"):
            base = f"{PREFIX}.{expert}.{name}"
            tensors[f"{base}.weight"] = quantized.packed.clone()
            tensors[f"{base}.weight_scale"] = quantized.block_scale.view(torch.float8_e4m3fn)
            tensors[f"{base}.weight_scale_2"] = quantized.global_scale * (1 + expert / 7)
            tensors[f"{base}.input_scale"] = torch.tensor(0.01)
    save(tmp_path, {name: t.clone() for name, t in tensors.items()})
    guessed, known = run(tmp_path), run(tmp_path, weights=True)
    assert known.totals.damage.zero_fraction == 0
    assert guessed.totals.damage.zero_fraction < 0.001
    for one, other in zip(guessed.projections, known.projections, strict=True):
        assert other.zero_blocks == 4 * 32 * 32
        assert one.assumed_zero_blocks == pytest.approx(other.zero_blocks, rel=0.05)


def test_damage_is_weighted_by_what_it_stands_over():
    """A destroyed block of small codes moves the weights less than one of large codes."""
    counts = np.zeros((2, 256), np.int64)
    counts[:, [0x10, 0x7E]] = 1
    energy = np.zeros_like(counts)
    energy[0, [0x10, 0x7E]] = 4, 400
    energy[1, [0x10, 0x7E]] = 400, 4
    got = tally(counts, np.array([SMALL, SMALL], np.float32), energy)
    small, large = got.one(0).weight_error, got.one(1).weight_error
    assert small is not None
    assert large is not None
    assert small < large
