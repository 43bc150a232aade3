"""The option --real-kernels of check-layer, and the step that it stands for."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from trtllm_b12x_fix.errors import InputError

if TYPE_CHECKING:
    import torch

    from trtllm_b12x_fix.commands.progress import ProgressLine
    from trtllm_b12x_fix.emulator.contract import KernelContract
    from trtllm_b12x_fix.integrations.b12x_wrapper import B12xKernels
    from trtllm_b12x_fix.layer_check.real_result import RealKernelsResult
    from trtllm_b12x_fix.layer_check.run import LayerInput, Settings

CHOICES = ("auto", "on", "off")


def add_argument(parser: argparse.ArgumentParser) -> None:
    """--real-kernels, of a parser or a group."""
    parser.add_argument(
        "--real-kernels",
        choices=CHOICES,
        default="auto",
        help="run FlashInfer's own kernels beside the emulated ones: where they can run, always "
        "(else an error), or never (default: auto)",
    )


def prepare(choice: str, contract: KernelContract, device: torch.device) -> B12xKernels | str:
    """The kernels, or one line that says why they will not run. To be asked before the check.

    Raises:
        InputError: they cannot run, and ``on`` insisted on them.
    """
    if choice == "off":
        return "--real-kernels off"
    from trtllm_b12x_fix.integrations.b12x_availability import why_not
    from trtllm_b12x_fix.integrations.b12x_wrapper import B12xKernels

    reason = why_not(contract, device)
    if not reason:
        return B12xKernels(contract, device)
    if choice == "on":
        raise InputError(f"--real-kernels on: {reason}")
    return reason


def run(
    kernels: B12xKernels | str, subject: LayerInput, settings: Settings, progress: ProgressLine
) -> RealKernelsResult:
    """Their part of the result. To be run after the check: a CUDA error here ends all CUDA work."""
    from trtllm_b12x_fix.layer_check import real_kernels
    from trtllm_b12x_fix.layer_check.real_result import not_run

    if isinstance(kernels, str):
        return not_run(kernels)
    return real_kernels.run(subject, settings, kernels, progress)
