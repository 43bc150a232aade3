"""Measure on one layer what each way of passing NVFP4 scales to the b12x kernels costs.

Every arm runs in an emulation of the kernel that FlashInfer's dispatch would launch, and is
compared with the same arithmetic on exact scales (fidelity) and with fp64 (true error). Nothing
here needs a GPU; nothing here ran on FP4 hardware. The verdict judges the repair; what the shipped
conversion costs stands beside it.

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
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_b12x_fix.commands import parsing, preset, real_kernels
from trtllm_b12x_fix.commands.progress import ProgressLine
from trtllm_b12x_fix.errors import (
    MATPLOTLIB_MISSING,
    InputError,
    MissingDependencyError,
)

if TYPE_CHECKING:
    import torch

    from trtllm_b12x_fix.checkpoint.findings import Finding
    from trtllm_b12x_fix.emulator.arithmetic import KernelFamily
    from trtllm_b12x_fix.emulator.contract import KernelContract
    from trtllm_b12x_fix.layer import Activation
    from trtllm_b12x_fix.layer_check.arms import Arm
    from trtllm_b12x_fix.layer_check.result import Gate, LayerCheckResult
    from trtllm_b12x_fix.layer_check.run import LayerInput

NAME = "check-layer"
HELP = "what baked and repaired scales cost on one layer (default: the embedded real layer)"

_ROWS = (1, 2, 4, 8, 17, 64)
KERNEL_NAMES = ("auto", "direct-micro", "micro", "static", "dynamic")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of check-layer."""
    _add_layer_arguments(parser.add_argument_group("layer (default: the embedded real layer)"))
    _add_check_arguments(parser)


def _add_layer_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--checkpoint",
        type=Path,
        metavar="PATH",
        help="an NVFP4 checkpoint: a folder, a safetensors file, or an index; read lazily",
    )
    group.add_argument(
        "--layer",
        metavar="N",
        help="block number, or a prefix such as mtp.layers.0, of the layer to check",
    )
    group.add_argument(
        "--list", action="store_true", help="list the checkpoint's MoE layers and stop"
    )
    preset.add_arguments(group)
    group.add_argument(
        "--experts",
        type=parsing.experts,
        metavar="A-B,...|N",
        help="with --checkpoint: route at random among these experts; those that no token goes to "
        "are not read, and the report says how many were (default: all, by the layer's own "
        "router); with --preset: how many experts the layer has",
    )
    group.add_argument(
        "--top-k",
        type=parsing.positive,
        metavar="K",
        help="experts per token (default: what config.json or the preset says)",
    )
    group.add_argument(
        "--activations",
        choices=("relu2", "silu"),
        help="activation (default: what config.json or the preset says, else silu if there is a "
        "gate)",
    )
    group.add_argument(
        "--inputs",
        metavar="FILE.safetensors[:TENSOR]",
        help="recorded activations [tokens, hidden] (default: N(0,1) at the calibrated amax)",
    )


def _add_check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rows",
        type=parsing.rows,
        default=_ROWS,
        metavar="N,...",
        help="token counts to check (default: 1,2,4,8,17,64)",
    )
    parser.add_argument(
        "--arms",
        type=parsing.arms,
        metavar="ARM,...",
        help=f"arms to run, of {', '.join(parsing.ARM_NAMES)} (default: all, fp32-rescale only "
        "where the layer's activation is relu2)",
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
    real_kernels.add_argument(parser)
    parser.add_argument(
        "--seed",
        type=parsing.seed,
        default=0,
        metavar="N",
        help="order of atomic adds in families that have them, random inputs and routing, and a "
        "preset's layer (default: 0)",
    )
    parser.add_argument(
        "--gate",
        type=parsing.gate,
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
    _check_options(args)
    _check_targets(args)
    if args.list:
        return _list(args)
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
    from trtllm_b12x_fix.layer_check.result import Verdict
    from trtllm_b12x_fix.layer_check.run import Settings
    from trtllm_b12x_fix.repair import InputScales

    device = _device(args.device)
    contract = _contract(args.flashinfer)
    kernels = real_kernels.prepare(args.real_kernels, contract, device)
    progress("loading the layer")
    made = None if args.preset is None else preset.load(args, progress)
    subject, own, findings = _subject(args) if made is None else (made.subject, None, ())
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
    own = own.to(device) if own else None
    subject = subject.to(device)
    try:
        result = check(subject, settings, gates, progress, own, findings, made)
    except InputError as error:
        if not findings:
            raise
        from trtllm_b12x_fix.report.listing import said

        # What was found until then may be why.
        found = "; ".join(said(finding) for finding in findings)
        raise InputError(f"{error}; findings in the checkpoint: {found}") from error
    # Last: a CUDA error in a real kernel ends all CUDA work of the process.
    real = real_kernels.run(kernels, subject, settings, progress)
    verdict = Verdict.FINDING if real.findings else result.verdict
    return replace(result, real_kernels=real, verdict=verdict)


def _check_targets(args: argparse.Namespace) -> None:
    from trtllm_b12x_fix.report import files

    # Found out now, not after the run.
    if args.plot == files.STDOUT == args.json:
        raise InputError("--json - and --plot -: only one report fits standard output")
    for target in (args.plot, args.json):
        if target is not None:
            files.check_writable(target)
            files.check_apart(target, _sources(args))
    if args.plot not in (None, files.STDOUT) and not args.plot.lower().endswith(".svg"):
        raise InputError(f"--plot {args.plot}: the figure is SVG; name a file that ends in .svg")
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise MissingDependencyError(MATPLOTLIB_MISSING)


#: Files of a checkpoint's folder that are read here, or by whoever serves the model.
_CHECKPOINT_FILES = ("*.safetensors*", "*config*.json", "tokenizer*")


def _sources(args: argparse.Namespace) -> list[Path]:
    """The files that a run reads."""
    sources = []
    if args.checkpoint is not None:
        folder = args.checkpoint if args.checkpoint.is_dir() else args.checkpoint.parent
        sources = [args.checkpoint, *(f for p in _CHECKPOINT_FILES for f in folder.glob(p))]
    if args.inputs is not None:
        path, suffix, _ = args.inputs.rpartition(".safetensors")
        sources.append(Path(path + suffix))
    return sources


def _report(args: argparse.Namespace, result: LayerCheckResult) -> None:
    from trtllm_b12x_fix.report import document, files, plot, table, terminal

    # Everything is rendered before anything is written, so a failure leaves no half report.
    outputs = []
    if args.plot is not None:
        outputs.append((args.plot, plot.to_svg(result)))
    if args.json is not None:
        outputs.append((args.json, document.to_json(result)))
    for target, text in outputs:
        files.write(target, text)
    if files.STDOUT not in (args.json, args.plot):
        terminal.show(table.render(result))


def _check_options(args: argparse.Namespace) -> None:
    """Options that only make sense together."""
    preset.check_options(args)
    if args.preset is not None:
        return
    if args.checkpoint is None:
        needless = ("layer", "experts", "top_k", "activations", "inputs")
        for name in needless:
            if getattr(args, name) is not None:
                option = name.replace("_", "-")
                other = " or --preset NAME" if name in preset.CHANGES else ""
                raise InputError(
                    f"--{option} needs --checkpoint PATH{other}; the embedded layer is fixed"
                )
        if args.list:
            raise InputError("--list needs --checkpoint PATH")
    elif args.list:
        _check_list_options(args)
    elif args.layer is None:
        raise InputError("--checkpoint needs --layer N; --list shows which layers there are")


#: Options that --list does nothing with, and their defaults.
_NOT_FOR_LISTS = {
    "rows": _ROWS,
    "kernel": "auto",
    "input_scales": "layer",
    "device": "auto",
    "seed": 0,
    "real_kernels": "auto",
    **dict.fromkeys(("layer", "experts", "top_k", "activations", "inputs", "arms")),
    **dict.fromkeys(("flashinfer", "gate", "plot")),
}


def _check_list_options(args: argparse.Namespace) -> None:
    for name, default in _NOT_FOR_LISTS.items():
        if getattr(args, name) != default:
            option = name.replace("_", "-")
            raise InputError(f"--{option} and --list: --list checks nothing, leave it out")


def _list(args: argparse.Namespace) -> int:
    _require_torch()
    from trtllm_b12x_fix.layer_check.from_checkpoint import list_layers
    from trtllm_b12x_fix.layer_check.result import Verdict
    from trtllm_b12x_fix.report import files, listing

    layers, checkpoint = list_layers(args.checkpoint)
    if args.json is not None:
        files.write(args.json, listing.to_json(layers, checkpoint))
    if args.json != files.STDOUT:
        files.write(files.STDOUT, listing.render(layers, checkpoint))
    return 1 if listing.verdict(layers, checkpoint) is Verdict.FINDING else 0


def _subject(
    args: argparse.Namespace,
) -> tuple[LayerInput, LayerInput | None, tuple[Finding, ...]]:
    """The layer to check; for the embedded one also at its own magnitude."""
    if args.checkpoint is None:
        from trtllm_b12x_fix.layer_check.embedded import load_inputs

        moved, own = load_inputs()
        return moved, own, ()
    from trtllm_b12x_fix.layer import Activation
    from trtllm_b12x_fix.layer_check.from_checkpoint import Request, load

    loaded = load(
        Request(
            path=args.checkpoint,
            layer=args.layer,
            tokens=max(args.rows),
            seed=args.seed,
            experts=args.experts,
            top_k=args.top_k,
            activation=Activation(args.activations) if args.activations else None,
            inputs=args.inputs,
        )
    )
    return loaded.subject, None, loaded.findings


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
            "check-layer needs torch and safetensors. This package never installs torch by itself: "
            "a container that serves models has it; elsewhere pip install torch (a CPU build is "
            "enough), and pip install safetensors"
        ) from error
