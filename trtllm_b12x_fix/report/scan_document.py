"""Scans as JSON. Fractions, never percent; what is not finite is null."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from trtllm_b12x_fix import __version__
from trtllm_b12x_fix.checkpoint.header import shown
from trtllm_b12x_fix.scan.matrix import MatrixRow
from trtllm_b12x_fix.scan.result import (
    BLIND,
    LayerSummary,
    ProjectionResult,
    ScanFinding,
    ScanResult,
    Verdict,
)
from trtllm_b12x_fix.scan.statistics import LIMIT, BakeDamage

SCHEMA = "trtllm-b12x-fix/scan/1"
SEVERAL_SCHEMA = "trtllm-b12x-fix/scans/1"


def to_json(results: Sequence[ScanResult], unusable: Sequence[tuple[str, str]] = ()) -> str:
    """One result as its document, several as a list in one; ends in a newline.

    Args:
        unusable: paths that could not be scanned, and why.
    """
    documents = [_document(result) for result in results]
    if len(documents) == 1 and not unusable:
        (document,) = documents
    else:
        verdicts = [verdict.value for verdict in Verdict]
        found = sorted({d["verdict"] for d in documents}, key=verdicts.index)
        document = {
            "schema": SEVERAL_SCHEMA,
            "verdict": "unusable" if unusable or not found else found[0],
            "reports": documents,
            "unusable": [{"source": path, "reason": reason} for path, reason in unusable],
        }
    text = io.StringIO()
    for piece in _rendered(document, "\n"):
        text.write(piece)
    return text.getvalue() + "\n"


def _rendered(value: Any, line: str) -> Iterator[str]:
    """JSON of which counts of bytes take one line, not 256; made piece by piece, since a checkpoint
    may have thousands of projections. Names come from files: a lone surrogate in one is escaped,
    since UTF-8 has none."""
    inner = line + "  "
    if isinstance(value, ProjectionResult):
        value = _projection(value)
    if isinstance(value, dict) and value:
        for place, (key, one) in enumerate(value.items()):
            yield f"{',' if place else '{'}{inner}{json.dumps(key)}: "
            yield from _rendered(one, inner)
        yield line + "}"
    elif isinstance(value, list) and value:
        for place, one in enumerate(value):
            yield f"{',' if place else '['}{inner}"
            yield from _rendered(one, inner)
        yield line + "]"
    elif isinstance(value, np.ndarray):
        yield json.dumps(value.tolist())
    else:
        text = shown(value) if isinstance(value, str) else value
        yield json.dumps(text, allow_nan=False)


def _document(result: ScanResult) -> dict[str, Any]:
    """A result as dicts and lists; projections are made documents when they are written."""
    totals = result.totals
    return {
        "schema": SCHEMA,
        "tool": __version__,
        "source": result.source,
        "verdict": result.verdict.value,
        "reason": result.reason,
        "advice": list(result.advice),
        "cannot_be_seen": BLIND,
        "limit_rms_error": LIMIT,
        "dialects": list(result.dialects),
        "quant_algo": result.quant_algo,
        "weights_read": result.weights_read,
        "totals": {
            "layers": totals.layers,
            "projections": totals.projections,
            "matrices": totals.matrices,
            "affected_projections": totals.affected_projections,
            "affected_matrices": totals.affected_matrices,
            "judged_matrices": totals.judged_matrices,
            "unjudged_matrices": totals.unjudged_matrices,
            "undecided_matrices": totals.undecided_matrices,
            "dense_matrices": totals.dense_matrices,
            "scale_bytes": totals.scale_bytes,
            "weight_bytes": totals.weight_bytes,
            **_damage(totals.damage),
        },
        "layers": [_layer(layer) for layer in result.layers],
        "projections": [*result.projections],
        "dense": [*result.dense],
        "findings": [_finding(finding) for finding in result.findings],
        "matrix": [_row(row) for row in result.matrix],
        "counting": {
            "backend": result.backend,
            "threads": result.threads,
            "seconds": number(result.seconds),
        },
    }


def number(value: float | None) -> float | None:
    """As in ``report.document``, which needs torch."""
    return value if value is not None and math.isfinite(value) else None


def _damage(damage: BakeDamage) -> dict[str, Any]:
    return {
        key: number(value) if isinstance(value, float) else value
        for key, value in asdict(damage).items()
    }


def _layer(layer: LayerSummary) -> dict[str, Any]:
    return {
        "layer": layer.layer,
        "number": layer.number,
        "stack": layer.stack.value,
        "matrices": layer.matrices,
        "affected_matrices": layer.affected,
        **_damage(layer.damage),
        "worst_projection": layer.worst_projection,
        "worst_expert": layer.worst_expert,
        "worst_rms_error": number(layer.worst_rms_error),
    }


def _projection(one: ProjectionResult) -> dict[str, Any]:
    low, high = one.weight_scale_2 or (None, None)
    return {
        "layer": one.layer,
        "number": one.number,
        "stack": one.stack.value,
        "projection": one.projection,
        "kind": one.kind.value,
        "matrices": one.matrices,
        "affected_matrices": one.affected,
        **_damage(one.damage),
        "weight_scale_2_min": number(low),
        "weight_scale_2_max": number(high),
        "saturated_fraction": one.saturated_fraction,
        "zero_blocks": one.zero_blocks,
        "assumed_zero_blocks": one.assumed_zero_blocks,
        "bake": one.bake.value,
        "worst": [
            {
                "expert": expert.expert,
                "weight_scale_2": number(expert.weight_scale_2),
                **_damage(expert.damage),
            }
            for expert in one.worst
        ],
        "stored_bytes": one.counts,
        "baked_bytes": one.baked,
    }


def _finding(finding: ScanFinding) -> dict[str, Any]:
    return {**asdict(finding), "severity": finding.severity.value}


def _row(row: MatrixRow) -> dict[str, Any]:
    return {
        "backend": row.backend.value,
        "tensor_parallel": row.tp,
        "shape": asdict(row.shape),
        "fit": row.fit.value,
        "intermediate": row.intermediate,
        "padded_intermediate": row.padded_intermediate or None,
        "padded_hidden": row.padded_hidden or None,
        "bakes": row.bakes,
        "notes": list(row.notes),
        "flashinfer": [asdict(version) for version in row.versions],
    }
