"""Word problems: what is held out stays out, and every worked step is right."""

import operator
import re

import pytest

from evals.relu2_lm import grammar
from evals.relu2_lm.problems import Split, extract_answer, generate, templates

_STEP = re.compile(r"(\d+)([-+*/])(\d+)=(\d+)")
_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


@pytest.fixture(scope="module")
def problems():
    return {split: list(generate(split, 3, 400)) for split in Split}


def test_there_are_many_templates_and_many_are_held_out():
    every = templates()
    held_out = [template for template in every if template.held_out]
    assert len({template.key for template in every}) == len(every) == 2880
    assert len(held_out) == 240
    assert all(len(template.events) == 2 for template in every)


def test_the_same_seed_makes_the_same_problems():
    first, again = (list(generate(Split.TRAIN, 5, 20)) for _ in range(2))
    assert first == again
    assert first != list(generate(Split.TRAIN, 6, 20))


@pytest.mark.parametrize("split", Split)
def test_every_step_is_right_and_the_last_is_the_answer(problems, split):
    for problem in problems[split]:
        results = []
        for step in problem.steps:
            left, sign, right, result = _STEP.fullmatch(step).groups()
            assert _OPERATORS[sign](int(left), int(right)) == int(result), step
            results.append(int(result))
        assert results[-1] == problem.answer == extract_answer(problem.solution)
        assert tuple(results) == problem.results
        assert len(problem.steps) >= 2
        assert max(results) <= 999


def test_training_sees_nothing_that_is_held_out(problems):
    for problem in problems[Split.TRAIN]:
        numbers = {int(number) for number in re.findall(r"\d+", problem.prompt + problem.solution)}
        assert numbers.isdisjoint(grammar.HELD_OUT_NUMBERS)
        _, first, second, _ = problem.template.split("-")
        assert (first, second) not in grammar.HELD_OUT_PAIRS


@pytest.mark.parametrize(
    ("split", "template", "number"),
    [
        (Split.NEW_NUMBERS, False, True),
        (Split.NEW_TEMPLATES, True, False),
        (Split.NEW_BOTH, True, True),
    ],
)
def test_a_split_holds_what_its_name_says(problems, split, template, number):
    for problem in problems[split]:
        shown = {int(found) for found in re.findall(r"\d+", problem.question)}
        assert (not shown.isdisjoint(grammar.HELD_OUT_NUMBERS)) == number
        assert (tuple(problem.template.split("-")[1:3]) in grammar.HELD_OUT_PAIRS) == template
        assert problem.split is split


def test_the_total_follows_the_sentences():
    """One problem worked by hand."""
    wanted = "colours-friends-double-cost"
    found = next(p for p in generate(Split.TRAIN, 0, 4000) if p.template == wanted)
    red, blue, friends, each, dollars = found.given
    assert found.answer == (red + blue - friends * each) * 2 * dollars


def test_answers_are_read_as_gsm8k_writes_them():
    assert extract_answer(" 1+2=3\n#### 3") == 3
    assert extract_answer("#### 3\n#### 45 ") == 45
    assert extract_answer(" 1+2=3") is None
