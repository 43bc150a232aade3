"""A patch of the installed TensorRT-LLM, for whoever builds it from source.

Prints a unified diff that is made from the file as it is installed: behind its assignment of
_b12x_weights goes a block that puts the checkpoint's own block scales back and passes
weight_scale_2 where it is fp32. Apply it in the folder that holds tensorrt_llm:

  trtllm-b12x-fix emit-patch -o b12x.patch && patch -p1 < b12x.patch

strategies
  alphas        weight_scale_2 in the alphas; needs input_global_scale (FlashInfer 0.6.17 or later)
  fp32-rescale  weight_scale_2 in fc2_input_scale; relu2 only, loading another layer raises
  auto          by the installed FlashInfer

exit codes
  0  the patch was written
  1  there is nothing to patch; why is said on standard error
  2  the file cannot be read, or its place for the block is not the one known
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from trtllm_b12x_fix.integrations.flashinfer_wrapper import find_flashinfer
from trtllm_b12x_fix.integrations.trtllm_patch import choose_strategy, find_target, make_patch
from trtllm_b12x_fix.integrations.trtllm_patch_block import PatchStrategy
from trtllm_b12x_fix.report import files
from trtllm_b12x_fix.report.text import printable

NAME = "emit-patch"
HELP = "print a patch of TensorRT-LLM's source that keeps block scales intact"
STRATEGIES = ("auto", *(strategy.value for strategy in PatchStrategy))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of emit-patch."""
    parser.add_argument(
        "--file",
        type=Path,
        metavar="PATH",
        help="a quantization.py below a folder tensorrt_llm (default: the installed one)",
    )
    parser.add_argument(
        "--strategy",
        choices=STRATEGIES,
        default="auto",
        help="how weight_scale_2 reaches the kernel (default: auto)",
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", default=files.STDOUT, help="where to write the patch"
    )


def run(args: argparse.Namespace) -> int:
    """Write the diff; returns the exit code.

    Raises:
        B12xFixError: the file or FlashInfer cannot be read, or the diff not be written.
    """
    files.check_writable(args.output)
    target = find_target(args.file)
    strategy, why = choose_strategy(args.strategy, find_flashinfer())
    patch = make_patch(target, strategy)
    if patch.reason:
        _say(f"nothing to patch in {target.path}: {patch.reason}")
        return 1
    files.write(args.output, patch.diff)
    _say(f"strategy {strategy.value} ({why}); apply with patch -p1 above {target.name}")
    return 0


def _say(words: str) -> None:
    print(f"trtllm-b12x-fix emit-patch: {printable(words)}", file=sys.stderr)
