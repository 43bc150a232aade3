"""A layer check as JSON. The format is documented in the README ("JSON of check-layer")."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from trtllm_b12x_fix.checkpoint.findings import Finding
from trtllm_b12x_fix.layer_check.result import (
    ArmResult,
    FamilyResult,
    GateOutcome,
    LayerCheckResult,
    OwnMagnitude,
)
from trtllm_b12x_fix.layer_check.scales import ScaleDamage
from trtllm_b12x_fix.metrics import Distance
from trtllm_b12x_fix.report import preset, real_kernels

SCHEMA = "trtllm-b12x-fix/check-layer/1"


def to_json(result: LayerCheckResult) -> str:
    """The whole result as a JSON document, ending in a newline."""
    return json.dumps(to_document(result), indent=2, allow_nan=False) + "\n"


def to_document(result: LayerCheckResult) -> dict[str, Any]:
    """The whole result as plain dicts and lists; fractions, never percent."""
    noise = {(family.rows, family.family): family.noise for family in result.families}
    return {
        "schema": SCHEMA,
        "verdict": result.verdict.value,
        "source": result.source,
        "layer": {**result.shape, "inputs": result.inputs},
        "flashinfer": {
            "version": result.flashinfer,
            "contract": result.contract_origin,
            "not_modelled": list(result.contract_exceptions),
            "fix": result.plan,
        },
        "evidence": _evidence(result),
        "input_scales": result.input_scales.value,
        "scales": {"fc1": _scales(result.fc1), "fc2": _scales(result.fc2)},
        "results": [
            _arm(arm, noise.get((arm.rows, arm.family)) if arm.family else None)
            for arm in result.results
        ],
        "families": [_family(family) for family in result.families],
        "gates": [_gate(gate) for gate in result.gates],
        "own_magnitude": _own(result.own_magnitude) if result.own_magnitude else None,
        "preset": preset.to_document(result.preset) if result.preset else None,
        "real_kernels": (
            real_kernels.to_document(result.real_kernels) if result.real_kernels else None
        ),
        "findings": [finding_document(finding) for finding in result.findings],
        "versions": result.versions,
        "seed": result.seed,
    }


def _evidence(result: LayerCheckResult) -> str:
    if result.ran_real_kernels:
        return f"emulated on {result.device}; real_kernels ran on it"
    return f"emulated on {result.device}; no FP4 kernel ran"


def number(value: float | None) -> float | None:
    """JSON has no NaN and no infinity: both become null."""
    return value if value is not None and math.isfinite(value) else None


def _distance(value: Distance | None) -> dict[str, Any] | None:
    if value is None:
        return None
    return {
        "relative_rms": number(value.relative_rms),
        "sqnr_db": number(value.sqnr_db),
        "cosine": number(value.cosine),
        "finite": not math.isnan(value.relative_rms),
    }


def _scales(scales: ScaleDamage) -> dict[str, Any]:
    return {
        key: number(value) if isinstance(value, float) else value
        for key, value in asdict(scales).items()
    }


def _arm(arm: ArmResult, noise: float | None) -> dict[str, Any]:
    return {
        "rows": arm.rows,
        "arm": arm.arm.value,
        "report_name": arm.arm.report_name,
        "strategy": arm.strategy.value,
        "kernel": arm.family.value if arm.family else None,
        "unavailable": arm.unavailable or None,
        "fidelity": _distance(arm.fidelity),
        "output_distance": _distance(arm.output_distance),
        "true_error": _distance(arm.true_error),
        "published": _distance(arm.published),
        "noise": number(noise),
        "codes_differing": arm.codes_differing,
        "first_divergence": arm.first_divergence.value if arm.first_divergence else None,
        "trap": arm.trap or None,
        "note": arm.note or None,
    }


def _family(family: FamilyResult) -> dict[str, Any]:
    return {
        "rows": family.rows,
        "kernel": family.family.value,
        "true_error": _distance(family.true_error),
        "noise": number(family.noise),
        "published": {
            "evaluation_order": number(family.evaluation_order),
            "summation": number(family.summation),
        },
        "layer_against_file_input_scales": number(family.input_scales),
    }


def _gate(gate: GateOutcome) -> dict[str, Any]:
    return {
        "arm": gate.arm.value,
        "limit": number(gate.limit),
        "worst": number(gate.worst),
        "worst_rows": gate.worst_rows or None,
        "passed": gate.passed,
        "reason": gate.reason or None,
    }


def finding_document(finding: Finding) -> dict[str, Any]:
    """One finding as a plain dict."""
    return {**asdict(finding), "severity": finding.severity.value}


def _own(own: OwnMagnitude) -> dict[str, Any]:
    return {
        "scales": {"fc1": _scales(own.fc1), "fc2": _scales(own.fc2)},
        "baked": _arm(own.baked, None),
    }
