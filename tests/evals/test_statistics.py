"""Paired statistics against enumeration, scipy and simulation. 10 seconds."""

from __future__ import annotations

import itertools
import json
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from evals import __main__ as cli
from evals.statistics import bootstrap, document, power, words
from evals.statistics.bootstrap import IntervalMethod, paired_interval
from evals.statistics.compare import (
    Conclusion,
    FloorOrigin,
    PairedTest,
    compare,
    floor_of_second_run,
)
from evals.statistics.exact import mcnemar, sign_flip
from evals.statistics.pairs import DocumentPair, Sample, pair
from evals.statistics.power import Effect
from evals.statistics.thresholds import unpaired_documents, unpaired_threshold
from trtllm_b12x_fix.errors import InputError

ISSUE = Effect(drop=0.02, discordant=0.04)


def two_sided(lost: int, gained: int) -> Fraction:
    """McNemar's exact p-value in whole numbers."""
    n, k = lost + gained, min(lost, gained)
    tail = sum(math.comb(n, i) for i in range(k + 1))
    return min(Fraction(1), Fraction(2 * tail, 2**n))


@given(st.integers(0, 60), st.integers(0, 60))
def test_mcnemar_is_exact(lost, gained):
    assert mcnemar(lost, gained) == pytest.approx(float(two_sided(lost, gained)), rel=1e-12)


@given(st.lists(st.integers(-4, 4), max_size=9))
def test_sign_flip_counts_all_signs(differences):
    observed = abs(sum(differences))
    extreme = [
        abs(sum(sign * d for sign, d in zip(signs, differences, strict=True))) >= observed
        for signs in itertools.product((1, -1), repeat=len(differences))
    ]
    assert sign_flip(differences) == pytest.approx(sum(extreme) / len(extreme), rel=1e-12)


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 5))
def test_sign_flip_with_one_repeat_is_mcnemar(lost, gained, alike):
    flips = [-1] * lost + [1] * gained + [0] * alike
    assert sign_flip(flips) == pytest.approx(mcnemar(lost, gained), rel=1e-9)


def test_repeats_of_a_document_are_not_independent_evidence():
    """Ten repeats that agree prove no more than one."""
    assert sign_flip([-10] * 5 + [10] * 3) == pytest.approx(mcnemar(5, 3))


def test_the_issues_figures():
    assert power.pairs_needed(ISSUE) == 843
    assert power.normal_pairs(ISSUE) == 783
    assert power.power(783, ISSUE) == pytest.approx(0.765, abs=0.001)
    for pairs in range(843, 1000):
        assert power.power(pairs, ISSUE) >= 0.8
    assert power.power(842, ISSUE) < 0.8


@pytest.mark.parametrize(
    ("pairs", "effect"),
    [(843, ISSUE), (783, ISSUE), (164, Effect(0.05, 0.08)), (60, Effect(0.2, 0.2)),
     (12, Effect(0.3, 0.6)), (5, Effect(0.5, 0.5))],
)  # fmt: skip
def test_power_is_what_simulated_runs_find(pairs, effect):
    runs = 40_000
    generator = np.random.default_rng(pairs)
    rest = max(0.0, 1 - effect.lost - effect.gained)
    draws = generator.multinomial(pairs, [effect.lost, effect.gained, rest], size=runs)
    splits, times = np.unique(draws[:, :2], axis=0, return_counts=True)
    found = sum(
        int(count)
        for (lost, gained), count in zip(splits, times, strict=True)
        if lost + gained and stats.binomtest(int(lost), int(lost + gained)).pvalue <= 0.05
    )
    expected = power.power(pairs, effect)
    assert found / runs == pytest.approx(expected, abs=4 * math.sqrt(0.25 / runs))


def test_the_test_keeps_its_level():
    """Without a difference at most 5% of runs find one, whatever the number of pairs."""
    for pairs in (10, 50, 164, 843, 1319):
        assert power.power(pairs, Effect(1e-12, 0.04)) <= 0.05


@pytest.mark.parametrize("discordant", [0.0, 0.001, 0.04, 0.2])
@pytest.mark.parametrize("pairs", [12, 164, 1319])
def test_the_detectable_drop_is_the_smallest(pairs, discordant):
    drop = power.detectable_drop(pairs, discordant)
    if drop is None:
        assert pairs == 12
        return
    reach = power.power(pairs, Effect(drop, max(drop, discordant)))
    below = power.power(pairs, Effect(0.97 * drop, max(0.97 * drop, discordant)))
    assert reach >= 0.8 > below


def test_too_few_documents_see_nothing():
    assert power.detectable_drop(5, 0.5) is None  # 5 flips of 5 have p 0.06
    assert power.detectable_drop(0, 0.5) is None


@pytest.mark.parametrize(
    ("drop", "discordant"), [(0.04, 0.02), (0, 0.1), (-0.1, 0.1), (0.5, 1.5), (math.nan, 0.1)]
)
def test_effects_that_cannot_be(drop, discordant):
    with pytest.raises(InputError, match="discordant"):
        Effect(drop, discordant)


def test_baselines_that_cannot_be():
    power.check_baseline(ISSUE, 0.95)
    for baseline in (0.02, 0.995, 0.0, 1.0):
        with pytest.raises(InputError, match="baseline"):
            power.check_baseline(ISSUE, baseline)
    with pytest.raises(InputError, match="10,000,000"):
        power.pairs_needed(Effect(1e-5, 0.5))


def test_tensorrt_llms_rule():
    gsm8k = unpaired_threshold(1319)
    assert gsm8k.allowed_drop == pytest.approx(0.032, abs=5e-4)
    assert gsm8k.detectable_drop == pytest.approx(0.048, abs=5e-4)
    assert unpaired_threshold(unpaired_documents(0.02)).detectable_drop <= 0.02
    assert unpaired_threshold(unpaired_documents(0.02) - 1).detectable_drop > 0.02


def test_the_interval_is_the_bootstraps():
    values = [-1.0] * 12 + [1.0] * 4 + [0.0] * 184
    interval = paired_interval(values, largest=1)
    # The draws' exact law: multinomial counts.
    draws = np.random.default_rng(5).multinomial(200, [0.06, 0.02, 0.92], size=200_000)
    low, high = np.quantile((draws[:, 1] - draws[:, 0]) / 200, [0.025, 0.975])
    assert interval.low == pytest.approx(low, abs=0.006)
    assert interval.high == pytest.approx(high, abs=0.006)
    assert interval.method is IntervalMethod.PAIRED_BOOTSTRAP
    assert paired_interval(values, largest=1) == interval
    assert paired_interval(values, largest=1, seed=1) != interval


def test_the_interval_covers_as_it_says(monkeypatch):
    """Of 300 simulated comparisons of 300 documents, about 95% hold the true difference."""
    monkeypatch.setattr(bootstrap, "RESAMPLES", 999)
    generator = np.random.default_rng(0)
    held = 0
    for _ in range(300):
        values = generator.choice([-1.0, 1.0, 0.0], p=[0.06, 0.02, 0.92], size=300)
        interval = paired_interval(values.tolist(), largest=1)
        held += interval.low <= -0.04 <= interval.high
    assert 0.90 <= held / 300 <= 0.99


def test_no_difference_at_all_has_an_interval_too():
    interval = paired_interval([0.0] * 100, largest=1)
    assert interval.method is IntervalMethod.NONE_DIFFERS
    assert interval.high == -interval.low == pytest.approx(bootstrap.unseen(100))
    # Were so many discordant, none of 100 would be seen with chance 2.5%.
    assert (1 - interval.high) ** 100 == pytest.approx(0.025)
    assert paired_interval([0.0], largest=1).method is IntervalMethod.TOO_FEW
    assert paired_interval([0.5, 0.5], largest=1).low == 0.5
    assert paired_interval([0.0] * 9, largest=math.inf).high == math.inf


def run(text: str, prefix: str = "d", repeat: int = 0) -> list[Sample]:
    """One letter a document: r right, w wrong, anything else not judged."""
    return [
        Sample(f"{prefix}{i}", repeat, {"r": True, "w": False}.get(letter),
               "answered" if letter in "rw" else "length")
        for i, letter in enumerate(text)
    ]  # fmt: skip


def test_pairs_are_matched_by_document_and_repeat():
    a = [*run("rrwu"), *run("rw", repeat=1), Sample("alone", 0, True)]
    b = [*run("rww r"), *run("wr", repeat=1)][::-1]
    pairing = pair(a, b)
    assert pairing.documents == (
        DocumentPair("d0", 2, 1, 2), DocumentPair("d1", 1, 1, 2), DocumentPair("d2", 0, 0, 1),
    )  # fmt: skip
    (unjudged,) = pairing.unjudged
    assert (unjudged.document, unjudged.status_a, unjudged.status_b) == ("d3", "length", "length")
    assert (pairing.only_a, pairing.only_b) == (1, 1)
    assert dict(pairing.statuses_b) == {"answered": 6, "length": 1}


def test_unjudged_answers_counted_as_failures():
    pairing = pair(run("rruu"), run("ruru"))
    assert pairing.documents == (DocumentPair("d0", 1, 1, 1),)
    assert [(one.right_a, one.right_b) for one in pairing.with_failures()] == [
        (1, 1), (1, 0), (0, 1), (0, 0),
    ]  # fmt: skip


def test_what_cannot_be_paired():
    with pytest.raises(InputError, match="twice"):
        pair([*run("r"), *run("r")], run("r"))
    with pytest.raises(InputError, match="in common"):
        pair(run("r", "a"), run("r", "b"))


def test_a_worse_arm_is_found():
    comparison = compare("good", run("r" * 50), "bad", run("r" * 38 + "w" * 12))
    result = comparison.result
    assert comparison.conclusion is Conclusion.WORSE
    assert (result.lost, result.gained, result.test) == (12, 0, PairedTest.MCNEMAR)
    assert result.p_value == pytest.approx(2 / 2**12)
    assert result.difference == pytest.approx(-0.24)
    assert result.interval.high < 0
    assert [one.document for one in comparison.discordant] == sorted(f"d{i}" for i in range(38, 50))
    assert "bad is worse than good by 24.0 points" in words.sentence(comparison)
    back = compare("bad", run("r" * 38 + "w" * 12), "good", run("r" * 50))
    assert back.conclusion is Conclusion.BETTER


def test_alike_is_never_called_equal():
    comparison = compare("a", run("r" * 90 + "w" * 10), "b", run("r" * 89 + "w" * 11))
    assert comparison.conclusion is Conclusion.NOT_DETECTABLE
    text = "\n".join(words.paragraph(comparison))
    seen = 100 * comparison.result.detectable_drop
    assert f"no difference detectable between a and b; this run could have seen {seen:.1f}" in text
    assert "A/A floor: not measured" in text
    assert "unpaired rule for 100 documents" in text
    for word in ("equal", "same", "identical", "no difference between"):
        assert word not in text
    assert "too few to see any" in words.sentence(compare("a", run("rr"), "b", run("rw")))


def test_the_reports_fifty_questions_could_not_have_seen_it():
    """46 of 50 against 48 of 50: nothing detectable, and nothing below 16 points was."""
    result = compare("CUTLASS", run("r" * 48 + "ww"), "CUTEDSL", run("r" * 46 + "w" * 4)).result
    assert result.conclusion is Conclusion.NOT_DETECTABLE
    assert result.p_value == pytest.approx(0.5)
    assert 0.14 < result.detectable_drop < 0.17


def test_unjudged_answers_can_change_the_conclusion():
    comparison = compare("a", run("r" * 60), "b", run("r" * 50 + "u" * 10))
    assert comparison.conclusion is Conclusion.NOT_DETECTABLE
    assert comparison.counting_failures.conclusion is Conclusion.WORSE
    assert comparison.depends_on_unjudged
    text = words.paragraph(comparison)[-1]
    assert "10 pairs without a verdict" in text
    assert "b: 50 answered, 10 length" in text
    assert "THE CONCLUSION DEPENDS ON THEM" in text
    calm = compare("a", run("r" * 60), "b", run("r" * 59 + "u"))
    assert not calm.depends_on_unjudged
    nothing = compare("a", run("uu"), "b", run("rr"))
    assert nothing.conclusion is Conclusion.NOTHING_COMPARED
    assert "nothing compared" in words.sentence(nothing)


def test_repeats_are_clustered_and_give_the_floor():
    """20 documents, 10 repeats: arm b loses three of them; a coin decides one in both arms."""
    a = [s for r in range(10) for s in run("r" * 19 + ("r" if r % 2 else "w"), repeat=r)]
    b = [s for r in range(10) for s in run("w" * 3 + "r" * 16 + "wr"[r % 2], repeat=r)]
    comparison = compare("a", a, "b", b)
    result = comparison.result
    assert result.documents == 20
    assert result.test is PairedTest.SIGN_FLIP
    assert result.p_value == pytest.approx(0.25)  # three documents, not thirty answers
    assert result.conclusion is Conclusion.NOT_DETECTABLE
    assert result.accuracy_a == pytest.approx(0.975)
    assert result.disagreement == pytest.approx((3 + 0.5) / 20)
    own = {floor.arm: floor for floor in comparison.floors}
    # A coin's repeats differ with chance 5/9 of pairs, in one document of 20.
    assert own["a"].disagreement == pytest.approx(5 / 9 / 20)
    assert own["a"].origin is FloorOrigin.REPEATS
    assert 0.1 < result.detectable_drop < 0.3
    assert "sign-flip test by document" in words.paragraph(comparison)[1]


def test_a_second_run_gives_the_floor_as_well():
    floor = floor_of_second_run("a", run("rrrw"), run("rwrw"))
    assert (floor.disagreement, floor.documents) == (0.25, 4)
    comparison = compare("a", run("rrrw"), "b", run("rrww"), floors=[floor])
    assert comparison.floors == (floor,)
    assert "a disagrees with itself in 25.0%" in "\n".join(words.paragraph(comparison))
    with pytest.raises(InputError, match="no judged"):
        floor_of_second_run("a", run("u"), run("r"))


def test_hostile_names_are_shown_harmless_and_the_json_is_whole():
    comparison = compare("a\x1b[31m", run("rru"), "b", run("rwr"))
    assert "\x1b" not in "\n".join(words.paragraph(comparison))
    data = json.loads(json.dumps(document.to_json(comparison), allow_nan=False))
    assert data["conclusion"] == "no-difference-detectable"
    assert data["discordant"] == [{"document": "d1", "right_a": 1, "right_b": 0, "repeats": 1}]
    assert data["result"]["interval"]["method"] == "paired-bootstrap"
    assert data["unjudged"][0]["status_a"] == "length"
    empty = document.to_json(compare("a", run("u"), "b", run("r")))
    assert empty["result"] is None


def test_the_command(capsys, tmp_path):
    target = tmp_path / "power.json"
    arguments = ["power", "--baseline", "0.95", "--discordant", "0.04", "--drop", "0.02"]
    assert cli.main([*arguments, "--json", str(target)]) == 0
    out = capsys.readouterr().out
    assert "843 documents" in out
    assert "783 have power 0.76" in out
    data = json.loads(target.read_text())
    assert (data["schema"], data["verdict"]) == ("trtllm-b12x-fix/power/1", "good")
    assert (data["pairs"], data["normal_approximation"]["pairs"]) == (843, 783)
    assert data["tasks"]["gsm8k"]["power"] > 0.9 > 0.2 > data["tasks"]["humaneval"]["power"]
    assert cli.main([*arguments, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == data


def test_the_command_refuses_what_cannot_be(capsys, tmp_path):
    assert cli.main(["power", "--baseline", "0.95", "--discordant", "0.02", "--drop", "0.04"]) == 2
    assert "at most the discordant share" in capsys.readouterr().err
    assert cli.main(["power", "--baseline", "0.01", "--discordant", "0.04", "--drop", "0.02"]) == 2
    assert "baseline" in capsys.readouterr().err
    for bad in ("2%", "0", "1", "nan", "x"):
        with pytest.raises(SystemExit) as ended:
            cli.main(["power", "--baseline", bad, "--discordant", "0.04", "--drop", "0.02"])
        assert ended.value.code == 2
    fine = ["power", "--baseline", "0.95", "--discordant", "0.04", "--drop", "0.02"]
    assert cli.main([*fine, "--json", str(tmp_path)]) == 2
    assert cli.main([]) == 2
