"""Brings the answers of two arms together, document by document and repeat by repeat."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from trtllm_b12x_fix.errors import InputError


@dataclass(frozen=True)
class Sample:
    """One judged or unjudged answer.

    Attributes:
        correct: None where nothing was judged.
        status: the reply's status, as grades name it.
    """

    document: str
    repeat: int
    correct: bool | None
    status: str = "answered"


@dataclass(frozen=True)
class DocumentPair:
    """One document in both arms, over the repeats that both judged.

    Attributes:
        right_a, right_b: how many of ``repeats`` each arm got right.
    """

    document: str
    right_a: int
    right_b: int
    repeats: int

    @property
    def difference(self) -> int:
        """Right answers of the second arm less those of the first."""
        return self.right_b - self.right_a

    @property
    def disagreement(self) -> float:
        """Chance that one answer of each arm, drawn at random, differ in being right."""
        a, b, n = self.right_a, self.right_b, self.repeats
        return (a * (n - b) + b * (n - a)) / n**2


@dataclass(frozen=True)
class Unjudged:
    """A repeat that at least one arm has no verdict for, with both statuses."""

    document: str
    repeat: int
    status_a: str
    status_b: str
    correct_a: bool | None
    correct_b: bool | None


@dataclass(frozen=True)
class Pairing:
    """Two arms side by side.

    Attributes:
        documents: those with at least one repeat judged in both, by name.
        unjudged: repeats without a verdict in one arm or both.
        only_a, only_b: repeats that the other arm was never asked.
        statuses_a, statuses_b: how often each status, over all samples of an arm.
    """

    documents: tuple[DocumentPair, ...]
    unjudged: tuple[Unjudged, ...]
    only_a: int
    only_b: int
    statuses_a: Mapping[str, int]
    statuses_b: Mapping[str, int]

    def with_failures(self) -> tuple[DocumentPair, ...]:
        """The same documents with every answer that was not judged counted as a failure."""
        right: dict[str, list[int]] = {
            pair.document: [pair.right_a, pair.right_b, pair.repeats] for pair in self.documents
        }
        for one in self.unjudged:
            counts = right.setdefault(one.document, [0, 0, 0])
            counts[0] += one.correct_a is True
            counts[1] += one.correct_b is True
            counts[2] += 1
        return tuple(DocumentPair(name, *right[name]) for name in sorted(right))


def pair(arm_a: Iterable[Sample], arm_b: Iterable[Sample]) -> Pairing:
    """Match two arms by document and repeat.

    Raises:
        InputError: an arm has a repeat twice, or the arms share none.
    """
    first, second = _by_key(arm_a, "first"), _by_key(arm_b, "second")
    shared = sorted(first.keys() & second.keys())
    if not shared:
        raise InputError("the arms have no document in common")
    counts: dict[str, list[int]] = {}
    unjudged = []
    for key in shared:
        a, b = first[key], second[key]
        if a.correct is None or b.correct is None:
            unjudged.append(Unjudged(*key, a.status, b.status, a.correct, b.correct))
            continue
        entry = counts.setdefault(a.document, [0, 0, 0])
        entry[0] += a.correct
        entry[1] += b.correct
        entry[2] += 1
    return Pairing(
        tuple(DocumentPair(name, *entry) for name, entry in counts.items()),
        tuple(unjudged),
        len(first) - len(shared),
        len(second) - len(shared),
        Counter(sample.status for sample in first.values()),
        Counter(sample.status for sample in second.values()),
    )


def _by_key(samples: Iterable[Sample], arm: str) -> dict[tuple[str, int], Sample]:
    found: dict[tuple[str, int], Sample] = {}
    for sample in samples:
        key = (sample.document, sample.repeat)
        if key in found:
            raise InputError(f"the {arm} arm has document {key[0]!r}, repeat {key[1]} twice")
        found[key] = sample
    return found


def repeat_disagreement(samples: Iterable[Sample]) -> tuple[float, int] | None:
    """How often two repeats of one arm differ in being right, and over how many documents.

    None where no document has two judged repeats.
    """
    counts: dict[str, list[int]] = {}
    for sample in samples:
        if sample.correct is not None:
            entry = counts.setdefault(sample.document, [0, 0])
            entry[0] += sample.correct
            entry[1] += 1
    shares = [2 * r * (n - r) / (n * (n - 1)) for r, n in counts.values() if n > 1]
    return (sum(shares) / len(shares), len(shares)) if shares else None
