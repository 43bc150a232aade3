"""HumanEval: problems, and the verdict on a reply's program."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evals.grading.code import complete, from_chat
from evals.grading.statuses import Kind, ReplyStatus, Verdict
from evals.sandbox.blocks import SandboxError
from evals.sandbox.inside.outcome import CodeOutcome
from evals.sandbox.judge import CodeVerdict, FunctionTest
from trtllm_b12x_fix.errors import InputError

_FIELDS = ("task_id", "prompt", "entry_point", "canonical_solution", "test")

#: Judges a program; raises SandboxError where it could not.
Judge = Callable[[FunctionTest, str], CodeVerdict]


@dataclass(frozen=True)
class Problem:
    """One problem, with the data set's own names."""

    task_id: str
    prompt: str
    entry_point: str
    canonical_solution: str
    test: str

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Problem:
        """A problem from a line of the data set.

        Raises:
            InputError: a field is missing or no text.
        """
        for name in _FIELDS:
            if not isinstance(document.get(name), str):
                raise InputError(f"a HumanEval problem needs the text field {name!r}")
        return cls(**{name: document[name] for name in _FIELDS})

    @property
    def function_test(self) -> FunctionTest:
        """The test, beside the data set's own solution.

        A test that calls the function by its name means a right one (HumanEval/33 compares the
        candidate with itself otherwise, and passes anything).
        """
        return FunctionTest(self.entry_point, self.test, self.prompt + self.canonical_solution)


@dataclass(frozen=True)
class CodeScore:
    """The verdict on one reply's program.

    Attributes:
        status: ANSWERED, or UNGRADED where the sandbox failed.
        program: None where the reply has none.
        outcome: None where nothing was run.
    """

    status: ReplyStatus
    verdict: Verdict
    program: str | None
    outcome: CodeOutcome | None
    detail: str


def load(path: Path) -> dict[str, Problem]:
    """Problems of a JSON-lines file, gzipped or not, by ``task_id``.

    Raises:
        InputError: the file cannot be read or a problem lacks a field.
    """
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode("utf-8")
        documents = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, EOFError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as JSON lines: {error}") from error
    if not documents or not all(isinstance(document, dict) for document in documents):
        raise InputError(f"{path}: no HumanEval problems")
    problems = [Problem.from_document(document) for document in documents]
    return {problem.task_id: problem for problem in problems}


def program_of(problem: Problem, kind: Kind, text: str) -> str | None:
    """The program that a reply's text amounts to, None where there is none in it."""
    if kind is Kind.COMPLETION:
        return complete(problem.prompt, text)
    return from_chat(problem.prompt, problem.entry_point, text)


def score(problem: Problem, kind: Kind, text: str, judge: Judge) -> CodeScore:
    """Judge a reply's text."""
    program = program_of(problem, kind, text)
    if program is None:
        reason = f"no code that defines {problem.entry_point}"
        return CodeScore(ReplyStatus.ANSWERED, Verdict.NO_ANSWER, None, None, reason)
    try:
        verdict = judge(problem.function_test, program)
    except SandboxError as error:
        return CodeScore(ReplyStatus.UNGRADED, Verdict.NOT_JUDGED, program, None, str(error))
    if verdict.outcome is CodeOutcome.NO_CALL:
        reason = "the test calls nothing"
        return CodeScore(ReplyStatus.UNGRADED, Verdict.NOT_JUDGED, program, verdict.outcome, reason)
    right = Verdict.CORRECT if verdict.passed else Verdict.WRONG
    return CodeScore(ReplyStatus.ANSWERED, right, program, verdict.outcome, verdict.detail)
