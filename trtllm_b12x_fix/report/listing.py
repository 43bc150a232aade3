"""The MoE layers of a checkpoint, as text and as JSON."""

from __future__ import annotations

import json
from typing import Any

from trtllm_b12x_fix.checkpoint.config import ModelConfig
from trtllm_b12x_fix.checkpoint.files import Checkpoint
from trtllm_b12x_fix.checkpoint.findings import Finding, Severity
from trtllm_b12x_fix.checkpoint.layers import LayerEntry, Layers, Stack, UnusableLayer
from trtllm_b12x_fix.layer_check.result import Verdict
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


def verdict(layers: Layers, checkpoint: Checkpoint) -> Verdict:
    """A finding where a layer cannot be checked, or where a part of one is missing."""
    damaged = any(one.severity is Severity.DAMAGE for one in _findings(layers, checkpoint))
    return Verdict.FINDING if damaged else Verdict.GOOD


def to_json(layers: Layers, checkpoint: Checkpoint) -> str:
    """The list as a JSON document, ending in a newline."""
    config = ModelConfig(checkpoint.config)
    document = {
        "schema": SCHEMA,
        "verdict": verdict(layers, checkpoint).value,
        "source": checkpoint.name,
        "layers": [_entry(entry, config.activation_name(entry)) for entry in layers.usable],
        "findings": [finding_document(finding) for finding in _findings(layers, checkpoint)],
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


def _findings(layers: Layers, checkpoint: Checkpoint) -> list[Finding]:
    config = ModelConfig(checkpoint.config)
    own = [one for entry in layers.usable for one in _of_layer(entry, config)]
    return [*checkpoint.findings, *own, *map(_cannot_be_checked, layers.unusable)]


def _of_layer(entry: LayerEntry, config: ModelConfig) -> list[Finding]:
    # Sizes that every layer has otherwise than the config says are no news in a list of sizes.
    claims = [one for one in config.contradictions(entry) if one.severity is Severity.DAMAGE]
    return [*claims, *entry.findings]


def said(finding: Finding) -> str:
    """A finding in one line, with its place."""
    place = finding.tensor or finding.file
    return f"{place}: {finding.message}" if place else finding.message


def _cannot_be_checked(layer: UnusableLayer) -> Finding:
    return Finding(
        Severity.DAMAGE,
        "layer-cannot-be-checked",
        f"{layer.prefix} cannot be checked: {layer.reason}",
        layer=layer.prefix,
    )


def render(layers: Layers, checkpoint: Checkpoint) -> str:
    """The list as a table, ending in a newline."""
    parts = []
    if layers.usable:
        config = ModelConfig(checkpoint.config)
        lost = "partly in other shards" if checkpoint.partial else "a shard is missing"
        rows = [_row(entry, config.activation_name(entry), lost) for entry in layers.usable]
        parts.append(grid(_HEADER, rows, left=1))
    elif not layers.unusable:
        parts.append(
            paragraph(
                f"{checkpoint.name}: no NVFP4 mixture-of-experts layer, so nothing to check: "
                "unquantized experts and dense layers do not go through b12x's MoE kernels."
            )
        )
    if findings := _findings(layers, checkpoint):
        parts.append("\n".join(bullet(said(finding)) for finding in findings))
    return "\n\n".join(parts) + "\n"


def _row(entry: LayerEntry, activation: str, lost: str) -> list[str]:
    number = "-" if entry.number is None else str(entry.number)
    return [
        number if entry.stack is Stack.MODEL else f"{number} (side stack)",
        str(entry.experts),
        str(entry.hidden),
        str(entry.intermediate),
        printable(activation),
        entry.dialect.value,
        entry.storage.value,
        printable(entry.prefix) + ("" if entry.present else f"  ({lost})"),
    ]
