"""The tables of evals/regress/README.md, drawn from the kept runs.

python -m tests.regression.pages prints them.
"""

from __future__ import annotations

import json
from typing import Any

from evals.regress.__main__ import BASELINES

_S = "0.6.18 static"
#: Variants of each table, by the kept run.
TABLES = {
    "full": (
        "w4a16, own magnitude",
        "reference, own magnitude",
        f"alphas, {_S}, own magnitude",
        f"alphas, {_S}, k=5 j=5",
        f"unit, {_S}, own magnitude",
        f"unit, {_S}, k=5 j=5",
        f"baked, {_S}, own magnitude",
        f"baked, {_S}, k=2 j=2",
        f"baked, {_S}, k=3 j=3",
        f"baked, {_S}, k=4 j=4",
        f"baked, {_S}, k=5 j=5",
        f"baked, {_S}, k=5",
        f"baked, {_S}, j=5",
        f"baked, {_S}, k=6 j=6",
        "alphas, 0.7.4 static, k=5 j=5",
        "baked, 0.7.4 static, k=5 j=5",
        "alphas, 0.7.4 direct-micro, k=5 j=5",
        "baked, 0.7.4 direct-micro, k=5 j=5",
        "baked, 0.6.16 static, k=5 j=5",
        "alphas, 0.6.18 direct-micro, own magnitude",
    ),
    "small": (
        "reference, own magnitude",
        f"alphas, {_S}, own magnitude",
        f"alphas, {_S}, k=5 j=5",
        f"baked, {_S}, own magnitude",
        f"baked, {_S}, k=5 j=5",
    ),
}


def table(kept: dict[str, Any], names: tuple[str, ...]) -> list[str]:
    """Markdown rows."""
    by_name = {variant["name"]: variant["metrics"]["all"] for variant in kept["variants"]}
    return [_row(name, by_name[name]) for name in names]


def _row(name: str, metrics: dict[str, list[float]]) -> str:
    kl, low, high = metrics["kl_mean"]
    change = metrics["perplexity_change"][0]
    grows = f"{change:+.0%}" if abs(change) < 100 else f"{1 + change:.0e} times"
    cells = [
        name,
        f"{kl:.3f} [{low:.3f}, {high:.3f}]",
        f"{metrics['kl_p99'][0]:.2f}",
        grows,
        f"{metrics['top1_agreement'][0]:.1%}",
        f"{metrics['gold_lost'][0]:.1%}",
        f"{metrics['gold_gained'][0]:.1%}",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    for suite, names in TABLES.items():
        print(suite)
        kept = json.loads((BASELINES / f"{suite}.json").read_text())
        print("\n".join(table(kept, names)))
