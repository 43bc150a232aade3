"""Loops at the end of a text."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_b12x_fix.canary.repetition import SHORT_PERIOD, find_loop

PROSE = "Bread is older than writing, and nobody knows who baked the first flat loaf of it."


@pytest.mark.parametrize("text", ["", " ", "Paris.", PROSE, "5, 6, 7, 8, 9, 10, 11, 12, 13, 14"])
def test_a_text_without_a_loop(text):
    assert find_loop(text) is None


@pytest.mark.parametrize(
    ("text", "period"),
    [
        ("!" * 40, 1),
        ("+" * 12, 1),
        ("|','" * 10, 4),
        ("\ufffd" * 30, 1),
        ("no no no no no no no", 3),
        ("enric\n\nenric  enric enric enric", 6),
    ],
)
def test_a_short_loop_is_degenerate(text, period):
    loop = find_loop(text)
    assert loop is not None
    assert loop.is_degenerate
    assert loop.period == period == len(loop.unit)
    assert loop.repeats >= 3


def test_a_loop_of_sentences_is_found_and_is_what_small_models_do():
    loop = find_loop(PROSE + " " + "It rose in the oven. " * 6)
    assert loop is not None
    assert loop.period > SHORT_PERIOD
    assert not loop.is_degenerate


def test_a_short_loop_after_a_long_text_is_not_most_of_it():
    loop = find_loop(PROSE * 2 + "ha" * 8)
    assert loop is not None
    assert not loop.is_degenerate


@given(
    unit=st.text("abcdefgh .", min_size=1, max_size=SHORT_PERIOD).filter(lambda text: text.strip()),
    times=st.integers(20, 60),
)
def test_any_short_unit_repeated_is_found(unit, times):
    loop = find_loop(unit * times)
    if len(" ".join((unit * times).split())) >= 20:
        assert loop is not None
        assert loop.is_degenerate
        assert loop.share > 0.8


@given(st.text(max_size=300))
def test_what_is_found_stands_at_the_end(text):
    loop = find_loop(text)
    if loop is not None:
        plain = " ".join(text.split())
        assert plain.endswith(loop.unit * 3)
        assert 0 < loop.share <= 1


def test_a_novel_takes_no_time():
    began = time.monotonic()
    find_loop("a" * 2_000_000)
    find_loop("ab " * 500_000 + "c")
    assert time.monotonic() - began < 5
