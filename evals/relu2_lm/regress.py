"""The small run that ``make regress`` makes: 200 fixed problems on a CPU, judged.

Answers are written for the arms whose accuracy is compared; the others are teacher forced, which
shows equal bits and KL in a tenth of the time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from evals.regress.statistics import Estimate
from evals.relu2_lm import checkpoint, quantize
from evals.relu2_lm.arms import Magnitude, standing_in
from evals.relu2_lm.decode import answers, divergence, solution_log_probabilities
from evals.relu2_lm.evaluate import (
    MANY_TOKENS,
    SPLITS,
    Case,
    Emulated,
    Plain,
    Subject,
    experts_of,
    subject,
)
from evals.relu2_lm.problems import Problem, generate
from evals.relu2_lm.record import bits, describe
from evals.relu2_lm.statistics import Comparison, compare, mean
from trtllm_b12x_fix.layer_check.arms import Arm

if TYPE_CHECKING:
    from collections.abc import Iterator

SCHEMA = "trtllm-b12x-fix/relu2-lm-regress/1"
BASELINE = Path(__file__).parents[2] / "tests/relu2_lm/baselines/small.json"
#: Problems of each split, 200 in all, and their seed, which no other run uses.
SHARES, SEED = (67, 66, 67), 8

REFERENCE = Emulated(None, "0.6.18", MANY_TOKENS, Magnitude.REPORTED)
BAKED = replace(REFERENCE, arm=Arm.BAKED)
RESCALE = replace(REFERENCE, arm=Arm.FP32_RESCALE)
OWN = replace(REFERENCE, magnitude=Magnitude.OWN)
ALPHAS = replace(REFERENCE, arm=Arm.ALPHAS)
OTHER_ORDER = replace(REFERENCE, order_seed=1)
CONTROL = replace(BAKED, magnitude=Magnitude.QUARTER)

#: Arms that write answers, and arms that are teacher forced only.
WRITTEN: tuple[Case, ...] = (Plain.BF16, REFERENCE, RESCALE, BAKED)
FORCED: tuple[Case, ...] = (Plain.W4A16, OWN, ALPHAS, CONTROL)
#: Problems by which an accuracy may leave the baseline beyond the baseline's ``order_changes``, the
#: answers that another order of the kernel's own adds changed: another CPU adds in another order.
_SPARE = 2


@dataclass(frozen=True)
class Measured:
    """One arm: whose answers are right (``None`` where none were written), and KL per problem."""

    case: Case
    right: list[bool] | None
    divergence: list[float]
    log_probabilities: Tensor


@dataclass(frozen=True)
class Result:
    """What was measured, and every way in which it is not as it has to be."""

    measured: dict[Case, Measured]
    findings: list[str]
    document: dict[str, Any]


def problems() -> list[Problem]:
    """The 200."""
    return [
        problem
        for split, count in zip(SPLITS, SHARES, strict=True)
        for problem in generate(split, SEED, count)
    ]


def run(
    tell: Callable[[str], None],
    folder: Path = checkpoint.KEPT,
    baseline: Path | None = BASELINE,
    written: Sequence[Case] = WRITTEN,
) -> Result:
    """Measure and judge; about a minute on one core.

    Args:
        tell: is given a line for each arm.
        baseline: accuracies to compare with; ``None`` compares with nothing.
        written: arms that write answers; all others of :data:`WRITTEN` are teacher forced.

    Raises:
        OSError: the checkpoint or the baseline is missing.
    """
    with _one_thread():
        given = _subject(folder)
        base = solution_log_probabilities(given.model, given.corpus)
        measured = {}
        for case in dict.fromkeys((*written, *WRITTEN, *FORCED)):
            measured[case] = _measure(given, case, base, writes=case in written)
            tell(_line(measured[case]))
    findings = judge(measured)
    document = to_document(measured, findings)
    if baseline is not None:
        findings += against_baseline(document, json.loads(baseline.read_text()))
        document = to_document(measured, findings)
    return Result(measured, findings, document)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Products here are small: a second thread costs more than it does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _subject(folder: Path) -> Subject:
    model = checkpoint.load(folder, torch.device("cpu"), torch.float32)
    layers = quantize.quantize(model, checkpoint.load_calibration(folder))
    return subject(model, layers, problems())


def _measure(given: Subject, case: Case, base: Tensor, writes: bool) -> Measured:
    right = None
    with standing_in(given.model, experts_of(given, case)) as model:
        if writes:
            found = answers(model, given.problems)
            right = [a == p.answer for a, p in zip(found, given.problems, strict=True)]
        log_q = base
        if case is not Plain.BF16:
            log_q = solution_log_probabilities(model, given.corpus)
    return Measured(case, right, divergence(base, log_q, given.corpus).tolist(), log_q)


def _line(found: Measured) -> str:
    name = " ".join(str(value) for value in describe(found.case).values() if value is not None)
    written = "" if found.right is None else f", exact {sum(found.right)}/{len(found.right)}"
    return f"relu2 LM, {name}: KL {np.mean(found.divergence):.2e}{written}"


def judge(measured: dict[Case, Measured]) -> list[str]:
    """What must hold whatever the machine; an empty list is good."""
    findings = []
    for case, what in ((OWN, "at its own magnitude"), (ALPHAS, "as alphas")):
        same = torch.equal(measured[case].log_probabilities, measured[REFERENCE].log_probabilities)
        if not same:
            findings.append(f"the reference has other bits {what}: scales were rounded")
    bake, control = _rise(measured, BAKED), _rise(measured, CONTROL)
    if bake.low <= 0:
        findings.append(f"the bake is not seen: KL above the reference by {bake}")
    if control.low <= bake.high:
        findings.append(f"a bake four times further down is not seen to be worse: {control}")
    rescale = _rise(measured, RESCALE)
    if rescale.high >= bake.low:
        findings.append(f"fp32-rescale is as far from the reference as the bake: {rescale}")
    return findings


def _rise(measured: dict[Case, Measured], case: Case) -> Estimate:
    """KL of an arm minus KL of the reference, problem by problem."""
    return mean(np.subtract(measured[case].divergence, measured[REFERENCE].divergence))


def to_document(measured: dict[Case, Measured], findings: Sequence[str]) -> dict[str, Any]:
    """Everything as JSON."""
    return {
        "schema": SCHEMA,
        "verdict": "regression" if findings else "good",
        "findings": list(findings),
        "problems": sum(SHARES),
        "problem_seed": SEED,
        "kernels": "emulated on a CPU",
        "torch": torch.__version__,
        "cases": [_case(measured, each) for each in measured.values()],
    }


def _case(measured: dict[Case, Measured], found: Measured) -> dict[str, Any]:
    document: dict[str, Any] = {
        **describe(found.case),
        "kl_from_bf16": asdict(mean(found.divergence)),
        "kl_above_reference": asdict(_rise(measured, found.case)),
    }
    if found.right is not None:
        document["exact"] = sum(found.right)
        document["right"] = bits(found.right)
        reference = measured[REFERENCE].right
        if reference is not None and found.case is not REFERENCE:
            document["against_reference"] = asdict(compare(found.right, reference))
    return document


def against_baseline(document: dict[str, Any], baseline: dict[str, Any]) -> list[str]:
    """Accuracies that left the baseline, and arms that it lacks."""
    if baseline.get("schema") != SCHEMA:
        return [f"the baseline is no {SCHEMA}"]
    findings = []
    allowed = baseline["order_changes"] + _SPARE
    stored = {_key(case): case["exact"] for case in baseline["cases"] if "exact" in case}
    for case in document["cases"]:
        if "exact" not in case:
            continue
        before = stored.get(_key(case))
        if before is None:
            findings.append(f"{case['arm']}: not in the baseline")
        elif abs(case["exact"] - before) > allowed:
            findings.append(
                f"{case['arm']}: {case['exact']} exact answers, {before} in the baseline, which "
                f"may differ by {allowed}"
            )
    return findings


def _key(case: dict[str, Any]) -> str:
    names = ("arm", "flashinfer", "step_tokens", "magnitude", "order_seed")
    return json.dumps([case.get(name) for name in names])


def new_baseline(tell: Callable[[str], None]) -> dict[str, Any]:
    """A run whose other-order arm writes answers too: how many change sides is the tolerance."""
    result = run(tell, baseline=None, written=(*WRITTEN, OTHER_ORDER))
    reference, other = result.measured[REFERENCE].right, result.measured[OTHER_ORDER].right
    assert reference is not None
    assert other is not None
    changes: Comparison = compare(other, reference)
    return {**result.document, "order_changes": changes.lost + changes.gained}
