"""What a backend's conversion would do to every NVFP4 projection of a checkpoint, and what else is
wrong with its scales. Reads block scales only (a 16th of the weights), needs numpy and no GPU.

TensorRT-LLM, vLLM and SGLang multiply weight_scale_2 into the E4M3 block scales for FlashInfer's
b12x kernels. A baked scale depends on its byte and on weight_scale_2 alone, so 256 counts for each
matrix give the exact error. Verdicts: clean, affected (the bake would damage it), broken (the file
itself is damaged or incomplete), not-applicable (nothing in it goes through the bake).

exit codes
  0  nothing that --fail-on names
  1  affected or broken (--fail-on damage), or any finding (--fail-on findings)
  2  a path that cannot be used; the others are reported all the same
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_b12x_fix.commands import parsing
from trtllm_b12x_fix.commands.progress import ProgressLine
from trtllm_b12x_fix.errors import B12xFixError, InputError, MissingDependencyError
from trtllm_b12x_fix.report.text import printable

if TYPE_CHECKING:
    from trtllm_b12x_fix.scan.result import ScanResult

NAME = "scan"
HELP = "what baking would do to every projection of a checkpoint, and what is wrong with its scales"

FAIL_ON = ("damage", "findings", "never")
_MOST_THREADS, _LIMIT = 16, 64  # by itself, and when asked for: each takes some MB
_UNUSABLE = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of scan."""
    parser.add_argument(
        "paths",
        nargs="+",
        type=_path,
        metavar="DIR_OR_FILE",
        help="NVFP4 checkpoints: folders, safetensors files or indexes; one report each",
    )
    parser.add_argument(
        "--weights",
        action="store_true",
        help="read the codes too (nine times the bytes): error of the weights, all-zero blocks, "
        "zero scales over weights",
    )
    parser.add_argument(
        "--fail-on",
        choices=FAIL_ON,
        default="damage",
        help="what ends with exit code 1 (default: damage, whether by the bake or in the file)",
    )
    parser.add_argument(
        "--threads",
        type=_threads,
        metavar="N",
        help=f"threads that read and count, at most {_LIMIT} (default: one for each core)",
    )
    parser.add_argument("--json", metavar="FILE", help="write everything as JSON; - for stdout")
    parser.add_argument("--html", metavar="FILE", help="write one self-contained page")
    parser.add_argument("--quiet", action="store_true", help="no progress on the terminal")


def _path(text: str) -> Path:
    # Path("") is the working directory: an unset variable would have that scanned.
    if not text:
        raise argparse.ArgumentTypeError("an empty path; write . for the working directory")
    return Path(text)


def _threads(text: str) -> int:
    number = parsing.positive(text)
    if number > _LIMIT:
        raise argparse.ArgumentTypeError(f"{text}: at most {_LIMIT}")
    return number


def run(args: argparse.Namespace) -> int:
    """Scan every path, print or write the reports, return the exit code.

    Raises:
        B12xFixError: a report cannot be written, or numpy is missing.
    """
    _require_numpy()
    _check_targets(args)
    from trtllm_b12x_fix.scan.result import FailOn

    results, unusable = _scan_all(args)
    _report(args, results, unusable)
    if unusable:
        return _UNUSABLE
    return max(result.exit_code(FailOn(args.fail_on)) for result in results)


def _scan_all(args: argparse.Namespace) -> tuple[list[ScanResult], list[tuple[str, str]]]:
    """Results, and the paths that cannot be used with the reason: one spares no other."""
    from trtllm_b12x_fix.scan.run import ScanSettings, scan

    settings = ScanSettings(args.threads or _cores(), args.weights)
    results: list[ScanResult] = []
    unusable: list[tuple[str, str]] = []
    for path in args.paths:
        with ProgressLine(f"{NAME} {printable(path.name)}", quiet=args.quiet) as progress:
            try:
                results.append(scan(path, settings, progress))
            except B12xFixError as error:
                unusable.append((str(path), str(error)))
    return results, unusable


def _report(
    args: argparse.Namespace, results: list[ScanResult], unusable: list[tuple[str, str]]
) -> None:
    from trtllm_b12x_fix.report import files, scan_document, scan_html, scan_table, terminal

    # Everything is rendered before anything is written, so a failure leaves no half report.
    outputs = []
    if args.html is not None:
        outputs.append((args.html, scan_html.to_html(results, unusable)))
    if args.json is not None:
        outputs.append((args.json, scan_document.to_json(results, unusable)))
    for target, text in outputs:
        files.write(target, text)
    if files.STDOUT not in (args.json, args.html):
        for result in results:
            terminal.show(scan_table.render(result) + ("\n" if len(args.paths) > 1 else ""))
    if unusable:
        _complain(unusable)


def _complain(unusable: list[tuple[str, str]]) -> None:
    for _, reason in unusable:
        print(f"trtllm-b12x-fix: {printable(reason)}", file=sys.stderr)


def _cores() -> int:
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        cores = os.cpu_count() or 1
    return min(cores, _MOST_THREADS)


def _require_numpy() -> None:
    try:
        import numpy  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError("scan needs numpy: pip install numpy") from error


def _check_targets(args: argparse.Namespace) -> None:
    from trtllm_b12x_fix.report import files

    # Found out now, not after the run.
    if args.html == files.STDOUT == args.json:
        raise InputError("--json - and --html -: only one report fits standard output")
    targets = [target for target in (args.html, args.json) if target is not None]
    if len({os.path.realpath(target) for target in targets}) < len(targets):
        raise InputError(f"--json and --html both name {args.html}: name two files")
    for target in targets:
        files.check_writable(target)
        for path in args.paths:
            files.check_apart(target, _sources(path))


#: Files of a checkpoint's folder that are read here, or by whoever serves the model.
_CHECKPOINT_FILES = ("*.safetensors*", "*config*.json", "tokenizer*")


def _sources(path: Path) -> Iterator[Path]:
    """The files of a checkpoint, those that only its indexes name included."""
    from trtllm_b12x_fix.checkpoint.json_files import read_weight_map

    folder = path if os.path.isdir(path) else path.parent
    yield path
    for pattern in _CHECKPOINT_FILES:
        for file in folder.glob(pattern):
            yield file
            if file.name.endswith(".index.json"):
                with suppress(B12xFixError):
                    yield from (folder / name for name in set(read_weight_map(file).values()))
