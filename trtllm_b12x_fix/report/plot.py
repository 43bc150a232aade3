"""A layer check as one self-contained SVG."""

from __future__ import annotations

import io
import math
import warnings
from typing import Any

from trtllm_b12x_fix.errors import MATPLOTLIB_MISSING, MissingDependencyError
from trtllm_b12x_fix.layer_check.arms import Arm
from trtllm_b12x_fix.layer_check.result import LayerCheckResult
from trtllm_b12x_fix.report.text import printable

# Okabe-Ito colours: told apart by colour-blind readers and in grey print.
_COLOURS = {
    Arm.FIX: "#009E73",
    Arm.BAKED: "#D55E00",
    Arm.ALPHAS: "#0072B2",
    Arm.FP32_RESCALE: "#CC79A7",
    Arm.UNIT: "#E69F00",
}


def to_svg(result: LayerCheckResult) -> str:
    """True error of every arm by row count, beside the exact-scale kernel's, as SVG text.

    Raises:
        MissingDependencyError: matplotlib is not importable.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(MATPLOTLIB_MISSING) from error
    # A fixed salt and no date make the file depend on the figures alone.
    with mpl.rc_context({"svg.hashsalt": "trtllm-b12x-fix", "svg.fonttype": "none"}):
        figure = Figure(figsize=(9, 4.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        _fidelity(left, result)
        _true_error(right, result)
        # "$" starts mathematics in matplotlib's text; a file's name may hold one.
        title = f"{printable(result.source)}\nFlashInfer {printable(result.flashinfer)}, emulated"
        figure.suptitle(title.replace("$", r"\$"), fontsize=10)
        buffer = io.StringIO()
        with warnings.catch_warnings():
            # Text stays text in the SVG: the viewer's fonts count, not those found here.
            warnings.filterwarnings("ignore", "Glyph", UserWarning)
            figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def _fidelity(axes: Any, result: LayerCheckResult) -> None:
    for arm in _arms(result):
        mine = [r for r in result.results if r.arm is arm and r.fidelity]
        points = [(r.rows, r.fidelity.relative_rms) for r in mine if r.fidelity]
        _line(axes, points, arm)
    axes.set_title("fidelity: distance from exact scales", fontsize=9)
    _finish(axes, result)


def _true_error(axes: Any, result: LayerCheckResult) -> None:
    for arm in _arms(result):
        mine = [r for r in result.results if r.arm is arm and r.true_error]
        points = [(r.rows, r.true_error.relative_rms) for r in mine if r.true_error]
        _line(axes, points, arm)
    exact = [(f.rows, 100 * f.true_error.relative_rms) for f in result.families]
    if exact:
        axes.plot(*zip(*exact, strict=True), "k.", label="exact scales")
    axes.set_title("true error: distance from fp64", fontsize=9)
    _finish(axes, result)


def _arms(result: LayerCheckResult) -> list[Arm]:
    return list(dict.fromkeys(r.arm for r in result.results))


def _line(axes: Any, points: list[tuple[int, float]], arm: Arm) -> None:
    finite = [(rows, 100 * value) for rows, value in points if math.isfinite(value)]
    if finite:
        rows, values = zip(*finite, strict=True)
        label = arm.value + (" (exact)" if not any(values) else "")
        axes.plot(rows, values, "o-", color=_COLOURS[arm], label=label, markersize=4)


def _finish(axes: Any, result: LayerCheckResult) -> None:
    rows = sorted({r.rows for r in result.results})
    axes.set_xscale("log", base=2)
    axes.set_xticks(rows, [str(count) for count in rows])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("rows (tokens)", fontsize=9)
    axes.set_ylabel("relative RMS, %", fontsize=9)
    axes.grid(visible=True, alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
