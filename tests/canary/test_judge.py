"""From answers to outcomes, and from outcomes to a verdict."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.canary.answers import (
    SMOOTH,
    answer,
    candidates,
    mixture,
    near,
    opinion,
    position,
    right,
    said,
    wrong,
)
from trtllm_b12x_fix.canary.advice import advice
from trtllm_b12x_fix.canary.judge import compare, judge_answer
from trtllm_b12x_fix.canary.lattice import find_lattice
from trtllm_b12x_fix.canary.prompts import (
    CONTINUATIONS,
    QUESTIONS,
    REPORTED,
    REPORTED_BROKEN,
    REPORTED_HEALTHY,
    Probe,
)
from trtllm_b12x_fix.canary.protocol import Endpoint, Position
from trtllm_b12x_fix.canary.records import Outcome, Verdict

FRANCE = CONTINUATIONS[0]
ASKED = len(CONTINUATIONS)
ON_LATTICE = (-0.25, -2.5, -4.0, -4.25, -4.5)


def reported(fixture, text: str):
    top = [(one.token, one.logprob) for one in fixture.top]
    return judge_answer(FRANCE, answer(text, [position(top[0][0], top)]), 0.1)


# ---- the prompts


def test_the_reports_own_prompts_come_first():
    first = [probe.prompt for probe in CONTINUATIONS[:REPORTED]]
    assert first == ["The capital of France is", "What is 2+2?", "1, 2, 3, 4,"]


@pytest.mark.parametrize("probe", [*CONTINUATIONS, *QUESTIONS], ids=lambda probe: probe.prompt)
def test_no_prompt_holds_its_answer(probe):
    assert probe.expected
    assert said(probe, probe.prompt).outcome is Outcome.MISSED
    assert said(probe, f"{probe.prompt} {probe.prompt} {probe.prompt}").outcome is Outcome.MISSED
    for word in probe.expected:
        assert said(probe, f"It is {word}, I think.").outcome is Outcome.ANSWERED


def test_prompts_are_distinct():
    for probes in (CONTINUATIONS, QUESTIONS):
        assert len({probe.prompt for probe in probes}) == len(probes)


# ---- one answer


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        (" Paris", Outcome.ANSWERED),
        (" PARIS!", Outcome.ANSWERED),
        (" **Paris**", Outcome.ANSWERED),
        ("The capital of France is Paris.", Outcome.ANSWERED),
        (" Parisian", Outcome.MISSED),
        (" comparison", Outcome.MISSED),
        (" the capital", Outcome.MISSED),
        ("", Outcome.EMPTY),
        (" \n\t", Outcome.EMPTY),
    ],
)
def test_the_text_decides(text, outcome):
    assert said(FRANCE, text).outcome is outcome


@pytest.mark.parametrize("text", ["5", " 5, 6, 7", "five", "5."])
def test_numbers_are_whole_words(text):
    probe = CONTINUATIONS[2]
    assert said(probe, text).outcome is Outcome.ANSWERED
    assert said(probe, "15, 25, 5th").outcome is Outcome.MISSED


def test_an_answer_in_the_thoughts_counts_and_is_told():
    judged = judge_answer(FRANCE, answer("", reasoning="That is Paris, of course"), 0.1)
    assert (judged.outcome, judged.in_reasoning) == (Outcome.ANSWERED, True)
    judged = judge_answer(FRANCE, answer("Paris", reasoning="Paris"), 0.1)
    assert not judged.in_reasoning


@pytest.mark.parametrize(
    "token", [" Paris", "Paris", "\u2581Paris", "\u0120Paris", " Par", "Pa", " paris"]
)
def test_an_expected_word_among_the_candidates_is_near(token):
    top = [(" the", -0.5), (token, -1.5)]
    judged = judge_answer(FRANCE, answer(" the city", [position(" the", top)]), 0.1)
    assert (judged.outcome, judged.rank, judged.logprob) == (Outcome.NEAR, 2, -1.5)


@pytest.mark.parametrize("token", ["", " ", "P", " P", "aris", "token_id:12366", " Parish"])
def test_other_candidates_are_not(token):
    top = [(" the", -0.5), (token, -1.5)]
    judged = judge_answer(FRANCE, answer(" the city", [position(" the", top)]), 0.1)
    assert (judged.outcome, judged.rank) == (Outcome.MISSED, None)


@pytest.mark.parametrize("lead", [" ", "\n", " **", '"', "\u2581", "\u0120"])
def test_spaces_and_markdown_may_come_before_the_answer(lead):
    """Tokenizers that give a space of its own before digits."""
    positions = [
        position(lead, [(lead, -0.1)]),
        position("6", [("6", -0.1), ("5", -3.0)]),
    ]
    judged = judge_answer(CONTINUATIONS[2], answer(" 6", positions), 0.1)
    assert (judged.outcome, judged.rank) == (Outcome.NEAR, 2)


def test_the_answer_begins_nowhere_else():
    positions = [
        position(" quite", [(" quite", -0.1)]),
        position(" Lyon", [(" Lyon", -0.1), (" Paris", -3.0)]),
    ]
    assert judge_answer(FRANCE, answer(" quite Lyon", positions), 0.1).rank is None


# ---- the report's figures


def test_the_reported_broken_answer_is_missed_and_recognized():
    judged = reported(REPORTED_BROKEN, " ** the capital of the country")
    assert judged.outcome is Outcome.MISSED
    assert judged.rank is None
    assert judged.lattice == find_lattice([one.logprob for one in REPORTED_BROKEN.top])
    assert judged.lattice.step == 1 / 16
    verdict = opinion([judged, *map(wrong, CONTINUATIONS[1:])])
    assert verdict.verdict is Verdict.BROKEN
    assert any("vllm#52308" in line for line in verdict.evidence)
    assert any("multiples of 1/16" in line for line in verdict.evidence)


def test_the_reported_broken_candidates_are_never_healthy():
    """Even where the other, easier prompts were still answered."""
    judged = reported(REPORTED_BROKEN, " ** the capital of the country")
    result = opinion([judged, *map(right, CONTINUATIONS[1:])])
    assert result.verdict is Verdict.SUSPICIOUS
    assert "vllm#52308" in result.reason


def test_the_reported_healthy_answer_is_right():
    judged = reported(REPORTED_HEALTHY, " Paris.")
    assert (judged.outcome, judged.rank, judged.logprob) == (Outcome.ANSWERED, 1, -0.0278)
    result = opinion([judged, *map(right, CONTINUATIONS[1:])])
    assert result.verdict is Verdict.HEALTHY


def test_similar_candidates_with_the_answer_among_them_are_not_the_report():
    top = [(" **", -1.0), (".", -1.5), (" ", -2.0), (",", -2.5), (" Paris", -3.0)]
    judged = judge_answer(FRANCE, answer(" **Paris**", [position(" **", top)]), 0.1)
    assert opinion([judged, *map(right, CONTINUATIONS[1:])]).verdict is Verdict.HEALTHY


# ---- the verdict


@pytest.mark.parametrize(
    ("answered", "verdict"),
    [
        (18, Verdict.HEALTHY),
        (17, Verdict.HEALTHY),  # SmolLM2-135M
        (13, Verdict.HEALTHY),
        (12, Verdict.SUSPICIOUS),
        (10, Verdict.SUSPICIOUS),  # SmolLM2-135M with MLP outputs doubled
        (6, Verdict.SUSPICIOUS),
        (5, Verdict.BROKEN),
        (0, Verdict.BROKEN),
    ],
)
def test_the_limits(answered, verdict):
    result = opinion(mixture(answered))
    assert result.verdict is verdict
    assert f"{answered} of {ASKED}" in result.reason
    assert result.verdict.exit_code == (0 if verdict is Verdict.HEALTHY else 1)


def test_an_unsure_model_is_not_broken():
    """Right ones second: a weak model or a wrong prompt format."""
    result = opinion(mixture(0, near))
    assert result.verdict is Verdict.SUSPICIOUS
    assert "among the best five" in result.reason


def test_knowing_only_the_easy_ones_is_suspicious():
    judged = [*map(wrong, CONTINUATIONS[:REPORTED]), *map(right, CONTINUATIONS[REPORTED:])]
    result = opinion(judged)
    assert result.verdict is Verdict.SUSPICIOUS
    assert "none of the prompts of vllm#52308" in result.reason


@given(st.lists(st.sampled_from([right, near, wrong]), min_size=ASKED, max_size=ASKED))
def test_the_lattice_never_changes_a_verdict(kinds):
    smooth = [kind(probe, SMOOTH) for kind, probe in zip(kinds, CONTINUATIONS, strict=True)]
    on_it = [kind(probe, ON_LATTICE) for kind, probe in zip(kinds, CONTINUATIONS, strict=True)]
    assert any(one.lattice for one in on_it)
    assert not any(one.lattice for one in smooth)
    first, second = opinion(smooth), opinion(on_it)
    assert (first.verdict, first.reason) == (second.verdict, second.reason)


@given(st.lists(st.sampled_from([right, near, wrong]), min_size=ASKED, max_size=ASKED), st.data())
def test_one_more_right_answer_never_makes_it_worse(kinds, data):
    place = data.draw(st.integers(0, ASKED - 1))
    before = [kind(probe) for kind, probe in zip(kinds, CONTINUATIONS, strict=True)]
    after = [*before[:place], right(CONTINUATIONS[place]), *before[place + 1 :]]
    order = list(Verdict)
    assert order.index(opinion(after).verdict) <= order.index(opinion(before).verdict)


def test_figures_that_are_no_numbers_are_broken_whatever_the_text():
    bad = judge_answer(FRANCE, answer(" Paris", [Position(" Paris", None, (), False)]), 0.1)
    result = opinion([bad, *map(right, CONTINUATIONS[1:])])
    assert result.verdict is Verdict.BROKEN
    assert "not finite" in result.reason


@pytest.mark.parametrize("text", ["", "!" * 40, "\ufffd" * 40, " Exc Exc Exc Exc Exc Exc Exc"])
def test_nothing_but_wreckage_is_broken(text):
    result = opinion([said(probe, text) for probe in CONTINUATIONS], story=text)
    assert result.verdict is Verdict.BROKEN
    assert "empty or a short loop" in result.reason


def test_wreckage_between_right_answers_is_suspicious():
    judged = mixture(ASKED - 2, lambda probe: said(probe, "!" * 40))
    assert opinion(judged).verdict is Verdict.SUSPICIOUS
    result = opinion(mixture(ASKED), story="ha" * 40)
    assert result.verdict is Verdict.SUSPICIOUS
    assert any("'ha' 40 times" in line for line in result.evidence)


def test_empty_answers_alone_are_no_doubt():
    """Instruct models end at once after a raw question: SmolLM2 does after "What is 2+2?"."""
    assert opinion(mixture(ASKED - 3, lambda probe: said(probe, ""))).verdict is Verdict.HEALTHY


def test_a_story_in_long_loops_is_what_small_models_tell():
    story = " Bread was baked in ancient Egypt, and it was good." * 5
    assert opinion(mixture(ASKED), story=story).verdict is Verdict.HEALTHY


# ---- A, B, A


def again(text: str, shift: float = 0.0):
    values = [value + shift for value in SMOOTH]
    return judge_answer(
        FRANCE, answer(text, [position(" Paris", candidates(" Paris", values))]), 0.1
    )


def test_the_same_again_is_stable():
    repeated = compare(right(FRANCE), right(FRANCE))
    assert repeated.is_stable
    assert (repeated.same_text, repeated.largest_change) == (True, 0.0)


def test_rounding_is_stable_even_if_the_words_after_the_answer_change():
    """CUTLASS sums with atomic adds: a healthy server may differ in the last digits."""
    repeated = compare(right(FRANCE), again(" Paris, which is", 0.03))
    assert repeated.is_stable
    assert not repeated.same_text
    assert repeated.largest_change == pytest.approx(0.03)
    result = opinion(mixture(ASKED), again=again(" Paris, which is", 0.03))
    assert result.verdict is Verdict.HEALTHY
    assert any("another text" in line and "0.03" in line for line in result.evidence)


@pytest.mark.parametrize(
    "second",
    [again(" Lyon"), again(" Paris", -1.5), said(FRANCE, "")],
    ids=["other answer", "other figures", "nothing"],
)
def test_another_answer_to_the_same_prompt_is_suspicious(second):
    result = opinion(mixture(ASKED), again=second)
    assert result.verdict is Verdict.SUSPICIOUS
    assert "asked again" in result.reason


def test_no_shared_candidate_is_not_stable():
    other = [(f" {letter}", -1.0) for letter in "vwxyz"]
    second = judge_answer(FRANCE, answer(" Paris", [position(" v", other)]), 0.1)
    assert not compare(right(FRANCE), second).is_stable


def test_without_figures_the_outcome_is_compared():
    repeated = compare(said(FRANCE, " Paris."), said(FRANCE, " Paris!"))
    assert repeated.is_stable
    assert repeated.largest_change is None
    assert not compare(said(FRANCE, " Paris."), said(FRANCE, " Rome.")).is_stable


# ---- evidence and advice


def test_sampling_is_told():
    top = candidates(" Paris")
    judged = judge_answer(FRANCE, answer(" the Paris", [position(" the", top)]), 0.1)
    result = opinion([judged, *map(right, CONTINUATIONS[1:])])
    assert any(f"1 of {ASKED} tokens were not the likeliest" in line for line in result.evidence)
    assert not any("likeliest" in line for line in opinion(mixture(ASKED)).evidence)


def test_equal_candidates_are_no_sampling():
    top = [(" Paris", -1.0), (" the", -1.0)]
    judged = judge_answer(FRANCE, answer(" the Paris", [position(" the", top)]), 0.1)
    result = opinion([judged, *map(right, CONTINUATIONS[1:])])
    assert not any("likeliest" in line for line in result.evidence)


def test_the_lattice_is_told_with_its_odds_and_its_harmlessness():
    judged = [right(probe, ON_LATTICE) for probe in CONTINUATIONS]
    (line,) = [line for line in opinion(judged).evidence if "multiples" in line]
    assert f"multiples of 1/4 in {ASKED} of {ASKED} places" in line
    assert re.search(r"by chance \d+e-\d+ each if logits were fp32", line)
    assert "counts neither way" in line


@pytest.mark.parametrize("verdict", [Verdict.SUSPICIOUS, Verdict.BROKEN])
def test_the_way_out_is_named(verdict):
    steps = " ".join(advice(verdict, Endpoint.COMPLETIONS))
    assert "--moe-backend flashinfer_cutlass" in steps
    assert "moe_config.backend: CUTLASS" in steps
    assert "template" in " ".join(advice(verdict, Endpoint.CHAT))


def test_a_healthy_server_needs_nothing():
    assert advice(Verdict.HEALTHY, Endpoint.CHAT) == ()


def test_words_are_escaped():
    probe = Probe("x", ("H2O (l)", "a+b"))
    assert said(probe, "aab").outcome is Outcome.MISSED
    assert said(probe, "a+b").outcome is Outcome.ANSWERED
