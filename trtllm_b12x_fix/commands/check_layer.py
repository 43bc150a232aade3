"""Measure on one layer what each way of passing NVFP4 scales to the b12x kernels costs.

Every arm runs in an emulation of the kernel that FlashInfer's dispatch would launch, and is
compared with the same arithmetic on exact scales (fidelity) and with fp64 (true error). Nothing
here needs a GPU; nothing here ran on FP4 hardware.

arms
  fix           what the repair really does on this FlashInfer version (gated by default)
  baked         upstream: weight_scale_2 multiplied into the E4M3 block scales
  alphas        intact scales, weight_scale_2 in the alphas, dispatch untouched
  fp32-rescale  intact scales, weight_scale_2 in fc2_input_scale (relu2 only)
  unit          intact scales, input scales of 1.0
"""

from __future__ import annotations

import argparse
import importlib.util
import re
from typing import TYPE_CHECKING

from trtllm_b12x_fix.commands.progress import ProgressLine
from trtllm_b12x_fix.errors import (
    MATPLOTLIB_MISSING,
    InputError,
    MissingDependencyError,
)

if TYPE_CHECKING:
    import torch

    from trtllm_b12x_fix.emulator.arithmetic import KernelFamily
    from trtllm_b12x_fix.emulator.contract import KernelContract
    from trtllm_b12x_fix.layer import Activation
    from trtllm_b12x_fix.layer_check.arms import Arm
    from trtllm_b12x_fix.layer_check.result import Gate, LayerCheckResult
    from trtllm_b12x_fix.layer_check.run import LayerInput

NAME = "check-layer"
HELP = "what baked and repaired scales cost on one layer (default: the embedded real layer)"

ARM_NAMES = ("fix", "baked", "alphas", "fp32-rescale", "unit")
KERNEL_NAMES = ("auto", "direct-micro", "micro", "static", "dynamic")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of check-layer."""
    parser.add_argument(
        "--rows",
        type=_rows,
        default=_rows("1,2,4,8,17,64"),
        metavar="N,...",
        help="token counts to check (default: 1,2,4,8,17,64)",
    )
    parser.add_argument(
        "--arms",
        type=_arms,
        metavar="ARM,...",
        help=f"arms to run, of {', '.join(ARM_NAMES)} (default: all, fp32-rescale only where the "
        "layer's activation is relu2)",
    )
    parser.add_argument(
        "--kernel",
        choices=KERNEL_NAMES,
        default="auto",
        help="kernel family; auto is the dispatch's own choice (default: auto)",
    )
    parser.add_argument(
        "--flashinfer",
        metavar="VERSION",
        help="FlashInfer version to emulate (default: the installed one, else 0.6.18)",
    )
    parser.add_argument(
        "--input-scales",
        choices=("layer", "file"),
        default="layer",
        help="activation scales: the layer's largest, as TensorRT-LLM uses, or each expert's own "
        "(default: layer)",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where to emulate (default: a CUDA GPU if there is one)",
    )
    parser.add_argument(
        "--seed",
        type=_seed,
        default=0,
        metavar="N",
        help="order of atomic adds in families that have them (default: 0)",
    )
    parser.add_argument(
        "--gate",
        type=_gate,
        action="append",
        metavar="ARM:PERCENT",
        help="largest fidelity error allowed, at every row count; repeatable (default: fix at 1%%, "
        "or 2.5%% where the fix is fp32-rescale)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON; - for stdout")
    parser.add_argument("--plot", metavar="FILE.svg", help="write a figure as SVG")
    parser.add_argument("--quiet", action="store_true", help="no progress on the terminal")


def run(args: argparse.Namespace) -> int:
    """Run the check, print or write its report, return the exit code.

    Raises:
        B12xFixError: input that cannot be used.
    """
    _check_targets(args)
    progress = ProgressLine(NAME, quiet=args.quiet)
    with progress:
        progress("loading torch")
        _require_torch()
        result = _check(args, progress)
    _report(args, result)
    from trtllm_b12x_fix.layer_check.result import Verdict

    return 1 if result.verdict is Verdict.FINDING else 0


def _check(args: argparse.Namespace, progress: ProgressLine) -> LayerCheckResult:
    from trtllm_b12x_fix.layer_check.check import check
    from trtllm_b12x_fix.layer_check.run import Settings
    from trtllm_b12x_fix.repair import InputScales

    device = _device(args.device)
    contract = _contract(args.flashinfer)
    progress("loading the layer")
    subject, own = _subject()
    arms = _chosen_arms(args.arms, subject.layer.activation)
    settings = Settings(
        contract=contract,
        arms=arms,
        rows=args.rows,
        forced=_family(args.kernel),
        input_scales=InputScales(args.input_scales),
        seed=args.seed,
    )
    gates = _gates(args.gate, arms)
    return check(subject.to(device), settings, gates, progress, own.to(device))


def _check_targets(args: argparse.Namespace) -> None:
    from trtllm_b12x_fix.report import files

    # Found out now, not after the run.
    if args.plot == files.STDOUT == args.json:
        raise InputError("--json - and --plot -: only one report fits standard output")
    for target in (args.plot, args.json):
        if target:
            files.check_writable(target)
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        raise MissingDependencyError(MATPLOTLIB_MISSING)


def _report(args: argparse.Namespace, result: LayerCheckResult) -> None:
    from trtllm_b12x_fix.report import document, files, plot, table, terminal

    # Everything is rendered before anything is written, so a failure leaves no half report.
    outputs = []
    if args.plot:
        outputs.append((args.plot, plot.to_svg(result)))
    if args.json:
        outputs.append((args.json, document.to_json(result)))
    for target, text in outputs:
        files.write(target, text)
    if files.STDOUT not in (args.json, args.plot):
        terminal.show(table.render(result))


def _subject() -> tuple[LayerInput, LayerInput]:
    """The embedded layer moved to the reported magnitude, and at its own."""
    from trtllm_b12x_fix.layer_check.embedded import load_inputs

    return load_inputs()


def _contract(version: str | None) -> KernelContract:
    from trtllm_b12x_fix.emulator.contract import DEFAULT_VERSION, contract_for
    from trtllm_b12x_fix.integrations.flashinfer import installed_contract

    if version is not None:
        return contract_for(version)
    installed = installed_contract()
    return installed if installed is not None else contract_for(DEFAULT_VERSION)


def _device(choice: str) -> torch.device:
    import torch

    if choice == "auto":
        choice = "cuda" if torch.cuda.is_available() else "cpu"
    if choice == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch sees no CUDA GPU here; use --device cpu")
    return torch.device(choice)


def _family(kernel: str) -> KernelFamily | None:
    from trtllm_b12x_fix.emulator.arithmetic import KernelFamily

    return None if kernel == "auto" else KernelFamily(kernel)


def _chosen_arms(names: tuple[str, ...] | None, activation: Activation) -> tuple[Arm, ...]:
    from trtllm_b12x_fix.layer_check.arms import Arm

    if names is None:
        return tuple(arm for arm in Arm if arm is not Arm.FP32_RESCALE or not activation.is_gated)
    return tuple(Arm(name) for name in names)


def _gates(gates: list[tuple[str, float]] | None, arms: tuple[Arm, ...]) -> tuple[Gate, ...]:
    from trtllm_b12x_fix.layer_check.arms import Arm
    from trtllm_b12x_fix.layer_check.result import Gate

    if gates is None:
        # Without the fix among the arms there is nothing to judge by default: figures only.
        return (Gate(Arm.FIX),) if Arm.FIX in arms else ()
    chosen = tuple(Gate(Arm(name), limit) for name, limit in gates)
    for gate in chosen:
        if gate.arm not in arms:
            raise InputError(f"--gate {gate.arm.value}: the arm is not among --arms")
    return chosen


def _require_torch() -> None:
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            "check-layer needs torch, which this package never installs by itself: a container "
            "that serves models has it; elsewhere a CPU build is enough (see the README)"
        ) from error


def _rows(text: str) -> tuple[int, ...]:
    try:
        rows = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of integers") from error
    if any(row < 1 for row in rows) or len(set(rows)) != len(rows):
        raise argparse.ArgumentTypeError(f"{text!r}: row counts must be positive and distinct")
    return rows


def _seed(text: str) -> int:
    # The check also uses seed + 1, and torch takes 64 signed bits.
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of 0 to 10^18 - 1")
    return int(text)


def _arms(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    unknown = [name for name in names if name not in ARM_NAMES]
    if unknown or len(set(names)) != len(names):
        raise argparse.ArgumentTypeError(f"{text!r}: arms are {', '.join(ARM_NAMES)}, each once")
    return names


def _gate(text: str) -> tuple[str, float]:
    match = re.fullmatch(r"([a-z0-9-]+):([0-9]+(?:\.[0-9]*)?|\.[0-9]+)%?", text)
    if not match or match[1] not in ARM_NAMES:
        raise argparse.ArgumentTypeError(
            f"{text!r}: write ARM:PERCENT, such as fix:1 or fp32-rescale:2.5"
        )
    return match[1], float(match[2]) / 100
