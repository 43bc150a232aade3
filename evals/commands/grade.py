"""Grade saved generations, later or elsewhere: extraction, verdict, and programs in the sandbox.

Takes JSON-lines files of generations and writes FILE.grades.jsonl beside each. Programs run in
bubblewrap, never in this process; where it cannot start, this says why and what to do.

exit codes
  0  every generation was graded, whatever the verdicts
  1  the sandbox failed for some: their status is "ungraded", and grading again may cure it
  2  a record that cannot be used, or no sandbox here
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trtllm_b12x_fix.errors import InputError
from trtllm_b12x_fix.report import files
from trtllm_b12x_fix.report.text import grid, printable

NAME = "grade"
HELP = "grade saved generations; programs run in the sandbox only"
SCHEMA = "trtllm-b12x-fix/grading/1"
#: By arm, task, status and verdicts.
Counts = Counter[tuple[str, str, str, str]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of grade."""
    parser.add_argument("records", nargs="+", type=Path, metavar="RECORDS")
    parser.add_argument("--json", metavar="FILE", help="write the counts (- for stdout)")
    parser.add_argument(
        "--jobs", type=_jobs, default=min(4, os.cpu_count() or 1), help="programs at a time"
    )


def run(args: argparse.Namespace) -> int:
    """Grade every file; returns the exit code.

    Raises:
        B12xFixError: a record cannot be used, or there is no sandbox here.
    """
    from evals.grading import output, records
    from evals.grading.grade import grade_all, needs_sandbox
    from evals.grading.sandboxed import sandboxed_judge

    if args.json is not None:
        files.check_writable(args.json)
    _check_distinct(args.records)
    read = {path: list(records.read(path)) for path in args.records}
    needed = any(map(needs_sandbox, read.values()))
    sandboxed = sandboxed_judge() if needed else None
    counts: Counts = Counter()
    for path, generations in read.items():
        judge = None if sandboxed is None else sandboxed.judge
        grades = grade_all(generations, judge, args.jobs, _progress(path))
        grader = None if sandboxed is None else sandboxed.described
        files.write(str(output.beside(path)), output.lines(grades, grader))
        counts.update(output.count(grades))
    return _report(counts, args, sandboxed.described if sandboxed else None)


def _report(counts: Counts, args: argparse.Namespace, grader: dict[str, Any] | None) -> int:
    ungraded = sum(n for (_, _, status, _), n in counts.items() if status == "ungraded")
    if args.json is not None:
        document = {
            "schema": SCHEMA,
            "verdict": "finding" if ungraded else "good",
            "files": [str(path) for path in args.records],
            "grader": grader,
            "counts": [
                {"arm": arm, "task": task, "status": status, "verdicts": verdicts, "count": n}
                for (arm, task, status, verdicts), n in sorted(counts.items())
            ],
        }
        files.write(args.json, json.dumps(document, indent=2) + "\n")
    if args.json != files.STDOUT:
        rows = [[*map(printable, key), str(n)] for key, n in sorted(counts.items())]
        files.write(
            files.STDOUT, grid(["arm", "task", "status", "verdict", "count"], rows, left=4) + "\n"
        )
    return 1 if ungraded else 0


def _check_distinct(paths: Sequence[Path]) -> None:
    names = [path.resolve() for path in paths]
    if len(set(names)) < len(names):
        raise InputError("the same record file is named twice")


def _progress(path: Path) -> Any:
    shown = printable(path.name)

    def tell(done: int, programs: int) -> None:
        if done % 50 == 0 or done == programs:
            print(f"{shown}: {done} of {programs} programs", file=sys.stderr, flush=True)

    return tell


def _jobs(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,3}", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)
