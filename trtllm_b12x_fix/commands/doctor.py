"""Whether TensorRT-LLM's b12x layers compute with exact scales in this environment, and why.

Files are found and read; neither TensorRT-LLM nor FlashInfer is imported, and no GPU is needed.
Run it with the Python, and in the environment, that the server has. What a launch script does by
itself (import trtllm_b12x_fix.auto) cannot be seen from outside: `status` tells of processes.

exit codes
  0  not affected, or affected and the fix is on and would hold
  1  affected, and the fix is off, would refuse, or cannot be judged
  2  an installation or a model that cannot be read, or no TensorRT-LLM for this Python
"""

from __future__ import annotations

import argparse
from pathlib import Path

from trtllm_b12x_fix.report import files, terminal

NAME = "doctor"
HELP = "is this environment affected, is the fix on, and would it hold"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of doctor."""
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="a checkpoint: its layers' shapes decide which strategies and flaws matter",
    )
    parser.add_argument("--json", metavar="FILE", help="write everything (- for stdout)")


def run(args: argparse.Namespace) -> int:
    """Print the report, write the JSON; returns the exit code.

    Raises:
        B12xFixError: the model cannot be read, or the JSON not be written.
    """
    # Not for every other command: it reads metadata and imports packaging.
    from trtllm_b12x_fix.doctor.diagnosis import diagnose, gather
    from trtllm_b12x_fix.report import doctor as report

    if args.json is not None:
        files.check_writable(args.json)
    diagnosis = diagnose(gather(args.model))
    if args.json is not None:
        files.write(args.json, report.to_json(diagnosis))
    if args.json != files.STDOUT:
        terminal.show(report.render(diagnosis))
    return diagnosis.verdict.exit_code
