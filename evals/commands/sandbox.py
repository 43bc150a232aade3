"""Whether programs can be judged here: start the sandbox, try from inside what it must prevent.

exit codes
  0  it starts, and every barrier held
  1  it does not: which of the usual blocks it is, and what to do about it
  2  the report cannot be written
"""

from __future__ import annotations

import argparse
import json

from trtllm_b12x_fix.report import files
from trtllm_b12x_fix.report.text import printable

NAME = "sandbox"
HELP = "does the sandbox for model-written programs start and hold here; if not, what to do"
SCHEMA = "trtllm-b12x-fix/sandbox/1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of sandbox."""
    parser.add_argument("--json", metavar="FILE", help="write the answer (- for stdout)")


def run(args: argparse.Namespace) -> int:
    """Try the sandbox; returns the exit code.

    Raises:
        B12xFixError: the JSON cannot be written.
    """
    from evals.grading.sandboxed import sandboxed_judge
    from evals.sandbox.blocks import SandboxUnavailableError

    if args.json is not None:
        files.check_writable(args.json)
    document: dict[str, object] = {"schema": SCHEMA, "verdict": "good", "block": None}
    try:
        described = sandboxed_judge().described
        document["sandbox"] = described
        words = f"sandbox good: {described['bubblewrap']}, Python {described['python']}"
    except SandboxUnavailableError as error:
        document |= {"verdict": "finding", "block": error.block.value, "remedy": str(error)}
        words = "\n".join(map(printable, str(error).split("\n")))
    if args.json is not None:
        files.write(args.json, json.dumps(document, indent=2) + "\n")
    if args.json != files.STDOUT:
        files.write(files.STDOUT, words + "\n")
    return 0 if document["verdict"] == "good" else 1
