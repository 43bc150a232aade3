"""What speaks for a verdict, in sentences: candidates, lattice, loops, the prompt asked twice."""

from __future__ import annotations

from trtllm_b12x_fix.canary.prompts import REPORTED_BROKEN
from trtllm_b12x_fix.canary.records import Judged, Outcome, Repeated

#: Of the five reported candidates, so many make it the reported answer.
_SIGNATURE = 4
#: Nats by which a token may trail the likeliest: equal logits, or another rounding of them.
_TIE = 1e-3


def describe(judged: tuple[Judged, ...], story: Judged, repeated: Repeated) -> tuple[str, ...]:
    """What was seen beside right and wrong, one sentence each."""
    lines: list[str] = []
    if any(is_reported(one) for one in judged):
        lines.append(
            f"the best five after {REPORTED_BROKEN.prompt!r} are, but for one at most, those of "
            f"{REPORTED_BROKEN.source}"
        )
    with_top = [one for one in judged if one.top]
    if with_top:
        missed = [one for one in with_top if one.outcome is not Outcome.ANSWERED]
        near = sum(one.outcome is Outcome.NEAR for one in missed)
        if missed:
            lines.append(
                f"an expected word is among the best five candidates of {near} of the "
                f"{len(missed)} that were not answered"
            )
        lines += _lattice(with_top)
        lines += _not_greedy(judged)
    thought = sum(one.in_reasoning for one in judged)
    if thought:
        lines.append(f"{thought} were answered in the reasoning, before any final answer")
    loops = [one for one in (*judged, story) if one.loop and one.loop.is_degenerate]
    lines += [
        f"{one.probe.prompt!r} ends in {one.loop.unit!r} {one.loop.repeats:.0f} times"
        for one in loops[:2]
        if one.loop
    ]
    return (*lines, *_repeated(repeated))


def _lattice(with_top: list[Judged]) -> list[str]:
    looked = [one for one in with_top if len(one.top) > 3]
    found = [one.lattice for one in looked if one.lattice]
    if not found:
        return []
    finest = min(one.step for one in found)
    chance = max(one.chance for one in found)
    line = (
        f"gaps between the best five are multiples of 1/{1 / finest:.0f} in {len(found)} of "
        f"{len(looked)} places (by chance {chance:.0e} each if logits were fp32): logits were "
        "rounded to bf16 at 8 or more, as many healthy servers do; it counts neither way"
    )
    return [line]


def _not_greedy(judged: tuple[Judged, ...]) -> list[str]:
    places = [place for one in judged for place in one.answer.positions if place.top]
    other = sum(
        place.logprob is not None and place.logprob < place.top[0].logprob - _TIE
        for place in places
    )
    if not other:
        return []
    line = (
        f"{other} of {len(places)} tokens were not the likeliest: the server does not decode "
        "greedily (sampling in spite of temperature 0, or a repetition penalty)"
    )
    return [line]


def _repeated(repeated: Repeated) -> list[str]:
    change = repeated.largest_change
    moved = "" if change is None else f", log-probabilities move by at most {change:.2g}"
    if repeated.same_text:
        return [f"asked again after the others, the first prompt gets the same text{moved}"]
    return [f"asked again after the others, the first prompt gets another text{moved}"]


def is_reported(judged: Judged) -> bool:
    """The first prompt's best candidates are the reported broken ones, and no expected word."""
    if judged.probe.prompt != REPORTED_BROKEN.prompt or judged.rank is not None:
        return False
    tokens = {_spelled(one.token) for one in judged.first_top}
    return len(tokens & {_spelled(one.token) for one in REPORTED_BROKEN.top}) >= _SIGNATURE


def _spelled(token: str) -> str:
    """Tokenizers' marks for a space as a space; the space itself stays."""
    return token.replace("\u0120", " ").replace("\u2581", " ")
