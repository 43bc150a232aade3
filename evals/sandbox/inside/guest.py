"""Runs a program and answers calls of its function. Everything here may be tampered with by the
program: nothing that it says is believed beyond the plain values it answers with.
"""

from __future__ import annotations

import random
import sys
import types
from typing import Any

from evals.sandbox.inside.channel import Channel
from evals.sandbox.inside.codec import decode, encode
from evals.sandbox.inside.confine import confine


def main(job: dict[str, Any]) -> None:
    """Load the program, then answer calls until the checker hangs up."""
    confine(job["limits"])
    channel = Channel(job["requests"], job["replies"], job["limits"]["message_bytes"])
    channel.send({"event": "hello"})
    random.seed(0)  # a program that draws numbers gets the same ones, hence the same verdict
    module = types.ModuleType("program")
    sys.modules["program"] = module
    try:
        # This file's own __future__ import must not reach the program.
        code = compile(job["program"], "<program>", "exec", dont_inherit=True)
        exec(code, module.__dict__)
    except BaseException as error:
        channel.send({"event": "load-failed", "raised": _describe(error)})
        return
    function = module.__dict__.get(job["entry_point"])
    if not callable(function):
        channel.send({"event": "no-function"})
        return
    channel.send({"event": "ready"})
    while True:
        try:
            request = channel.receive()
        except EOFError:
            return
        channel.send(_answer(function, request))


def _answer(function: Any, request: dict[str, Any]) -> dict[str, Any]:
    args, kwargs = decode(request["args"]), decode(request["kwargs"])
    reply: dict[str, Any] = {"event": "answer", "id": request["id"]}
    try:
        reply["value"] = encode(function(*args, **kwargs))
    except BaseException as error:
        reply["raised"] = _describe(error)
    # What the function did to its arguments is part of the answer.
    reply["args"], reply["kwargs"] = encode(args), encode(kwargs)
    return reply


def _describe(error: BaseException) -> list[str]:
    try:
        words = str(error)[:300]
    except BaseException:
        words = ""
    return [type(error).__name__[:100], words]
