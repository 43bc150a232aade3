"""Runs a problem's test against the guest's function and reports the verdict.

The test and the problem's own helpers come from the data set; nothing of the program runs here.
"""

from __future__ import annotations

import json
import os
import random
from typing import Any

from evals.sandbox.inside.channel import Channel
from evals.sandbox.inside.codec import CodecError, decode, encode, write_back
from evals.sandbox.inside.confine import confine
from evals.sandbox.inside.outcome import STARTED, CodeOutcome

_EVENTS = {
    "load-failed": CodeOutcome.LOAD_FAILED,
    "no-function": CodeOutcome.NO_FUNCTION,
}


class _Ended(BaseException):
    """The verdict is known before the test's end. Not an Exception: no test may swallow it."""

    def __init__(self, outcome: CodeOutcome, detail: str = "") -> None:
        super().__init__(detail)
        self.outcome = outcome
        self.detail = detail


class CandidateRaised(Exception):
    """What the test sees when the function raised."""


class Candidate:
    """Stands for the program's function: sends the call, gives back the plain value."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.calls = 0
        self.ended: _Ended | None = None

    def await_event(self) -> dict[str, Any]:
        """The guest's next message; the verdict, if it sends none that can be used."""
        try:
            return self._channel.receive()
        except EOFError:
            raise self._end(CodeOutcome.CRASHED) from None
        except CodecError as error:
            raise self._end(CodeOutcome.BAD_REPLY, str(error)) from None
        except MemoryError:
            raise self._end(CodeOutcome.BAD_REPLY, "an answer too large to hold") from None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.ended is not None:
            raise self.ended
        self.calls += 1
        request = {"id": self.calls, "args": encode(list(args)), "kwargs": encode(kwargs)}
        try:
            self._channel.send(request)
        except OSError:
            raise self._end(CodeOutcome.CRASHED) from None
        return self._accept(self.await_event(), list(args), kwargs)

    def _accept(self, reply: dict[str, Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        if reply.get("event") != "answer" or reply.get("id") != self.calls:
            raise self._end(CodeOutcome.BAD_REPLY, "no answer to this call")
        try:
            after, named = decode(reply.get("args")), decode(reply.get("kwargs"))
            value = decode(reply.get("value"))
        except (CodecError, MemoryError) as error:
            raise self._end(CodeOutcome.BAD_REPLY, str(error)) from None
        if isinstance(after, list) and isinstance(named, dict):
            for old, new in zip(args, after, strict=False):
                write_back(old, new)
            for name in kwargs.keys() & named.keys():
                write_back(kwargs[name], named[name])
        if "raised" in reply:
            raise self._raised(reply["raised"])
        if "value" not in reply:
            raise self._end(CodeOutcome.BAD_REPLY, "an answer without a value")
        return value

    def _raised(self, raised: Any) -> BaseException:
        name, words = describe(raised)
        if name == "MemoryError":
            return self._end(CodeOutcome.MEMORY_LIMIT, words)
        return CandidateRaised(f"{name}: {words}")

    def _end(self, outcome: CodeOutcome, detail: str = "") -> _Ended:
        self.ended = _Ended(outcome, detail)
        return self.ended


def describe(raised: Any) -> tuple[str, str]:
    """Type and words of an exception as the guest tells them."""
    if isinstance(raised, list) and len(raised) == 2:
        return str(raised[0])[:100], str(raised[1])[:300]
    return "?", ""


def main(job: dict[str, Any]) -> None:
    """Check one program; writes ``started`` and then the verdict on the report pipe."""
    confine(job["limits"])
    candidate = Candidate(Channel(job["replies"], job["requests"], job["limits"]["message_bytes"]))
    try:
        _start(candidate, job["report"])
        outcome, detail = _run_test(job, candidate)
    except _Ended as ended:
        outcome, detail = ended.outcome, ended.detail
    report = {"outcome": outcome.value, "detail": detail[:500], "calls": candidate.calls}
    _write(job["report"], json.dumps(report))


def _start(candidate: Candidate, report: int) -> None:
    if candidate.await_event().get("event") != "hello":
        raise RuntimeError("the guest did not say hello")
    _write(report, STARTED)
    event = candidate.await_event()
    if event.get("event") == "ready":
        return
    outcome = _EVENTS.get(str(event.get("event")), CodeOutcome.BAD_REPLY)
    name, words = describe(event.get("raised"))
    if outcome is CodeOutcome.LOAD_FAILED and name == "MemoryError":
        outcome = CodeOutcome.MEMORY_LIMIT
    raise _Ended(outcome, f"{name}: {words}" if "raised" in event else "")


def _run_test(job: dict[str, Any], candidate: Candidate) -> tuple[CodeOutcome, str]:
    names: dict[str, Any] = {"__name__": "test"}
    # Helpers that a test calls by name come from the problem, not from the program.
    for name in ("reference", "test"):
        exec(compile(job[name], f"<{name}>", "exec", dont_inherit=True), names)
    check = names["check"]
    random.seed(0)  # tests draw their own cases: every program gets the same
    try:
        check(candidate)
    except AssertionError as error:
        return CodeOutcome.WRONG, _words(error)
    except CandidateRaised as error:
        return CodeOutcome.RAISED, _words(error)
    except Exception as error:
        return CodeOutcome.TEST_RAISED, f"{type(error).__name__}: {_words(error)}"
    if candidate.ended is not None:
        return candidate.ended.outcome, candidate.ended.detail
    if candidate.calls == 0:
        return CodeOutcome.NO_CALL, ""
    return CodeOutcome.PASSED, ""


def _words(error: Exception) -> str:
    try:
        return str(error)
    except Exception:  # an answer in the message can be a number too long to print
        return "?"


def _write(report: int, line: str) -> None:
    os.write(report, line.encode() + b"\n")
