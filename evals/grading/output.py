"""Grades as JSON lines, beside the generations that they are of."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from evals.grading.grade import Grade, Score

SCHEMA = "trtllm-b12x-fix/grade/1"


def beside(records: Path) -> Path:
    """Where the grades of a record file go: run.jsonl has run.grades.jsonl."""
    return records.with_name(f"{records.stem}.grades.jsonl")


def lines(grades: Iterable[Grade], grader: dict[str, Any] | None) -> str:
    """One JSON object per grade; the same grades give the same text.

    Args:
        grader: the sandbox, its interpreter and limits; None where no program ran.
    """
    return "".join(json.dumps(_record(grade, grader)) + "\n" for grade in grades)


def count(grades: Iterable[Grade]) -> Counter[tuple[str, str, str, str]]:
    """How many grades by arm, task, status and verdicts ("strict correct, flexible wrong")."""
    return Counter(
        (one.generation.arm, one.generation.task.value, one.status.value, _verdicts(one))
        for one in grades
    )


def _verdicts(grade: Grade) -> str:
    if len(grade.scores) == 1:
        return next(iter(grade.scores.values())).verdict.value
    return ", ".join(f"{name} {score.verdict.value}" for name, score in grade.scores.items())


def _record(grade: Grade, grader: dict[str, Any] | None) -> dict[str, Any]:
    generation = grade.generation
    return {
        "schema": SCHEMA,
        "generation_sha256": generation.sha256,
        "arm": generation.arm,
        "task": generation.task.value,
        "document_id": generation.document_id,
        "repeat": generation.repeat,
        "status": grade.status.value,
        "detail": grade.detail,
        "scores": {name: _score(score) for name, score in grade.scores.items()},
        "grader": grader,
    }


def _score(score: Score) -> dict[str, Any]:
    return {
        "answer": score.answer,
        "verdict": score.verdict.value,
        "lm_eval": score.lm_eval,
        "outcome": None if score.outcome is None else score.outcome.value,
        "detail": score.detail,
    }
