"""Distances that must not flatter: zeros, NaN, signs, steps."""

from __future__ import annotations

import math

import pytest
import torch

from trtllm_b12x_fix.errors import ShapeError
from trtllm_b12x_fix.metrics import compare_codes, distance


def test_equal_tensors_are_exact():
    value = torch.tensor([1.0, -2.0])
    found = distance(value, value.clone())
    assert (found.relative_rms, found.cosine, found.sqnr_db) == (0.0, 1.0, math.inf)


def test_relative_rms_is_relative_to_the_reference():
    found = distance(torch.tensor([1.1, 0.0]), torch.tensor([1.0, 0.0]))
    assert found.relative_rms == pytest.approx(0.1, rel=1e-6)
    assert found.sqnr_db == pytest.approx(20.0, abs=1e-4)


def test_a_negative_reference_is_no_excuse():
    assert distance(torch.tensor([5.0]), torch.tensor([-5.0])).relative_rms == 2.0
    assert distance(torch.tensor([5.0]), torch.tensor([-5.0])).cosine == -1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_never_close(bad):
    for pair in ((torch.tensor([bad]), torch.ones(1)), (torch.ones(1), torch.tensor([bad]))):
        assert math.isnan(distance(*pair).relative_rms)
        assert math.isnan(distance(*pair).sqnr_db)


def test_zero_against_something_is_all_wrong_and_the_reverse_infinitely():
    assert distance(torch.zeros(2), torch.ones(2)).relative_rms == 1.0
    assert distance(torch.ones(2), torch.zeros(2)).relative_rms == math.inf
    assert distance(torch.zeros(2), torch.zeros(2)).relative_rms == 0.0


def test_scale_is_no_excuse_for_cosine_alone():
    found = distance(torch.tensor([2.0, 4.0]), torch.tensor([1.0, 2.0]))
    assert found.cosine == pytest.approx(1.0)
    assert found.relative_rms == pytest.approx(1.0)


def test_code_steps_cross_zero_and_ignore_its_sign():
    left = torch.tensor([0, 8, 1, 9, 7], dtype=torch.uint8)
    right = torch.tensor([8, 0, 9, 9, 15], dtype=torch.uint8)
    found = compare_codes(left, right)
    assert (found.total, found.differing, found.largest_step) == (5, 2, 14)


def test_shapes_must_match():
    with pytest.raises(ShapeError):
        distance(torch.zeros(2), torch.zeros(3))
    with pytest.raises(ShapeError):
        compare_codes(torch.zeros(2, dtype=torch.uint8), torch.zeros(3, dtype=torch.uint8))
