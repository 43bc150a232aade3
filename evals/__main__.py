"""``python -m evals SUBCOMMAND``: parse, call, exit code. 0 good, 1 finding, 2 unusable input."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from evals.commands import COMMANDS
from trtllm_b12x_fix.errors import B12xFixError
from trtllm_b12x_fix.report.text import printable

EXIT_UNUSABLE = 2
EXIT_INTERRUPTED = 130

_EPILOG = (
    "The A/B runner is not built yet: nothing here starts a server. "
    "exit codes: 0 good, 1 a limit or finding, 2 input that cannot be used, 130 interrupted"
)


def build_parser() -> argparse.ArgumentParser:
    """The command line, with every subcommand of ``evals.commands``."""
    parser = argparse.ArgumentParser(
        prog="python -m evals",
        description="A/B evaluation of one model served with and without the fix.",
        epilog=_EPILOG,
    )
    subparsers = parser.add_subparsers(dest="command", metavar="SUBCOMMAND", required=True)
    for command in COMMANDS:
        child = subparsers.add_parser(
            command.NAME,
            help=command.HELP,
            description=command.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(child)
        child.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit code and never shows a traceback for bad input."""
    parser = build_parser()
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments:
        parser.print_help(sys.stderr)
        return EXIT_UNUSABLE
    args = parser.parse_args(arguments)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except B12xFixError as error:
        # A remedy has lines of its own; nothing else that is not printable passes.
        print("evals:", "\n".join(map(printable, str(error).split("\n"))), file=sys.stderr)
    except ModuleNotFoundError as error:
        print(f"evals: needs {error.name}: pip install '.[cli,evals]'", file=sys.stderr)
    except KeyboardInterrupt:
        print("evals: interrupted; unfinished reports were not written", file=sys.stderr)
        return EXIT_INTERRUPTED
    except OSError as error:
        print(f"evals: {printable(str(error))}", file=sys.stderr)
    return EXIT_UNUSABLE


if __name__ == "__main__":
    sys.exit(main())
