"""``python -m evals SUBCOMMAND``: parse, call, exit code. 0 good, 1 finding, 2 unusable input."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from evals.commands import COMMANDS
from trtllm_b12x_fix.cli import EXIT_CODES, EXIT_UNUSABLE, add_commands, run_command
from trtllm_b12x_fix.report.text import printable


def build_parser() -> argparse.ArgumentParser:
    """The command line, with every subcommand of ``evals.commands``."""
    parser = argparse.ArgumentParser(
        prog="python -m evals",
        description="A/B evaluation of one model served with and without the fix.",
        epilog=f"The A/B runner is not built yet: nothing here starts a server. {EXIT_CODES}",
    )
    add_commands(parser, COMMANDS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit code and never shows a traceback for bad input."""
    try:
        return run_command(build_parser(), argv, "evals", _lines)
    except ModuleNotFoundError as error:
        print(f"evals: needs {error.name}: pip install '.[cli,evals]'", file=sys.stderr)
        return EXIT_UNUSABLE


def _lines(text: str) -> str:
    """A remedy has lines of its own; nothing else that is not printable passes."""
    return "\n".join(map(printable, text.split("\n")))


if __name__ == "__main__":
    sys.exit(main())
