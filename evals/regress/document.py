"""A run as JSON, and an earlier run read back as a baseline. Fractions and nats, never percent."""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from evals.regress.generate import Generation, diverge
from evals.regress.judge import Baseline, Check, Verdict
from evals.regress.layer_errors import LayerErrors
from evals.regress.statistics import CONFIDENCE, DRAWS
from evals.regress.suite import Scored, Suite
from evals.regress.summary import ALL, FLOOR_CONFIDENCE, Comparison, Metrics, Summary
from trtllm_b12x_fix.emulator import grouped
from trtllm_b12x_fix.errors import InputError
from trtllm_b12x_fix.law import Powers

SCHEMA = "trtllm-b12x-fix/regress/1"
_PACKAGES = ("torch", "transformers", "gguf", "numpy", "scipy", "numba")


@dataclass(frozen=True)
class Run:
    """Everything a run found.

    Attributes:
        inputs: what was run on; a baseline with other inputs cannot be compared.
        moved: the powers that bring weights to the reported magnitude.
        same_bits: kernels that ran, and the kernels of all versions that compute the same.
    """

    suite: Suite
    inputs: dict[str, Any]
    moved: Powers
    seed: int
    device: torch.device
    scored: Sequence[Scored]
    summary: Summary
    layers: Sequence[LayerErrors]
    checks: Sequence[Check]
    verdict: Verdict
    seconds: float
    generations: Sequence[Generation] = ()
    comparisons: Sequence[Comparison] = ()
    same_bits: dict[str, list[str]] = field(default_factory=dict)


def to_document(run: Run) -> dict[str, Any]:
    """The run as plain dicts and lists."""
    return {
        "schema": SCHEMA,
        "verdict": run.verdict.value,
        "suite": run.suite.name.value,
        "inputs": run.inputs,
        "moved": vars(run.moved),
        "seed": run.seed,
        "evidence": evidence(run.device),
        "seconds": round(run.seconds, 1),
        "same_bits": run.same_bits,
        "intervals": {
            "method": "percentile bootstrap over documents, paired",
            "confidence": CONFIDENCE,
            "draws": DRAWS,
            "floor_confidence": FLOOR_CONFIDENCE,
        },
        "checks": [vars(check) for check in run.checks],
        "variants": [_variant(scored, run.summary) for scored in run.scored],
        "comparisons": [
            {
                "left": each.left.name,
                "right": each.right.name,
                "told_apart": [name for name in each.metrics if each.told_apart(name)],
                "metrics": _metrics(each.metrics),
            }
            for each in run.comparisons
        ],
        "floors": {
            arm.value: {name: _number(value) for name, value in run.summary.floor(arm).items()}
            for arm in dict.fromkeys(variant.arm for variant in run.summary.variants)
        },
        "layers": [_layer(layer) for layer in run.layers],
        "generations": _generations(run.generations),
    }


def evidence(device: torch.device) -> dict[str, Any]:
    """What ran where, with versions. Every b12x kernel is emulated."""
    on_gpu = device.type == "cuda"
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "kernels": "emulated",
        "device": torch.cuda.get_device_name(device) if on_gpu else f"CPU, {platform.machine()}",
        "threads": torch.get_num_threads(),
        "products": grouped.describe(device, weights=0),
        "versions": versions,
    }


def load_baseline(path: Path, suite: Suite, inputs: dict[str, Any]) -> Baseline:
    """What an earlier run of the same suite on the same inputs found.

    Raises:
        InputError: not readable, another format, or a run on other inputs.
    """
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(
            f"{path}: no baseline of the suite {suite.name.value!r}; --write-baseline makes one"
        ) from error
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(stored, dict) or stored.get("schema") != SCHEMA:
        raise InputError(f"{path}: not a result of this program ({SCHEMA})")
    # A file may have another name; its content may not differ.
    hashes = [key for key in inputs if key.endswith("sha256")]
    differing = [key for key in hashes if stored["inputs"].get(key) != inputs[key]]
    if stored["suite"] != suite.name.value:
        differing.insert(0, "suite")
    if differing:
        raise InputError(
            f"{path} was made on other inputs ({', '.join(differing)} differ): nothing to compare "
            "with. Run on its inputs, or make a new baseline with --write-baseline"
        )
    values = {
        each["name"]: {metric: _read(found[0]) for metric, found in each["metrics"][ALL].items()}
        for each in stored["variants"]
        if each["metrics"]
    }
    floors = {
        arm: {metric: _read(value) for metric, value in found.items()}
        for arm, found in stored["floors"].items()
    }
    return Baseline(values, floors)


def _read(value: float | None) -> float:
    return math.nan if value is None else float(value)


def dump(document: dict[str, Any]) -> str:
    """JSON text, ending in a newline; rows of numbers stay on one line."""
    return _pretty(document, 0) + "\n"


def _pretty(value: Any, depth: int) -> str:
    flat = json.dumps(value, allow_nan=False)
    if len(flat) <= 96 or not isinstance(value, (dict, list)) or not value:
        return flat
    pad, end = "  " * (depth + 1), "  " * depth
    if isinstance(value, dict):
        rows = [f"{json.dumps(key)}: {_pretty(item, depth + 1)}" for key, item in value.items()]
        return "{\n" + ",\n".join(pad + row for row in rows) + "\n" + end + "}"
    if all(isinstance(item, (int, float, type(None))) for item in value):
        return flat
    rows = [_pretty(item, depth + 1) for item in value]
    return "[\n" + ",\n".join(pad + row for row in rows) + "\n" + end + "]"


def _variant(scored: Scored, summary: Summary) -> dict[str, Any]:
    variant = scored.variant
    ran = scored.scores is not None
    return {
        "name": variant.name,
        "arm": variant.arm.value,
        "kernel": str(variant.kernel) if variant.kernel else None,
        "powers": vars(variant.powers),
        "order": variant.seed,
        "not_run": scored.not_run or None,
        "seconds": round(scored.seconds, 2),
        "states_sha256": scored.scores.states_sha256 if scored.scores else None,
        "metrics": {group: _metrics(summary.metrics(variant, group)) for group in summary.groups}
        if ran
        else None,
    }


def _metrics(metrics: Metrics) -> dict[str, list[float | None]]:
    """[value, low, high] of each."""
    return {name: [_number(v) for v in (e.value, e.low, e.high)] for name, e in metrics.items()}


def _layer(layer: LayerErrors) -> dict[str, Any]:
    return {
        "number": layer.number,
        "reported": vars(layer.reported),
        "baked": [_number(value) for value in layer.baked],
        "baked_at_reported": _number(layer.baked_at_reported),
        "violations": layer.violations,
    }


def _generations(generations: Sequence[Generation]) -> list[dict[str, Any]]:
    if not generations:
        return []
    base = generations[0].tokens
    documents: list[dict[str, Any]] = []
    for each in generations:
        if each.not_run:
            documents.append({"name": each.variant.name, "not_run": each.not_run})
            continue
        divergence = diverge(each.tokens, base)
        documents.append(
            {
                "name": each.variant.name,
                "not_run": None,
                "seconds": round(each.seconds, 1),
                "identical": _number(divergence.identical),
                "first_divergence": divergence.first,
                "length_shift": divergence.length_shift,
            }
        )
    return documents


def _number(value: float) -> float | None:
    """Six significant digits; ``None`` for what is not finite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
