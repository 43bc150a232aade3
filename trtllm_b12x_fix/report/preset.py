"""A made-up layer's part of the report: published figures beside what came out, and the caveat."""

from __future__ import annotations

from typing import Any

from trtllm_b12x_fix.layer_check.result import MeasuredFigure, PresetReport
from trtllm_b12x_fix.presets.published import Quantity
from trtllm_b12x_fix.report.text import grid, paragraph, percent

_HEADER = ["figure", "published", "source", "here", "role"]


def render(preset: PresetReport) -> str:
    """The preset's table and what may be concluded from it, as plain text."""
    made = f"{preset.experts_made} of {preset.experts} experts made"
    parts = [f"preset {preset.name} ({made})"]
    if preset.figures:
        parts.append(grid(_HEADER, [_row(figure) for figure in preset.figures], left=1))
    if preset.true_error_ratios:
        ratios = ", ".join(f"{ratio:.2f} at {rows}" for rows, ratio in preset.true_error_ratios)
        parts.append(paragraph(f"true error, baked over exact scales, by rows: {ratios}."))
    if preset.changed:
        changes = "; ".join(preset.changed)
        parts.append(
            paragraph(f"Not the published shape ({changes}): its figures are not this layer's.")
        )
    parts.append(paragraph(f"{preset.caveat}."))
    return "\n".join(parts)


def to_document(preset: PresetReport) -> dict[str, Any]:
    """The same as plain dicts and lists; fractions, never percent."""
    return {
        "name": preset.name,
        "origin": preset.origin,
        "caveat": preset.caveat,
        "changed": list(preset.changed),
        "experts_made": preset.experts_made,
        "experts": preset.experts,
        "figures": [
            {
                "name": figure.published.quantity.value,
                "published": [figure.published.low, figure.published.high],
                "source": figure.published.source,
                "role": figure.published.role.value,
                "measured": list(figure.measured) if figure.measured else None,
            }
            for figure in preset.figures
        ],
        "true_error_baked_over_exact": [
            {"rows": rows, "ratio": ratio} for rows, ratio in preset.true_error_ratios
        ],
    }


def _row(figure: MeasuredFigure) -> list[str]:
    published = figure.published
    measured = "not run"
    if figure.measured is not None:
        measured = _interval(published.quantity, *figure.measured)
    return [
        published.quantity.value,
        _interval(published.quantity, published.low, published.high),
        published.source,
        measured,
        published.role.value,
    ]


def _interval(quantity: Quantity, low: float, high: float) -> str:
    def one(value: float) -> str:
        return f"{value:.1e}" if quantity is Quantity.WEIGHT_SCALE_2 else percent(value)

    first, last = one(low), one(high)
    return first if first == last else f"{first} to {last}"
