"""A text that ends in a loop: the same few characters over and over."""

from __future__ import annotations

from dataclasses import dataclass

_LEAST_REPEATS = 3
_LEAST_CHARACTERS = 12
_LONGEST_TEXT = 1024
#: Longer loops are sentences, which small healthy models repeat under greedy decoding.
SHORT_PERIOD = 12


@dataclass(frozen=True)
class Loop:
    """The end of a text repeats itself.

    Attributes:
        period: length of what is repeated, in characters.
        repeats: how often it stands at the end, the first time included.
        share: fraction of the text that the loop takes.
        unit: what is repeated.
    """

    period: int
    repeats: float
    share: float
    unit: str

    @property
    def is_degenerate(self) -> bool:
        """A short loop over most of the text: no model says that, unless asked to."""
        return self.period <= SHORT_PERIOD and self.share >= 0.5


def find_loop(text: str) -> Loop | None:
    """The loop at the end of a text, or None; of several the one that takes most of it."""
    text = " ".join(text.split())[-_LONGEST_TEXT:]
    best: Loop | None = None
    for period in range(1, len(text) // _LEAST_REPEATS + 1):
        length = _periodic_tail(text, period)
        if length < max(_LEAST_REPEATS * period, _LEAST_CHARACTERS):
            continue
        if best is None or length > best.share * len(text) + period:
            unit = text[-period:]
            best = Loop(period, length / period, length / len(text), unit)
    return best


def _periodic_tail(text: str, period: int) -> int:
    """Length of the longest end of the text that repeats with a period."""
    place = len(text) - 1
    while place >= period and text[place] == text[place - period]:
        place -= 1
    return len(text) - 1 - place + period
