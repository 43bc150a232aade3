"""Recorded activations from a file of their own."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from trtllm_b12x_fix.checkpoint.files import open_file
from trtllm_b12x_fix.errors import InputError

#: Tensor names tried in a file of recorded activations when none is named.
RECORDED_NAMES = ("hidden_states", "recorded.hidden_states", "x")
_WHERE = re.compile(r"(?P<path>.*\.safetensors)(?::(?P<tensor>.+))?", re.DOTALL)


def read_recorded(where: str, tokens: int) -> tuple[Tensor, str]:
    """The first tokens of ``FILE.safetensors`` or ``FILE.safetensors:TENSOR``, bf16; in words, too.

    Raises:
        InputError: no such file or tensor, too few tokens, or values that bf16 cannot hold.
    """
    match = _WHERE.fullmatch(where)
    if match is None:
        raise InputError(f"--inputs {where}: write FILE.safetensors or FILE.safetensors:TENSOR")
    source = open_file(Path(match["path"]))
    name = match["tensor"] or next((n for n in RECORDED_NAMES if source.has(n)), "")
    if not name:
        raise InputError(
            f"{source.name}: none of {', '.join(RECORDED_NAMES)} in it: name the tensor with "
            "--inputs FILE.safetensors:TENSOR"
        )
    x = source.get(name)
    if not x.is_floating_point() or x.dim() != 2:
        raise InputError(
            f"{source.name}: {name} must be floating [tokens, hidden], got {x.dtype} "
            f"{tuple(x.shape)}"
        )
    if x.shape[0] < tokens:
        raise InputError(f"{source.name}: {name} has {x.shape[0]} tokens, --rows asks for {tokens}")
    x = x[:tokens]
    for values, fault in (
        (x.double(), "holds NaN or infinity"),
        (x.to(torch.bfloat16), "holds values beyond bf16"),
    ):
        if not bool(values.isfinite().all()):
            raise InputError(f"{source.name}: {name} {fault}")
    return x.to(torch.bfloat16), f"recorded ({source.name}: {name})"
