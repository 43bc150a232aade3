"""Reads a saved reply of an OpenAI-style server: its status, and the text that is the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from evals.grading.statuses import Kind, ReplyStatus, Thinking, TransportFailure

_OPEN, _CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class Request:
    """What matters of a request for reading its reply.

    Attributes:
        stop: the stop strings that were sent; servers that ignore them are cut here.
    """

    kind: Kind
    stop: tuple[str, ...] = ()
    thinking: Thinking = Thinking.TAGGED


@dataclass(frozen=True)
class Reply:
    """What came back, as it was saved.

    Attributes:
        http_status: None where nothing came.
        body: parsed JSON, or text that is none.
        failure: why nothing came.
    """

    http_status: int | None
    body: Any
    failure: TransportFailure | None = None


@dataclass(frozen=True)
class Answer:
    """A reply, read.

    Attributes:
        text: the answer without thinking, cut at the first stop string; whatever there is of one
            where the status is not ANSWERED.
        thinking: the rest.
        detail: what explains the status; text from a server or model, to be shown escaped.
    """

    status: ReplyStatus
    text: str = ""
    thinking: str = ""
    detail: str = ""


def read(request: Request, reply: Reply) -> Answer:
    """What a reply says; total, for any body."""
    if reply.failure is not None:
        return Answer(ReplyStatus(reply.failure.value))
    if reply.http_status != 200:
        return Answer(ReplyStatus.HTTP_ERROR, detail=f"HTTP {reply.http_status}")
    body = reply.body
    if not isinstance(body, dict):
        return Answer(ReplyStatus.MALFORMED, detail=f"a body of type {type(body).__name__}")
    if body.get("error") or body.get("object") == "error":
        return Answer(ReplyStatus.ERROR_BODY, detail=str(body.get("error") or body)[:300])
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return Answer(ReplyStatus.MALFORMED, detail="no choices")
    return _read_choice(request, choices[0])


def _read_choice(request: Request, choice: dict[str, Any]) -> Answer:
    message = choice if request.kind is Kind.COMPLETION else choice.get("message")
    if not isinstance(message, dict):
        return Answer(ReplyStatus.MALFORMED, detail="no message")
    content = message.get("text" if request.kind is Kind.COMPLETION else "content")
    # vLLM and SGLang have named the field both ways.
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    if not isinstance(content, str | None) or not isinstance(reasoning, str):
        return Answer(ReplyStatus.MALFORMED, detail="content that is no text")
    parts = _split(content or "", reasoning, request)
    cut = _cut(parts.text, request.stop)
    # A server that ignores stop strings, or that runs into its limit after one, has answered.
    stopped_here = len(cut) < len(parts.text)
    finish = "stop" if stopped_here else choice.get("finish_reason")
    status, detail = _judge(content, parts, finish, choice, cut)
    return Answer(status, cut, parts.thinking, detail)


@dataclass(frozen=True)
class _Parts:
    text: str
    thinking: str
    open: bool  # whether the thinking goes on to the reply's end


def _split(content: str, reasoning: str, request: Request) -> _Parts:
    """Answer and thinking apart; a tag that the prompt opened has only its end in the reply."""
    before, close, after = content.rpartition(_CLOSE)
    opened = request.thinking is Thinking.OPENED and not reasoning
    if close and _OPEN not in after:
        return _Parts(after, reasoning + before.replace(_OPEN, ""), open=False)
    if _OPEN in content or (opened and not close):
        return _Parts("", reasoning + content, open=True)
    return _Parts(content, reasoning, open=False)


def _judge(
    content: str | None, parts: _Parts, finish: Any, choice: dict[str, Any], cut: str
) -> tuple[ReplyStatus, str]:
    without_answer = parts.open or (not parts.text.strip() and bool(parts.thinking))
    if finish == "length":
        return (ReplyStatus.LENGTH_IN_THINKING if without_answer else ReplyStatus.LENGTH), ""
    if finish is None:
        return ReplyStatus.UNFINISHED, ""
    if finish != "stop":
        return ReplyStatus.OTHER_FINISH, str(finish)[:100]
    if without_answer:
        return _thought_only(parts, choice)
    if content is None:
        return ReplyStatus.NULL_CONTENT, ""
    if not cut.strip():
        return ReplyStatus.EMPTY, ""
    return ReplyStatus.ANSWERED, ""


def _thought_only(parts: _Parts, choice: dict[str, Any]) -> tuple[ReplyStatus, str]:
    """Thinking and no answer: TensorRT-LLM and vLLM name the stop string that they met."""
    met = choice.get("stop_reason")
    if isinstance(met, str):
        return ReplyStatus.STOP_IN_THINKING, f"stop string {met!r}"
    unknown = "" if "stop_reason" in choice else "the server does not say what ended it"
    return (ReplyStatus.UNCLOSED_THINKING if parts.open else ReplyStatus.REASONING_ONLY), unknown


def _cut(text: str, stop: Sequence[str]) -> str:
    """Text up to the first stop string in it."""
    found = [text.find(one) for one in stop if one and one in text]
    return text[: min(found)] if found else text
