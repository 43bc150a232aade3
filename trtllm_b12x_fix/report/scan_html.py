"""Scans as one HTML page: no script, nothing fetched, every text escaped."""

from __future__ import annotations

import html
from collections.abc import Sequence

import numpy as np

from trtllm_b12x_fix import __version__
from trtllm_b12x_fix.doctor.advisories import human_bytes
from trtllm_b12x_fix.report.text import percent, printable
from trtllm_b12x_fix.scan.result import BLIND, ProjectionResult, ScanResult
from trtllm_b12x_fix.scan.statistics import LIMIT, NAN, BakeDamage

_CHARTS, _ROWS = 12, 100
_WIDTH, _HEIGHT, _FOOT = 512, 96, 14
_SUBNORMAL_END = 8
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:76rem;margin:2rem auto;padding:0 1rem;
color:#1b1f24;background:#fff}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}
table{border-collapse:collapse;width:100%;font-size:.86rem}
th,td{text-align:right;padding:.2rem .6rem;border-bottom:1px solid #d8dee4;
overflow-wrap:anywhere;vertical-align:top}
th{background:#f6f8fa}.l{text-align:left}
.verdict{padding:.8rem 1rem;border-left:6px solid #57606a;background:#f6f8fa}
.broken,.affected{border-color:#b42318}.clean{border-color:#1a7f37}
.damage{color:#b42318;font-weight:600}.charts{display:flex;flex-wrap:wrap;gap:1rem}
figure{margin:0;max-width:32rem}figcaption{font-size:.82rem;overflow-wrap:anywhere}
svg{width:100%;height:auto;border:1px solid #d8dee4}
.zero{fill:#b42318}.sub{fill:#e08b2c}.norm{fill:#3b6ea8}.stored{fill:none;stroke:#57606a}
text{font:10px system-ui,sans-serif;fill:#57606a}
"""
_DAMAGE_HEADER = ("blocks", "baked to 0", "subnormal", "mean error", "RMS", "largest", "weights")


def to_html(results: Sequence[ScanResult], unusable: Sequence[tuple[str, str]] = ()) -> str:
    """The page for all checkpoints of a run.

    Args:
        unusable: paths that could not be scanned, and why.
    """
    sections = "".join(_section(result) for result in results)
    sections += "".join(
        f'<section><h1>{_text(path)}</h1><p class="verdict broken">unusable: {_text(why)}</p>'
        "</section>"
        for path, why in unusable
    )
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>NVFP4 block scales</title><style>{_STYLE}</style></head><body>{sections}"
        f"<footer><p>trtllm-b12x-fix {_text(__version__)}</p></footer></body></html>\n"
    )


def _text(value: object) -> str:
    """Names come from files: nothing in them may be markup or a control character."""
    return html.escape(printable(str(value)))


def _section(result: ScanResult) -> str:
    verdict = result.verdict.value
    advice = "".join(f"<li>{_text(step)}</li>" for step in result.advice)
    totals = result.totals
    dialects = ", ".join(result.dialects) or "none"
    codes = "read" if result.weights_read else "not read (--weights reads them)"
    answer = (
        f'<p class="verdict {_text(verdict)}"><strong>{_text(verdict)}</strong>: '
        f"{_text(result.reason)}</p><ul>{advice}</ul>"
    )
    read = (
        f"<p>{totals.layers} layers, {totals.matrices:,} matrices of experts, "
        f"{totals.dense_matrices:,} dense NVFP4 linears; dialects: {_text(dialects)}; "
        f"{human_bytes(totals.scale_bytes)} of block scales; codes {codes}. "
        f"A matrix counts as damaged from an RMS error of {percent(LIMIT)} on.</p>"
    )
    parts = [
        f"<h1>{_text(result.source)}</h1>",
        answer,
        read,
        f"<p>{_text(BLIND)}</p>",
        _charts(result.projections),
        _projections("Worst projections (figures of the worst matrix)", result.projections),
        _layers(result),
        _projections(
            "NVFP4 linears, dense by their names (such do not go through b12x's MoE kernels)",
            result.dense,
        ),
        _findings(result),
        _matrix(result),
    ]
    return f"<section>{''.join(parts)}</section>"


def _table(title: str, header: Sequence[str], rows: list[list[str]], left: int = 1) -> str:
    """A table of escaped cells; the first ``left`` columns are text."""
    if not rows:
        return ""

    def line(tag: str, cells: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=l' if i < left else ''}>{cell}</{tag}>" for i, cell in enumerate(cells)
        )

    shown = rows[:_ROWS]
    more = len(rows) - len(shown)
    body = "".join(f"<tr>{line('td', row)}</tr>" for row in shown)
    note = f"<p>and {more} more (--json has all)</p>" if more else ""
    return (
        f"<h2>{_text(title)}</h2><table><thead><tr>{line('th', header)}</tr></thead>"
        f"<tbody>{body}</tbody></table>{note}"
    )


def _figures(damage: BakeDamage) -> list[str]:
    weights = "-" if damage.weight_error is None else percent(damage.weight_error)
    fractions = (
        damage.zero_fraction,
        damage.subnormal_fraction,
        damage.mean_error,
        damage.rms_error,
        damage.max_error,
    )
    return [f"{damage.blocks:,}", *map(percent, fractions), weights]


def _projections(title: str, projections: tuple[ProjectionResult, ...]) -> str:
    rows = []
    for one in projections:
        worst = one.worst[0] if one.worst else None
        expert = "-" if worst is None or worst.expert is None else str(worst.expert)
        rows.append(
            [
                _text(f"{one.layer}.{one.projection}"),
                f"{one.matrices:,}",
                f"{one.affected:,}",
                expert,
                *_figures(worst.damage if worst else one.damage),
            ]
        )
    return _table(title, ("projection", "matrices", "damaged", "expert", *_DAMAGE_HEADER), rows)


def _layers(result: ScanResult) -> str:
    rows = [
        [_text(one.layer), f"{one.matrices:,}", f"{one.affected:,}", *_figures(one.damage)]
        for one in result.layers
    ]
    return _table("Layers", ("layer", "matrices", "damaged", *_DAMAGE_HEADER), rows)


def _findings(result: ScanResult) -> str:
    rows = [
        [
            f'<span class="{_text(one.severity.value)}">{_text(one.severity.value)}</span>',
            _text(one.code),
            _text(one.message),
            _text(one.tensor or one.file or one.layer),
            _text(one.advice),
            f"{one.count:,}",
        ]
        for one in result.findings
    ]
    header = ("severity", "finding", "what", "where first", "to do", "places")
    return _table("Findings", header, rows, left=5)


def _matrix(result: ScanResult) -> str:
    rows = []
    for row in result.matrix:
        traps = "; ".join(
            f"{v.version}: {', '.join(v.traps) or 'none known'}"
            + (f", second copy {human_bytes(v.second_copy_bytes)}" if v.second_copy_bytes else "")
            for v in row.versions
        )
        rows.append(
            [
                _text(row.backend.value),
                _text(row.shape),
                _text(row.fit.value),
                _text("; ".join(row.notes) or "-"),
                _text(traps or "-"),
                str(row.tp),
                f"{row.intermediate:,}",
                f"{row.padded_intermediate:,}" if row.padded_intermediate else "-",
                "rounded twice" if row.bakes else "intact",
            ]
        )
    header = (
        "backend", "shape", "fit", "notes", "FlashInfer (per rank)", "TP", "intermediate",
        "padded to", "scales",
    )  # fmt: skip
    return _table("Backends", header, rows, left=5)


def _charts(projections: tuple[ProjectionResult, ...]) -> str:
    figures = []
    for one in projections[:_CHARTS]:
        name = _text(f"{one.layer}.{one.projection}")
        damage = one.damage
        figures.append(
            f"<figure>{_chart(one)}<figcaption>{name}: {percent(damage.zero_fraction)} baked to 0, "
            f"{percent(damage.subnormal_fraction)} subnormal, all experts</figcaption></figure>"
        )
    if not figures:
        return ""
    return (
        "<h2>Distributions: stored scales (line) and baked ones (bars: zero red, subnormal "
        f"orange, normal blue), by E4M3 code</h2><div class=charts>{''.join(figures)}</div>"
    )


def _chart(one: ProjectionResult) -> str:
    """Both distributions over the 127 positive codes, each scaled to its own largest bar."""
    step = _WIDTH / NAN
    top = max(int(one.baked.max(initial=0)), 1)
    bars = []
    for code in np.flatnonzero(one.baked):
        height = max(_HEIGHT * int(one.baked[code]) / top, 0.5)
        kind = "zero" if code == 0 else "sub" if code < _SUBNORMAL_END else "norm"
        bars.append(
            f'<rect class={kind} x="{code * step:.1f}" y="{_HEIGHT - height:.1f}" '
            f'width="{step:.1f}" height="{height:.1f}"/>'
        )
    stored = one.counts[:NAN]
    peak = max(int(stored.max(initial=0)), 1)
    points = " ".join(
        f"{(code + 0.5) * step:.1f},{_HEIGHT - _HEIGHT * int(count) / peak:.1f}"
        for code, count in enumerate(stored)
    )
    marks = "".join(
        f'<text x="{code * step:.0f}" y="{_HEIGHT + 11}">{label}</text>'
        for code, label in ((0, "0"), (8, "2^-6"), (56, "1"), (112, "128"))
    )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT + _FOOT}" role="img">{"".join(bars)}'
        f'<polyline class=stored points="{points}"/>{marks}</svg>'
    )
