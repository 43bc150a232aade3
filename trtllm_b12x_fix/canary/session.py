"""Find out which route and which figures a server gives, then ask in that way."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from trtllm_b12x_fix.canary.client import Client, Reply, ServerError
from trtllm_b12x_fix.canary.prompts import Probe
from trtllm_b12x_fix.canary.protocol import (
    Answer,
    Endpoint,
    Logprobs,
    ProtocolError,
    read_answer,
    request_body,
)

#: The completions route first: it has no template between the prompt and the model.
ROUTES = (Endpoint.COMPLETIONS, Endpoint.CHAT)
#: Enough for thoughts to come to the point; only for models that think aloud.
THINKING_TOKENS = 512
_REFUSED = {401: "needs an API key", 403: "refuses access"}
_MODELS_SHOWN = 8
#: Asked to see what the server can do; not judged.
_FIRST_TEXT = "Hello"


@dataclass
class Session:
    """A server, the way it answers, and what was noticed on the way.

    Attributes:
        endpoint: the route in use.
        logprobs: whether they are asked for.
        notes: for the report, each once.
        thinks: the model spends its first tokens on thoughts: ask for more.
    """

    client: Client
    model: str
    endpoint: Endpoint
    logprobs: Logprobs
    notes: list[str] = field(default_factory=list)
    thinks: bool = False

    def ask(self, probe: Probe, tokens: int) -> Answer:
        """The answer to one prompt.

        Raises:
            ServerError: unreachable, or no usable answer in either form.
        """
        answer = self._ask(probe, THINKING_TOKENS if self.thinks else tokens)
        if answer.is_cut and answer.reasoning and not answer.text.strip() and not self.thinks:
            self._give_time()
            answer = self._ask(probe, THINKING_TOKENS)
        if answer.model is not None and not _same_name(answer.model, self.model):
            self._note(f"asked for {self.model!r}, the server answered as {answer.model!r}")
        return answer

    def look_for_thoughts(self, probe: Probe) -> None:
        """Ask a chat model once without haste. Templates that open the thoughts themselves leave no
        mark at their beginning: only a long answer shows the end of thoughts, or no end.

        Raises:
            ServerError: as :meth:`ask`.
        """
        if self.endpoint is Endpoint.CHAT:
            answer = self._ask(probe, THINKING_TOKENS)
            if answer.reasoning or answer.is_cut:
                self._give_time()

    def _give_time(self) -> None:
        self.thinks = True
        self._note(f"the model thinks aloud, or ends late: given {THINKING_TOKENS} tokens a prompt")

    def _ask(self, probe: Probe, tokens: int) -> Answer:
        text = probe.prompt
        reply = self._send(text, tokens, self.logprobs)
        if not reply.is_good and self.logprobs is Logprobs.ASKED:
            # JSON has no NaN: servers fail on such log-probabilities and can still say the text.
            bare = self._send(text, tokens, Logprobs.NOT_ASKED)
            if bare.is_good:
                self._note(f"log-probabilities failed for {text!r}: {reply.complaint()}")
                reply = bare
        if not reply.is_good:
            raise ServerError(f"{self.client.address}: {text!r} failed: {reply.complaint()}")
        try:
            return read_answer(reply.document, text)
        except ProtocolError as error:
            raise ServerError(f"{self.client.address}: {error}") from error

    def _send(self, text: str, tokens: int, logprobs: Logprobs) -> Reply:
        body = request_body(self.endpoint, self.model, text, tokens, logprobs)
        return self.client.post(self.endpoint.value, body)

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def open_session(client: Client, model: str, routes: tuple[Endpoint, ...] = ROUTES) -> Session:
    """Try routes in order, with log-probabilities and without, until one gives text.

    Raises:
        ServerError: unreachable, a key is needed, no such model, or no route gives text.
    """
    refusals: list[tuple[Endpoint, Logprobs, str]] = []
    for endpoint, logprobs in itertools.product(routes, Logprobs):
        body = request_body(endpoint, model, _FIRST_TEXT, 1, logprobs)
        reply = client.post(endpoint.value, body)
        if reply.status in _REFUSED:
            why = _REFUSED[reply.status]
            raise ServerError(
                f"{client.address} {why} (--api-key-env VARIABLE): {reply.complaint()}"
            )
        reason = _why_not(reply)
        if reason is None:
            return _session(client, model, endpoint, logprobs, reply, refusals)
        refusals.append((endpoint, logprobs, reason))
    raise ServerError(_all_refused(client, model, refusals))


def _session(
    client: Client,
    model: str,
    endpoint: Endpoint,
    logprobs: Logprobs,
    reply: Reply,
    refusals: list[tuple[Endpoint, Logprobs, str]],
) -> Session:
    session = Session(client, model, endpoint, logprobs)
    for other, with_logprobs, reason in refusals:
        what = " with log-probabilities" if with_logprobs is Logprobs.ASKED else ""
        if other is endpoint or with_logprobs is Logprobs.NOT_ASKED:
            session.notes.append(f"{other.value}{what} was not to be had: {reason}")
    if logprobs is Logprobs.ASKED and not read_answer(reply.document, _FIRST_TEXT).positions:
        session.logprobs = Logprobs.NOT_ASKED
        session.notes.append("the server gives no log-probabilities: judged by its text alone")
    return session


def _why_not(reply: Reply) -> str | None:
    """Why a reply cannot be used, or None."""
    if not reply.is_good:
        return reply.complaint()
    try:
        read_answer(reply.document, _FIRST_TEXT)
    except ProtocolError as error:
        return str(error)
    return None


def _all_refused(client: Client, model: str, refusals: list[tuple[Endpoint, Logprobs, str]]) -> str:
    reasons = dict.fromkeys(f"{endpoint.value}: {reason}" for endpoint, _, reason in refusals)
    served = _served(client)
    if served is None:
        names = ""
    elif model in served:
        names = f"; it does list {model!r}"
    else:
        shown = ", ".join(served[:_MODELS_SHOWN]) or "none"
        names = f"; --model {model!r} is not among the models it lists: {shown}"
    return f"{client.address} gives no text{names} ({'; '.join(reasons)})"


def _served(client: Client) -> list[str] | None:
    """The names that the server lists, or None if it lists none."""
    try:
        reply = client.get("/models")
    except ServerError:
        return None
    data: Any = reply.document.get("data") if isinstance(reply.document, dict) else None
    if reply.status != 200 or not isinstance(data, list):
        return None
    names = [one.get("id") for one in data if isinstance(one, dict)]
    return [name for name in names if isinstance(name, str)]


def _same_name(served: str, asked: str) -> bool:
    """transformers adds a revision, some servers cut a path down to its last part."""
    served = served.partition("@")[0]
    return served == asked or asked.rstrip("/").endswith(f"/{served.rpartition('/')[2]}")
