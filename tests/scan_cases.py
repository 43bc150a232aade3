"""Checkpoints for the tests of the scan: sound ones without a single finding, and how to run it."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.checkpoints import GATED, QWEN, experts, linear, router
from trtllm_b12x_fix import cli
from trtllm_b12x_fix.scan.result import ScanFinding, ScanResult
from trtllm_b12x_fix.scan.run import ScanSettings, scan

PREFIX = QWEN.format(5)
EXPERT = 2
DENSE = "model.layers.5.self_attn.o_proj"
CONFIG = {"model_type": "qwen3_moe", "num_experts_per_tok": 4, "hidden_act": "silu"}
FLOAT8 = torch.float8_e4m3fn
#: Large weights, so that the bake only rounds once more; the other puts it in the damaged range.
LARGE, SMALL = 2.0**-9, 2.0**-15


def sound(
    prefix: str = PREFIX, names: tuple[str, ...] = GATED, scale: float = LARGE, seed: int = 0
) -> dict[str, Tensor]:
    """Experts, each with its own ``weight_scale_2`` (one for gate and up), and a router."""
    tensors = experts(prefix, names, seed=seed)
    for name in tensors:
        if name.endswith("weight_scale_2"):
            expert = int(name.removeprefix(f"{prefix}.").partition(".")[0])
            tensors[name] = torch.tensor(scale * (1 + expert / 8))
    return tensors | router(prefix)


def with_dense() -> dict[str, Tensor]:
    """Sound experts and a sound dense linear."""
    dense = linear(DENSE, 32, 64, torch.Generator().manual_seed(9))
    return sound() | dense


def tensor(projection: str, short: str, expert: int = EXPERT, prefix: str = PREFIX) -> str:
    return f"{prefix}.{expert}.{projection}.{short}"


def run(path: Path, *, weights: bool = False, threads: int = 1) -> ScanResult:
    return scan(path, ScanSettings(threads, weights), lambda _: None)


def command(*arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = cli.main(["scan", *map(str, arguments)])
    return code, out.getvalue(), err.getvalue()


def document(*arguments: object) -> tuple[int, dict[str, Any]]:
    code, out, _ = command(*arguments, "--json", "-")
    return code, json.loads(out)


def codes(result: ScanResult) -> list[str]:
    return [finding.code for finding in result.findings]


def only(result: ScanResult, code: str) -> ScanFinding:
    """The one finding there is, of this kind."""
    (finding,) = result.findings
    assert finding.code == code
    return finding
