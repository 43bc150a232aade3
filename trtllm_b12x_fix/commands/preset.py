"""The options of check-layer that make a layer up: --preset, and the sizes that change it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from trtllm_b12x_fix.commands import parsing
from trtllm_b12x_fix.errors import InputError

if TYPE_CHECKING:
    from trtllm_b12x_fix.commands.progress import ProgressLine
    from trtllm_b12x_fix.layer_check.from_preset import Loaded

#: What only a preset can change, and what means something for a checkpoint too.
_SIZES = ("hidden", "intermediate")
CHANGES = (*_SIZES, "experts", "top_k", "activations")


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """--preset, --hidden, --intermediate."""
    group.add_argument(
        "--preset",
        choices=parsing.PRESET_NAMES,
        help="a layer made up on the fly at a published shape; --hidden, --intermediate, "
        "--experts, --top-k and --activations change its shape, not the law of its weights",
    )
    group.add_argument(
        "--hidden", type=parsing.positive, metavar="N", help="with --preset: hidden size"
    )
    group.add_argument(
        "--intermediate",
        type=parsing.positive,
        metavar="N",
        help="with --preset: intermediate size of an expert",
    )


def check_options(args: argparse.Namespace) -> None:
    """Options that do not go with a preset, or only with one.

    Raises:
        InputError: there is one; the message names it.
    """
    if args.preset is None:
        for name in _SIZES:
            if getattr(args, name) is not None:
                raise InputError(f"--{name} needs --preset NAME: other layers have their own size")
        return
    for name in ("checkpoint", "layer", "list", "inputs"):
        if getattr(args, name) not in (None, False):
            raise InputError(f"--{name} and --preset: a preset's layer and inputs are made up")
    if args.experts is not None and len(args.experts) != 1:
        raise InputError(
            "with --preset, --experts says how many experts the layer has: one number, such as 64"
        )


def load(args: argparse.Namespace, progress: ProgressLine) -> Loaded:
    """Make the layer that the options describe.

    Raises:
        InputError: sizes that do not fit.
    """
    from trtllm_b12x_fix.layer import Activation
    from trtllm_b12x_fix.layer_check import from_preset

    request = from_preset.Request(
        name=args.preset,
        tokens=max(args.rows),
        seed=args.seed,
        hidden=args.hidden,
        intermediate=args.intermediate,
        experts=args.experts[0] if args.experts else None,
        top_k=args.top_k,
        activation=Activation(args.activations) if args.activations else None,
    )
    return from_preset.load(request, progress)
