"""Compares two arms on the same documents and says what can be said, and no more."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from evals.statistics import power as paired_power
from evals.statistics.bootstrap import Interval, paired_interval
from evals.statistics.exact import mcnemar, sign_flip
from evals.statistics.pairs import DocumentPair, Pairing, Sample, pair, repeat_disagreement
from evals.statistics.thresholds import UnpairedThreshold, unpaired_threshold
from trtllm_b12x_fix.errors import InputError

ALPHA = 0.05


class PairedTest(enum.Enum):
    """Which exact test gave the p-value."""

    MCNEMAR = "exact-mcnemar"
    SIGN_FLIP = "exact-sign-flip-by-document"
    """Documents asked several times: their repeats are not independent."""


class Conclusion(enum.Enum):
    """What a comparison may say."""

    WORSE = "worse"
    BETTER = "better"
    NOT_DETECTABLE = "no-difference-detectable"
    NOTHING_COMPARED = "nothing-compared"


class FloorOrigin(enum.Enum):
    """Where an A/A floor was measured."""

    REPEATS = "repeats-of-one-arm"
    SECOND_RUN = "second-run-of-one-arm"


@dataclass(frozen=True)
class Floor:
    """How much an arm disagrees with itself: what an A/B disagreement has to be seen against."""

    arm: str
    disagreement: float
    documents: int
    origin: FloorOrigin


@dataclass(frozen=True)
class Result:
    """One set of paired documents, tested. Fractions; differences are second arm less first.

    Attributes:
        accuracy_a, accuracy_b: mean over documents, each counting once.
        interval: of the difference.
        disagreement: chance that one answer of each arm differ in being right.
        detectable_drop: what so many documents would have found with power 0.8, given this
            disagreement; None where they could find nothing.
    """

    documents: int
    accuracy_a: float
    accuracy_b: float
    difference: float
    interval: Interval
    test: PairedTest
    p_value: float
    lost: int
    gained: int
    disagreement: float
    detectable_drop: float | None
    conclusion: Conclusion


@dataclass(frozen=True)
class Comparison:
    """Two arms, compared.

    Attributes:
        result: over answers that both arms have a verdict for; None where there are none.
        counting_failures: the same with every answer that was not judged counted as wrong; the two
            bracket what the unjudged ones can do.
        discordant: documents where the arms differ, largest difference first.
        floors: A/A floors that are known; empty means that none was measured.
        unpaired: TensorRT-LLM's rule for as many documents, for comparison.
    """

    arm_a: str
    arm_b: str
    result: Result | None
    counting_failures: Result | None
    discordant: tuple[DocumentPair, ...]
    pairing: Pairing
    floors: tuple[Floor, ...]
    unpaired: UnpairedThreshold | None

    @property
    def conclusion(self) -> Conclusion:
        return Conclusion.NOTHING_COMPARED if self.result is None else self.result.conclusion

    @property
    def depends_on_unjudged(self) -> bool:
        """Whether counting unjudged answers as wrong would change the conclusion."""
        counted = self.counting_failures
        return counted is not None and counted.conclusion is not self.conclusion


def compare(
    arm_a: str,
    samples_a: Sequence[Sample],
    arm_b: str,
    samples_b: Sequence[Sample],
    floors: Iterable[Floor] = (),
    seed: int = 0,
) -> Comparison:
    """Compare two arms; repeats of an arm give its floor beside those handed in.

    Args:
        floors: from second runs, see :func:`floor_of_second_run`.
        seed: of the bootstrap.

    Raises:
        InputError: the arms share no document, or one has a repeat twice.
    """
    pairing = pair(samples_a, samples_b)
    own = [_floor_of_repeats(arm_a, samples_a), _floor_of_repeats(arm_b, samples_b)]
    documents = pairing.documents
    discordant = [one for one in documents if one.difference]
    discordant.sort(key=lambda one: (-abs(one.difference) / one.repeats, one.document))
    return Comparison(
        arm_a=arm_a,
        arm_b=arm_b,
        result=_result(documents, seed) if documents else None,
        counting_failures=_result(pairing.with_failures(), seed) if pairing.unjudged else None,
        discordant=tuple(discordant),
        pairing=pairing,
        floors=(*(floor for floor in own if floor is not None), *floors),
        unpaired=unpaired_threshold(len(documents)) if documents else None,
    )


def floor_of_second_run(arm: str, first: Iterable[Sample], second: Iterable[Sample]) -> Floor:
    """The A/A floor from two runs of one arm.

    Raises:
        InputError: the runs share no judged document.
    """
    documents = pair(first, second).documents
    if not documents:
        raise InputError(f"the two runs of {arm} share no judged document")
    disagreement = _mean([one.disagreement for one in documents])
    return Floor(arm, disagreement, len(documents), FloorOrigin.SECOND_RUN)


def _floor_of_repeats(arm: str, samples: Iterable[Sample]) -> Floor | None:
    found = repeat_disagreement(samples)
    return None if found is None else Floor(arm, *found, FloorOrigin.REPEATS)


def _result(documents: Sequence[DocumentPair], seed: int) -> Result:
    differences = [one.difference / one.repeats for one in documents]
    lost = sum(one.difference < 0 for one in documents)
    gained = sum(one.difference > 0 for one in documents)
    once = all(one.repeats == 1 for one in documents)
    p_value = mcnemar(lost, gained) if once else sign_flip([d.difference for d in documents])
    difference = _mean(differences)
    disagreement = _mean([one.disagreement for one in documents])
    return Result(
        documents=len(documents),
        accuracy_a=_mean([one.right_a / one.repeats for one in documents]),
        accuracy_b=_mean([one.right_b / one.repeats for one in documents]),
        difference=difference,
        interval=paired_interval(differences, largest=1.0, seed=seed),
        test=PairedTest.MCNEMAR if once else PairedTest.SIGN_FLIP,
        p_value=p_value,
        lost=lost,
        gained=gained,
        disagreement=disagreement,
        detectable_drop=(
            paired_power.detectable_drop(len(documents), disagreement)
            if once
            else _detectable_by_spread(differences)
        ),
        conclusion=_conclude(p_value, documents),
    )


def _conclude(p_value: float, documents: Sequence[DocumentPair]) -> Conclusion:
    if p_value > ALPHA:
        return Conclusion.NOT_DETECTABLE
    # The sum that was tested, which unequal repeats can tell apart from the mean of documents.
    total = sum(one.difference for one in documents)
    return Conclusion.WORSE if total < 0 else Conclusion.BETTER


def _detectable_by_spread(differences: Sequence[float]) -> float | None:
    """With repeats: by the normal approximation, from how documents' differences spread."""
    if len(differences) < 2:
        return None
    # One document that differs by all of it stands for what a quiet run may have missed.
    spread = max(float(np.std(differences, ddof=1)), 1 / math.sqrt(len(differences)))
    z_sum = float(stats.norm.ppf(1 - ALPHA / 2) + stats.norm.ppf(paired_power.POWER))
    return z_sum * spread / math.sqrt(len(differences))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
