"""Gaps on a lattice: the report's are, smooth ones are not, and the odds are as claimed."""

from __future__ import annotations

import random

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_b12x_fix.canary.lattice import LEAST_GAPS, STEPS, find_lattice
from trtllm_b12x_fix.canary.prompts import REPORTED_BROKEN


def test_the_reported_top_5_lies_on_sixteenths():
    lattice = find_lattice([one.logprob for one in REPORTED_BROKEN.top])
    assert lattice is not None
    assert (lattice.step, lattice.gaps) == (1 / 16, 4)
    assert lattice.chance == pytest.approx(5.3e-10, rel=0.01)


def test_one_gap_off_by_one_printed_digit_too_many_is_no_lattice():
    values = [one.logprob for one in REPORTED_BROKEN.top]
    values[2] += 0.0003
    assert find_lattice(values) is None


@given(
    step=st.sampled_from(STEPS),
    counts=st.lists(st.integers(0, 40), min_size=LEAST_GAPS, max_size=6),
    constant=st.floats(-20, 0),
    decimals=st.sampled_from([4, 5, 7, 17]),
)
def test_multiples_of_a_step_are_found_with_that_step_or_a_coarser_one(
    step, counts, constant, decimals
):
    values, place = [], 0
    for count in (0, *counts):
        place += count
        values.append(round(constant - step * place, decimals))
    lattice = find_lattice(values)
    assert lattice is not None
    assert lattice.step >= step
    assert all(count * step % lattice.step == 0 for count in counts)


@given(st.permutations([one.logprob for one in REPORTED_BROKEN.top]))
def test_order_does_not_matter(values):
    assert find_lattice(values) == find_lattice(sorted(values))


@pytest.mark.parametrize("values", [[], [-1.0], [-1.0, -2.0], [-1.0, -2.0, -3.0]])
def test_too_few_gaps_say_nothing(values):
    assert find_lattice(values) is None


def test_equal_logits_are_on_every_lattice():
    lattice = find_lattice([-1.61] * 5)
    assert lattice is not None
    assert lattice.step == STEPS[0]


@pytest.mark.parametrize("decimals", [4, None])
def test_the_chance_is_what_smooth_gaps_show(decimals):
    """Three gaps fit once in 9e6 or 3e10, too rarely to count; one gap, three times, can be."""
    generator = random.Random(52308)
    tries, hits, claimed = 40_000, 0, 0.0048 if decimals else 0.00032
    for _ in range(tries):
        gap = generator.uniform(0, 20)
        if decimals:
            gap = round(gap, decimals)
        hits += find_lattice([-gap * place for place in range(LEAST_GAPS + 1)]) is not None
    known = find_lattice([-1.0, -2.0, -3.0, -4.0] if decimals else [1 / 3, -2 / 3, -5 / 3, -8 / 3])
    assert known is not None
    assert known.chance == pytest.approx(claimed**LEAST_GAPS, rel=0.01)
    # Poisson, 5 sigma. Of an exact gap times three, the tolerance takes a third.
    expected = claimed * tries / (1 if decimals else 3)
    assert abs(hits - expected) <= 5 * expected**0.5


@pytest.mark.parametrize(("low", "step"), [(8, 1 / 16), (16, 1 / 8), (32, 1 / 4)])
def test_a_healthy_head_in_bf16_shows_the_same_lattice(low, step):
    """Why the lattice is never a verdict: rounding to 8 significant bits alone makes it."""
    generator = np.random.default_rng(3)
    logits = low * (1 + 0.9 * generator.random((200, 5)))
    rounded = logits.astype(ml_dtypes.bfloat16).astype(np.float64)
    for row in rounded - 23.4567891:  # any constant: the normalization of a softmax
        lattice = find_lattice(list(row))
        assert lattice is not None
        assert lattice.step >= step
    assert not any(find_lattice(list(row)) for row in logits)
