"""GSM8K extraction: lm-eval's, to the letter, and numbers compared as numbers. 2 seconds."""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from decimal import Decimal
from functools import cache
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from evals.grading import gsm8k
from evals.grading.code import COMPLETION_STOP
from evals.grading.statuses import Verdict
from tests.oracles.fetch import ORACLES
from trtllm_b12x_fix.errors import InputError

SAMPLE = Path(__file__).parents[1] / "data/gsm8k_sample.jsonl"
LM_EVAL = ORACLES["lm-eval"].path / "lm_eval"
Is = Verdict


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("... so it is 18.\n#### 18", Is.CORRECT, Is.CORRECT),
        ("#### 18\n\n", Is.CORRECT, Is.CORRECT),
        ("#### 18.", Is.CORRECT, Is.CORRECT),
        ("#### 18.00", Is.CORRECT, Is.CORRECT),
        ("#### 17", Is.WRONG, Is.WRONG),
        ("#### -18", Is.WRONG, Is.WRONG),
        ("#### $18", Is.NO_ANSWER, Is.CORRECT),
        ("####18", Is.NO_ANSWER, Is.CORRECT),
        ("The answer is 18", Is.NO_ANSWER, Is.CORRECT),
        ("The answer is **18**.", Is.NO_ANSWER, Is.CORRECT),
        ("She makes $18 a day", Is.NO_ANSWER, Is.CORRECT),
        ("18 dollars, from 9 eggs at $2", Is.NO_ANSWER, Is.WRONG),
        ("#### 18\nQuestion 2: what is 5?", Is.CORRECT, Is.WRONG),
        ("#### 17 no wait #### 18", Is.WRONG, Is.CORRECT),
        ("no number at all", Is.NO_ANSWER, Is.NO_ANSWER),
        ("it is eighteen ...", Is.NO_ANSWER, Is.NO_ANSWER),
        ("#### .", Is.NO_ANSWER, Is.NO_ANSWER),
    ],
)
def test_both_extractions(text, strict, flexible):
    score = gsm8k.score(text, "9 * 2 = <<9*2=18>>18\n#### 18")
    assert (score.strict.verdict, score.flexible.verdict) == (strict, flexible)


def test_numbers_and_text_are_compared_side_by_side():
    same = gsm8k.score("#### 1,080", "#### 1080").strict
    assert (same.verdict, same.lm_eval, same.answer) == (Is.CORRECT, True, "1,080")
    equal = gsm8k.score("#### 1080.0", "#### 1,080").strict
    assert (equal.verdict, equal.lm_eval) == (Is.CORRECT, False)
    for text in ("#### 1.2.3", "#### ,"):
        assert gsm8k.score(text, "#### 5").strict.verdict is Is.NO_ANSWER


def test_all_solutions_of_the_sample_are_right_by_their_own_answer():
    records = [json.loads(line) for line in SAMPLE.read_text().splitlines()]
    assert len(records) == 64
    for record in records:
        score = gsm8k.score(record["answer"], record["answer"])
        assert score.strict.verdict is score.flexible.verdict is Is.CORRECT
        assert score.strict.lm_eval
        assert gsm8k.as_number(gsm8k.target(record["answer"])) is not None


@pytest.mark.parametrize("answer", ["", "18", "#### x", "the answer is 5", "####"])
def test_a_target_without_a_number_is_refused(answer):
    with pytest.raises(InputError, match="####"):
        gsm8k.target(answer)


def test_odd_numbers_are_none():
    assert gsm8k.as_number("18") == Decimal(18)
    for text in ("nan", "infinity", "", "1 2", "--5"):
        assert gsm8k.as_number(text) is None


@pytest.mark.oracle("lm-eval")
def test_patterns_are_those_of_lm_evals_task():
    task = yaml.safe_load((LM_EVAL / "tasks/gsm8k/gsm8k.yaml").read_text())
    filters = {one["name"]: one["filter"] for one in task["filter_list"]}
    (strict, first), (flexible, also_first) = filters["strict-match"], filters["flexible-extract"]
    assert first == also_first == {"function": "take_first"}
    assert strict == {"function": "regex", "regex_pattern": gsm8k.STRICT_PATTERN}
    assert flexible == {
        "function": "regex", "group_select": -1, "regex_pattern": gsm8k.FLEXIBLE_PATTERN,
    }  # fmt: skip
    (metric,) = task["metric_list"]
    assert (metric["ignore_case"], metric["ignore_punctuation"]) == (True, False)
    assert tuple(metric["regexes_to_ignore"]) == gsm8k.IGNORED_PATTERNS
    assert tuple(task["generation_kwargs"]["until"]) == gsm8k.STOP
    loader = type("Loader", (yaml.SafeLoader,), {})
    loader.add_constructor("!function", lambda *_: None)
    code = yaml.load((LM_EVAL / "tasks/humaneval/humaneval.yaml").read_text(), loader)
    assert tuple(code["generation_kwargs"]["until"]) == COMPLETION_STOP


@cache
def lm_evals_own():
    """lm-eval's regex filter and comparison, its registries and its other needs left out."""
    nothing = {
        "lm_eval": {}, "lm_eval.api": {}, "sacrebleu": {},
        "lm_eval.api.filter": {"Filter": object},
        "lm_eval.api.registry": dict.fromkeys(
            ("register_filter", "register_metric", "register_aggregation"),
            lambda *_, **__: lambda wrapped: wrapped,
        ),
    }  # fmt: skip
    kept = {name: sys.modules.get(name) for name in nothing}
    try:
        for name, contents in nothing.items():
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__dict__.update(contents)
        filters = load("filters/extraction.py")
        return filters.RegexFilter, load("api/metrics.py").exact_match_hf_evaluate
    finally:
        for name, module in kept.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def load(name: str):
    spec = importlib.util.spec_from_file_location(Path(name).stem, LM_EVAL / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


numeric = st.text("0123456789.,$-# \n", max_size=12)


@pytest.mark.oracle("lm-eval")
@given(st.lists(numeric | st.sampled_from(["#### ", " so ", "18", "the"]), max_size=6))
def test_every_text_is_extracted_and_compared_as_lm_eval_does(parts):
    text = "".join(parts)
    regex_filter, exact_match = lm_evals_own()
    answer = "reasons\n#### 18"
    score = gsm8k.score(text, answer)
    for ours, pattern, select in (
        (score.strict, gsm8k.STRICT_PATTERN, 0),
        (score.flexible, gsm8k.FLEXIBLE_PATTERN, -1),
    ):
        ((theirs,),) = regex_filter(pattern, select).apply([[text]], [{}])
        assert (gsm8k.NO_MATCH if ours.answer is None else ours.answer) == theirs
        matched = exact_match(
            predictions=[theirs], references=[answer],
            regexes_to_ignore=list(gsm8k.IGNORED_PATTERNS), ignore_case=True,
        )  # fmt: skip
        assert ours.lm_eval == bool(matched["exact_match"])
