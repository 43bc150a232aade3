"""A parity run as JSON. The format is documented in the README."""

from __future__ import annotations

import json
from typing import Any

from trtllm_b12x_fix.metrics import Distance
from trtllm_b12x_fix.parity.arms import ArmResult, KernelReport
from trtllm_b12x_fix.parity.result import CaseResult, PreparationReport
from trtllm_b12x_fix.parity.suspects import REPORTED, Fault
from trtllm_b12x_fix.report.document import number
from trtllm_b12x_fix.report.parity import Parity

SCHEMA = "trtllm-b12x-fix/parity/1"


def to_json(result: Parity) -> str:
    """The whole result as a JSON document, ending in a newline."""
    return json.dumps(to_document(result), indent=2, allow_nan=False) + "\n"


def to_document(result: Parity) -> dict[str, Any]:
    """The whole result as plain dicts and lists; fractions, never percent."""
    return {
        "schema": SCHEMA,
        "verdict": result.verdict.value,
        "layers": {
            "origin": result.origin,
            "seed": result.seed,
            "experts": result.grid.experts,
            "top_k": result.grid.top_k,
        },
        "suspects": [
            {
                "name": suspect.value,
                "reported": suspect in REPORTED,
                "outcome": outcome,
                "found": list(found),
            }
            for suspect, outcome, found in result.outcomes()
        ],
        "preparation": _preparation(result.preparation, result.why_no_preparation),
        "kernels": _kernels(result.kernels, result.why_no_kernels),
    }


def _preparation(report: PreparationReport | None, why_not: str) -> dict[str, Any]:
    if report is None:
        return {"status": "not run", "why_not": why_not}
    return {
        "status": "emulated on the CPU",
        "why_not": None,
        "vllm": report.vllm,
        "flashinfer": report.flashinfer,
        "routing_weights": report.recovery.value,
        "stand_ins": list(report.stand_ins),
        "cases": [_case(case) for case in report.cases],
    }


def _case(case: CaseResult) -> dict[str, Any]:
    return {
        "activation": case.activation.value,
        "hidden": case.hidden,
        "padded_hidden": case.padded_hidden,
        "intermediate": case.intermediate,
        "padded_intermediate": case.padded_intermediate,
        "tokens": case.tokens,
        "path": case.path.value,
        "replay": case.replay.value,
        "router": case.regime.name,
        "faults": _faults(case.faults),
        "fidelity": _distance(case.fidelity),
        "true_error": _distance(case.true_error),
        "emulation_error": _distance(case.emulation_error),
        "refused": case.refused or None,
    }


def _kernels(report: KernelReport | None, why_not: str) -> dict[str, Any]:
    if report is None:
        return {"status": "not run", "why_not": why_not}
    return {
        "status": "ran",
        "why_not": None,
        "device": report.device,
        "flashinfer": report.flashinfer,
        "vllm": report.vllm or None,
        "named": _faults(report.named),
        "controls_failed": [
            {
                "activation": cell.activation.value,
                "hidden": cell.hidden,
                "intermediate": cell.intermediate,
                "tokens": cell.tokens,
            }
            for cell in report.controls_failed
        ],
        "arms": [_arm(result) for result in report.arms],
    }


def _arm(result: ArmResult) -> dict[str, Any]:
    return {
        "activation": result.cell.activation.value,
        "hidden": result.cell.hidden,
        "intermediate": result.cell.intermediate,
        "tokens": result.cell.tokens,
        "arm": result.arm.value,
        "status": result.status.value,
        "fidelity": _distance(result.fidelity),
        "true_error": _distance(result.true_error),
        "emulation_error": _distance(result.emulation_error),
        "noise": number(result.noise),
        "faults": _faults(result.faults),
        "detail": result.detail or None,
    }


def _faults(faults: tuple[Fault, ...]) -> list[dict[str, str]]:
    return [{"suspect": fault.suspect.value, "detail": fault.detail} for fault in faults]


def _distance(value: Distance | None) -> float | None:
    return None if value is None else number(value.relative_rms)
