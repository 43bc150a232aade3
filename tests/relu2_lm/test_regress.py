"""The small run: its judgement on made-up measurements, and the real one on a few problems."""

import copy
import json

import numpy as np
import pytest
import torch

from evals.relu2_lm import __main__ as command
from evals.relu2_lm import checkpoint, decode, evaluate, regress
from evals.relu2_lm.evaluate import Emulated, Plain
from evals.relu2_lm.problems import Split
from evals.relu2_lm.record import bits, unpack_bits
from evals.relu2_lm.regress import ALPHAS, BAKED, CONTROL, OWN, REFERENCE, RESCALE
from evals.relu2_lm.statistics import compare, mean
from trtllm_b12x_fix.layer_check.arms import Arm

_RNG = np.random.default_rng(0)
_NOISE = _RNG.exponential(1e-4, 200)
_KL = {
    Plain.BF16: 0.0,
    Plain.W4A16: 2e-4,
    REFERENCE: 4e-4,
    RESCALE: 4e-4,
    BAKED: 2e-3,
    OWN: 4e-4,
    ALPHAS: 4e-4,
    CONTROL: 0.5,
}


def measured(**changed):
    """A good run, with the KL of some arms changed."""
    kl = {**_KL, **{getattr(regress, name): value for name, value in changed.items()}}
    found = {}
    for case, value in kl.items():
        right = [n % 10 != 0 for n in range(200)] if case in regress.WRITTEN else None
        divergence = list(value + value * _NOISE * 1e3 * _RNG.uniform(0.5, 1.5, 200))
        log_p = torch.zeros(4, 3)
        found[case] = regress.Measured(case, right, divergence, log_p)
    return found


def test_a_good_run_has_no_finding():
    assert regress.judge(measured()) == []


@pytest.mark.parametrize("case", [OWN, ALPHAS], ids=["own magnitude", "alphas"])
def test_other_bits_are_a_finding(case):
    found = measured()
    found[case].log_probabilities[2, 1] = 1e-7
    (finding,) = regress.judge(found)
    assert "scales were rounded" in finding


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"BAKED": 4e-4, "RESCALE": 1e-4}, "the bake is not seen"),
        ({"CONTROL": 2e-3}, "is not seen to be worse"),
        ({"RESCALE": 2e-3}, "fp32-rescale is as far"),
    ],
)
def test_what_has_to_differ_is_a_finding_if_it_does_not(changed, words):
    assert any(words in finding for finding in regress.judge(measured(**changed)))


@pytest.fixture
def baseline():
    return json.loads(regress.BASELINE.read_text())


def test_the_baseline_agrees_with_itself_and_is_good(baseline):
    assert regress.against_baseline(baseline, baseline) == []
    assert baseline["verdict"] == "good"
    assert baseline["problems"] == 200


def test_leaving_the_baseline_is_a_finding(baseline):
    changed = copy.deepcopy(baseline)
    allowed = baseline["order_changes"] + 2
    changed["cases"][0]["exact"] -= allowed
    assert regress.against_baseline(changed, baseline) == []
    changed["cases"][0]["exact"] -= 1
    (finding,) = regress.against_baseline(changed, baseline)
    assert "bf16" in finding
    del changed["cases"][0]["arm"]
    changed["cases"][0]["arm"] = "other"
    assert regress.against_baseline(changed, baseline) == ["other: not in the baseline"]
    assert regress.against_baseline(changed, {"schema": "x"})


def test_the_200_problems_are_fixed():
    problems = regress.problems()
    assert len(problems) == 200
    assert {problem.split for problem in problems} == set(evaluate.SPLITS)
    assert problems == regress.problems()


def test_the_kept_model_answers_and_the_judge_accepts_it(monkeypatch):
    """Fewer problems than make regress, chosen where the kept model is always right."""
    monkeypatch.setattr(regress, "SHARES", (1, 14, 1))
    lines = []
    result = regress.run(lines.append, baseline=None, written=(Plain.BF16,))
    assert len(lines) == len(regress.WRITTEN) + len(regress.FORCED)
    assert sum(result.measured[Plain.BF16].right) >= 13
    assert result.measured[BAKED].right is None
    own, alphas, far = (result.measured[c].log_probabilities for c in (OWN, ALPHAS, CONTROL))
    assert torch.equal(own, alphas)
    assert not torch.equal(own, far)
    # 16 problems are too few to see the bake in; everything else holds.
    assert all("bake" in finding for finding in result.findings)
    assert result.document["verdict"] == ("regression" if result.findings else "good")


def test_the_command_says_what_is_missing(tmp_path, capsys):
    missing = tmp_path / "nothing"
    arguments = ["evaluate", "--checkpoint", str(missing), "--out", str(tmp_path / "x.json")]
    assert command.main(arguments) == 2
    assert str(missing) in capsys.readouterr().err


def test_pairing_is_exact():
    baseline = [True] * 20 + [False] * 10
    arm = [False] * 6 + [True] * 14 + [True] + [False] * 9
    found = compare(arm, baseline)
    assert (found.lost, found.gained) == (6, 1)
    assert found.p_value == pytest.approx(0.125)  # (1 + 7) * 2 / 2^7
    assert found.difference == pytest.approx(-5 / 30)
    assert found.low < found.difference < found.high
    with pytest.raises(ValueError, match="30 problems with 29"):
        compare(arm, baseline[1:])
    interval = mean([1.0, 2.0, 3.0, 4.0])
    assert interval.value == 2.5
    assert 1.0 <= interval.low < 2.5 < interval.high <= 4.0


def test_bits_come_back():
    right = [n % 3 == 0 for n in range(21)]
    assert unpack_bits(bits(right), 21) == right


def test_the_matrix_is_the_issues():
    cases = evaluate.cases()
    arms = {case.value if isinstance(case, Plain) else case.arm_name for case in cases}
    assert {"bf16", "w4a16", "reference", "alphas", "fp32-rescale", "baked"} <= arms
    emulated = [case for case in cases if isinstance(case, Emulated)]
    for version in evaluate.VERSIONS:
        for tokens in (evaluate.ONE_TOKEN, evaluate.MANY_TOKENS):
            found = {c.arm for c in emulated if (c.version, c.tokens) == (version, tokens)}
            assert {None, Arm.BAKED, Arm.ALPHAS, Arm.FP32_RESCALE} <= found
    assert len(set(cases)) == len(cases)


def test_time_runs_out_and_that_is_said(monkeypatch):
    from tests.relu2_lm.models import subject

    monkeypatch.setattr(decode, "NEW_TOKENS", 2)
    monkeypatch.setattr(decode.answers, "__defaults__", (2,))
    outcomes, left_out = evaluate.run(subject(), list(Plain), 0.0, lambda _: None)
    assert not outcomes
    assert [case for case, why in left_out if "no time" in why] == list(Plain)
    assert (checkpoint.KEPT / checkpoint.WEIGHTS).stat().st_size < 12e6
    assert Split.TRAIN not in evaluate.SPLITS
