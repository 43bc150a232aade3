"""Output sums against loops written from the kernels' rounding sequences."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests import oracle
from trtllm_b12x_fix.emulator.accumulate import combine
from trtllm_b12x_fix.emulator.arithmetic import OutputSum
from trtllm_b12x_fix.errors import InputError

T, K, S, H = 3, 4, 5, 32


@pytest.fixture
def terms():
    rng = np.random.default_rng(0)
    partials = rng.normal(size=(T, K, S, H)).astype(np.float32)
    alpha = np.exp(rng.normal(size=(T, K))).astype(np.float32)
    weights = rng.uniform(size=(T, K)).astype(np.float32)
    return partials, alpha, weights


def run(terms, kind, seed=None):
    out = combine(*(torch.from_numpy(t) for t in terms), kind, seed).output
    assert out.dtype == torch.bfloat16
    return out.float().numpy()


def test_bf16_atomics_in_slot_order(terms):
    partials, alpha, weights = terms
    expected = np.zeros((T, H), np.float32)
    for t in range(T):
        for k in range(K):
            for s in range(S):
                term = oracle.bf16(partials[t, k, s] * alpha[t, k])
                term = oracle.bf16(term * weights[t, k])
                expected[t] = oracle.bf16(expected[t] + term)
    assert np.array_equal(run(terms, OutputSum.BF16_ATOMICS), expected)


def test_retained_slices_weigh_in_bf16(terms):
    partials, alpha, weights = terms
    expected = np.zeros((T, H), np.float32)
    for t in range(T):
        for k in range(K):
            factor = oracle.bf16(alpha[t, k] * weights[t, k])
            for s in range(S):
                term = oracle.bf16(oracle.bf16(partials[t, k, s]) * factor)
                expected[t] = oracle.bf16(expected[t] + term)
    assert np.array_equal(run(terms, OutputSum.BF16_ATOMICS_RETAINED), expected)


def test_slots_are_summed_in_fp32_in_order(terms):
    partials, alpha, weights = terms
    expected = np.zeros((T, H), np.float32)
    for t in range(T):
        for k in range(K):
            factor = oracle.bf16(alpha[t, k] * weights[t, k])
            for s in range(S):
                expected[t] += oracle.bf16(oracle.bf16(partials[t, k, s]) * factor)
    assert np.array_equal(run(terms, OutputSum.FP32_SLOTS), oracle.bf16(expected))


@pytest.mark.parametrize("kind", [OutputSum.SINGLE_STORE, OutputSum.FP32])
def test_fp32_throughout_rounds_once(terms, kind):
    partials, alpha, weights = (t.astype(np.float64) for t in terms)
    exact = (partials * (alpha * weights)[:, :, None, None]).sum(axis=(1, 2))
    # Within one bf16 rounding (2^-9 relative) plus fp32 summation noise.
    assert np.abs(run(terms, kind) - exact).max() <= np.abs(exact).max() * 2.0**-8


@pytest.mark.parametrize("kind", list(OutputSum))
def test_a_seed_gives_one_order(terms, kind):
    assert np.array_equal(run(terms, kind, 7), run(terms, kind, 7))


@pytest.mark.parametrize("kind", list(OutputSum))
def test_only_atomics_depend_on_the_order(terms, kind):
    different = not np.array_equal(run(terms, kind, 1), run(terms, kind, 2))
    assert different == kind.has_random_order


def test_random_orders_use_every_term_once():
    """With one-hot powers of two any lost or doubled term shows exactly."""
    partials = torch.zeros(1, 2, 4, 8)
    for slot in range(8):
        partials[0, slot // 4, slot % 4, slot] = 2.0**slot
    one = torch.ones(1, 2)
    for seed in range(5):
        out = combine(partials, one, one, OutputSum.BF16_ATOMICS, seed).output
        assert out.float().tolist() == [[2.0**slot for slot in range(8)]]


def test_bf16_atomics_lose_what_the_guide_says():
    """0.16% * sqrt(N / 2) for N adds, emulated with Gaussian terms of equal size."""
    generator = torch.Generator().manual_seed(0)
    partials = torch.randn(8, 22, 21, 256, generator=generator)
    one = torch.ones(8, 22)
    out = combine(partials, one, one, OutputSum.BF16_ATOMICS, 0).output.double()
    exact = partials.double().sum(dim=(1, 2))
    error = float((out - exact).norm() / exact.norm())
    assert 0.018 < error < 0.028


@pytest.mark.parametrize("kind", list(OutputSum))
def test_unrounded_is_the_same_terms_in_fp32(terms, kind):
    both = combine(*(torch.from_numpy(t) for t in terms), kind, 3)
    assert both.unrounded.dtype == torch.float32
    if not kind.has_random_order:
        assert torch.equal(both.unrounded.to(torch.bfloat16), both.output)
    error = (both.output.double() - both.unrounded.double()).norm() / both.unrounded.norm()
    assert 0 < float(error) < 0.02  # bf16 adds of 20 terms: 0.16% * sqrt(10)


def test_a_seed_must_be_an_integer(terms):
    with pytest.raises(InputError, match="order_seed"):
        run(terms, OutputSum.BF16_ATOMICS, 0.5)
