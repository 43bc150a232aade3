"""Whether a served model's output is right: known continuations, asked of a running server.

Some twenty short greedy prompts go to an OpenAI-style server (vLLM, TensorRT-LLM, SGLang,
llama.cpp, transformers): to /v1/completions, or /v1/chat/completions where there is no other.
Where the server gives log-probabilities, the best five candidates are looked at, too.

It sees a backend that computes something else (vllm#52308). It does not see a few percent: healthy
does not say that block scales are exact. For that: status, doctor, check-layer.

exit codes
  0  healthy
  1  suspicious or broken
  2  no answer: unreachable, not ready within --wait, a wrong model name, not such a server
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from trtllm_b12x_fix.commands import parsing
from trtllm_b12x_fix.commands.progress import ProgressLine
from trtllm_b12x_fix.errors import InputError

if TYPE_CHECKING:
    from trtllm_b12x_fix.canary.protocol import Endpoint

NAME = "canary"
HELP = "is a served model's output right: known continuations, asked of a running server"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of canary."""
    parser.add_argument(
        "--base-url", required=True, metavar="URL", help="where it serves: http://localhost:8000"
    )
    parser.add_argument(
        "--model", required=True, metavar="NAME", help="the name under which it serves the model"
    )
    parser.add_argument(
        "--endpoint",
        choices=("auto", "completions", "chat"),
        default="auto",
        help="the route to ask (default: completions, or chat where there is no other)",
    )
    parser.add_argument(
        "--api-key-env",
        metavar="VARIABLE",
        help="the environment variable that holds the API key (none is sent otherwise)",
    )
    parser.add_argument(
        "--wait",
        type=parsing.seconds,
        default=10.0,
        metavar="SECONDS",
        help="how long to wait for a server that starts, loads or is busy (default: 10)",
    )
    parser.add_argument(
        "--timeout",
        type=parsing.seconds,
        default=300.0,
        metavar="SECONDS",
        help="for one answer; first ones may compile kernels (default: 300)",
    )
    parser.add_argument("--json", metavar="FILE", help="write everything as JSON; - for stdout")
    parser.add_argument("--quiet", action="store_true", help="no progress on the terminal")


def run(args: argparse.Namespace) -> int:
    """Ask, print or write the report, return the exit code.

    Raises:
        B12xFixError: the server cannot be asked, or the report not be written.
    """
    # Not for every other command: it imports http and ssl.
    from trtllm_b12x_fix.canary.address import parse_address
    from trtllm_b12x_fix.canary.client import Client, read_key
    from trtllm_b12x_fix.canary.run import run_canary
    from trtllm_b12x_fix.report import canary as report
    from trtllm_b12x_fix.report import canary_document, files, terminal
    from trtllm_b12x_fix.report.text import printable

    if not args.model.strip():
        raise InputError("--model is empty")
    if args.timeout == 0:
        raise InputError("--timeout 0 gives a server no time to answer")
    if args.json is not None:
        files.check_writable(args.json)
    address = parse_address(args.base_url)
    key = read_key(args.api_key_env)
    with ProgressLine(NAME, quiet=args.quiet) as line:

        def progress(doing: str) -> None:
            line(printable(doing))  # it may hold the server's words

        client = Client(address, args.timeout, args.wait, key, progress)
        result = run_canary(client, args.model, _routes(args.endpoint), progress)
    if args.json is not None:
        files.write(args.json, canary_document.to_json(result))
    if args.json != files.STDOUT:
        terminal.show(report.render(result))
    return result.opinion.verdict.exit_code


def _routes(name: str) -> tuple[Endpoint, ...]:
    from trtllm_b12x_fix.canary.protocol import Endpoint
    from trtllm_b12x_fix.canary.session import ROUTES

    return ROUTES if name == "auto" else (Endpoint[name.upper()],)
