"""The MoE layers of a checkpoint, as text and as JSON."""

from __future__ import annotations

import json
from typing import Any

from trtllm_b12x_fix.checkpoint.config import ModelConfig
from trtllm_b12x_fix.checkpoint.discovery import LayerEntry, Stack
from trtllm_b12x_fix.checkpoint.files import Checkpoint
from trtllm_b12x_fix.report.document import finding_document
from trtllm_b12x_fix.report.text import bullet, grid, paragraph, printable

SCHEMA = "trtllm-b12x-fix/list-layers/1"
_HEADER = [
    "layer",
    "experts",
    "hidden",
    "intermediate",
    "activation",
    "dialect",
    "storage",
    "prefix",
]


def to_json(entries: list[LayerEntry], checkpoint: Checkpoint) -> str:
    """The list as a JSON document, ending in a newline."""
    config = ModelConfig(checkpoint.config)
    document = {
        "schema": SCHEMA,
        "verdict": "good",
        "source": checkpoint.name,
        "layers": [_entry(entry, config.activation_name(entry)) for entry in entries],
        "findings": [finding_document(finding) for finding in checkpoint.findings],
    }
    return json.dumps(document, indent=2) + "\n"


def _entry(entry: LayerEntry, activation: str) -> dict[str, Any]:
    return {
        "number": entry.number,
        "prefix": entry.prefix,
        "stack": entry.stack.value,
        "experts": entry.experts,
        "hidden": entry.hidden,
        "intermediate": entry.intermediate,
        "gated": entry.is_gated,
        "activation": activation,
        "dialect": entry.dialect.value,
        "storage": entry.storage.value,
        "present": entry.present,
    }


def render(entries: list[LayerEntry], checkpoint: Checkpoint) -> str:
    """The list as a table, ending in a newline."""
    parts = []
    if entries:
        config = ModelConfig(checkpoint.config)
        rows = [_row(entry, config.activation_name(entry)) for entry in entries]
        parts.append(grid(_HEADER, rows, left=1))
    else:
        parts.append(
            paragraph(
                f"{checkpoint.name}: no NVFP4 mixture-of-experts layer, so nothing to check: "
                "unquantized experts and dense layers do not go through b12x's MoE kernels."
            )
        )
    if checkpoint.findings:
        parts.append("\n".join(bullet(finding.message) for finding in checkpoint.findings))
    return "\n\n".join(parts) + "\n"


def _row(entry: LayerEntry, activation: str) -> list[str]:
    number = "-" if entry.number is None else str(entry.number)
    return [
        number if entry.stack is Stack.MODEL else f"{number} (side stack)",
        str(entry.experts),
        str(entry.hidden),
        str(entry.intermediate),
        printable(activation),
        entry.dialect.value,
        entry.storage.value,
        printable(entry.prefix) + ("" if entry.present else "  (a shard is missing)"),
    ]
