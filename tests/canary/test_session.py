"""Servers of every kind, faked: which route, which figures, and what is said about it."""

from __future__ import annotations

import pytest

from tests.canary.fake_server import (
    FakeServer,
    Made,
    Seen,
    chat_figures,
    completion,
    figures,
    knows,
    message,
    says,
    serve,
)
from trtllm_b12x_fix.canary.address import parse_address
from trtllm_b12x_fix.canary.client import Client, ServerError
from trtllm_b12x_fix.canary.prompts import CONTINUATIONS, QUESTIONS
from trtllm_b12x_fix.canary.protocol import Endpoint
from trtllm_b12x_fix.canary.records import Verdict
from trtllm_b12x_fix.canary.run import CanaryResult, run_canary
from trtllm_b12x_fix.canary.session import THINKING_TOKENS

NOT_FOUND = Made({"detail": "Not Found"}, 404)


def ask(server: FakeServer, model: str = "m", key: str | None = None) -> CanaryResult:
    return run_canary(Client(parse_address(server.url), 5, 0, key), model)


def with_figures(seen: Seen) -> Made:
    """Both routes, with log-probabilities where asked for."""
    text = knows(seen.prompt)
    token = text.rstrip(".")
    top = {token: -0.2581, " q": -2.7407, " z": -4.3844, " x": -4.6199, " w": -4.6778}
    if seen.is_chat:
        return Made(message(text, chat_figures((token, top)) if seen.wants_logprobs else None))
    return Made(completion(text, figures((token, top)) if seen.wants_logprobs else None))


def test_the_completions_route_with_figures_is_preferred():
    with serve(with_figures) as server:
        result = ask(server)
    assert result.opinion.verdict is Verdict.HEALTHY
    assert (result.endpoint, result.has_logprobs) == (Endpoint.COMPLETIONS, True)
    assert result.notes == ()
    assert all(one.rank == 1 for one in result.judged)
    assert not any(seen.is_chat for seen in server.posts)


def test_what_is_asked_and_in_which_order():
    with serve(with_figures) as server:
        ask(server)
    prompts = [seen.prompt for seen in server.posts]
    # After a word to see what the server can do: all, a story, and the first again.
    assert prompts[1:-2] == [probe.prompt for probe in CONTINUATIONS]
    assert prompts[-1] == prompts[1] == "The capital of France is"
    assert all(seen.body["temperature"] == 0 for seen in server.posts)
    assert all(seen.body["model"] == "m" for seen in server.posts)
    assert max(seen.body["max_tokens"] for seen in server.posts) <= 64


def test_a_server_that_ignores_the_wish_for_figures():
    """transformers serve does."""
    with serve(says(knows)) as server:
        result = ask(server)
    assert result.opinion.verdict is Verdict.HEALTHY
    assert not result.has_logprobs
    assert any("no log-probabilities" in note for note in result.notes)
    assert not any(seen.wants_logprobs for seen in server.posts[1:])


@pytest.mark.parametrize("status", [400, 422, 500, 501])
def test_a_server_that_refuses_figures(status):
    def behaviour(seen: Seen) -> Made:
        if seen.wants_logprobs:
            return Made({"error": {"message": "logprobs are not supported"}}, status)
        return Made(completion(knows(seen.prompt)))

    with serve(behaviour) as server:
        result = ask(server)
    assert result.opinion.verdict is Verdict.HEALTHY
    assert result.endpoint is Endpoint.COMPLETIONS
    assert any("logprobs are not supported" in note for note in result.notes)


@pytest.mark.parametrize("status", [404, 405, 400, 501])
@pytest.mark.parametrize("gives_figures", [True, False])
def test_a_server_without_the_completions_route(status, gives_figures):
    def behaviour(seen: Seen) -> Made:
        if not seen.is_chat:
            return Made({"detail": "Not Found"}, status)
        return with_figures(seen) if gives_figures else Made(message(knows(seen.prompt)))

    with serve(behaviour) as server:
        result = ask(server)
    assert result.opinion.verdict is Verdict.HEALTHY
    assert (result.endpoint, result.has_logprobs) == (Endpoint.CHAT, gives_figures)
    assert [one.probe for one in result.judged] == list(QUESTIONS)


def test_a_completions_route_that_answers_in_the_wrong_form_gives_way_to_chat():
    def behaviour(seen: Seen) -> Made:
        return Made(message(knows(seen.prompt))) if seen.is_chat else Made({"id": "x"})

    with serve(behaviour) as server:
        assert ask(server).endpoint is Endpoint.CHAT


def test_one_prompt_whose_figures_json_cannot_say():
    """vLLM and TensorRT-LLM answer 500 when a log-probability is NaN."""

    def behaviour(seen: Seen) -> Made:
        if seen.wants_logprobs and seen.prompt == CONTINUATIONS[4].prompt:
            return Made({"error": {"message": "Out of range float values"}}, 500)
        return with_figures(seen)

    with serve(behaviour) as server:
        result = ask(server)
    assert result.judged[4].answer.positions == ()
    assert result.judged[5].answer.positions != ()
    assert any("Out of range" in note and "Japan" in note for note in result.notes)


def test_nan_in_the_body_is_broken():
    def behaviour(seen: Seen) -> Made:
        made = with_figures(seen)
        if seen.wants_logprobs:
            made.body["choices"][0]["logprobs"]["token_logprobs"] = [float("nan")]
        return made

    with serve(behaviour) as server:  # json.dumps writes NaN, as some servers do
        result = ask(server)
    assert result.opinion.verdict is Verdict.BROKEN
    assert "not finite" in result.opinion.reason


@pytest.mark.parametrize("form", ["tags", "tags, opened by the template", "apart", "new name"])
def test_a_reasoning_model(form):
    """Thoughts of more than an ordinary answer's tokens, in every form that servers give them."""
    thoughts = "The user asks something easy. " * 4
    opened = "<think>" if form == "tags" else ""
    name = {"apart": "reasoning_content", "new name": "reasoning"}.get(form)

    def behaviour(seen: Seen) -> Made:
        if not seen.is_chat:
            return NOT_FOUND
        if seen.body["max_tokens"] < THINKING_TOKENS:
            if name:
                return Made(message(None, finish_reason="length", **{name: thoughts}))
            return Made(message(f"{opened}{thoughts}", finish_reason="length"))
        if name:
            return Made(message(knows(seen.prompt), **{name: thoughts}))
        return Made(message(f"{opened}{thoughts}</think>{knows(seen.prompt)}"))

    with serve(behaviour) as server:
        result = ask(server)
    assert result.opinion.verdict is Verdict.HEALTHY
    assert result.judged[0].answer.reasoning.strip() == thoughts.strip()
    assert any("thinks aloud" in note for note in result.notes)
    # One token to see the routes, then never in haste.
    assert {seen.body["max_tokens"] for seen in server.posts} == {1, THINKING_TOKENS}


def test_a_chat_model_that_does_not_think_gets_no_more_tokens():
    def behaviour(seen: Seen) -> Made:
        return Made(message(knows(seen.prompt))) if seen.is_chat else NOT_FOUND

    with serve(behaviour) as server:
        assert not any("thinks" in note for note in ask(server).notes)
    assert [seen.body["max_tokens"] for seen in server.posts].count(THINKING_TOKENS) == 1


def test_a_model_that_thinks_on_the_completions_route():
    def behaviour(seen: Seen) -> Made:
        if seen.body["max_tokens"] < THINKING_TOKENS:
            return Made(completion("<think>Hm, let me see", finish_reason="length"))
        return Made(completion(f"<think>Hm.</think>{knows(seen.prompt)}"))

    with serve(behaviour) as server:
        assert ask(server).opinion.verdict is Verdict.HEALTHY
    assert [seen.body["max_tokens"] for seen in server.posts].count(8) == 1


def test_a_reasoning_model_that_comes_to_no_end_but_names_the_answer():
    def behaviour(seen: Seen) -> Made:
        if not seen.is_chat:
            return NOT_FOUND
        text = f"<think>Easy: {knows(seen.prompt)} But wait, "
        return Made(message(text, finish_reason="length"))

    with serve(behaviour) as server:
        result = ask(server)
    assert result.opinion.verdict is Verdict.HEALTHY
    assert all(one.in_reasoning for one in result.judged)
    assert any("in the reasoning" in line for line in result.opinion.evidence)


def test_a_fluent_wrong_model_is_broken_and_the_way_out_is_told():
    text = "a matter of some debate among the people who live there and elsewhere too"
    words = text.split()

    def text_of(prompt: str) -> str:
        return " " + " ".join(words[len(prompt) % 9 :])

    with serve(says(text_of)) as server:
        assert ask(server).opinion.verdict is Verdict.BROKEN


def test_a_model_that_remembers_what_others_asked():
    """A, B, A: answers that depend on what came before."""
    count = 0

    def behaviour(seen: Seen) -> Made:
        nonlocal count
        count += seen.prompt == CONTINUATIONS[0].prompt
        text = " Rome." if count == 2 else knows(seen.prompt)
        return Made(completion(text))

    with serve(behaviour) as server:
        result = ask(server)
    assert result.opinion.verdict is Verdict.SUSPICIOUS
    assert not result.repeated.same_outcome


def test_another_name_in_the_answer_is_told():
    with serve(lambda seen: Made(completion(knows(seen.prompt), model="other"))) as server:
        assert any("'other'" in note for note in ask(server).notes)


@pytest.mark.parametrize("served", ["/models/big", "/models/big@main", "big"])
def test_the_same_name_written_otherwise_is_not(served):
    with serve(lambda seen: Made(completion(knows(seen.prompt), model=served))) as server:
        assert not any("answered as" in note for note in ask(server, "/models/big").notes)


# ---- servers that cannot be asked


def unknown_model(seen: Seen) -> Made:
    """As vLLM: 404 for the model, and a list of what is there."""
    if seen.method == "GET":
        return Made({"data": [{"id": "nemotron"}, {"id": "lora-a"}, {"no": "id"}]})
    words = f"The model `{seen.body['model']}` does not exist."
    return Made({"error": {"message": words, "type": "NotFoundError", "code": 404}}, 404)


def test_a_wrong_model_name_lists_the_right_ones():
    with serve(unknown_model) as server, pytest.raises(ServerError) as caught:
        ask(server, "nemotrom")
    text = str(caught.value)
    assert "'nemotrom' is not among the models it lists: nemotron, lora-a" in text
    assert "does not exist" in text


def test_a_model_that_is_listed_and_does_not_answer():
    with serve(unknown_model) as server, pytest.raises(ServerError, match="it does list 'nemo"):
        ask(server, "nemotron")


@pytest.mark.parametrize(
    "models",
    [NOT_FOUND, Made(b"<html>"), Made({"data": "x"}), Made([]), Made({"data": []}), Made({}, 503)],
)
def test_no_list_of_models_is_no_second_error(models):
    def behaviour(seen: Seen) -> Made:
        return models if seen.method == "GET" else NOT_FOUND

    with serve(behaviour) as server, pytest.raises(ServerError, match="gives no text"):
        ask(server)


@pytest.mark.parametrize("status", [401, 403])
def test_a_missing_key_is_named_at_once(status):
    with (
        serve(lambda _: Made({"error": "Unauthorized"}, status)) as server,
        pytest.raises(ServerError, match="--api-key-env"),
    ):
        ask(server)
    assert len(server.seen) == 1


def test_a_web_server_is_no_model_server():
    page = b"<!doctype html><title>It works!</title>"
    with serve(lambda _: Made(page)) as server, pytest.raises(ServerError, match="not JSON"):
        ask(server)


def test_a_server_that_dies_on_the_way():
    count = 0

    def behaviour(seen: Seen) -> Made:
        nonlocal count
        count += 1
        if count > 5:
            return Made({"error": {"message": "EngineCore died"}}, 500)
        return with_figures(seen)

    with serve(behaviour) as server, pytest.raises(ServerError, match="EngineCore died"):
        ask(server)


def test_a_later_answer_without_text_is_an_error():
    count = 0

    def behaviour(seen: Seen) -> Made:
        nonlocal count
        count += 1
        return with_figures(seen) if count < 5 else Made({"choices": []})

    with serve(behaviour) as server, pytest.raises(ServerError, match="no choices"):
        ask(server)


def test_a_key_over_plain_http_to_this_machine_is_no_matter():
    with serve(with_figures) as server:
        assert ask(server, key="EMPTY").notes == ()
    assert all(seen.headers["Authorization"] == "Bearer EMPTY" for seen in server.seen)


@pytest.mark.parametrize("key", ["k", "e", "tokens", "Paris"])
def test_a_key_that_is_a_word_spoils_no_answer(key):
    with serve(with_figures) as server:
        result = ask(server, key=key)
    assert (result.opinion.verdict, result.has_logprobs) == (Verdict.HEALTHY, True)


def test_a_key_over_plain_http_to_another_is_told(monkeypatch):
    from trtllm_b12x_fix.canary.address import Address

    with serve(with_figures) as server:
        monkeypatch.setattr(Address, "is_loopback", property(lambda _: False))
        assert any("plain HTTP" in note for note in ask(server, key="k").notes)
        assert ask(server).notes == ()
