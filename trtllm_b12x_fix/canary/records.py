"""What came of one prompt, of one asked twice, and of all. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from trtllm_b12x_fix.canary.lattice import Lattice
from trtllm_b12x_fix.canary.prompts import Probe
from trtllm_b12x_fix.canary.protocol import Answer, Candidate
from trtllm_b12x_fix.canary.repetition import Loop

#: Nats: the same prompt asked twice may differ by rounding (atomic adds, vllm#54945), not by this.
STABLE_TO = 1.0


class Outcome(Enum):
    """What became of one prompt."""

    ANSWERED = "answered"
    NEAR = "near"  # among the best five where the answer begins, but not said
    MISSED = "missed"
    EMPTY = "empty"


class Verdict(Enum):
    """The answer to "is this server's model sound"."""

    HEALTHY = "healthy"
    SUSPICIOUS = "suspicious"
    BROKEN = "broken"

    @property
    def exit_code(self) -> int:
        """0 good, 1 a finding."""
        return 0 if self is Verdict.HEALTHY else 1


@dataclass(frozen=True)
class Judged:
    """One prompt and what came of it.

    Attributes:
        top: the candidates where the answer begins if an expected word is among them, else those
            at the first position; empty without log-probabilities.
        rank: of an expected word's first token among them, from 1; None if it is not there.
        logprob: of that token, nats.
        lattice: of ``top``.
        loop: at the end of the text.
        in_reasoning: answered there and not in the text.
        is_finite: no log-probability of a token that came is something else than a number.
    """

    probe: Probe
    answer: Answer
    seconds: float
    outcome: Outcome
    top: tuple[Candidate, ...]
    rank: int | None
    logprob: float | None
    lattice: Lattice | None
    loop: Loop | None
    in_reasoning: bool
    is_finite: bool

    @property
    def is_loop(self) -> bool:
        """The same few characters again and again."""
        return self.loop is not None and self.loop.is_degenerate

    @property
    def first_top(self) -> tuple[Candidate, ...]:
        """The candidates at the first position; empty without log-probabilities."""
        positions = self.answer.positions
        return positions[0].top if positions else ()

    @property
    def is_wrecked(self) -> bool:
        """Nothing, or a short loop."""
        return self.outcome is Outcome.EMPTY or self.is_loop


@dataclass(frozen=True)
class Repeated:
    """One prompt asked before and after all others (A, B, A).

    Attributes:
        same_text: whether both texts are equal.
        same_outcome: whether both are right, or neither.
        largest_change: of a log-probability at the first position, nats, over the candidates that
            both have; None without log-probabilities.
    """

    first: Judged
    again: Judged
    same_text: bool
    same_outcome: bool
    largest_change: float | None

    @property
    def is_stable(self) -> bool:
        """Differences are of the size that rounding makes."""
        change = self.largest_change
        return self.same_outcome and (change is None or change <= STABLE_TO)


@dataclass(frozen=True)
class Opinion:
    """Verdict, why in one sentence, and what else was seen."""

    verdict: Verdict
    reason: str
    evidence: tuple[str, ...]
