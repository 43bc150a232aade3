"""A canary as plain text: the answer, the evidence, every prompt."""

from __future__ import annotations

from trtllm_b12x_fix.canary.advice import BLIND, advice
from trtllm_b12x_fix.canary.prompts import REPORTED_BROKEN, REPORTED_HEALTHY
from trtllm_b12x_fix.canary.protocol import Candidate, Endpoint
from trtllm_b12x_fix.canary.records import Judged, Outcome, Verdict
from trtllm_b12x_fix.canary.run import CanaryResult
from trtllm_b12x_fix.report.text import bullet, grid, labelled, paragraph, printable

_WORDS = {
    Verdict.HEALTHY: "good: healthy",
    Verdict.SUSPICIOUS: "FINDING: suspicious",
    Verdict.BROKEN: "FINDING: broken",
}
_TEXT_WIDTH = 30
_PROMPT_WIDTH = 44


def render(result: CanaryResult) -> str:
    """The report, ending in a newline."""
    parts = [_head(result), _evidence(result), _answers(result)]
    if _has_ranks(result):
        parts.append(_candidates(result))
    if result.opinion.verdict is Verdict.HEALTHY:
        parts.append(paragraph(BLIND))
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(result: CanaryResult) -> str:
    given = "with log-probabilities" if result.has_logprobs else "text alone"
    lines = [
        labelled("VERDICT", f"{_WORDS[result.opinion.verdict]}: {result.opinion.reason}"),
        labelled(
            "server",
            f"{result.address}{result.endpoint.value}, model {result.model}, {given}; greedy, "
            f"{result.seconds:.1f} s",
        ),
    ]
    for place, step in enumerate(advice(result.opinion.verdict, result.endpoint)):
        lines.append(labelled("to do" if place == 0 else "", step))
    return "\n".join(lines)


def _evidence(result: CanaryResult) -> str:
    lines = [*result.opinion.evidence, *result.notes]
    return "\n".join(["evidence", *map(bullet, lines)])


def _answers(result: CanaryResult) -> str:
    header = ["prompt", "expected", "", "answer"]
    if _has_ranks(result):
        header[3:3] = ["rank", "logprob"]
    rows = [_row(one, _has_ranks(result)) for one in (*result.judged, result.story)]
    return grid(header, rows, left=3)


def _has_ranks(result: CanaryResult) -> bool:
    """A chat answer begins with any word: where the expected one stands says nothing there."""
    return result.has_logprobs and result.endpoint is Endpoint.COMPLETIONS


def _row(one: Judged, has_ranks: bool) -> list[str]:
    text = one.answer.text if one.answer.text.strip() else one.answer.reasoning
    where = " (in its reasoning)" if one.in_reasoning else ""
    # A story has no right answer.
    outcome = one.outcome.value if one.probe.expected or one.outcome is Outcome.EMPTY else "-"
    row = [
        _cut(one.probe.prompt, _PROMPT_WIDTH),
        "/".join(one.probe.expected[:2]) or "-",
        outcome,
        _cut(text, _TEXT_WIDTH) + where,
    ]
    if has_ranks:
        logprob = "-" if one.logprob is None else f"{one.logprob:.4f}"
        row[3:3] = ["-" if one.rank is None else str(one.rank), logprob]
    return row


def _candidates(result: CanaryResult) -> str:
    first = result.judged[0]
    lines = [
        f"best candidates after {first.probe.prompt!r}",
        f"  here      {_listed(first.top) or 'none given'}",
        f"  healthy   {_listed(REPORTED_HEALTHY.top)} ({REPORTED_HEALTHY.source})",
        f"  broken    {_listed(REPORTED_BROKEN.top)} ({REPORTED_BROKEN.source})",
    ]
    return "\n".join(printable(line) for line in lines)


def _listed(top: tuple[Candidate, ...]) -> str:
    return ", ".join(f"{one.token[:20]!r} {one.logprob:.4f}" for one in top)


def _cut(text: str, width: int) -> str:
    text = repr(printable(text.replace("\n", " ")))
    return text if len(text) <= width else f"{text[: width - 3]}..."
