"""Ask everything, in order, and judge."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from trtllm_b12x_fix.canary.client import Client
from trtllm_b12x_fix.canary.judge import compare, judge, judge_answer
from trtllm_b12x_fix.canary.prompts import (
    CONTINUATIONS,
    QUESTIONS,
    STORY,
    STORY_QUESTION,
    Probe,
)
from trtllm_b12x_fix.canary.protocol import Endpoint
from trtllm_b12x_fix.canary.records import Judged, Opinion, Repeated
from trtllm_b12x_fix.canary.session import ROUTES, Session, open_session

#: Answers are a word long; a chat model wraps it in a sentence.
_TOKENS = {Endpoint.COMPLETIONS: 8, Endpoint.CHAT: 32}
_STORY_TOKENS = 48
_ASKED = {
    Endpoint.COMPLETIONS: (CONTINUATIONS, STORY),
    Endpoint.CHAT: (QUESTIONS, STORY_QUESTION),
}


@dataclass(frozen=True)
class CanaryResult:
    """Everything that was asked and what came of it.

    Attributes:
        address: the API's root, without credentials.
        has_logprobs: whether any answer came with log-probabilities.
    """

    address: str
    model: str
    endpoint: Endpoint
    has_logprobs: bool
    notes: tuple[str, ...]
    judged: tuple[Judged, ...]
    story: Judged
    repeated: Repeated
    opinion: Opinion
    seconds: float


def run_canary(
    client: Client,
    model: str,
    routes: tuple[Endpoint, ...] = ROUTES,
    progress: Callable[[str], None] = lambda _: None,
) -> CanaryResult:
    """Ask the prompts of ``prompts``, the first one again at the end.

    Args:
        routes: to be tried, in order; the first that gives text is used for everything.

    Raises:
        ServerError: the server cannot be asked, or stops answering on the way.
    """
    began = time.monotonic()
    progress("which routes there are")
    session = open_session(client, model, routes)
    if (
        client.key is not None
        and client.address.scheme == "http"
        and not client.address.is_loopback
    ):
        session.notes.append("the API key went over plain HTTP: anyone on the way can read it")
    probes, longer = _ASKED[session.endpoint]
    session.look_for_thoughts(probes[0])
    judged = []
    for place, probe in enumerate(probes, 1):
        progress(f"prompt {place} of {len(probes)}")
        judged.append(_ask(session, probe, _TOKENS[session.endpoint]))
    progress("a longer text")
    story = _ask(session, longer, _STORY_TOKENS)
    progress("the first prompt again")
    again = _ask(session, probes[0], _TOKENS[session.endpoint])
    repeated = compare(judged[0], again)
    return CanaryResult(
        str(client.address),
        model,
        session.endpoint,
        any(one.answer.positions for one in judged),
        tuple(session.notes),
        tuple(judged),
        story,
        repeated,
        judge(tuple(judged), story, repeated),
        time.monotonic() - began,
    )


def _ask(session: Session, probe: Probe, tokens: int) -> Judged:
    began = time.monotonic()
    answer = session.ask(probe, tokens)
    return judge_answer(probe, answer, time.monotonic() - began)
