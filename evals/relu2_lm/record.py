"""Outcomes as JSON: accuracies, paired comparisons, and who was right about what."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from evals.relu2_lm.arms import Magnitude
from evals.relu2_lm.evaluate import PROBLEM_SEED, SPLITS, Case, Emulated, Outcome, Plain, Subject
from evals.relu2_lm.problems import Problem
from evals.relu2_lm.statistics import compare, mean
from trtllm_b12x_fix.law import move_layer
from trtllm_b12x_fix.layer import Projection
from trtllm_b12x_fix.layer_check.scales import damage

SCHEMA = "trtllm-b12x-fix/relu2-lm/1"


def record(
    given: Subject, outcomes: Sequence[Outcome], left_out: Sequence[tuple[Case, str]]
) -> dict[str, Any]:
    """Everything that was measured, and on what."""
    return {
        "schema": SCHEMA,
        "device": device_name(given.model.lm_head.weight.device),
        "dtype": str(given.model.lm_head.weight.dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "problem_seed": PROBLEM_SEED,
        "problems": len(given.problems),
        "kernels": "emulated",
        "layers": {str(n): _layer(given, n) for n in given.layers},
        "cases": [_outcome(given.problems, outcome, outcomes) for outcome in outcomes],
        "left_out": [{**describe(case), "why": why} for case, why in left_out],
    }


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads, {platform.machine()}"


def _layer(given: Subject, number: int) -> dict[str, Any]:
    layer = given.layers[number]
    found: dict[str, Any] = {}
    for projection in Projection:
        scales = layer.projection(projection).weight_scale_2
        found[projection.value] = {
            "weight_scale_2": float(scales.log2().mean().exp2()),
            "baked": {m.value: _damage(given, number, projection, m) for m in Magnitude},
        }
    return found


def _damage(
    given: Subject, number: int, projection: Projection, magnitude: Magnitude
) -> dict[str, Any]:
    layer = given.layers[number]
    powers = magnitude.powers(layer)
    counted = damage(move_layer(layer, powers).projection(projection))
    return {
        "moved_by": powers.k if projection is Projection.FC1 else powers.j,
        "zero_fraction": counted.zero_fraction,
        "mean_relative_error": counted.mean_relative_error,
    }


def describe(case: Case) -> dict[str, Any]:
    """A case as JSON."""
    if isinstance(case, Plain):
        return {"arm": case.value}
    return {
        "arm": case.arm_name,
        "flashinfer": case.version,
        "step_tokens": case.tokens,
        "magnitude": case.magnitude.value,
        "order_seed": case.order_seed,
    }


def _outcome(
    problems: Sequence[Problem], outcome: Outcome, every: Sequence[Outcome]
) -> dict[str, Any]:
    shares = {
        split.value: [r for r, p in zip(outcome.right, problems, strict=True) if p.split is split]
        for split in SPLITS
    }
    found: dict[str, Any] = {
        **describe(outcome.case),
        "accuracy": sum(outcome.right) / len(outcome.right),
        "accuracy_by_split": {name: sum(s) / len(s) for name, s in shares.items() if s},
        "kl_from_bf16": asdict(mean(outcome.divergence)),
        "seconds": outcome.seconds,
        "right": bits(outcome.right),
    }
    for name, baseline in _baselines(outcome, every).items():
        found[name] = asdict(compare(outcome.right, baseline.right))
        rise = np.subtract(outcome.divergence, baseline.divergence)
        found[name]["kl_difference"] = asdict(mean(rise))
    return found


def _baselines(outcome: Outcome, every: Sequence[Outcome]) -> dict[str, Outcome]:
    """bf16, and for an arm the reference of the same kernel and magnitude in slot order."""
    found = {}
    for other in every:
        if other.case is Plain.BF16 and outcome.case is not Plain.BF16:
            found["against_bf16"] = other
        if isinstance(outcome.case, Emulated) and isinstance(other.case, Emulated):
            same = (other.case.version, other.case.tokens, other.case.magnitude) == (
                outcome.case.version, outcome.case.tokens, outcome.case.magnitude
            )  # fmt: skip
            plain = other.case.arm is None and other.case.order_seed is None
            if same and plain and other is not outcome:
                found["against_reference"] = other
    return found


def bits(right: Sequence[bool]) -> str:
    """Right or wrong per problem as hexadecimal digits, first problem first."""
    padded = [*right, *[False] * (-len(right) % 4)]
    nibbles = (padded[i : i + 4] for i in range(0, len(padded), 4))
    return "".join(f"{sum(b << (3 - n) for n, b in enumerate(nibble)):x}" for nibble in nibbles)


def unpack_bits(text: str, count: int) -> list[bool]:
    """Back from :func:`bits`."""
    return [bool(int(digit, 16) >> (3 - n) & 1) for digit in text for n in range(4)][:count]
