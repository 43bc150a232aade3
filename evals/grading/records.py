"""Saved generations: what a record needs to be graded later, or elsewhere, from the file alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from evals.grading import gsm8k
from evals.grading.humaneval import Problem
from evals.grading.reply import Reply, Request
from evals.grading.statuses import Kind, Thinking, TransportFailure
from trtllm_b12x_fix.errors import InputError

SCHEMA = "trtllm-b12x-fix/generation/1"
_E = TypeVar("_E", bound=Enum)


class Task(Enum):
    GSM8K = "gsm8k"
    HUMANEVAL = "humaneval"


@dataclass(frozen=True)
class Generation:
    """One saved reply with all that its grading needs.

    Attributes:
        arm: which of the compared servers answered.
        document: the data set's own fields (GSM8K: question, answer; HumanEval: all five).
        repeat: 0, 1, ... where a document is asked several times.
        sha256: of the record's line: two grades of one generation carry the same.
    """

    arm: str
    task: Task
    document_id: str
    document: Mapping[str, Any]
    repeat: int
    request: Request
    reply: Reply
    sha256: str


def read(path: Path) -> Iterator[Generation]:
    """The generations of a JSON-lines file, in its order.

    A last line without its line end was cut off while being written, and is left out: the runner
    asks again for what is not there.

    Raises:
        InputError: the file or a line cannot be used; names file and line.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    lines = data.split(b"\n")[:-1]
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield parse(line)
        except InputError as error:
            raise InputError(f"{path}, line {number}: {error}") from error


def parse(line: bytes) -> Generation:
    """One record.

    Raises:
        InputError: says which field is wrong.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"not JSON: {error}") from error
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        found = record.get("schema") if isinstance(record, dict) else None
        raise InputError(f"schema {found!r}, this reads {SCHEMA!r}")
    document = _field(record, "document", dict)
    task = _enum(Task, record, "task")
    _check_document(record, task, document)
    return Generation(
        arm=_field(record, "arm", str),
        task=task,
        document_id=_field(record, "document_id", str),
        document=document,
        repeat=_field(record, "repeat", int),
        request=_request(_field(record, "request", dict)),
        reply=_reply(_field(record, "reply", dict)),
        sha256=hashlib.sha256(line).hexdigest(),
    )


def document_hash(document: Mapping[str, Any]) -> str:
    """SHA-256 of a document's JSON with sorted keys and no spaces."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _check_document(record: dict[str, Any], task: Task, document: dict[str, Any]) -> None:
    stated = record.get("document_sha256")
    if stated is not None and stated != document_hash(document):
        raise InputError("document_sha256 is not the document's: the record was changed")
    if task is Task.GSM8K:
        gsm8k.target(_field(document, "answer", str))
    else:
        Problem.from_document(document)


def _request(request: dict[str, Any]) -> Request:
    stop = request.get("stop", [])
    if not isinstance(stop, list) or not all(isinstance(one, str) for one in stop):
        raise InputError("request.stop is no list of texts")
    kind = _enum(Kind, request, "kind")
    thinking = _enum(Thinking, {"thinking": "tagged", **request}, "thinking")
    return Request(kind, tuple(stop), thinking)


def _reply(reply: dict[str, Any]) -> Reply:
    status = reply.get("http_status")
    failure = reply.get("failure")
    if status is not None and (not isinstance(status, int) or isinstance(status, bool)):
        raise InputError("reply.http_status is no number")
    if (status is None) == (failure is None):
        raise InputError("reply needs one of http_status and failure")
    told = None if failure is None else _enum(TransportFailure, reply, "failure")
    return Reply(status, reply.get("body"), told)


def _field(record: dict[str, Any], name: str, kind: type) -> Any:
    value = record.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise InputError(f"field {name!r} is {type(value).__name__}, not {kind.__name__}")
    return value


def _enum(kind: type[_E], record: Mapping[str, Any], name: str) -> _E:
    try:
        return kind(record.get(name))
    except ValueError:
        known = ", ".join(str(member.value) for member in kind)
        raise InputError(f"{name} {record.get(name)!r} is none of {known}") from None
