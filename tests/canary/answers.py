"""Answers made up for the judge: healthy, broken and anything between."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from tests.canary.fake_server import STORY_TEXT
from trtllm_b12x_fix.canary.judge import compare, judge, judge_answer
from trtllm_b12x_fix.canary.prompts import CONTINUATIONS, STORY, Probe
from trtllm_b12x_fix.canary.protocol import Answer, Candidate, Position
from trtllm_b12x_fix.canary.records import Judged, Opinion

SMOOTH = (-0.2581, -2.7407, -4.3844, -4.6199, -4.6778)  # SmolLM2-135M, fp32


def position(
    token: str, top: Sequence[tuple[str, float]], logprob: float | None = None
) -> Position:
    candidates = tuple(Candidate(*pair) for pair in top)
    if logprob is None and candidates:
        logprob = next((one.logprob for one in candidates if one.token == token), None)
    finite = logprob is None or math.isfinite(logprob)
    return Position(token, logprob if finite else None, candidates, finite)


def answer(text: str, positions: Iterable[Position] = (), reasoning: str = "") -> Answer:
    return Answer(text, reasoning, False, tuple(positions), "m")


def candidates(best: str, values: Sequence[float] = SMOOTH) -> list[tuple[str, float]]:
    return list(zip((best, " the", " a", " not", " in"), values, strict=True))


def right(probe: Probe, values: Sequence[float] = SMOOTH) -> Judged:
    word = f" {probe.expected[0]}"
    return judge_answer(probe, answer(f"{word}.", [position(word, candidates(word, values))]), 0.1)


def near(probe: Probe, values: Sequence[float] = SMOOTH) -> Judged:
    top = [(" the", values[0]), (f" {probe.expected[0]}", values[1]), (" a", values[2])]
    return judge_answer(probe, answer(" the thing.", [position(" the", top)]), 0.1)


def wrong(probe: Probe, values: Sequence[float] = SMOOTH) -> Judged:
    """Fluent, and nothing of what was asked: no fixed words, so that no loop is in it."""
    top = candidates(" quite", values)
    return judge_answer(probe, answer(" quite another matter.", [position(" quite", top)]), 0.1)


def said(probe: Probe, text: str) -> Judged:
    return judge_answer(probe, answer(text), 0.1)


def opinion(
    judged: Sequence[Judged], *, story: str = STORY_TEXT, again: Judged | None = None
) -> Opinion:
    return judge(
        tuple(judged), said(STORY, story), compare(judged[0], judged[0] if again is None else again)
    )


def mixture(answered: int, others=wrong, probes: Sequence[Probe] = CONTINUATIONS) -> list[Judged]:
    """So many right ones, from the first."""
    return [(right if place < answered else others)(p) for place, p in enumerate(probes)]
