"""Run one command with the repair switched on in it and in every process it starts.

    trtllm-b12x-fix run -- trtllm-serve MODEL --config serve.yaml

sets TRTLLM_B12X_FIX=auto for that command alone, then becomes it: signals and the exit code are
the command's. The start-up file of the environment the command runs in does the rest, so the
package must be installed there. Options that are not given leave their variables as they are, and
TRTLLM_B12X_FIX, too, where it has a value: off stays off, unless --strategy is given.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys

from trtllm_b12x_fix import startup
from trtllm_b12x_fix.errors import InputError
from trtllm_b12x_fix.settings import (
    ACCUMULATE,
    MODE,
    ON_UNKNOWN,
    VERIFY,
    Accumulate,
    Mode,
    OnUnknown,
    Settings,
    Verify,
)

NAME = "run"
HELP = "run a command, such as trtllm-serve, with the repair switched on"

_STRATEGIES = (Mode.AUTO, Mode.ALPHAS, Mode.FP32_RESCALE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of run."""
    parser.add_argument(
        "--strategy",
        choices=[mode.value for mode in _STRATEGIES],
        help=f"how weight_scale_2 reaches the kernel (default: what {MODE} says; where that is "
        "unset auto, by what the kernel can take)",
    )
    parser.add_argument(
        "--verify",
        choices=[verify.value for verify in Verify],
        help=f"which layers to check after loading ({VERIFY}; default: first)",
    )
    parser.add_argument(
        "--on-unknown",
        choices=[choice.value for choice in OnUnknown],
        help="what to do about versions whose contract is not known: refuse to start, or decode "
        f"with CUTLASS ({ON_UNKNOWN}; default: fail)",
    )
    parser.add_argument(
        "--accumulate",
        choices=[choice.value for choice in Accumulate],
        help=f"how the experts of a token are summed ({ACCUMULATE}; default: auto)",
    )
    parser.add_argument(
        "words",
        nargs=argparse.REMAINDER,
        metavar="-- COMMAND",
        help="the command and its arguments",
    )


def run(args: argparse.Namespace) -> int:
    """Become the command; returns only by raising.

    Raises:
        InputError: no command, none of that name, one that cannot be started, or a variable of
            ours that has a value that is not known.
    """
    words: list[str] = args.words[1:] if args.words[:1] == ["--"] else args.words
    if not words:
        raise InputError("run needs a command: trtllm-b12x-fix run -- trtllm-serve MODEL")
    environ = {**os.environ, **_variables(args)}
    # Whoever starts a server can switch the repair off around a script that has this command in it.
    environ[MODE] = environ.get(MODE) or Mode.AUTO.value
    # Here, rather than minutes later in a worker.
    settings = Settings.from_environment(environ)
    if shutil.which(words[0]) is None:
        raise InputError(f"cannot run {words[0]}: no such command (PATH was searched)")
    if settings.mode.wants_repair:
        _warn_without_hook()
    else:
        asked = f"{MODE}={settings.mode.value}"
        _say(f"{asked}: the command runs without the repair (with it: --strategy auto)")
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(words[0], words, environ)
    except OSError as error:
        # Such as a script whose interpreter is gone: the file is there, and yet is not.
        raise InputError(f"cannot run {words[0]}: {error.strerror}") from error


def _variables(args: argparse.Namespace) -> dict[str, str]:
    given = {
        MODE: args.strategy,
        VERIFY: args.verify,
        ON_UNKNOWN: args.on_unknown,
        ACCUMULATE: args.accumulate,
    }
    return {name: value for name, value in given.items() if value is not None}


def _warn_without_hook() -> None:
    # Site start-up put the finder in place, unless this package is only on PYTHONPATH, or the
    # start-up file was lost: then nothing would happen in the command, and nothing would say so.
    if not startup.is_in_place():
        _say(
            "the start-up file trtllm_b12x_fix.pth did not run in this Python: install the package "
            "with pip, or the command may run without the repair"
        )


def _say(words: str) -> None:
    print(f"trtllm-b12x-fix: {words}", file=sys.stderr)
