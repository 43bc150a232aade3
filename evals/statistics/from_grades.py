"""Samples out of grade files."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evals.grading.output import SCHEMA
from evals.grading.statuses import ReplyStatus, Verdict
from evals.statistics.pairs import Sample
from trtllm_b12x_fix.errors import InputError


@dataclass(frozen=True, order=True)
class Series:
    """What one comparison is about: an arm's answers to a task under one way of scoring."""

    arm: str
    task: str
    score: str


def read(paths: Iterable[Path]) -> dict[Series, list[Sample]]:
    """All samples of grade files, in their order.

    Raises:
        InputError: a file or a line cannot be used; names both.
    """
    found: defaultdict[Series, list[Sample]] = defaultdict(list)
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"cannot read {path}: {error}") from error
        for number, line in enumerate(lines, start=1):
            try:
                _add(json.loads(line), found)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise InputError(f"{path}, line {number}: no grade: {error}") from error
    return dict(found)


def _add(record: Any, found: defaultdict[Series, list[Sample]]) -> None:
    if record["schema"] != SCHEMA:
        raise ValueError(f"schema {record['schema']!r}, this reads {SCHEMA!r}")
    status = ReplyStatus(record["status"])
    for name, score in record["scores"].items():
        series = Series(str(record["arm"]), str(record["task"]), str(name))
        correct = Verdict(score["verdict"]).correct
        sample = Sample(str(record["document_id"]), int(record["repeat"]), correct, status.value)
        found[series].append(sample)
