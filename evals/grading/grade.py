"""Grades saved generations: status, extraction and verdict of each, programs in the sandbox."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from evals.grading import gsm8k, humaneval, reply
from evals.grading.humaneval import CodeScore, Judge, Problem
from evals.grading.records import Generation, Task
from evals.grading.statuses import ReplyStatus, Verdict
from evals.sandbox.blocks import SandboxError
from evals.sandbox.inside.outcome import CodeOutcome
from evals.sandbox.judge import CodeVerdict, FunctionTest


@dataclass(frozen=True)
class Score:
    """One way of scoring a generation.

    Attributes:
        answer: the number as it stands in the text, or the program; None where there is none.
        verdict: NOT_JUDGED unless the status is ANSWERED.
        lm_eval: what lm-eval's own comparison says of the same text, whatever the status; None
            where it has none that differs (code).
        outcome: of a program that ran.
        detail: words of a program or a test, to be shown escaped.
    """

    answer: str | None
    verdict: Verdict
    lm_eval: bool | None = None
    outcome: CodeOutcome | None = None
    detail: str = ""


@dataclass(frozen=True)
class Grade:
    """A generation, graded.

    Attributes:
        scores: GSM8K has "strict" and "flexible", HumanEval "pass".
        text: the answer without thinking.
        detail: what explains the status.
    """

    generation: Generation
    status: ReplyStatus
    scores: Mapping[str, Score]
    text: str
    detail: str


def needs_sandbox(generations: Iterable[Generation]) -> bool:
    """Whether any of them holds a program."""
    return any(one.task is Task.HUMANEVAL for one in generations)


def grade_all(
    generations: Iterable[Generation],
    judge: Judge | None,
    jobs: int = 1,
    told: Callable[[int, int], None] | None = None,
) -> list[Grade]:
    """Grade in order; equal programs for equal tests run once, so they get equal verdicts.

    Args:
        judge: runs a program; None where there is none to run.
        jobs: programs at a time.
        told: called after each program with how many are done, of how many.

    """
    read = list(generations)
    if judge is not None:
        judge = _run_programs(read, judge, jobs, told)
    return [grade(one, judge) for one in read]


def grade(generation: Generation, judge: Judge | None) -> Grade:
    """Grade one generation."""
    answer = reply.read(generation.request, generation.reply)
    if generation.task is Task.GSM8K:
        scores = _gsm8k(generation, answer)
        return Grade(generation, answer.status, scores, answer.text, answer.detail)
    problem = Problem.from_document(generation.document)
    if answer.status is not ReplyStatus.ANSWERED:
        scores = {"pass": Score(None, Verdict.NOT_JUDGED)}
        return Grade(generation, answer.status, scores, answer.text, answer.detail)
    code = _code(problem, generation, answer.text, judge)
    score = Score(code.program, code.verdict, None, code.outcome, code.detail)
    detail = code.detail if code.status is ReplyStatus.UNGRADED else answer.detail
    return Grade(generation, code.status, {"pass": score}, answer.text, detail)


def _gsm8k(generation: Generation, answer: reply.Answer) -> dict[str, Score]:
    numbers = gsm8k.score(answer.text, generation.document["answer"])
    judged = answer.status is ReplyStatus.ANSWERED
    return {
        name: Score(number.answer, number.verdict if judged else Verdict.NOT_JUDGED, number.lm_eval)
        for name, number in (("strict", numbers.strict), ("flexible", numbers.flexible))
    }


def _code(problem: Problem, generation: Generation, text: str, judge: Judge | None) -> CodeScore:
    if judge is None:
        program = humaneval.program_of(problem, generation.request.kind, text)
        return CodeScore(ReplyStatus.UNGRADED, Verdict.NOT_JUDGED, program, None, "no sandbox")
    return humaneval.score(problem, generation.request.kind, text, judge)


def _run_programs(
    generations: list[Generation],
    judge: Judge,
    jobs: int,
    told: Callable[[int, int], None] | None,
) -> Judge:
    """Run every distinct program once, several at a time; gives a judge that knows them all."""
    programs = list(dict.fromkeys(filter(None, map(_program, generations))))
    done = itertools.count(1)

    def run(program: tuple[FunctionTest, str]) -> CodeVerdict | SandboxError:
        try:
            return judge(*program)
        except SandboxError as error:
            return error
        finally:
            if told is not None:
                told(next(done), len(programs))

    with ThreadPoolExecutor(max_workers=jobs) as pool:
        known = dict(zip(programs, pool.map(run, programs), strict=True))

    def recall(function_test: FunctionTest, program: str) -> CodeVerdict:
        result = known[function_test, program]
        if isinstance(result, SandboxError):
            raise result
        return result

    return recall


def _program(generation: Generation) -> tuple[FunctionTest, str] | None:
    answer = reply.read(generation.request, generation.reply)
    if generation.task is not Task.HUMANEVAL or answer.status is not ReplyStatus.ANSWERED:
        return None
    problem = Problem.from_document(generation.document)
    program = humaneval.program_of(problem, generation.request.kind, answer.text)
    return None if program is None else (problem.function_test, program)
