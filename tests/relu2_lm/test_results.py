"""The recorded H200 runs: whole, consistent with each other, and what the README says of them."""

import json
from pathlib import Path

import pytest

from evals.relu2_lm import checkpoint
from evals.relu2_lm.record import unpack_bits
from evals.relu2_lm.table import table

ROOT = Path(__file__).parents[2]
RECORDED = json.loads((ROOT / "tests/relu2_lm/baselines/h200.json").read_text())
RUNS = RECORDED["runs"]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CASES = [case for run in RUNS for case in run["cases"]]


def _key(case):
    names = ("arm", "flashinfer", "step_tokens", "magnitude", "order_seed")
    return tuple(case.get(name) for name in names)


def test_the_readme_shows_the_recorded_table():
    for line in table(RUNS).splitlines():
        assert line in README


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(k) for k in _key(case)))
def test_accuracies_are_the_recorded_answers(case):
    right = unpack_bits(case["right"], RUNS[0]["problems"])
    assert len(right) >= 2000
    assert sum(right) / len(right) == pytest.approx(case["accuracy"])


def test_the_trained_model_reaches_nine_tenths():
    (bf16,) = {case["accuracy"] for case in CASES if case["arm"] == "bf16"}
    assert bf16 >= 0.9
    log = json.loads((checkpoint.KEPT / "training_log.json").read_text())
    assert log["recipe"]["seconds"] <= 480
    assert "H200" in log["device"]
    assert log["log"][-1]["exact"] >= 0.9


def test_both_runs_give_the_same_answers_where_both_have_an_arm():
    first, second = ({_key(case): case["right"] for case in run["cases"]} for run in RUNS)
    shared = set(first) & set(second)
    assert len(shared) >= 8
    # Atomic adds in another order are another arm: these were run in slot order.
    assert all(first[key] == second[key] for key in shared if key[-1] is None)


def test_alphas_answers_as_the_reference_does():
    by_key = {_key(case): case["right"] for case in CASES}
    alphas = [key for key in by_key if key[0] == "alphas"]
    assert len(alphas) >= 5
    for key in alphas:
        assert by_key[key] == by_key[("reference", *key[1:])]
