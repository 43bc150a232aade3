"""Every way in which a reply can be something other than an answer has its own name. Instant."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evals.grading.reply import Reply, Request, read
from evals.grading.statuses import Kind, ReplyStatus, Thinking, TransportFailure

CHAT = Request(Kind.CHAT)
OPENED = Request(Kind.CHAT, thinking=Thinking.OPENED)
STOPPED = Request(Kind.COMPLETION, stop=("Question:", "</s>"))
Is = ReplyStatus


def chat(content, finish="stop", **fields):
    extra = {key: fields.pop(key) for key in list(fields) if key == "stop_reason"}
    message = {"role": "assistant", "content": content, **fields}
    return Reply(200, {"choices": [{"message": message, "finish_reason": finish, **extra}]})


def completion(text, finish="stop", **fields):
    return Reply(200, {"choices": [{"text": text, "finish_reason": finish, **fields}]})


CASES = [
    ("a plain answer", CHAT, chat("42"), Is.ANSWERED, "42"),
    ("no time", CHAT, Reply(None, None, TransportFailure.TIMEOUT), Is.TIMEOUT, ""),
    ("no server", CHAT, Reply(None, None, TransportFailure.CONNECTION), Is.CONNECTION, ""),
    ("500", CHAT, Reply(500, {"error": "x"}), Is.HTTP_ERROR, ""),
    ("200 with an error", CHAT, Reply(200, {"error": {"message": "x"}}), Is.ERROR_BODY, ""),
    (
        "200 with object error",
        CHAT,
        Reply(200, {"object": "error", "message": "x"}),
        Is.ERROR_BODY,
        "",
    ),
    ("200 with text", CHAT, Reply(200, "<html>"), Is.MALFORMED, ""),
    ("200 with null", CHAT, Reply(200, None), Is.MALFORMED, ""),
    ("no choices", CHAT, Reply(200, {"choices": []}), Is.MALFORMED, ""),
    ("a null choice", CHAT, Reply(200, {"choices": [None]}), Is.MALFORMED, ""),
    ("no message", CHAT, Reply(200, {"choices": [{"finish_reason": "stop"}]}), Is.MALFORMED, ""),
    ("content as parts", CHAT, chat([{"type": "text"}]), Is.MALFORMED, ""),
    ("null content", CHAT, chat(None), Is.NULL_CONTENT, ""),
    ("null text", STOPPED, completion(None), Is.NULL_CONTENT, ""),
    ("empty", CHAT, chat(""), Is.EMPTY, ""),
    ("white space", CHAT, chat(" \n"), Is.EMPTY, " \n"),
    (
        "reasoning only",
        CHAT,
        chat(None, reasoning_content="so", stop_reason=None),
        Is.REASONING_ONLY,
        "",
    ),
    ("reasoning, other name", CHAT, chat("", reasoning="so"), Is.REASONING_ONLY, ""),
    ("reasoning and answer", CHAT, chat("42", reasoning_content="7"), Is.ANSWERED, "42"),
    (
        "reasoning cut off",
        CHAT,
        chat(None, "length", reasoning_content="so"),
        Is.LENGTH_IN_THINKING,
        "",
    ),
    (
        "stopped in reasoning",
        CHAT,
        chat(None, reasoning_content="so", stop_reason="Question:"),
        Is.STOP_IN_THINKING,
        "",
    ),
    (
        "end token in reasoning",
        CHAT,
        chat(None, reasoning_content="so", stop_reason=2),
        Is.REASONING_ONLY,
        "",
    ),
    ("thought and answered", CHAT, chat("<think>7</think>42"), Is.ANSWERED, "42"),
    ("thought twice", CHAT, chat("<think>7</think>8<think>9</think>42"), Is.ANSWERED, "42"),
    ("tag opened by the prompt", OPENED, chat("7 and</think>42"), Is.ANSWERED, "42"),
    ("only the end tag, unasked", CHAT, chat("7 and</think>42"), Is.ANSWERED, "42"),
    ("thinking not ended", CHAT, chat("<think>so 42"), Is.UNCLOSED_THINKING, ""),
    ("thinking not ended, opened by the prompt", OPENED, chat("so 42"), Is.UNCLOSED_THINKING, ""),
    ("thinking again", CHAT, chat("<think>7</think>8<think>so"), Is.UNCLOSED_THINKING, ""),
    (
        "opened by the prompt, parsed by the server",
        OPENED,
        chat("42", reasoning_content="7"),
        Is.ANSWERED,
        "42",
    ),
    (
        "stop string in thinking",
        CHAT,
        chat("<think>so", stop_reason="\n\n"),
        Is.STOP_IN_THINKING,
        "",
    ),
    ("cut off in thinking", CHAT, chat("<think>so", "length"), Is.LENGTH_IN_THINKING, ""),
    (
        "cut off in the answer",
        CHAT,
        chat("the answer is 4", "length"),
        Is.LENGTH,
        "the answer is 4",
    ),
    (
        "cut off after thinking",
        CHAT,
        chat("<think>7</think>the answer", "length"),
        Is.LENGTH,
        "the answer",
    ),
    ("cut off with nothing", CHAT, chat("", "length"), Is.LENGTH, ""),
    ("nothing after thinking", CHAT, chat("<think>7</think>\n"), Is.REASONING_ONLY, "\n"),
    (
        "a server that ignores stop strings",
        STOPPED,
        completion(" 42\n\nQuestion: next", "length"),
        Is.ANSWERED,
        " 42\n\n",
    ),
    ("the first of two stop strings", STOPPED, completion("42</s> Question:"), Is.ANSWERED, "42"),
    ("nothing before the stop string", STOPPED, completion("Question: 1"), Is.EMPTY, ""),
    ("no finish reason", CHAT, chat("42", None), Is.UNFINISHED, "42"),
    ("a tool call", CHAT, chat(None, "tool_calls"), Is.OTHER_FINISH, ""),
    ("filtered", CHAT, chat("4", "content_filter"), Is.OTHER_FINISH, "4"),
    ("aborted", CHAT, chat("4", "abort"), Is.OTHER_FINISH, "4"),
]


@pytest.mark.parametrize(
    ("request_", "reply", "status", "text"),
    [case[1:] for case in CASES],
    ids=[case[0] for case in CASES],
)
def test_statuses(request_, reply, status, text):
    answer = read(request_, reply)
    assert (answer.status, answer.text) == (status, text)


def test_every_status_of_a_reply_was_seen():
    assert {case[3] for case in CASES} == set(Is) - {Is.UNGRADED}


def test_details_name_what_explains():
    assert "'Question:'" in read(CHAT, CASES[20][2]).detail
    assert "500" in read(CHAT, Reply(500, None)).detail
    assert "message" in read(CHAT, Reply(200, {"error": {"message": "x"}})).detail
    silent = read(CHAT, chat("<think>so"))
    assert "does not say" in silent.detail
    assert read(CHAT, chat("<think>so", stop_reason=None)).detail == ""


def test_thinking_is_kept_beside_the_answer():
    assert read(CHAT, chat("<think>7</think>42")).thinking == "7"
    assert read(CHAT, chat("42", reasoning_content="7")).thinking == "7"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["choices", "message", "content", "text", "finish_reason", "error", "x",
                         "reasoning_content", "stop_reason", "object"]),
        inner,
    ),
    max_leaves=12,
)  # fmt: skip


@given(json_values, st.sampled_from([CHAT, OPENED, STOPPED]))
def test_any_body_has_a_status(body, request_):
    answer = read(request_, Reply(200, body))
    if answer.status is Is.ANSWERED:
        assert answer.text.strip()
