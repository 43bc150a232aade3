"""From answers to a verdict. Pure.

Limits come from measuring SmolLM2-135M-Instruct on such prompts: sound, it knows 95%. With its MLPs
damaged as kernels damage them (rows, columns or block scales in the wrong place, halves swapped, a
third of the blocks zero, outputs scaled by 0 to 0.5 or by 4) 0 to 5%; with outputs doubled 57%;
with Gaussian noise of 10% of the weights' standard deviation 71%, of 30% 5%.
"""

from __future__ import annotations

import re

from trtllm_b12x_fix.canary.evidence import describe, is_reported
from trtllm_b12x_fix.canary.lattice import find_lattice
from trtllm_b12x_fix.canary.prompts import REPORTED, Probe
from trtllm_b12x_fix.canary.protocol import Answer, Candidate, Position, plain
from trtllm_b12x_fix.canary.records import Judged, Opinion, Outcome, Repeated, Verdict
from trtllm_b12x_fix.canary.repetition import find_loop

#: Fraction of the prompts answered: from the first on healthy, up to the second broken.
HEALTHY_FROM, BROKEN_TO = 0.7, 0.3
#: Fraction of texts that are empty or a short loop from which on a server is broken.
WRECKED_FROM = 0.5
#: Short loops among the short answers that one bad prompt explains.
MOST_LOOPS = 1
# A token before the answer itself: a space of its own, a quote, Markdown.
_EMPTY = re.compile(r"[\W_]*")
#: How far into the answer the first word may be.
_LEAD = 4


def judge_answer(probe: Probe, answer: Answer, seconds: float) -> Judged:
    """What became of one prompt."""
    said = _holds(answer.text, probe.expected)
    thought = not said and _holds(answer.reasoning, probe.expected)
    top, rank = _place(answer.positions, probe.expected)
    if said or thought:
        outcome = Outcome.ANSWERED
    elif rank is not None:
        outcome = Outcome.NEAR
    elif not (answer.text + answer.reasoning).strip():
        outcome = Outcome.EMPTY
    else:
        outcome = Outcome.MISSED
    return Judged(
        probe,
        answer,
        seconds,
        outcome,
        top,
        rank,
        top[rank - 1].logprob if rank else None,
        find_lattice([one.logprob for one in top]),
        find_loop(answer.text or answer.reasoning),
        thought,
        all(position.is_finite for position in answer.positions),
    )


def compare(first: Judged, again: Judged) -> Repeated:
    """The same prompt before and after the others."""
    before = {one.token: one.logprob for one in first.first_top}
    after = {one.token: one.logprob for one in again.first_top}
    shared = before.keys() & after.keys()
    change = max((abs(before[token] - after[token]) for token in shared), default=None)
    if before and after and not shared:
        change = float("inf")
    return Repeated(
        first,
        again,
        first.answer.text == again.answer.text,
        (first.outcome is Outcome.ANSWERED) == (again.outcome is Outcome.ANSWERED),
        change,
    )


def judge(judged: tuple[Judged, ...], story: Judged, repeated: Repeated) -> Opinion:
    """The verdict. The lattice is never part of it: it tells rounding, not right from wrong."""
    asked = len(judged)
    answered = sum(one.outcome is Outcome.ANSWERED for one in judged)
    wrecked = sum(one.is_wrecked for one in judged)
    known = f"{answered} of {asked} continuations that every healthy model knows"
    evidence = describe(judged, story, repeated)
    if not all(one.is_finite for one in (*judged, story)):
        return Opinion(
            Verdict.BROKEN,
            f"log-probabilities that are not finite numbers, and {known}",
            evidence,
        )
    if wrecked >= WRECKED_FROM * asked and answered < HEALTHY_FROM * asked:
        return Opinion(
            Verdict.BROKEN, f"{known}; {wrecked} texts are empty or a short loop", evidence
        )
    if answered <= BROKEN_TO * asked:
        near = sum(one.outcome is Outcome.NEAR for one in judged)
        if answered + near >= HEALTHY_FROM * asked:
            return Opinion(
                Verdict.SUSPICIOUS,
                f"{known}; {near} more are among the best five: a weak model, a wrong prompt "
                "format, or mild damage",
                evidence,
            )
        return Opinion(Verdict.BROKEN, known, evidence)
    if answered < HEALTHY_FROM * asked:
        return Opinion(Verdict.SUSPICIOUS, known, evidence)
    doubts = _doubts(judged, story, repeated)
    if doubts:
        return Opinion(Verdict.SUSPICIOUS, f"{known}, but {'; '.join(doubts)}", evidence)
    return Opinion(Verdict.HEALTHY, known, evidence)


def _doubts(judged: tuple[Judged, ...], story: Judged, repeated: Repeated) -> list[str]:
    """What a model that knows its answers should not do. An empty text is none of it: instruct
    models end at once where they see no question."""
    doubts = []
    if not any(one.outcome is Outcome.ANSWERED for one in judged[:REPORTED]):
        doubts.append("none of the prompts of vllm#52308")
    if any(is_reported(one) for one in judged):
        doubts.append("the best candidates are those of vllm#52308")
    if story.is_loop:
        doubts.append("a longer text falls into a short loop")
    loops = sum(one.is_loop for one in judged)
    if loops > MOST_LOOPS:
        doubts.append(f"{loops} answers are a short loop")
    if not repeated.is_stable:
        doubts.append("the first prompt, asked again, was answered otherwise")
    return doubts


def _holds(text: str, expected: tuple[str, ...]) -> bool:
    return any(
        re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) for word in expected
    )


def _place(
    positions: tuple[Position, ...], expected: tuple[str, ...]
) -> tuple[tuple[Candidate, ...], int | None]:
    """Candidates to look at: where the answer begins after spaces and Markdown, or at the start."""
    if not positions:
        return (), None
    for position in positions[:_LEAD]:
        rank = _rank(position.top, expected)
        if rank is not None:
            return position.top, rank
        if not _EMPTY.fullmatch(plain(position.token)):
            break
    return positions[0].top, None


def _rank(top: tuple[Candidate, ...], expected: tuple[str, ...]) -> int | None:
    for place, candidate in enumerate(top, 1):
        token = plain(candidate.token).lower()
        if any(_begins(token, word.lower()) for word in expected):
            return place
    return None


def _begins(token: str, word: str) -> bool:
    """A whole word, or at least two characters of its beginning."""
    return token == word or (len(token) >= 2 and word.startswith(token))
