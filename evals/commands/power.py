"""How many documents a paired comparison needs to see a drop, before a run is started.

By the exact McNemar test, two-sided, alpha 0.05, power 0.8. --discordant is the share of documents
that exactly one arm gets right: take it from an earlier run, or from the A/A floor. All fractions.

exit codes
  0  computed
  2  fractions that contradict each other
"""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

from trtllm_b12x_fix.report import files
from trtllm_b12x_fix.report.text import percent

NAME = "power"
HELP = "how many documents a paired comparison needs to see a drop"
SCHEMA = "trtllm-b12x-fix/power/1"
#: Documents of the test splits.
TASKS = {"gsm8k": 1319, "humaneval": 164}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of power."""
    parser.add_argument("--baseline", type=_fraction, required=True, metavar="P")
    parser.add_argument("--discordant", type=_fraction, required=True, metavar="P")
    parser.add_argument("--drop", type=_fraction, required=True, metavar="P")
    parser.add_argument("--json", metavar="FILE", help="write the figures (- for stdout)")


def run(args: argparse.Namespace) -> int:
    """Compute and print; returns the exit code.

    Raises:
        B12xFixError: the fractions contradict each other, or the JSON cannot be written.
    """
    if args.json is not None:
        files.check_writable(args.json)
    document = _compute(args.baseline, args.discordant, args.drop)
    if args.json is not None:
        files.write(args.json, json.dumps(document, indent=2) + "\n")
    if args.json != files.STDOUT:
        files.write(files.STDOUT, _render(document))
    return 0


def _compute(baseline: float, discordant: float, drop: float) -> dict[str, Any]:
    from evals.statistics import power, thresholds

    effect = power.Effect(drop, discordant)
    power.check_baseline(effect, baseline)
    pairs, normal = power.pairs_needed(effect), power.normal_pairs(effect)
    return {
        "schema": SCHEMA,
        "verdict": "good",
        "baseline": baseline,
        "discordant": discordant,
        "drop": drop,
        "alpha": power.ALPHA,
        "power": power.POWER,
        "pairs": pairs,
        "achieved_power": power.power(pairs, effect),
        "normal_approximation": {"pairs": normal, "achieved_power": power.power(normal, effect)},
        "unpaired_documents_per_arm": thresholds.unpaired_documents(drop),
        "tasks": {
            name: {
                "documents": documents,
                "power": power.power(documents, effect),
                "detectable_drop": power.detectable_drop(documents, discordant),
            }
            for name, documents in TASKS.items()
        },
    }


def _render(document: dict[str, Any]) -> str:
    normal = document["normal_approximation"]
    baseline, discordant = percent(document["baseline"]), percent(document["discordant"])
    drop, approximate = _points(document["drop"]), f"{normal['achieved_power']:.2f}"
    lines = [
        f"a drop of {drop} from {baseline}, {discordant} of documents discordant",
        f"  exact McNemar (two-sided, alpha 0.05, power 0.8): {document['pairs']:,} documents",
        f"  the normal approximation's {normal['pairs']:,} have power {approximate}",
        f"  unpaired, by TensorRT-LLM's rule: {document['unpaired_documents_per_arm']:,} per arm",
    ]
    for name, task in document["tasks"].items():
        seen = task["detectable_drop"]
        lines.append(
            f"  {name}, {task['documents']:,} documents: power {task['power']:.2f}; "
            + ("sees no drop" if seen is None else f"sees a drop of {_points(seen)}")
        )
    return "\n".join(lines) + "\n"


def _points(fraction: float) -> str:
    return f"{100 * fraction:.3g} points"


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a fraction between 0 and 1")
    return value
