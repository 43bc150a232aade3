"""A scan as plain text: the answer first, then the worst, then everything else in short."""

from __future__ import annotations

from trtllm_b12x_fix.checkpoint.findings import Severity
from trtllm_b12x_fix.checkpoint.layers import Stack
from trtllm_b12x_fix.doctor.advisories import human_bytes
from trtllm_b12x_fix.report.text import bullet, grid, labelled, paragraph, percent, printable
from trtllm_b12x_fix.scan.matrix import Fit, MatrixRow
from trtllm_b12x_fix.scan.result import (
    BLIND,
    ExpertDamage,
    Kind,
    LayerSummary,
    ProjectionResult,
    ScanFinding,
    ScanResult,
    Verdict,
)
from trtllm_b12x_fix.scan.statistics import LIMIT, BakeDamage
from trtllm_b12x_fix.scan.verdict import COMMAND

_SHOWN_PROJECTIONS, _SHOWN_LAYERS, _SHOWN_DENSE, _SHOWN_FINDINGS = 10, 16, 5, 30
_NAME = 100
_DAMAGE_HEADER = ["blocks", "baked to 0", "subnormal", "mean error", "RMS", "largest"]


def render(result: ScanResult) -> str:
    """The report of one checkpoint, ending in a newline."""
    parts = [_head(result), _answer(result)]
    if result.projections:
        parts += [_projections(result), _layers(result)]
    if result.dense:
        parts.append(_dense(result))
    if result.matrix:
        parts.append(_matrix(result.matrix))
    parts.append(_notes(result))
    return "\n\n".join(parts) + "\n"


def count(number: int, one: str, many: str = "") -> str:
    """A number and its noun."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _head(result: ScanResult) -> str:
    totals = result.totals
    what = (
        f"{count(totals.layers, 'layer')} of NVFP4 experts, "
        f"{count(totals.matrices, 'expert matrix', 'expert matrices')}, "
        f"{count(totals.dense_matrices, 'dense NVFP4 linear')}"
    )
    made = ", ".join(result.dialects) or "no NVFP4 tensors"
    if result.quant_algo:
        made += f", {result.quant_algo}"
    read = f"{human_bytes(totals.scale_bytes)} of block scales"
    if result.weights_read:
        read += f" and {human_bytes(totals.weight_bytes)} of codes"
    if not totals.scale_bytes:
        read = "no block scales"
    rate = (totals.scale_bytes + totals.weight_bytes) / max(result.seconds, 1e-9) / 1e9
    lines = [
        labelled("file", f"{result.source}: {what} ({made})"),
        labelled(
            "read",
            f"{read} in {result.seconds:.1f} s ({rate:.2f} GB/s, {result.threads} threads, "
            f"{result.backend}); no GPU, no kernel ran",
        ),
    ]
    return "\n".join(lines)


def _answer(result: ScanResult) -> str:
    lines = [labelled("VERDICT", f"{result.verdict.value}: {result.reason}")]
    for place, step in enumerate(result.advice):
        label = "to do" if place == 0 else ""
        words, found, command = step.partition(COMMAND)
        lines.append(labelled(label, words.strip()))
        if found:  # to be copied: not wrapped
            lines.append(" " * 9 + printable(f"{found}{command}"))
    if result.verdict is Verdict.CLEAN and result.findings:
        notes = count(len(result.findings), "note")
        lines.append(labelled("", f"{notes} below: what else was seen"))
    return "\n".join(lines)


def _projections(result: ScanResult) -> str:
    shown = result.projections[:_SHOWN_PROJECTIONS]
    header = ["worst projections", "matrices", "damaged", "worst", *_DAMAGE_HEADER[1:]]
    rows = []
    for one in shown:
        worst = one.worst[0] if one.worst else None
        rows.append(
            [
                _name(one),
                f"{one.matrices:,}",
                f"{one.affected:,}",
                _expert(worst),
                *_figures(worst.damage if worst else one.damage)[1:],
            ]
        )
    text = grid(header, rows, left=1)
    rest = len(result.projections) - len(shown)
    note = (
        "Figures are of the worst matrix of each projection: one destroyed expert would vanish in "
        f"a mean. Damaged: RMS error of its block scales above {percent(LIMIT)}."
    )
    if rest > 0:
        note += f" {rest} more projections are better than these; --json has all."
    return f"{text}\n{paragraph(note)}"


def _name(one: ProjectionResult) -> str:
    unusable = " (unusable layer)" if one.kind is Kind.UNUSABLE else ""
    return f"{_short(f'{one.layer}.{one.projection}')}{unusable}"


def _short(name: str) -> str:
    """A name for a table: one from a file may be longer than any screen."""
    text = printable(name)
    half = _NAME // 2 - 2
    return text if len(text) <= _NAME else f"{text[:half]}...{text[-half:]}"


def _expert(worst: ExpertDamage | None) -> str:
    if worst is None:
        return "none usable"
    return "-" if worst.expert is None else f"expert {worst.expert}"


def _figures(damage: BakeDamage) -> list[str]:
    return [
        f"{damage.blocks:,}",
        percent(damage.zero_fraction),
        percent(damage.subnormal_fraction),
        percent(damage.mean_error),
        percent(damage.rms_error),
        percent(damage.max_error),
    ]


def _layers(result: ScanResult) -> str:
    shown = result.layers[:_SHOWN_LAYERS]
    weights = result.weights_read
    header = ["layer", "matrices", "damaged", *_DAMAGE_HEADER]
    rows = [[_layer_name(one), f"{one.matrices:,}", f"{one.affected:,}", *_figures(one.damage)]
            for one in shown]  # fmt: skip
    total = result.totals
    rows.append(
        ["all", f"{total.matrices:,}", f"{total.affected_matrices:,}", *_figures(total.damage)]
    )
    if weights:
        header.append("weights")
        for row, damage in zip(rows, [*(o.damage for o in shown), total.damage], strict=True):
            row.append("-" if damage.weight_error is None else percent(damage.weight_error))
    text = grid(header, rows, left=1)
    rest = len(result.layers) - len(shown)
    if rest > 0:
        text += "\n" + paragraph(f"{rest} more layers are better than these; --json has all.")
    if weights:
        text += "\n" + paragraph(
            "weights: relative RMS error of the dequantized weights. All-zero blocks are left out."
        )
    else:
        text += "\n" + paragraph(_assumption(result))
    return text


def _assumption(result: ScanResult) -> str:
    assumed = sum(one.assumed_zero_blocks for one in result.projections)
    return (
        "Codes were not read (--weights reads them): blocks of scale 0 are left out, and of blocks "
        "of scale 1.0, which ModelOpt gives to all-zero blocks, those that tower above their "
        f"neighbours in the histogram: {assumed:,} here."
    )


def _layer_name(layer: LayerSummary) -> str:
    if layer.number is not None and layer.stack is Stack.MODEL:
        return f"{layer.number}"
    return _short(layer.layer)


def _dense(result: ScanResult) -> str:
    header = ["dense NVFP4 linears, worst", *_DAMAGE_HEADER]
    rows = [[_name(one), *_figures(one.damage)] for one in result.dense[:_SHOWN_DENSE]]
    return grid(header, rows, left=1) + "\n" + paragraph(
        f"{len(result.dense)} in all, dense by their names. Such do not go through b12x's MoE "
        "kernels and keep their scales; the figures say what the same bake would do to them."
    )  # fmt: skip


def _matrix(rows: tuple[MatrixRow, ...]) -> str:
    header = ["backend", "TP", "shape", "a rank's part", "scales", "notes"]
    table, seen, notes = [], "", []
    for row in rows:
        shape = str(row.shape)
        marks = []
        for note in row.notes:
            if note not in notes:
                notes.append(note)
            marks.append(f"({notes.index(note) + 1})")
        table.append(
            [
                row.backend.value,
                str(row.tp),
                shape if shape != seen else "",
                _part(row),
                "rounded twice" if row.bakes else "intact",
                " ".join(marks) or "-",
            ]
        )
        seen = shape
    text = grid(header, table, left=1)
    lines = [f"({i + 1}) {note}" for i, note in enumerate(notes)]
    lines += _versions(rows)
    return "\n".join([text, *map(paragraph, lines)])


def _part(row: MatrixRow) -> str:
    if row.fit is Fit.IMPOSSIBLE:
        return "impossible"
    text = f"intermediate {row.intermediate}"
    if row.padded_intermediate != row.intermediate:
        text += f" padded to {row.padded_intermediate}"
    return text if row.fit is Fit.PADDED else f"{text}, aligned"


def _versions(rows: tuple[MatrixRow, ...]) -> list[str]:
    """What FlashInfer's versions have in store for the most frequent shape."""
    mine = [row for row in rows if row.shape == rows[0].shape and row.versions]
    lines = []
    for place, version in enumerate(mine[0].versions if mine else ()):
        met: dict[str, list[int]] = {}
        copies = []
        for row in mine:
            here = row.versions[place]
            for trap in here.traps:
                met.setdefault(trap, []).append(row.tp)
            if here.second_copy_bytes:
                copies.append(f"{human_bytes(here.second_copy_bytes)} at TP {row.tp}")
        traps = ", ".join(
            trap if len(sizes) == len(mine) else f"{trap} (at TP {', '.join(map(str, sizes))})"
            for trap, sizes in met.items()
        )
        second = f"; second copies per rank: {', '.join(copies)}" if copies else ""
        lines.append(f"b12x of FlashInfer {version.version}: {traps or 'none known'}{second}")
    return lines


def _notes(result: ScanResult) -> str:
    parts = []
    if result.findings:
        counts = [
            f"{sum(f.severity is severity for f in result.findings)} {word}"
            for severity, word in ((Severity.DAMAGE, "of damage"), (Severity.NOTE, "notes"))
        ]
        lines = [f"findings ({', '.join(counts)})"]
        lines += [_finding(finding) for finding in result.findings[:_SHOWN_FINDINGS]]
        rest = len(result.findings) - _SHOWN_FINDINGS
        if rest > 0:
            lines.append(bullet(f"and {rest} more; --json has all"))
        parts.append("\n".join(lines))
    parts.append(paragraph(BLIND))
    return "\n\n".join(parts)


def _finding(finding: ScanFinding) -> str:
    text = f"{finding.severity.value.upper()} {finding.code}: {finding.message}"
    return bullet(f"{text}. To do: {finding.advice}" if finding.advice else text)
