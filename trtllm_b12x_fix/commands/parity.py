"""Whether trtllm-gen's NVFP4 MoE (vLLM's choice on B200) is right on your shapes, and what breaks.

On a GPU of capability 10.0 or 10.3: FlashInfer's monolithic and modular kernels and CUTLASS run
beside emulation and truth; arms that differ by one suspect each name the one that breaks. Anywhere
else: the installed vLLM prepares layers for real on the CPU, every argument that the kernel would
get is judged, and the kernel's place is taken by an emulator of its contract. That clears or names
every suspect but the compiled kernel.

exit codes
  0  good: nothing that was judged is wrong
  1  a suspect is named, or nothing could be concluded
  2  no vLLM or FlashInfer that can be used, or options that do not fit
"""

from __future__ import annotations

import argparse
import contextlib
import os
import site
import sys
from typing import TYPE_CHECKING

from trtllm_b12x_fix.commands import parsing
from trtllm_b12x_fix.commands.progress import ProgressLine
from trtllm_b12x_fix.errors import InputError, MissingDependencyError
from trtllm_b12x_fix.report import files, terminal

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

    from trtllm_b12x_fix.integrations.vllm_preparation import VllmPreparation
    from trtllm_b12x_fix.layer import Activation, MoELayer
    from trtllm_b12x_fix.parity.arms import KernelReport
    from trtllm_b12x_fix.parity.result import PreparationReport
    from trtllm_b12x_fix.parity.run import Grid
    from trtllm_b12x_fix.presets.shapes import LayerShape

NAME = "parity"
HELP = "is trtllm-gen's NVFP4 MoE right on B200, and is what vLLM hands it (runs on a CPU too)"

_HALVES = ("auto", "kernels", "preparation", "both")
_ACTIVATIONS = ("relu2", "silu")
_PATHS = ("monolithic", "modular")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of parity."""
    parser.add_argument(
        "--half",
        choices=_HALVES,
        default="auto",
        help="the real kernels, vLLM's preparation on the CPU, or both (default: kernels where "
        "they can run, else preparation)",
    )
    for name, default, what in (
        ("hidden", "1024,2560,2688,2816,2880,3072", "hidden sizes"),
        ("intermediate", "1856,176", "intermediate sizes"),
        ("tokens", "1,8,64,512", "token counts"),
    ):
        parser.add_argument(
            f"--{name}",
            type=parsing.rows,
            default=parsing.rows(default),
            metavar="N,N",
            help=f"{what} (default: {default})",
        )
    for name, choices in (("activations", _ACTIVATIONS), ("paths", _PATHS)):
        listed = ",".join(choices)
        parser.add_argument(
            f"--{name}",
            type=_some_of(choices),
            default=choices,
            metavar=listed,
            help=f"default: {listed}",
        )
    parser.add_argument("--experts", type=parsing.positive, default=128, metavar="N")
    parser.add_argument("--top-k", type=parsing.positive, default=6, metavar="K")
    parser.add_argument("--seed", type=parsing.seed, default=0, metavar="N")
    parser.add_argument(
        "--site",
        action="append",
        default=[],
        metavar="DIR",
        help="a folder of Python packages that comes first, such as one made by pip install "
        "--target: judges a vLLM or FlashInfer that is not the installed one; repeatable",
    )
    parser.add_argument("--json", metavar="FILE", help="write everything (- for stdout)")
    parser.add_argument("--quiet", action="store_true", help="no progress line")


def _some_of(choices: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    """An argument type: some of these names, separated by commas, each once."""

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(part.strip() for part in text.split(","))
        if len(set(names)) != len(names) or not set(names) <= set(choices):
            raise argparse.ArgumentTypeError(f"{text!r}: write some of {','.join(choices)}")
        return names

    return parse


def run(args: argparse.Namespace) -> int:
    """Print the report, write the JSON; returns the exit code.

    Raises:
        B12xFixError: options that do not fit, or a half that was asked for and cannot run.
    """
    if args.json is not None:
        files.check_writable(args.json)
    _add_sites(args.site)
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(f"parity needs torch: {error}") from error
    from trtllm_b12x_fix.parity.result import Verdict
    from trtllm_b12x_fix.report import parity as report
    from trtllm_b12x_fix.report import parity_document

    grid = _grid(args)
    # Foreign code prints: nothing of it may come between the lines of a report.
    with (
        ProgressLine("parity", quiet=args.quiet) as progress,
        contextlib.redirect_stdout(sys.stderr),
    ):
        kernels, why_no_kernels = _kernels(args, grid, progress)
        preparation, why_no_preparation = _preparation(
            args, grid, kernels, why_no_kernels, progress
        )
    result = report.Parity(
        grid, preparation, why_no_preparation, kernels, why_no_kernels, ORIGIN, args.seed
    )
    if args.json is not None:
        files.write(args.json, parity_document.to_json(result))
    if args.json != files.STDOUT:
        terminal.show(report.render(result))
    return 0 if result.verdict is Verdict.GOOD else 1


#: Whose weights the layers have.
ORIGIN = "made up: Gaussian weights at sigma 0.02, quantized as ModelOpt does; router made up"


def _add_sites(folders: list[str]) -> None:
    for folder in reversed(folders):
        if not os.path.isdir(folder):
            raise InputError(f"--site {folder}: no such folder")
        # Its .pth files count, and it has to win over what is installed.
        site.addsitedir(folder)
        sys.path.insert(0, os.path.abspath(folder))


def _grid(args: argparse.Namespace) -> Grid:
    from trtllm_b12x_fix.layer import Activation
    from trtllm_b12x_fix.parity.call import Path
    from trtllm_b12x_fix.parity.run import Grid

    grid = Grid(
        activations=tuple(Activation(name) for name in args.activations),
        hidden=args.hidden,
        intermediate=args.intermediate,
        tokens=args.tokens,
        paths=tuple(Path(name) for name in args.paths),
        experts=args.experts,
        top_k=args.top_k,
        seed=args.seed,
    )
    for shape in grid.layers():  # sizes that cannot be are refused before anything is made
        _shape(grid, *shape)
    return grid


def _shape(grid: Grid, activation: Activation, hidden: int, intermediate: int) -> LayerShape:
    from trtllm_b12x_fix.presets.shapes import LayerShape

    return LayerShape(hidden, intermediate, grid.experts, grid.top_k, activation)


def _source(grid: Grid, shape: tuple[Activation, int, int]) -> tuple[MoELayer, Tensor]:
    from trtllm_b12x_fix.presets import generate
    from trtllm_b12x_fix.presets.shapes import NEMOTRON_3_NANO

    sizes = _shape(grid, *shape)
    layer = generate.make_layer(NEMOTRON_3_NANO, sizes, range(grid.experts), grid.seed)
    return layer, generate.tokens(sizes, grid.seed, max(grid.tokens))


def _kernels(
    args: argparse.Namespace, grid: Grid, progress: ProgressLine
) -> tuple[KernelReport | None, str]:
    """The GPU half, or why it did not run."""
    if args.half == "preparation":
        return None, "--half preparation"
    import torch

    from trtllm_b12x_fix.integrations import trtllm_gen_availability

    if reason := trtllm_gen_availability.why_not():
        if args.half == "kernels":
            raise InputError(f"--half kernels: {reason}")
        return None, reason
    from trtllm_b12x_fix.integrations.trtllm_gen import TrtllmGenKernels
    from trtllm_b12x_fix.parity import run_kernels

    device = torch.device("cuda")
    kernels = TrtllmGenKernels(device)
    preparation = _vllm(device)
    ran = run_kernels.run(grid, lambda *shape: _source(grid, shape), kernels, preparation, progress)
    return ran, ""


def _vllm(device: torch.device) -> VllmPreparation | None:
    """vLLM's preparation for the GPU half, which can do without."""
    from trtllm_b12x_fix.integrations.vllm_preparation import VllmPreparation

    try:
        return VllmPreparation(device)
    except InputError:
        return None


def _preparation(
    args: argparse.Namespace,
    grid: Grid,
    kernels: KernelReport | None,
    why_no_kernels: str,
    progress: ProgressLine,
) -> tuple[PreparationReport | None, str]:
    """The CPU half, or why it did not run."""
    if args.half == "kernels" or (args.half == "auto" and kernels is not None):
        return None, "the real kernels ran; --half both runs this half too"
    import torch

    from trtllm_b12x_fix.integrations.vllm_preparation import VllmPreparation
    from trtllm_b12x_fix.parity import run as parity_run

    progress("importing vLLM")
    try:
        preparation = VllmPreparation(torch.device("cpu"))
    except InputError as error:
        raise InputError(f"{error}. Real kernels: not run: {why_no_kernels}") from error
    ran = parity_run.run(grid, lambda *shape: _source(grid, shape), preparation, progress)
    return ran, ""
