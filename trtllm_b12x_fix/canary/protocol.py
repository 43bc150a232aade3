"""OpenAI's two text routes, as servers really speak them: bodies out, answers in. Pure.

Read from the sources of vLLM 0.33.0, transformers 5.14 (serve) and llama-cpp-python 0.3.36, and
the published answers of TensorRT-LLM and llama.cpp. What a server leaves out or sends in another
type is taken as absent; only an answer without any text is an error.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import Enum
from typing import Any

#: As many as every server gives: OpenAI's completions refuse more.
TOP = 5
#: A server that ignores max_tokens is no reason to judge a novel.
_LONGEST_TEXT = 20_000
#: vLLM writes this for minus infinity: a token that cannot be chosen.
_NEVER = -9999.0
_THOUGHTS = re.compile(r"</?(?:think|thinking|thought|reasoning|seed:think)>", re.IGNORECASE)


class Endpoint(Enum):
    """A route below the API's root."""

    COMPLETIONS = "/completions"
    CHAT = "/chat/completions"


class Logprobs(Enum):
    """Whether log-probabilities are asked for."""

    ASKED = "asked"
    NOT_ASKED = "not asked"


class ProtocolError(Exception):
    """An answer with status 200 that holds no text where the protocol has it."""


@dataclass(frozen=True)
class Candidate:
    """A token that could have come, and its log-probability in nats."""

    token: str
    logprob: float


@dataclass(frozen=True)
class Position:
    """One generated token.

    Attributes:
        token: as the server spells it.
        logprob: of the token that came, nats; None if not given or not finite.
        top: the best candidates, best first; finite ones only.
        is_finite: False if the server gave something that is no number: NaN, infinite, vLLM's
            -9999 for a token that came, or null for it and for candidates (as JSON writers that
            know no NaN do).
    """

    token: str
    logprob: float | None
    top: tuple[Candidate, ...]
    is_finite: bool


@dataclass(frozen=True)
class Answer:
    """What a server made of one prompt.

    Attributes:
        text: without the prompt, if the server repeated it, and without thoughts.
        reasoning: thoughts, whether apart or in the text.
        is_cut: the token limit ended it.
        positions: empty where the server gives no log-probabilities.
        model: the name that the server gives itself, or None.
    """

    text: str
    reasoning: str
    is_cut: bool
    positions: tuple[Position, ...]
    model: str | None


def request_body(
    endpoint: Endpoint, model: str, prompt: str, tokens: int, logprobs: Logprobs
) -> dict[str, Any]:
    """A greedy request. Nothing beyond what OpenAI documents: strict servers refuse the rest."""
    body: dict[str, Any] = {"model": model, "max_tokens": tokens, "temperature": 0}
    if endpoint is Endpoint.CHAT:
        body["messages"] = [{"role": "user", "content": prompt}]
        if logprobs is Logprobs.ASKED:
            body |= {"logprobs": True, "top_logprobs": TOP}
    else:
        body["prompt"] = prompt
        if logprobs is Logprobs.ASKED:
            body["logprobs"] = TOP
    return body


def read_answer(document: dict[str, Any], prompt: str) -> Answer:
    """The answer in a reply of either route.

    Raises:
        ProtocolError: no choice, or no text in it.
    """
    choice = _first(document.get("choices"))
    if choice is None:
        raise ProtocolError("no choices in the answer")
    message = choice.get("message")
    if isinstance(message, dict):
        text = _text(message.get("content"))
        apart = _text(message.get("reasoning_content")) or _text(message.get("reasoning"))
        if text is None and apart is None and "content" not in message:
            raise ProtocolError("a message without content")
    else:
        text, apart = _text(choice.get("text")), None
        if text is None:
            raise ProtocolError("a choice without text or message")
    inside, said = split_thoughts((text or "").removeprefix(prompt))
    thoughts = "\n".join(part for part in (apart, inside) if part)
    model = document.get("model")
    return Answer(
        text=said[:_LONGEST_TEXT],
        reasoning=thoughts[:_LONGEST_TEXT],
        is_cut=choice.get("finish_reason") == "length",
        positions=_positions(choice.get("logprobs")),
        model=model if isinstance(model, str) else None,
    )


def split_thoughts(text: str) -> tuple[str, str]:
    """Thoughts and what is said after them: ``<think>a</think>b`` gives ``("a", "b")``.

    Templates often open the thoughts themselves, so that only the end is in the answer.
    """
    marks = list(_THOUGHTS.finditer(text))
    if not marks:
        return "", text
    last = marks[-1]
    if last.group().startswith("</"):
        return _THOUGHTS.sub("", text[: last.start()]).strip(), text[last.end() :]
    return _THOUGHTS.sub("", text).strip(), ""


def plain(token: str) -> str:
    """A token without its tokenizer's marks for spaces and newlines, and without the spaces."""
    for mark in ("\u0120", "\u2581", "\u010a"):
        token = token.replace(mark, " ")
    return token.strip()


def _first(value: Any) -> dict[str, Any] | None:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return value[0]
    return None


def _text(value: Any) -> str | None:
    """Text, or a list of parts with text in them."""
    if isinstance(value, list):
        parts = [part.get("text") for part in value if isinstance(part, dict)]
        return "".join(part for part in parts if isinstance(part, str))
    return value if isinstance(value, str) else None


def _positions(value: Any) -> tuple[Position, ...]:
    if not isinstance(value, dict):
        return ()
    # The chat route's form; llama.cpp's own server uses it on both.
    if isinstance(value.get("content"), list):
        return tuple(_chat_position(one) for one in value["content"] if isinstance(one, dict))
    tokens, logprobs, tops = (
        _list(value.get(name)) for name in ("tokens", "token_logprobs", "top_logprobs")
    )
    made = []
    for place, token in enumerate(tokens):
        logprob = logprobs[place] if place < len(logprobs) else None
        top = tops[place] if place < len(tops) else None
        pairs = list(top.items()) if isinstance(top, dict) else []
        made.append(_position(token, logprob, pairs))
    return tuple(made)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _chat_position(value: dict[str, Any]) -> Position:
    top = value.get("top_logprobs")
    listed = [one for one in _list(top) if isinstance(one, dict)]
    pairs = [(one.get("token"), one.get("logprob")) for one in listed]
    return _position(value.get("token"), value.get("logprob"), pairs)


def _position(token: Any, logprob: Any, pairs: list[tuple[Any, Any]]) -> Position:
    finite = _finite(logprob)
    if logprob is None:
        is_finite = not any(value is None or _is_nan(value) for _, value in pairs)
    else:
        is_finite = finite is not None and finite > _NEVER
    return Position(
        token if isinstance(token, str) else "",
        finite if is_finite else None,
        _ordered(pairs),
        is_finite,
    )


def _ordered(pairs: list[tuple[Any, Any]]) -> tuple[Candidate, ...]:
    found = []
    for token, value in pairs:
        logprob = _finite(value)
        if isinstance(token, str) and logprob is not None and logprob > _NEVER:
            found.append(Candidate(token, logprob))
    # Some servers add the token that came, beside the best: a sixth.
    return tuple(sorted(found, key=lambda one: -one.logprob)[:TOP])


def _finite(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)
