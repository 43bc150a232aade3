"""The sentences that word problems are made of, as data.

A problem is an opening, two events and a question. Every sentence has its words and the
arithmetic that it adds to the worked solution. A *template* is one choice of these four; a pair of
events that is held out never stands in a training problem in this order, so no training problem
has a held-out template.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

#: A number of a sentence by its slot, a literal, the running total, or the step before.
Operand = str | int
TOTAL, LAST = "total", "last"


class Op(enum.Enum):
    """Arithmetic of one step; values are how steps are written."""

    ADD = "+"
    SUBTRACT = "-"
    MULTIPLY = "*"
    DIVIDE = "/"


@dataclass(frozen=True)
class Step:
    left: Operand
    op: Op
    right: Operand


@dataclass(frozen=True)
class Sentence:
    """Words with slots in braces, and what the sentence does to the running total.

    Slots ``a`` and ``b`` are numbers of :data:`RANGES`; ``name``, ``friend``, ``things``, ``place``
    and ``box`` are words. An opening without steps starts the total at ``a``.
    """

    key: str
    words: str
    steps: tuple[Step, ...] = ()


#: Inclusive range of each number slot: amounts, contents of a container, counts and divisors.
RANGES = {"a": (2, 99), "b": (2, 99), "n": (2, 30), "k": (2, 9)}

_SUM = (Step("a", Op.ADD, "b"),)
_PRODUCT = (Step("k", Op.MULTIPLY, "n"),)
_TWICE = (Step(TOTAL, Op.MULTIPLY, 2),)

OPENINGS = (
    Sentence("has", "{name} has {a} {things}."),
    Sentence("place", "{name} finds {a} {things} in the {place}."),
    Sentence("boxes", "{name} has {k} {boxes} with {n} {things} each.", _PRODUCT),
    Sentence("colours", "{name} has {a} red {things} and {b} blue {things}.", _SUM),
    Sentence("shared", "{friend} has {a} {things} and {name} has {k} times as many.",
             (Step("a", Op.MULTIPLY, "k"),)),
)  # fmt: skip

_TAKE_PRODUCT = (*_PRODUCT, Step(TOTAL, Op.SUBTRACT, LAST))
_ADD_PRODUCT = (*_PRODUCT, Step(TOTAL, Op.ADD, LAST))
_TAKE_SUM = (*_SUM, Step(TOTAL, Op.SUBTRACT, LAST))

EVENTS = (
    Sentence("buy", "{name} buys {a} more.", (Step(TOTAL, Op.ADD, "a"),)),
    Sentence("gift", "{friend} brings {a} {things}.", (Step(TOTAL, Op.ADD, "a"),)),
    Sentence("give", "{name} gives {a} of them to {friend}.", (Step(TOTAL, Op.SUBTRACT, "a"),)),
    Sentence("lose", "Then {a} {things} get lost.", (Step(TOTAL, Op.SUBTRACT, "a"),)),
    Sentence("bags", "{name} buys {k} {boxes} with {n} {things} each.", _ADD_PRODUCT),
    Sentence("friends", "{name} gives {k} friends {n} {things} each.", _TAKE_PRODUCT),
    Sentence("double", "Then {name} doubles the number of {things}.", _TWICE),
    Sentence("half", "{name} sells half of the {things}.", (Step(TOTAL, Op.DIVIDE, 2),)),
    Sentence("two", "{name} sells {a} of them on Monday and {b} on Friday.", _TAKE_SUM),
    Sentence("daily", "Every day for {k} days {friend} adds {n} {things}.", _ADD_PRODUCT),
    Sentence("third", "Only one third of the {things} stays, the rest is sold.",
             (Step(TOTAL, Op.DIVIDE, 3),)),
    Sentence("spoil", "In the {place} {a} of them spoil.", (Step(TOTAL, Op.SUBTRACT, "a"),)),
)  # fmt: skip

QUESTIONS = (
    Sentence("now", "How many {things} does {name} have now?"),
    Sentence("left", "How many {things} are there in the end?"),
    Sentence("packs", "{name} packs them into {k} equal {boxes}. How many are in each?",
             (Step(TOTAL, Op.DIVIDE, "k"),)),
    Sentence("cost", "Each one costs {k} dollars. How much do they cost together?",
             (Step(TOTAL, Op.MULTIPLY, "k"),)),
)  # fmt: skip

#: Ordered pairs of events that no training problem has next to each other.
HELD_OUT_PAIRS = frozenset(
    {
        ("buy", "half"),
        ("gift", "friends"),
        ("give", "bags"),
        ("lose", "double"),
        ("bags", "give"),
        ("friends", "daily"),
        ("double", "two"),
        ("half", "gift"),
        ("two", "third"),
        ("daily", "lose"),
        ("third", "buy"),
        ("spoil", "spoil"),
    }
)

#: Numbers that no training problem contains, as a given number or as a result.
HELD_OUT_NUMBERS = frozenset({13, 27, 31, 46, 58, 62, 74, 85, 90, 99})

WORDS = {
    "name": ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Ivy", "Jack",
             "Kate", "Leo", "Mia", "Noah", "Olga", "Paul", "Rosa", "Sam", "Tina", "Victor"),
    "things": ("apples", "books", "cards", "coins", "cookies", "eggs", "flowers", "keys", "lamps",
               "marbles", "nuts", "pears", "pencils", "plates", "shells", "spoons", "stamps",
               "stickers", "stones", "tickets"),
    "place": ("attic", "cellar", "garden", "garage", "kitchen", "market", "school", "shop"),
    "boxes": ("bags", "baskets", "boxes", "crates", "jars", "packs"),
}  # fmt: skip
