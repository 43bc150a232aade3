"""Mutants of the canary: each must make the named test fail."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tests.canary import (
    test_client,
    test_command,
    test_judge,
    test_lattice,
    test_protocol,
    test_repetition,
    test_session,
)
from trtllm_b12x_fix.canary import (
    advice,
    client,
    evidence,
    judge,
    lattice,
    protocol,
    records,
    repetition,
    run,
    session,
)
from trtllm_b12x_fix.canary.address import Address
from trtllm_b12x_fix.canary.protocol import ProtocolError
from trtllm_b12x_fix.canary.records import Judged, Outcome, Verdict
from trtllm_b12x_fix.errors import B12xFixError
from trtllm_b12x_fix.report import canary as report


@dataclass(frozen=True)
class Mutant:
    """A wrong value in the place of ``owner.attribute``, and the test that must notice."""

    name: str
    owner: Any
    attribute: str
    wrong: Any
    guard: Any
    arguments: dict[str, Any] = field(default_factory=dict)

    def call(self, request: pytest.FixtureRequest) -> None:
        """Run the test with its arguments; what is no argument is a fixture."""
        names = inspect.signature(self.guard).parameters
        given = {
            name: self.arguments[name] if name in self.arguments else request.getfixturevalue(name)
            for name in names
            if name in self.arguments or name in ("monkeypatch", "capsys", "tmp_path")
        }
        self.guard(**given)


true_judge = judge.judge
true_read = protocol.read_answer
true_body = session.request_body
true_position = protocol._position


def _lattice_is_a_fault(judged, story, repeated):
    opinion = true_judge(judged, story, repeated)
    found = any(one.lattice for one in judged)
    return replace(opinion, verdict=Verdict.BROKEN) if found else opinion


def _substring(text, expected):
    return any(word.lower() in text.lower() for word in expected)


def _exact_case(text, expected):
    return any(word in text.replace(".", " ").split() for word in expected)


def _echoes(document, prompt):
    return true_read(document, "")


def _warm(endpoint, model, prompt, tokens, logprobs):
    return {**true_body(endpoint, model, prompt, tokens, logprobs), "temperature": 1}


def _more(endpoint, model, prompt, tokens, logprobs):
    body = true_body(endpoint, model, prompt, tokens, logprobs)
    return {**body, "repetition_penalty": 1.0}


def _any_number(value):
    return float(value) if isinstance(value, int | float) else None


def _always(value: Any) -> property:
    return property(lambda _: value)


def _default_key(variable):
    import os

    return os.environ.get(variable or "OPENAI_API_KEY")


def _finite_position(token, logprob, pairs):
    return replace(true_position(token, logprob, pairs), is_finite=True)


def _all_finite(probe, answer, seconds):
    return replace(judge.judge_answer(probe, answer, seconds), is_finite=True)


L, R, P, J, S, C = (
    test_lattice, test_repetition, test_protocol, test_judge, test_session, test_client,
)  # fmt: skip
_REPORTED = L.test_the_reported_top_5_lies_on_sixteenths
_DRIPS = {"talk": C.raw(b"HTTP/1.1 200 OK\r\nContent-Length: 29\r\n\r\n", *[b"{"] * 40, pause=0.1)}
_DRIPS_TO_THE_END = {"talk": C.raw(b"HTTP/1.1 200 OK\r\n\r\n", *[b"{"] * 30, pause=0.1)}

MUTANTS = [
    # lattice
    Mutant("sixteenths are no lattice", lattice, "STEPS", (1.0, 0.5, 0.25, 0.125), _REPORTED),
    Mutant(
        "two gaps are a lattice", lattice, "LEAST_GAPS", 1,
        L.test_too_few_gaps_say_nothing, {"values": [-1.0, -2.0]},
    ),
    Mutant(
        "nearly is on the lattice", lattice, "_FOUR_DECIMALS", (5e-3, 1e-2),
        L.test_one_gap_off_by_one_printed_digit_too_many_is_no_lattice,
    ),
    Mutant(
        "chance is smaller than it is", lattice, "_FOUR_DECIMALS", (1.05e-4, 1e-4),
        L.test_the_chance_is_what_smooth_gaps_show, {"decimals": 4},
    ),
    Mutant(
        "printed figures are exact", lattice, "_tolerance", lambda _: (1e-6, 2e-6), _REPORTED,
    ),
    Mutant(
        "the lattice decides", test_judge, "opinion",
        lambda judged: _lattice_is_a_fault(
            tuple(judged), test_judge.said(run.STORY, "x y"), judge.compare(judged[0], judged[0])
        ),
        J.test_the_lattice_never_changes_a_verdict,
    ),
    # repetition
    Mutant(
        "sentences are short loops", repetition, "SHORT_PERIOD", 1000,
        R.test_a_loop_of_sentences_is_found_and_is_what_small_models_do,
    ),
    Mutant(
        "no loop is degenerate", repetition.Loop, "is_degenerate", _always(False),
        R.test_a_short_loop_is_degenerate, {"text": "!" * 40, "period": 1},
    ),
    Mutant(
        "a loop at the end is the whole", repetition.Loop, "is_degenerate", _always(True),
        R.test_a_short_loop_after_a_long_text_is_not_most_of_it,
    ),
    # protocol
    Mutant(
        "thoughts are answers", test_protocol, "split_thoughts", lambda text: ("", text),
        P.test_thoughts_are_told_from_what_is_said,
        {"text": "<think>a</think>b", "thoughts": "a", "said": "b"},
    ),
    Mutant(
        "the prompt is an answer", test_protocol, "read_answer", _echoes,
        P.test_a_prompt_that_comes_back_is_no_answer,
    ),
    Mutant(
        "NaN is a number", protocol, "_finite", _any_number,
        P.test_a_figure_that_is_no_number_is_seen, {"value": float("inf")},
    ),
    Mutant(
        "NaN in the body passes", protocol, "_position", _finite_position,
        S.test_nan_in_the_body_is_broken,
    ),
    Mutant(
        "null is never NaN", protocol, "_position", _finite_position,
        P.test_null_for_everything_is_a_nan_that_json_could_not_say,
    ),
    Mutant(
        "candidates as they come", protocol, "_ordered",
        lambda pairs: tuple(protocol.Candidate(*pair) for pair in pairs),
        P.test_candidates_are_sorted_and_five,
    ),
    Mutant(
        "a tokenizer's mark is a letter", test_protocol, "plain", str.strip,
        P.test_tokenizers_marks_are_spaces, {"token": "\u2581Paris"},
    ),
    # judge
    Mutant(
        "healthy from the half", judge, "HEALTHY_FROM", 0.5,
        J.test_the_limits, {"answered": 10, "verdict": Verdict.SUSPICIOUS},
    ),
    Mutant(
        "healthy only if all is known", judge, "HEALTHY_FROM", 0.99,
        J.test_the_limits, {"answered": 17, "verdict": Verdict.HEALTHY},
    ),
    Mutant(
        "nothing is broken", judge, "BROKEN_TO", -1.0,
        J.test_the_limits, {"answered": 0, "verdict": Verdict.BROKEN},
    ),
    Mutant(
        "the unsure are broken", judge, "_rank", lambda *_: None,
        J.test_an_unsure_model_is_not_broken,
    ),
    Mutant(
        "parts of words count", judge, "_holds", _substring,
        J.test_the_text_decides, {"text": " Parisian", "outcome": Outcome.MISSED},
    ),
    Mutant(
        "case matters", judge, "_holds", _exact_case,
        J.test_the_text_decides, {"text": " PARIS!", "outcome": Outcome.ANSWERED},
    ),
    Mutant(
        "one letter is a beginning", judge, "_begins", lambda token, word: word.startswith(token),
        J.test_other_candidates_are_not, {"token": " P"},
    ),
    Mutant(
        "only the first token counts", judge, "_LEAD", 1,
        J.test_spaces_and_markdown_may_come_before_the_answer, {"lead": " "},
    ),
    Mutant(
        "any later token counts", judge, "_EMPTY", re.compile("(?s:.*)"),
        J.test_the_answer_begins_nowhere_else,
    ),
    Mutant(
        "the reported candidates are not known", judge, "is_reported", lambda _: False,
        J.test_the_reported_broken_candidates_are_never_healthy,
    ),
    Mutant(
        "the report's prompts are like others", judge, "REPORTED", 0,
        J.test_similar_candidates_with_the_answer_among_them_are_not_the_report,
    ),
    Mutant(
        "four of five reported candidates are not enough", evidence, "_SIGNATURE", 6,
        J.test_the_reported_broken_candidates_are_never_healthy,
    ),
    Mutant(
        "figures that are none pass", test_judge, "judge_answer", _all_finite,
        J.test_figures_that_are_no_numbers_are_broken_whatever_the_text,
    ),
    Mutant(
        "wreckage is an answer", judge, "WRECKED_FROM", 2.0,
        J.test_nothing_but_wreckage_is_broken, {"text": "!" * 40},
    ),
    Mutant(
        "loops do not count", judge, "MOST_LOOPS", 100,
        J.test_wreckage_between_right_answers_is_suspicious,
    ),
    Mutant(
        "empty texts are a doubt", Judged, "is_loop",
        property(lambda self: self.outcome is Outcome.EMPTY),
        J.test_empty_answers_alone_are_no_doubt,
    ),
    Mutant(
        "any change is stable", records, "STABLE_TO", 1e9,
        J.test_another_answer_to_the_same_prompt_is_suspicious,
        {"second": test_judge.again(" Paris", -1.5)},
    ),
    Mutant(
        "rounding is a fault", records, "STABLE_TO", 1e-3,
        J.test_rounding_is_stable_even_if_the_words_after_the_answer_change,
    ),
    Mutant(
        "the same outcome is not asked for", records.Repeated, "is_stable", _always(True),
        J.test_another_answer_to_the_same_prompt_is_suspicious,
        {"second": test_judge.again(" Lyon")},
    ),
    Mutant(
        "sampling is not told", evidence, "_not_greedy", lambda _: [], J.test_sampling_is_told,
    ),
    Mutant(
        "ties are sampling", evidence, "_TIE", -1e-3, J.test_equal_candidates_are_no_sampling,
    ),
    Mutant(
        "the lattice is not told", evidence, "_lattice", lambda _: [],
        J.test_the_lattice_is_told_with_its_odds_and_its_harmlessness,
    ),
    Mutant(
        "no way out", advice, "_CUTLASS", "think about it",
        J.test_the_way_out_is_named, {"verdict": Verdict.BROKEN},
    ),
    Mutant(
        "a finding is exit code 0", Verdict, "exit_code", _always(0),
        J.test_the_limits, {"answered": 0, "verdict": Verdict.BROKEN},
    ),
    # client
    Mutant(
        "loading is an answer", client, "_BUSY", set(),
        C.test_a_server_that_loads_is_asked_again, {"status": 503},
    ),
    Mutant(
        "the time-out starts anew with every byte", client._Watch, "_cut", lambda _: None,
        C.test_the_time_out_is_for_the_whole_answer, _DRIPS,
    ),
    Mutant(
        "the socket is forgotten while a body is read", client._Watch, "hold", lambda _: None,
        C.test_the_time_out_is_for_the_whole_answer, _DRIPS_TO_THE_END,
    ),
    Mutant(
        "keys are shown", client, "_SECRET_FROM", 1000,
        C.test_the_key_is_sent_and_never_shown,
    ),
    Mutant(
        "any key is hidden everywhere", client, "_SECRET_FROM", 1,
        S.test_a_key_that_is_a_word_spoils_no_answer, {"key": "k"},
    ),
    Mutant(
        "a key is taken unasked", test_client, "read_key", _default_key,
        C.test_the_key_comes_from_the_named_variable_alone,
    ),
    Mutant(
        "loopback is another machine", Address, "is_loopback", _always(False),
        S.test_a_key_over_plain_http_to_this_machine_is_no_matter,
    ),
    # session
    Mutant(
        "status 200 is an answer", session, "_why_not",
        lambda reply: None if reply.status == 200 else reply.complaint(),
        S.test_a_completions_route_that_answers_in_the_wrong_form_gives_way_to_chat,
    ),
    Mutant(
        "models are not listed", session, "_served", lambda _: None,
        S.test_a_wrong_model_name_lists_the_right_ones,
    ),
    Mutant(
        "any name is the same", session, "_same_name", lambda *_: True,
        S.test_another_name_in_the_answer_is_told,
    ),
    Mutant(
        "thinking gets no time", session, "THINKING_TOKENS", 32,
        S.test_a_reasoning_model, {"form": "tags"},
    ),
    Mutant(
        "requests are not greedy", session, "request_body", _warm,
        S.test_what_is_asked_and_in_which_order,
    ),
    Mutant(
        "requests have more than is documented", test_protocol, "request_body", _more,
        P.test_requests_are_greedy_and_hold_nothing_that_a_strict_server_refuses,
    ),
    Mutant(
        "a key is asked for at the end", session, "_REFUSED", {},
        S.test_a_missing_key_is_named_at_once, {"status": 401},
    ),
    # report
    Mutant(
        "names go to the terminal as they are", report, "labelled",
        lambda label, text: f"{label} {text}",
        test_command.test_nothing_hostile_reaches_the_terminal,
    ),
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_wrong_canary_is_caught(mutant, monkeypatch, request):
    if not hasattr(mutant.owner, mutant.attribute):
        pytest.fail(f"nothing is called {mutant.attribute}")
    monkeypatch.setattr(mutant.owner, mutant.attribute, mutant.wrong)
    # An error of ours, or a value missing where the test looks, is a failure of it, too.
    caught = (
        AssertionError, pytest.fail.Exception, B12xFixError, ProtocolError, ValueError,
    )  # fmt: skip
    with pytest.raises(caught):
        mutant.call(request)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_canary_as_it_is_passes(mutant, request):
    """The guards are called rightly: they fail for the mutant alone."""
    mutant.call(request)
