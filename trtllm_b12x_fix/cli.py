"""``trtllm-b12x-fix SUBCOMMAND``: parse, call, exit code. 0 good, 1 finding, 2 unusable input."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from trtllm_b12x_fix import __version__
from trtllm_b12x_fix.commands import COMMANDS
from trtllm_b12x_fix.errors import B12xFixError
from trtllm_b12x_fix.report.text import printable

EXIT_UNUSABLE = 2
EXIT_INTERRUPTED = 130

EXIT_CODES = (
    "exit codes: 0 good, 1 a limit or finding, 2 input that cannot be used, 130 interrupted"
)


def build_parser() -> argparse.ArgumentParser:
    """The command line, with every subcommand of :data:`COMMANDS`."""
    parser = argparse.ArgumentParser(
        prog="trtllm-b12x-fix",
        description="Exact NVFP4 mixture-of-experts scales for TensorRT-LLM's CUTEDSL (b12x) "
        "backend on SM120/121. Serving: doctor (is this environment hit), run (serve with the "
        "fix), status (what every process did), canary (does a served model answer right). "
        "Checkpoints: scan (which scales the shipped "
        "conversion destroys), check-layer (what that does to a layer's output).",
        epilog=EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    add_commands(parser, COMMANDS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit code and never shows a traceback for bad input."""
    return run_command(build_parser(), argv, "trtllm-b12x-fix")


def add_commands(parser: argparse.ArgumentParser, commands: Iterable[Any]) -> None:
    """One subparser for each command module (NAME, HELP, ``add_arguments``, ``run``)."""
    subparsers = parser.add_subparsers(dest="command", metavar="SUBCOMMAND", required=True)
    for command in commands:
        says_its_own = "exit codes" in (command.__doc__ or "")
        child = subparsers.add_parser(
            command.NAME,
            help=command.HELP,
            description=command.__doc__,
            epilog=None if says_its_own else EXIT_CODES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(child)
        child.set_defaults(run=command.run)


def run_command(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    program: str,
    show: Callable[[str], str] = printable,
) -> int:
    """Parse, call, exit code: 0 good, 1 a finding, 2 unusable input, 130 interrupted.

    Args:
        program: what messages open with.
        show: makes an error's text harmless on a terminal.
    """
    if argv is None:
        argv = sys.argv[1:]
    if not argv:
        parser.print_help(sys.stderr)
        return EXIT_UNUSABLE
    args = parser.parse_args(argv)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except B12xFixError as error:
        print(f"{program}: {show(str(error))}", file=sys.stderr)
        return EXIT_UNUSABLE
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        print(f"{program}: out of memory: {error}", file=sys.stderr)
        return EXIT_UNUSABLE
    except KeyboardInterrupt:
        print(f"{program}: interrupted; unfinished reports were not written", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output (head, less) has gone; Python would complain again at exit.
        _discard_output()
        return EXIT_UNUSABLE
    except OSError as error:
        # Standard output on a full disk: without this, exit code 1 would read as a finding.
        _discard_output()
        print(f"{program}: {printable(str(error))}", file=sys.stderr)
        return EXIT_UNUSABLE


def _is_out_of_memory(error: BaseException) -> bool:
    # torch raises RuntimeError on a CPU and torch.OutOfMemoryError, a RuntimeError, on a GPU.
    words = str(error).lower()
    return isinstance(error, MemoryError) or any(
        phrase in words for phrase in ("out of memory", "not enough memory", "can't allocate")
    )


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
