"""Checks of a run: the law, what the bake has to show, and the figures of an earlier run."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from evals.regress.arms import Arm, Variant
from evals.regress.generate import Generation
from evals.regress.layer_errors import LayerErrors, root_mean_square
from evals.regress.suite import Scored
from evals.regress.summary import Summary
from trtllm_b12x_fix.emulator.arithmetic import KernelFamily
from trtllm_b12x_fix.emulator.contract import DirectMicro, contract_for
from trtllm_b12x_fix.law import Powers

#: Metrics held against a baseline; the others are reported.
HELD = ("kl_mean", "perplexity_change", "top1_agreement")


class Verdict(enum.Enum):
    """Values are those of the JSON's ``verdict``."""

    GOOD = "good"
    REGRESSION = "regression"
    INCOMPLETE = "incomplete"


@dataclass(frozen=True)
class Check:
    """One thing that has to hold.

    Attributes:
        passed: ``None`` where it could not be judged; ``detail`` says why.
        detail: what was seen, in words with figures.
    """

    name: str
    passed: bool | None
    detail: str


def verdict(checks: Iterable[Check], results: Iterable[Scored | Generation]) -> Verdict:
    """A failed check counts for more than a run that was cut short."""
    if any(check.passed is False for check in checks):
        return Verdict.REGRESSION
    if any(each.not_run for each in results):
        return Verdict.INCOMPLETE
    return Verdict.GOOD


def misreads_input_scales(variant: Variant) -> bool:
    """Direct micro of 0.6.17 to 0.7.1 multiplies by what it should divide by: no exact arm."""
    kernel = variant.kernel
    return (
        kernel is not None
        and kernel.family is KernelFamily.DIRECT_MICRO
        and contract_for(kernel.version).direct_micro is DirectMicro.MULTIPLIES
    )


def law_of_models(summary: Summary) -> list[Check]:
    """The same final states, bit for bit, wherever the law moved the weights of an exact arm.

    One check per arm and kernel that ran at several magnitudes; and one that the bake, which has
    to break the law, does.
    """
    checks = []
    for own in summary.variants:
        moved = [each for each in summary.variants if _is_moved(each, own)]
        if own.powers != Powers() or not moved or misreads_input_scales(own):
            continue
        states = summary.states_sha256(own)
        differing = [each for each in moved if summary.states_sha256(each) != states]
        where = ", ".join(str(each.powers) for each in moved)
        if own.arm.obeys_the_law:
            broken = ", ".join(str(each.powers) for each in differing)
            detail = f"not the same bits at {broken}" if broken else f"the same bits at {where}"
            checks.append(Check(f"law, whole model: {own.label}", not differing, detail))
        elif own.arm is Arm.BAKED:
            detail = f"other bits at {len(differing)} of {len(moved)} magnitudes"
            checks.append(Check(f"bake is seen, whole model: {own.label}", bool(differing), detail))
    return checks


def law_of_layers(layers: Sequence[LayerErrors], moved: Powers) -> list[Check]:
    """Every layer by itself: exact arms at every power, the bake's error on its way.

    From one exponent to the next a single layer's error may fall a little while hardly any block
    scale is subnormal; from its own magnitude to the reported one it may not, and over all layers
    it may not fall at any step.

    Args:
        moved: the reported magnitude of the whole model.
    """
    broken = [violation for layer in layers for violation in layer.violations]
    obeying = [layer.number for layer in layers if layer.baked_obeys]
    falling = [layer.number for layer in layers if layer.falls]
    own = [layer.baked[0] for layer in layers]
    reported = [layer.baked_at_reported for layer in layers]
    way = root_mean_square(layers)[: min(moved.k, moved.j) + 1]
    steps = ", ".join(f"{error:.1%}" for error in way)
    return [
        Check(
            "law, every layer: reference and alphas",
            not broken,
            "; ".join(broken[:3]) or f"the same codes and bits in {len(layers)} layers",
        ),
        Check(
            "bake is seen, every layer",
            not obeying,
            f"layers {obeying} keep every bit"
            if obeying
            else f"other bits in {len(layers)} layers",
        ),
        Check(
            "bake's error does not fall from own to reported magnitude, any layer",
            not falling,
            f"falls in layers {falling}" if falling else f"{_range(own)} to {_range(reported)}",
        ),
        Check(
            "bake's error does not fall at any step, all layers",
            len(way) > 1 and all(later >= earlier for earlier, later in pairwise(way)),
            f"root mean square {steps}",
        ),
    ]


def law_of_generations(generations: Sequence[Generation]) -> list[Check]:
    """Greedy tokens of an exact arm do not depend on magnitude either.

    Token for token is asked only of a device that repeats itself: the arm runs twice as it is.
    """
    checks = []
    ran = [each for each in generations if not each.not_run]
    for own, again in _repeated(ran):
        for other in ran:
            if own.variant.arm.obeys_the_law and _is_moved(other.variant, own.variant):
                name = f"law, greedy generation: {own.variant.label}"
                alike = sum(a == b for a, b in zip(own.tokens, other.tokens, strict=True))
                detail = f"{alike} of {len(own.tokens)} answers alike at {other.variant.powers}"
                if again.tokens == own.tokens:
                    checks.append(Check(name, alike == len(own.tokens), detail))
                else:
                    why = "not judged, the same run twice gives other tokens on this device"
                    checks.append(Check(name, None, f"{why}; {detail}"))
    return checks


def _repeated(ran: Sequence[Generation]) -> list[tuple[Generation, Generation]]:
    """Pairs of the first and the second run of one variant."""
    first: dict[Variant, Generation] = {}
    pairs = []
    for each in ran:
        if each.variant in first:
            pairs.append((first[each.variant], each))
        first.setdefault(each.variant, each)
    return pairs


@dataclass(frozen=True)
class Baseline:
    """What an earlier run found.

    Attributes:
        values: each metric by the variant's name.
        floors: how far each metric may move by another order of adds, by the arm's name. Those of
            the earlier run: a defect of this one cannot widen them.
    """

    values: dict[str, dict[str, float]]
    floors: dict[str, dict[str, float]]


def against_baseline(summary: Summary, baseline: Baseline) -> list[Check]:
    """Hold every metric against an earlier run's, within the floor of another order of adds.

    Both directions count: an emulation has no reason to get better either.
    """
    checks = []
    for variant in summary.variants:
        if variant.arm is Arm.BF16:
            continue
        stored = baseline.values.get(variant.name)
        floor = baseline.floors.get(variant.arm.value, {})
        if stored is None:
            checks.append(Check(f"baseline: {variant.name}", False, "the baseline lacks it"))
            continue
        checks.append(_held(variant, summary, stored, floor))
    return checks


def _held(
    variant: Variant, summary: Summary, stored: dict[str, float], floor: dict[str, float]
) -> Check:
    now = summary.metrics(variant)
    moved: list[str] = []
    kept: list[str] = []
    for metric in HELD:
        before, after = stored.get(metric, math.nan), now[metric].value
        allowed = floor.get(metric, 0.0)
        # Written so that NaN on either side fails; two NaN are the same.
        same = math.isnan(before) and math.isnan(after)
        inside = same or abs(after - before) <= allowed
        text = f"{metric} {before:.4f} -> {after:.4f}, floor {allowed:.4f}"
        (kept if inside else moved).append(text)
    detail = "; ".join(moved) or kept[0]
    return Check(f"baseline: {variant.name}", not moved, detail)


def _is_moved(each: Variant, own: Variant) -> bool:
    same = (each.arm, each.kernel, each.seed) == (own.arm, own.kernel, own.seed)
    return same and each.powers != own.powers and own.powers == Powers()


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.1%} to {max(values):.1%}"
