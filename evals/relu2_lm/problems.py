"""Word problems from :mod:`.grammar`: deterministic in (seed, index), with worked solutions."""

from __future__ import annotations

import enum
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from evals.relu2_lm import grammar
from evals.relu2_lm.grammar import Op, Sentence, Step

#: No number of a problem is larger.
LARGEST = 999
ANSWER = re.compile(r"#### (\d+)")
_SLOT = re.compile(r"\{(\w+)\}")


class Split(enum.Enum):
    """Which problems: what training may see, and what it may not."""

    TRAIN = "train"
    NEW_NUMBERS = "new-numbers"  # trained templates, a held-out number among the given ones
    NEW_TEMPLATES = "new-templates"  # a held-out template, trained numbers
    NEW_BOTH = "new-both"


@dataclass(frozen=True)
class Template:
    opening: Sentence
    events: tuple[Sentence, ...]
    question: Sentence

    @property
    def sentences(self) -> tuple[Sentence, ...]:
        return (self.opening, *self.events, self.question)

    @property
    def key(self) -> str:
        return "-".join(sentence.key for sentence in self.sentences)

    @property
    def held_out(self) -> bool:
        pairs = zip(self.events, self.events[1:], strict=False)
        return any((a.key, b.key) in grammar.HELD_OUT_PAIRS for a, b in pairs)


def templates() -> tuple[Template, ...]:
    """All of them, held out or not, in a fixed order."""
    return tuple(
        Template(opening, (first, second), question)
        for opening in grammar.OPENINGS
        for first in grammar.EVENTS
        for second in grammar.EVENTS
        for question in grammar.QUESTIONS
    )


@dataclass(frozen=True)
class Problem:
    """One problem.

    Attributes:
        template: key of its template.
        question: the text, without what a prompt adds.
        steps: the worked solution, one ``a+b=c`` each.
        answer: the exact answer.
        given, results: every number in the text, and every step's result.
    """

    template: str
    question: str
    steps: tuple[str, ...]
    answer: int
    given: tuple[int, ...]
    results: tuple[int, ...]

    @property
    def split(self) -> Split:
        """What of it training did not see; TRAIN where it saw everything."""
        numbers = not grammar.HELD_OUT_NUMBERS.isdisjoint((*self.given, *self.results))
        if tuple(self.template.split("-")[1:3]) in grammar.HELD_OUT_PAIRS:
            return Split.NEW_BOTH if numbers else Split.NEW_TEMPLATES
        return Split.NEW_NUMBERS if numbers else Split.TRAIN

    @property
    def prompt(self) -> str:
        return f"Question: {self.question}\nAnswer:"

    @property
    def solution(self) -> str:
        return " " + "\n".join([*self.steps, f"#### {self.answer}"])


def extract_answer(text: str) -> int | None:
    """The number after the last ``####``, as GSM8K has it; ``None`` without one."""
    found = ANSWER.findall(text)
    return int(found[-1]) if found else None


_TEMPLATES = templates()
_TRAINED = tuple(template for template in _TEMPLATES if not template.held_out)
_HELD_OUT = tuple(template for template in _TEMPLATES if template.held_out)
_POOL = {
    Split.TRAIN: _TRAINED,
    Split.NEW_NUMBERS: _TRAINED,
    Split.NEW_TEMPLATES: _HELD_OUT,
    Split.NEW_BOTH: _HELD_OUT,
}


def generate(split: Split, seed: int, count: int) -> Iterator[Problem]:
    """``count`` problems of a split; the same for the same seed."""
    rng = random.Random(f"{seed}/{split.value}")
    made = 0
    while made < count:
        problem = _attempt(rng, rng.choice(_POOL[split]))
        if problem is not None and _belongs(problem, split):
            made += 1
            yield problem


def _belongs(problem: Problem, split: Split) -> bool:
    held_out = grammar.HELD_OUT_NUMBERS
    if split in (Split.NEW_NUMBERS, Split.NEW_BOTH):
        return not held_out.isdisjoint(problem.given)
    return held_out.isdisjoint(problem.given) and held_out.isdisjoint(problem.results)


def _attempt(rng: random.Random, template: Template) -> Problem | None:
    """A problem of this template, or ``None`` where the numbers drawn do not fit it."""
    draws = [_draw_numbers(rng, sentence) for sentence in template.sentences]
    worked = _work(template, draws)
    if worked is None:
        return None
    steps, results, total = worked
    words = _draw_words(rng)
    sentences = list(zip(template.sentences, draws, strict=True))
    text = " ".join(sentence.words.format(**words, **numbers) for sentence, numbers in sentences)
    given = tuple(number for numbers in draws for number in numbers.values())
    return Problem(template.key, text, tuple(steps), total, given, tuple(results))


def _work(
    template: Template, draws: list[dict[str, int]]
) -> tuple[list[str], list[int], int] | None:
    """Written steps, their results and the answer."""
    steps, results = [], []
    total = draws[0].get("a", 0)
    for sentence, numbers in zip(template.sentences, draws, strict=True):
        last = total
        for step in sentence.steps:
            done = _evaluate(step, total, last, numbers)
            if done is None:
                return None
            written, last = done
            steps.append(written)
            results.append(last)
        total = last
    return steps, results, total


def _draw_words(rng: random.Random) -> dict[str, str]:
    name, friend = rng.sample(grammar.WORDS["name"], 2)
    others = {slot: rng.choice(grammar.WORDS[slot]) for slot in ("things", "place", "boxes")}
    return {"name": name, "friend": friend, **others}


def _draw_numbers(rng: random.Random, sentence: Sentence) -> dict[str, int]:
    slots = [slot for slot in _SLOT.findall(sentence.words) if slot in grammar.RANGES]
    return {slot: rng.randint(*grammar.RANGES[slot]) for slot in slots}


def _evaluate(step: Step, total: int, last: int, numbers: dict[str, int]) -> tuple[str, int] | None:
    known = {**numbers, grammar.TOTAL: total, grammar.LAST: last}
    left, right = (
        known[side] if isinstance(side, str) else side for side in (step.left, step.right)
    )
    if step.op is Op.DIVIDE and left % right:
        return None
    result = {
        Op.ADD: left + right,
        Op.SUBTRACT: left - right,
        Op.MULTIPLY: left * right,
        Op.DIVIDE: left // right,
    }[step.op]
    if not 0 < result <= LARGEST:
        return None
    return f"{left}{step.op.value}{right}={result}", result
