"""The real kernels' part of a layer check's report: text and JSON."""

from __future__ import annotations

import math
from typing import Any

from trtllm_b12x_fix.layer_check.real_result import (
    ArmStatus,
    RealArm,
    RealKernelsResult,
    RunStatus,
)
from trtllm_b12x_fix.metrics import Distance
from trtllm_b12x_fix.report.text import bullet, grid, paragraph, percent, printable, span

_HEADER = [
    "rows",
    "real kernel",
    "arm",
    "vs emulated",
    "true error",
    "noise",
    "time",
    "first call",
    "peak",
    "status",
]
_FORCED_HEADER = ["forced", "arm", "at rows", "vs emulated", "true error", "noise", "time"]

_LEGEND = (
    "vs emulated: the real output against the emulated one, same kernel and arguments. noise: "
    "largest distance between runs on one input. time: median of calls, warm caches; first call: "
    "with the kernel's compilation unless an earlier arm had it compiled. peak: memory beyond what "
    "was allocated before the wrapper was built."
)


def render(result: RealKernelsResult) -> str:
    """The text: one line where the kernels did not run, else two tables and their notes."""
    if result.status is RunStatus.NOT_RUN:
        return paragraph(f"real kernels: not run: {result.why_not}")
    title = printable(f"real kernels: FlashInfer {result.flashinfer} on {result.device}")
    own = [_row(arm) for arm in _ran(result) if arm.forced is None]
    forced = _forced_rows(result)
    parts = [title]
    if own:
        parts.append(grid(_HEADER, own, left=3))
    if forced:
        parts.append(grid(_FORCED_HEADER, forced, left=3))
    notes = _notes(result)
    if notes:
        parts.append("\n".join(notes))
    parts.append(paragraph(_LEGEND))
    return "\n\n".join(parts)


def _ran(result: RealKernelsResult) -> list[RealArm]:
    return [arm for arm in result.arms if arm.family is not None]


def _row(arm: RealArm) -> list[str]:
    return [
        str(arm.rows),
        arm.family.value if arm.family else "-",
        arm.arm.value,
        _percent(arm.vs_emulated),
        _percent(arm.true_error),
        "-" if arm.noise is None else percent(arm.noise),
        _duration(arm.time_s),
        _duration(arm.first_call_s),
        _size(arm.peak_bytes),
        arm.status.value,
    ]


def _forced_rows(result: RealKernelsResult) -> list[list[str]]:
    """One line for each forced family and arm, over all row counts at which it ran."""
    groups: dict[tuple[str, str], list[RealArm]] = {}
    for arm in _ran(result):
        if arm.forced is not None:
            groups.setdefault((arm.forced.value, arm.arm.value), []).append(arm)
    rows = []
    for (family, name), arms in groups.items():
        times = [_duration(arm.time_s) for arm in (arms[0], arms[-1])]
        rows.append(
            [
                family,
                name,
                ",".join(str(arm.rows) for arm in arms),
                _span([arm.vs_emulated for arm in arms]),
                _span([arm.true_error for arm in arms]),
                span([arm.noise for arm in arms if arm.noise is not None] or [math.nan]),
                times[0] if len(arms) == 1 else " to ".join(times),
            ]
        )
    return rows


def _notes(result: RealKernelsResult) -> list[str]:
    """Why arms are missing or wrong, each reason once."""
    places: dict[str, list[RealArm]] = {}
    for arm in result.arms:
        if arm.status is not ArmStatus.OK:
            places.setdefault(arm.status_text, []).append(arm)
    notes = [] if not places else ["notes on the real kernels"]
    return notes + [bullet(f"{_places(arms)}: {text}") for text, arms in places.items()]


def _places(arms: list[RealArm]) -> str:
    rows: dict[str, list[str]] = {}
    for arm in arms:
        kernel = arm.forced.value if arm.forced else "own choice"
        rows.setdefault(f"{arm.arm.value}, {kernel}", []).append(str(arm.rows))
    return "; ".join(f"{name}, rows {','.join(counts)}" for name, counts in rows.items())


def _percent(value: Distance | None) -> str:
    if value is None:
        return "-"
    return "exact" if value.relative_rms == 0 else percent(value.relative_rms)


def _span(values: list[Distance | None]) -> str:
    return span([value.relative_rms for value in values if value is not None] or [math.nan])


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 0.01:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _size(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:.1f} MiB"


def to_document(result: RealKernelsResult) -> dict[str, Any]:
    """The value of ``real_kernels``: distances are relative RMS, as fractions."""
    return {
        "status": result.status.value,
        "why_not": result.why_not or None,
        "device": result.device or None,
        "flashinfer": result.flashinfer or None,
        "arms": [_arm(arm) for arm in result.arms],
    }


def _arm(arm: RealArm) -> dict[str, Any]:
    return {
        "arm": arm.arm.value,
        "family": arm.family.value if arm.family else None,
        "forced": arm.forced.value if arm.forced else None,
        "rows": arm.rows,
        "noise": _number(arm.noise),
        "vs_emulated": _number(arm.vs_emulated.relative_rms if arm.vs_emulated else None),
        "true_error": _number(arm.true_error.relative_rms if arm.true_error else None),
        "time_s": _number(arm.time_s),
        "first_call_s": _number(arm.first_call_s),
        "peak_bytes": arm.peak_bytes,
        "status": arm.status_text,
    }


def _number(value: float | None) -> float | None:
    # JSON has no NaN and no infinity; report.document has the same for its own figures.
    return value if value is not None and math.isfinite(value) else None
