"""A canary as JSON, with everything that was said."""

from __future__ import annotations

import json
import math
from typing import Any

from trtllm_b12x_fix import __version__
from trtllm_b12x_fix.canary.advice import advice
from trtllm_b12x_fix.canary.protocol import Candidate
from trtllm_b12x_fix.canary.records import Judged, Outcome, Repeated
from trtllm_b12x_fix.canary.run import CanaryResult

SCHEMA = "trtllm-b12x-fix/canary/1"


def to_json(result: CanaryResult) -> str:
    """The document, ending in a newline. Plain ASCII, so that no text can break a reader."""
    return json.dumps(_document(result), indent=2, allow_nan=False) + "\n"


def _document(result: CanaryResult) -> dict[str, Any]:
    judged, opinion = result.judged, result.opinion
    counts = {outcome.value: sum(one.outcome is outcome for one in judged) for outcome in Outcome}
    return {
        "schema": SCHEMA,
        "tool": __version__,
        "verdict": opinion.verdict.value,
        "exit_code": opinion.verdict.exit_code,
        "reason": opinion.reason,
        "evidence": list(opinion.evidence),
        "to_do": list(advice(opinion.verdict, result.endpoint)),
        "notes": list(result.notes),
        "base_url": result.address,
        "model": result.model,
        "endpoint": result.endpoint.value,
        "logprobs": result.has_logprobs,
        "seconds": round(result.seconds, 3),
        "asked": len(judged),
        "counts": counts,
        "answered_fraction": counts[Outcome.ANSWERED.value] / len(judged),
        "answers": [_answer(one) for one in judged],
        "story": _answer(result.story),
        "repeated": _repeated(result.repeated),
    }


def _answer(one: Judged) -> dict[str, Any]:
    lattice, loop = one.lattice, one.loop
    return {
        "prompt": one.probe.prompt,
        "expected": list(one.probe.expected),
        "outcome": one.outcome.value,
        "text": one.answer.text,
        "reasoning": one.answer.reasoning,
        "in_reasoning": one.in_reasoning,
        "top": _top(one.top),
        "rank": one.rank,
        "logprob": one.logprob,
        "finite": one.is_finite,
        "lattice": None
        if lattice is None
        else {"step": lattice.step, "gaps": lattice.gaps, "chance_if_fp32": lattice.chance},
        "loop": None
        if loop is None
        else {
            "unit": loop.unit,
            "repeats": loop.repeats,
            "share": loop.share,
            "degenerate": loop.is_degenerate,
        },
        "seconds": round(one.seconds, 3),
    }


def _top(top: tuple[Candidate, ...]) -> list[dict[str, Any]]:
    return [{"token": one.token, "logprob": one.logprob} for one in top]


def _repeated(repeated: Repeated) -> dict[str, Any]:
    change = repeated.largest_change
    return {
        "prompt": repeated.first.probe.prompt,
        "first": repeated.first.answer.text,
        "again": repeated.again.answer.text,
        "same_text": repeated.same_text,
        "same_outcome": repeated.same_outcome,
        # No shared candidate at all has no finite change.
        "largest_change": None if change is None or math.isinf(change) else change,
        "stable": repeated.is_stable,
    }
