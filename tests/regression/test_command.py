"""`python -m evals.regress` from end to end on a tiny model: exit codes, JSON, every verdict."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from importlib.metadata import version

import pytest
import torch

from evals.regress import judge, suite
from evals.regress.arms import STATIC, Arm, Variant
from evals.regress.document import SCHEMA, dump, load_baseline
from evals.regress.generate import Generation
from evals.regress.suite import Scored, SuiteName
from tests.regression.tiny import QUICK, SUITE, Bench
from trtllm_b12x_fix.errors import InputError
from trtllm_b12x_fix.law import Powers


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        made = Bench(tmp_path_factory.mktemp("regress"), monkeypatch)
        made.prepare()
        yield made


@pytest.fixture(scope="module")
def result(bench):
    path = bench.folder / "result.json"
    assert bench.run("--json", str(path)) == 0
    return json.loads(path.read_text())


class TestGood:
    def test_it_repeats_itself_bit_for_bit(self, bench, result):
        baseline = json.loads(bench.baseline.read_text())
        for now, then in zip(result["variants"], baseline["variants"], strict=True):
            assert now["states_sha256"] == then["states_sha256"]
            assert now["metrics"] == then["metrics"]

    def test_every_kind_of_check_was_made(self, result):
        kinds = {check["name"].split(":")[0] for check in result["checks"]}
        assert kinds == {
            "law, whole model",
            "law, every layer",
            "law, greedy generation",
            "bake is seen, whole model",
            "bake is seen, every layer",
            "bake's error does not fall from own to reported magnitude, any layer",
            "bake's error does not fall at any step, all layers",
            "baseline",
        }
        assert all(check["passed"] for check in result["checks"])

    def test_the_json_says_what_ran_where(self, result):
        assert result["schema"] == SCHEMA
        assert result["verdict"] == "good"
        assert result["evidence"]["kernels"] == "emulated"
        assert result["evidence"]["device"].startswith("CPU")
        assert result["evidence"]["versions"]["torch"] == version("torch")
        assert result["moved"] == {"k": 5, "j": 5, "i": 0}
        assert "0.7.4 micro" in result["same_bits"]["0.6.18 static"]
        assert len(result["layers"]) == 2
        assert result["generations"][0]["name"] == "bf16, own magnitude"

    def test_intervals_hold_their_values_and_bf16_is_the_origin(self, result):
        for variant in result["variants"]:
            assert set(variant["metrics"]) == {"all", "gsm8k", "humaneval"}
            for metrics in variant["metrics"].values():
                for value, low, high in metrics.values():
                    assert low <= value <= high
        bf16 = result["variants"][0]["metrics"]["all"]
        assert bf16["kl_mean"] == bf16["perplexity_change"] == [0, 0, 0]
        assert bf16["top1_agreement"] == [1, 1, 1]

    def test_baking_is_told_apart_at_the_reported_magnitude(self, result):
        found = {(c["left"], c["right"]): c for c in result["comparisons"]}
        where = "0.6.18 static, k=5 j=5"
        baked = found[f"baked, {where}", f"alphas, {where}"]
        value, low, _ = baked["metrics"]["kl_mean"]
        assert value > low > 0
        assert "kl_mean" in baked["told_apart"]

    def test_json_on_stdout_is_alone_there(self, bench, capsys):
        assert bench.run("--json", "-") == 0
        assert json.loads(capsys.readouterr().out)["verdict"] == "good"

    def test_the_text_names_what_was_emulated(self, bench, capsys):
        assert bench.run() == 0
        text = capsys.readouterr().out
        assert "EMULATED on CPU" in text
        assert text.rstrip().splitlines()[-1].startswith("GOOD: every check holds")
        assert "not run" not in text


def test_the_full_suite_runs_every_arm_on_every_kernel(tmp_path, monkeypatch, capsys):
    full = replace(QUICK, name=SuiteName.FULL, sweep=range(11))
    bench = Bench(tmp_path, monkeypatch, full)
    bench.prepare()
    kept = json.loads(bench.baseline.read_text())
    assert kept["verdict"] == "good"
    assert {v["kernel"] for v in kept["variants"]} == {None, *map(str, suite.KERNELS)}
    lawful = [c["name"] for c in kept["checks"] if c["name"].startswith("law, whole model")]
    # w4a16, the reference, and `alphas` on four kernels: 0.6.16 has none, one misreads scales.
    assert len(lawful) == 2 + 4
    assert not any("0.6.18 direct-micro" in name for name in lawful)
    trap = [v for v in kept["variants"] if v["kernel"] == "0.6.18 direct-micro"]
    broken = {v["arm"] for v in trap if v["metrics"]["all"]["kl_mean"][0] > 5}
    assert broken == {"alphas", "baked"}
    assert capsys.readouterr().out.rstrip().splitlines()[-1].startswith("GOOD")


class TestNotGood:
    def test_a_baseline_that_moved_is_a_regression(self, bench, tmp_path, capsys):
        document = json.loads(bench.baseline.read_text())
        stored = document["variants"][2]["metrics"]["all"]["kl_mean"]
        moved = tmp_path / "moved.json"
        floor = document["floors"]["alphas"]["kl_mean"]
        for change, expected in ((0.9, 0), (1.1, 1), (-1.1, 1)):  # in both directions
            kept = stored[0]
            stored[0] = kept + change * floor
            moved.write_text(json.dumps(document))
            assert bench.run("--baseline", str(moved)) == expected
            stored[0] = kept
        assert "FAIL baseline: alphas, 0.6.18 static, own magnitude: kl_mean" in (
            capsys.readouterr().out
        )

    def test_figures_that_became_nan_are_a_regression(self, bench, tmp_path):
        document = json.loads(bench.baseline.read_text())
        document["variants"][2]["metrics"]["all"]["kl_mean"][0] = None
        moved = tmp_path / "moved.json"
        moved.write_text(json.dumps(document))
        assert bench.run("--baseline", str(moved)) == 1

    def test_what_the_time_limit_cut_is_named_and_not_good(self, bench, capsys):
        assert bench.run("--time-limit", "0") == 1
        out = capsys.readouterr().out
        cut = [line for line in out.splitlines() if "not run: the time limit was reached" in line]
        assert len(cut) == 8 + 7  # every arm but bf16, every generation but the first
        assert out.rstrip().splitlines()[-1].startswith("INCOMPLETE")

    @pytest.mark.parametrize("what", ["schema", "suite", "documents_sha256", "model_sha256"])
    def test_another_baseline_is_unusable(self, bench, tmp_path, capsys, what):
        document = json.loads(bench.baseline.read_text())
        where = document["inputs"] if what.endswith("sha256") else document
        where[what] = "another"
        other = tmp_path / "other.json"
        other.write_text(json.dumps(document))
        assert bench.run("--baseline", str(other)) == 2
        error = capsys.readouterr().err
        assert ("not a result" if what == "schema" else what) in error
        assert "Traceback" not in error

    @pytest.mark.parametrize(
        ("options", "word"),
        [
            (["--baseline", "{folder}/none.json"], "--write-baseline makes one"),
            (["--gsm8k", "{folder}/none.jsonl"], "no such file"),
            (["--human-eval", "{folder}/gsm8k.jsonl"], "task_id"),
            (["--calibration", "{folder}/gsm8k.jsonl"], "not a calibration"),
            (["--device", "cuda"], "no CUDA GPU"),
            (["--device", "toaster"], "toaster"),
            (["--json", "{folder}/none/x.json"], "none/x.json"),
        ],
    )
    def test_unusable_input_is_exit_2_and_named(self, bench, capsys, options, word):
        if options[0] == "--device" and torch.cuda.is_available():
            pytest.skip("there is a GPU here")
        filled = [option.format(folder=bench.folder) for option in options]
        assert bench.run(*filled) == 2
        error = capsys.readouterr().err
        assert word in error
        assert "Traceback" not in error

    def test_a_suite_that_wants_more_documents_says_so(self, bench, capsys):
        few = bench.folder / "few.jsonl"
        few.write_text("\n".join(bench.items.read_text().splitlines()[:26]))
        assert bench.run("--gsm8k", str(few)) == 2
        assert "6 documents of at most 60 tokens" in (error := capsys.readouterr().err)
        assert "--gsm8k FILE" in error


class TestJudge:
    def test_a_failed_check_outweighs_a_cut_run(self):
        good, bad = judge.Check("a", True, ""), judge.Check("b", False, "")
        whole, cut = [], [_not_run()]
        assert judge.verdict([good], whole) is judge.Verdict.GOOD
        assert judge.verdict([good], cut) is judge.Verdict.INCOMPLETE
        assert judge.verdict([good, bad], cut) is judge.Verdict.REGRESSION

    def test_generations_are_judged_only_where_the_device_repeats_itself(self):
        def made(powers, *answers):
            return Generation(Variant(Arm.ALPHAS, STATIC, powers), [list(a) for a in answers])

        own, moved = made(Powers(), [1, 2], [3]), made(Powers(5, 5), [1, 2], [4])
        (failed,) = judge.law_of_generations([own, own, moved])
        assert failed.passed is False
        assert failed.detail == "1 of 2 answers alike at k=5 j=5"
        (passed,) = judge.law_of_generations([own, own, made(Powers(5, 5), [1, 2], [3])])
        assert passed.passed is True
        (unsure,) = judge.law_of_generations([own, made(Powers(), [1, 2], [5]), moved])
        assert unsure.passed is None
        assert judge.verdict([unsure], []) is judge.Verdict.GOOD
        assert judge.law_of_generations([own, moved]) == []

    def test_no_number_is_lost_on_the_way_through_json(self):
        document = {"a": [1.5, None, 2], "b": {"c": ["x" * 200, []]}, "d": {}, "e": [[1] * 60] * 2}
        assert json.loads(dump(document)) == document
        with pytest.raises(ValueError, match="JSON"):
            dump({"a": math.nan})

    def test_a_baseline_that_is_no_json_is_named(self, tmp_path):
        path = tmp_path / "x.json"
        path.write_text("{")
        with pytest.raises(InputError, match="not readable as JSON"):
            load_baseline(path, SUITE, {})


def _not_run():
    return Scored(Variant(Arm.REFERENCE), None, 0.0, "cut")
