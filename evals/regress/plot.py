"""KL against the exponent of the law, one line per arm, from a result's JSON to an SVG file.

python -m evals.regress.plot tests/regression/baselines/full.json evals/regress/kl.svg
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from pathlib import Path
from typing import Any

from evals.regress.arms import STATIC, Arm
from evals.regress.document import SCHEMA
from evals.regress.summary import ALL

# Okabe-Ito colours: told apart by colour-blind readers and in grey print.
_STYLES = {
    Arm.W4A16: ("#56B4E9", "s"),
    Arm.REFERENCE: ("#000000", "D"),
    Arm.ALPHAS: ("#0072B2", "o"),
    Arm.UNIT: ("#E69F00", "^"),
    Arm.BAKED: ("#D55E00", "o"),
}

#: (exponent, mean KL, low, high)
Point = tuple[int, float, float, float]


def points(document: dict[str, Any], arm: Arm) -> list[Point]:
    """An arm's mean KL where FC1 and FC2 were moved together, by exponent; b12x arms on static."""
    kernel = str(STATIC) if arm.strategy else None
    found = []
    for variant in document["variants"]:
        powers = variant["powers"]
        same = variant["arm"] == arm.value and variant["kernel"] == kernel
        if not same or variant["order"] or powers["k"] != powers["j"] or not variant["metrics"]:
            continue
        value, low, high = variant["metrics"][ALL]["kl_mean"]
        if None not in (value, low, high):
            found.append((int(powers["k"]), value, low, high))
    return sorted(found)


def to_svg(document: dict[str, Any]) -> str:
    """The plot as SVG text that depends on the figures alone."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "trtllm-b12x-fix", "svg.fonttype": "none"}):
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.subplots()
        for arm, (colour, marker) in _STYLES.items():
            _line(axes, points(document, arm), arm, colour, marker)
        moved = document["moved"]["k"]
        axes.axvline(moved, color="grey", linestyle=":", label="weight_scale_2 nearest 2e-5")
        axes.set_yscale("log")
        axes.set_xlabel("k: weights of FC1 and FC2 divided by 2^k, the same function")
        axes.set_ylabel("mean KL from bf16, nats")
        inputs, device = document["inputs"], document["evidence"]["device"]
        axes.set_title(
            f"{inputs['scored_tokens']:,} tokens of {inputs['documents']} documents; "
            f"b12x static of FlashInfer {STATIC.version}, emulated on {device}",
            fontsize=9,
        )
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize=8)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def _line(axes: Any, found: list[Point], arm: Arm, colour: str, marker: str) -> None:
    if not found:
        return
    exponents, values, lows, highs = zip(*found, strict=True)
    below = [max(0.0, value - low) for value, low in zip(values, lows, strict=True)]
    above = [max(0.0, high - value) for value, high in zip(values, highs, strict=True)]
    axes.errorbar(
        exponents, values, yerr=[below, above], color=colour, marker=marker, markersize=4,
        label=arm.value, capsize=2,
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("svg", type=Path)
    arguments = parser.parse_args()
    try:
        document = json.loads(arguments.result.read_text(encoding="utf-8"))
        if document["schema"] != SCHEMA:
            raise ValueError(f"not a result of {SCHEMA}")
        arguments.svg.write_text(to_svg(document), encoding="utf-8")
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"plot: {arguments.result}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
