"""Bodies and answers of the two routes, as servers write them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.canary.fake_server import chat_figures, completion, figures, message
from trtllm_b12x_fix.canary.protocol import (
    Candidate,
    Endpoint,
    Logprobs,
    ProtocolError,
    plain,
    read_answer,
    request_body,
    split_thoughts,
)

PROMPT = "The capital of France is"
TOP = {" Paris": -0.25, " the": -2.5, " London": -4.0}


def test_requests_are_greedy_and_hold_nothing_that_a_strict_server_refuses():
    documented = {"model", "max_tokens", "temperature", "logprobs"}
    for logprobs in Logprobs:
        raw = request_body(Endpoint.COMPLETIONS, "m", PROMPT, 7, logprobs)
        chat = request_body(Endpoint.CHAT, "m", PROMPT, 7, logprobs)
        assert raw.keys() <= documented | {"prompt"}
        assert chat.keys() <= documented | {"messages", "top_logprobs"}
        for body in (raw, chat):
            assert (body["model"], body["max_tokens"], body["temperature"]) == ("m", 7, 0)
            assert ("logprobs" in body) is (logprobs is Logprobs.ASKED)
        assert raw["prompt"] == PROMPT
        assert chat["messages"] == [{"role": "user", "content": PROMPT}]
    assert request_body(Endpoint.COMPLETIONS, "m", "", 1, Logprobs.ASKED)["logprobs"] == 5
    assert request_body(Endpoint.CHAT, "m", "", 1, Logprobs.ASKED)["logprobs"] is True


@pytest.mark.parametrize(
    "document",
    [
        completion(" Paris.", figures((" Paris", TOP))),
        message(" Paris.", chat_figures((" Paris", TOP))),
        # llama.cpp's own server: the chat route's form on the completions route.
        completion(" Paris.", chat_figures((" Paris", TOP))),
    ],
)
def test_text_and_figures_are_read_from_every_form(document):
    answer = read_answer(document, PROMPT)
    assert answer.text == " Paris."
    assert answer.model == "m"
    (position,) = answer.positions
    assert (position.token, position.logprob, position.is_finite) == (" Paris", -0.25, True)
    assert position.top == tuple(Candidate(*pair) for pair in TOP.items())


def test_candidates_are_sorted_and_five():
    top = {f" {n}": -float(n) for n in (4, 6, 1, 3, 5, 2)}
    (position,) = read_answer(completion("x", figures((" 4", top))), "").positions
    assert [one.logprob for one in position.top] == [-1, -2, -3, -4, -5]


def test_a_prompt_that_comes_back_is_no_answer():
    assert read_answer(completion(f"{PROMPT} Paris."), PROMPT).text == " Paris."


@pytest.mark.parametrize(
    ("text", "thoughts", "said"),
    [
        ("Paris", "", "Paris"),
        ("<think>Hm, France.</think>Paris", "Hm, France.", "Paris"),
        ("<think>\n\n</think>\n\nParis", "", "\n\nParis"),
        ("Hm, France.</think> Paris", "Hm, France.", " Paris"),
        ("<think>Hm, Fra", "Hm, Fra", ""),
        ("<THINKING>a</THINKING>b", "a", "b"),
        ("<think>a</think>b<think>c", "abc", ""),
        ("1 < 2 and <b>bold</b>", "", "1 < 2 and <b>bold</b>"),
    ],
)
def test_thoughts_are_told_from_what_is_said(text, thoughts, said):
    assert split_thoughts(text) == (thoughts, said)


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize("content", [None, ""])
def test_thoughts_apart_that_did_not_end(name, content):
    answer = read_answer(message(content, finish_reason="length", **{name: "Hm, Fra"}), PROMPT)
    assert (answer.text, answer.reasoning, answer.is_cut) == ("", "Hm, Fra", True)


@pytest.mark.parametrize(("finish", "cut"), [("length", True), ("stop", False), (None, False)])
def test_an_answer_that_met_the_limit(finish, cut):
    assert read_answer(completion(" Paris", finish_reason=finish), "").is_cut is cut


def test_content_in_parts():
    parts = [{"type": "text", "text": "Pa"}, {"type": "image"}, 3, {"type": "text", "text": "ris"}]
    assert read_answer(message(parts), "").text == "Paris"


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"choices": []},
        {"choices": None},
        {"choices": ["x"]},
        {"choices": {"0": "x"}},
        {"choices": [{}]},
        {"choices": [{"text": None}]},
        {"choices": [{"text": 3}]},
        {"choices": [{"message": {}}]},
        {"choices": [{"message": "hello"}]},
        {"error": {"message": "no"}},
    ],
)
def test_an_answer_without_text_is_an_error(document):
    with pytest.raises(ProtocolError):
        read_answer(document, "")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -9999.0, 10**400, "NaN"])
def test_a_figure_that_is_no_number_is_seen(value):
    for document in (
        completion("!", {**figures(("!", {"!": -1.0})), "token_logprobs": [value]}),
        message("!", {"content": [{"token": "!", "logprob": value, "top_logprobs": []}]}),
    ):
        (position,) = read_answer(document, "").positions
        assert position.logprob is None
        assert not position.is_finite


def test_null_for_everything_is_a_nan_that_json_could_not_say():
    (position,) = read_answer(completion("!", figures(("!", {"!": None, "a": None}))), "").positions
    assert not position.is_finite
    assert position.top == ()


@pytest.mark.parametrize(
    "logprobs",
    [
        {"tokens": ["a"], "token_logprobs": None, "top_logprobs": [{"a": -1.0}]},
        {"tokens": ["a"], "top_logprobs": [{"a": -1.0}]},
        {"tokens": ["a"], "token_logprobs": [], "top_logprobs": None},
        {"tokens": ["a"], "token_logprobs": [None], "top_logprobs": [None]},
        {"content": [{"token": "a"}]},
    ],
)
def test_a_figure_that_is_not_given_is_no_fault(logprobs):
    (position,) = read_answer(completion("a", logprobs), "").positions
    assert position.is_finite
    assert position.logprob is None


def test_a_token_that_cannot_come_is_no_candidate():
    top = {" Paris": -0.1, " a": -9999.0, " b": -math.inf, " c": math.nan}
    (position,) = read_answer(completion("x", figures((" Paris", top))), "").positions
    assert position.is_finite
    assert [one.token for one in position.top] == [" Paris"]


@pytest.mark.parametrize("token", [" Paris", "Paris", "\u0120Paris", "\u2581Paris", "Paris\u010a"])
def test_tokenizers_marks_are_spaces(token):
    assert plain(token) == "Paris"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "choices",
                    "text",
                    "message",
                    "content",
                    "logprobs",
                    "tokens",
                    "token_logprobs",
                    "top_logprobs",
                    "token",
                    "logprob",
                    "finish_reason",
                    "model",
                    "reasoning",
                ]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=25,
)


@given(JSON)
def test_no_json_makes_it_fail_otherwise(value):
    for document in (value, {"choices": [value]}, {"choices": [{"text": "", "logprobs": value}]}):
        if isinstance(document, dict):
            try:
                answer = read_answer(document, "x")
            except ProtocolError:
                continue
            for position in answer.positions:
                assert all(math.isfinite(one.logprob) for one in position.top)
                assert position.logprob is None or math.isfinite(position.logprob)
