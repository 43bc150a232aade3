"""Mutants of the power-of-two law and of the model-level regression: each must be caught.

Two kinds: functions of the law and of the measures, caught by the test that guards them; and
backends broken on purpose, caught by the regression itself, which has to exit with 1 and name the
check. A path that rounds scales has to fail the law.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from evals.regress import (
    arms,
    documents,
    experts,
    generate,
    judge,
    language_model,
    scoring,
    statistics,
    suite,
)
from tests.regression import test_command, test_law, test_measures, test_model, tiny
from tests.regression.tiny import Bench
from trtllm_b12x_fix import law, repair
from trtllm_b12x_fix.emulator import moe
from trtllm_b12x_fix.emulator.arithmetic import KernelFamily
from trtllm_b12x_fix.formats import e4m3
from trtllm_b12x_fix.law import Powers
from trtllm_b12x_fix.layer import Activation


@dataclass(frozen=True)
class Mutant:
    name: str
    owner: Any
    attribute: str
    wrong: Any
    guard: Callable[..., None]


def _subjects() -> suite.Subjects:
    model = tiny.model()
    layers = experts.quantize(model, experts.calibrate(model, test_model.DOCUMENTS))
    return suite.Subjects(model, layers, list(test_model.DOCUMENTS))


def on_subjects(test: Callable[..., None], *arguments: Any) -> Callable[[], None]:
    """A guard that wants the tiny model quantized, by whatever stands in the package then."""
    return lambda: test(_subjects(), *arguments)


_move_layer, _move_routing, _ldexp = law.move_layer, law.move_routing, law._ldexp
_trace, _w4a16 = arms.trace, arms.w4a16
_calibrate, _quantize = experts.calibrate, experts._quantize
_mean, _estimate = statistics.Columns._mean, statistics.estimate


def _forgets_fc2(layer, powers):
    return _move_layer(layer, replace(powers, j=0))


def _i_moves_routing_once(routing, powers):
    return _move_routing(routing, replace(powers, i=powers.i // 2 if powers.i else 0))


def _no_range(values, exponent, what):
    return torch.ldexp(values, torch.tensor(exponent)).to(values.dtype)


def _tokens_are_drawn(self, column):
    """Every token a document of its own: intervals far too narrow."""
    rng = np.random.default_rng(0)
    shuffled = rng.permutation(column.astype(np.float64))
    sums = np.bincount(self.document, weights=shuffled, minlength=self.documents)
    return lambda draws: (draws @ sums) / (draws @ self._tokens)


def _documents_weigh_the_same(self, column):
    sums = np.bincount(self.document, weights=column.astype(np.float64))
    return lambda draws: (draws @ (sums / self._tokens)) / draws.sum(axis=1)


def _unpaired(left, right):
    return lambda draws: left(draws) - right(draws[::-1])


def _short_tail(self, column):
    order = np.argsort(-column)[: max(1, int(0.001 * len(column)))]

    def statistic(draws):
        above = np.cumsum(draws[:, self.document[order]], axis=1)
        allowed = 0.01 * (draws @ self._tokens)
        return column[order][np.argmax(above > allowed[:, None], axis=1)]

    return statistic


def _reverse_kl(states, baseline, head, where, digest):
    found = _score(baseline, states, head, where, digest)
    return replace(found, surprise=_score(states, baseline, head, where, digest).surprise)


_score = scoring.score


def _one_late(documents_):
    found = _positions(documents_)
    return replace(found, states=found.states + 1)


_positions = scoring.positions


def _whole_text_is_scored(texts, tokenizer):
    return [replace(found, scored_from=1) for found in _tokenize(texts, tokenizer)]


_tokenize = documents.tokenize


def _no_padding_mask(ids_of, device):
    ids, real = _padded(ids_of, device)
    return ids, torch.ones_like(real)


_padded = language_model._padded


def _first_scale_for_all(weights, input_amax):
    found = _quantize(weights, input_amax)
    return replace(found, weight_scale_2=found.weight_scale_2[:1].expand(len(weights)).clone())


def _gate_up(weights, input_amax):
    if weights[0].shape[1] == tiny.HIDDEN:
        weights = [torch.cat(weight.chunk(2)[::-1]) for weight in weights]
    return _quantize(weights, input_amax)


def _first_documents_only(model, documents_):
    return _calibrate(model, documents_[:1])


def _w4a16_rounds_nothing(subject):
    from trtllm_b12x_fix.emulator import reference

    return reference.truth(subject.layer, subject.x, subject.routing).bfloat16()


def _same_order(variant, number, subject):
    return _trace(replace(variant, seed=0), number, subject)


def _left_and_right(prompts, device):
    """Prompts at the left edge: the last position is padding."""
    ids, mask = _left_padded(prompts, device)
    return ids, torch.ones_like(mask)


_left_padded = generate._left_padded


MUTANTS = (
    Mutant(
        "FC2 stays where it was",
        law,
        "move_layer",
        _forgets_fc2,
        lambda: test_law.TestTheFunctionIsTheSame().test_in_fp64_bit_for_bit(Activation.SILU),
    ),
    Mutant(
        "relu2's factor is not squared",
        law,
        "move_routing",
        _i_moves_routing_once,
        lambda: test_law.TestTheFunctionIsTheSame().test_in_fp64_bit_for_bit(Activation.RELU2),
    ),
    Mutant(
        "nothing is out of range",
        law,
        "_ldexp",
        _no_range,
        lambda: test_law.TestRefusals().test_what_leaves_the_range_is_refused_by_name(
            Powers(k=140), "weight_scale_2"
        ),
    ),
    Mutant(
        "violations never found",
        law,
        "_first_violation",
        lambda *_: None,
        lambda: test_law.TestTheDetector().test_it_says_where_and_how_much(),
    ),
    Mutant(
        "only values count, not bits",
        law,
        "_same_bits",
        torch.equal,
        lambda: test_law.TestTheDetector().test_nan_equals_nan_and_signs_of_zero_count(),
    ),
    Mutant(
        "only the output is looked at",
        law,
        "_stages",
        lambda own, moved: [("output", own.output, moved.output)],
        lambda: test_law.TestBakedDoesNot().test_it_breaks_the_law_where_weights_are_small(
            Activation.RELU2, "0.7.2", KernelFamily.STATIC
        ),
    ),
    Mutant(
        "a bake that never rounds to zero",
        repair,
        "bake",
        lambda matrices: (matrices.block_scale // 2 + 1).clamp(min=8),
        lambda: (
            test_law.TestBakedDoesNot().test_its_error_does_not_fall_on_the_way_to_the_reported_magnitude(
                Activation.SILU
            )
        ),
    ),
    Mutant(
        "the solution is the whole text",
        documents,
        "tokenize",
        _whole_text_is_scored,
        lambda: (
            test_measures.TestDocuments().test_a_token_belongs_to_the_solution_if_it_begins_there()
        ),
    ),
    Mutant(
        "predictions are one token late",
        scoring,
        "positions",
        _one_late,
        lambda: (
            test_measures.TestScores().test_positions_point_at_the_state_before_each_scored_token()
        ),
    ),
    Mutant(
        "KL the other way round",
        scoring,
        "score",
        _reverse_kl,
        lambda: test_measures.TestScores().test_kl_and_surprise_are_scipys(),
    ),
    Mutant(
        "tokens are drawn, not documents",
        statistics.Columns,
        "_mean",
        _tokens_are_drawn,
        lambda: (
            test_measures.TestIntervals().test_the_interval_of_a_mean_is_that_of_a_plain_bootstrap()
        ),
    ),
    Mutant(
        "short documents weigh as much as long ones",
        statistics.Columns,
        "_mean",
        _documents_weigh_the_same,
        lambda: test_measures.TestIntervals().test_values_are_plain_means_over_tokens(),
    ),
    Mutant(
        "differences are not paired",
        statistics,
        "difference",
        _unpaired,
        lambda: test_measures.TestIntervals().test_the_difference_is_paired(),
    ),
    Mutant(
        "the tail is cut off",
        statistics.Columns,
        "_p99",
        _short_tail,
        lambda: test_measures.TestIntervals().test_values_are_plain_means_over_tokens(),
    ),
    Mutant(
        "padding counts as tokens",
        language_model,
        "_padded",
        _no_padding_mask,
        lambda: test_model.TestReplacing().test_its_own_mlp_as_the_function_changes_nothing(),
    ),
    Mutant(
        "one weight_scale_2 for all experts",
        experts,
        "_quantize",
        _first_scale_for_all,
        on_subjects(test_model.TestExperts().test_quantized_as_modelopt_does),
    ),
    Mutant(
        "gate before up",
        experts,
        "_quantize",
        _gate_up,
        on_subjects(test_model.TestExperts().test_quantized_as_modelopt_does),
    ),
    Mutant(
        "calibrated on the first document alone",
        experts,
        "calibrate",
        _first_documents_only,
        on_subjects(test_model.TestExperts().test_calibration_is_the_largest_value_of_every_token),
    ),
    Mutant(
        "W4A16 without its own rounding",
        arms,
        "w4a16",
        _w4a16_rounds_nothing,
        on_subjects(test_model.TestArms().test_w4a16_is_the_truth_up_to_bf16),
    ),
    Mutant(
        "the other order is the same order",
        arms,
        "trace",
        _same_order,
        on_subjects(
            test_model.TestTheLawOnANetwork().test_another_order_of_adds_shows_and_is_repeatable
        ),
    ),
    Mutant(
        "left padding is read",
        generate,
        "_left_padded",
        _left_and_right,
        on_subjects(test_model.TestGeneration().test_bf16_is_transformers_own_greedy_search),
    ),
    Mutant(
        "the variant reads the prompt, too",
        generate._Phase,
        "__call__",
        lambda self, number, x: self._decode(number, x),
        on_subjects(
            test_model.TestGeneration().test_prompts_are_read_by_the_reference_whatever_decodes
        ),
    ),
    Mutant(
        "the end token is part of the answer",
        generate,
        "_until",
        lambda tokens, end: tokens,
        on_subjects(lambda _: test_model.TestGeneration().test_answers_stop_at_the_end_token()),
    ),
    Mutant(
        "a cut run is good",
        judge,
        "verdict",
        lambda checks, _: judge.Verdict.GOOD,
        lambda: test_command.TestJudge().test_a_failed_check_outweighs_a_cut_run(),
    ),
    Mutant(
        "generations are judged on any device",
        judge,
        "_repeated",
        lambda ran: [(each, each) for each in ran],
        lambda: (
            test_command.TestJudge().test_generations_are_judged_only_where_the_device_repeats_itself()
        ),
    ),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_guard_fails_on_its_mutant(monkeypatch, mutant):
    mutant.guard()  # sound as it stands
    monkeypatch.setattr(mutant.owner, mutant.attribute, mutant.wrong)
    for module in (test_measures, test_model, test_command, arms, suite):
        if module is not mutant.owner and hasattr(module, mutant.attribute):
            monkeypatch.setattr(module, mutant.attribute, mutant.wrong)
    # ValueError: a guard that unpacks what it found, and found another number of things.
    with pytest.raises((AssertionError, ValueError, pytest.fail.Exception)):
        mutant.guard()


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patched:
        made = Bench(tmp_path_factory.mktemp("planted"), patched, tiny.QUICK)
        made.prepare()
        yield made


_alphas, _baked, _activate = repair._alphas, repair._baked, moe._activate


def _half_alphas(layer, s1, s2):
    args = _alphas(layer, s1, s2)
    return replace(args, w1_alpha=args.w1_alpha.half().float())


def _e4m3_input_scale(layer, s1, s2):
    args = _alphas(layer, s1, s2)
    coarse = s1.to(torch.float8_e4m3fn).float()
    return replace(args, input_global_scale=coarse)


def _half_a_bake(layer, s1, s2):
    """The root of weight_scale_2 in the block scales, the other root in the alpha."""
    args = _alphas(layer, s1, s2)
    root = args.w1_alpha.sqrt()
    exact = e4m3.decode(args.w1_block_scale) * root[:, None, None]
    return replace(args, w1_block_scale=e4m3.encode(exact), w1_alpha=root)


def _silent_last_expert(layer, s1, s2):
    args = _alphas(layer, s1, s2)
    w2_alpha = args.w2_alpha.clone()
    w2_alpha[-1] = 0
    return replace(args, w2_alpha=w2_alpha)


def _swapped(fc1, activation, sigmoid):
    return _activate(fc1.roll(fc1.shape[-1] // 2, -1), activation, sigmoid)


PLANTED = [
    ("fp16 alphas", repair, "_alphas", _half_alphas, ["law, whole model: alphas", "law, every"]),
    (
        "input scales in E4M3",
        repair,
        "_alphas",
        _e4m3_input_scale,
        ["law, whole model: alphas", "law, every layer"],
    ),
    (
        "half a bake",
        repair,
        "_alphas",
        _half_a_bake,
        ["law, whole model: alphas", "law, every layer"],
    ),
    (
        "a bake that no longer bakes",
        repair,
        "_baked",
        _alphas,
        [
            "bake is seen, whole model",
            "bake is seen, every layer",
            "baseline: baked, 0.6.18 static, k=5 j=5",
        ],
    ),
    # What the law cannot see, since no power of two tells, the baseline does.
    (
        "gate and up swapped",
        moe,
        "_activate",
        _swapped,
        ["baseline: alphas, 0.6.18 static, own", "baseline: reference, own"],
    ),
    (
        "one expert silent",
        repair,
        "_alphas",
        _silent_last_expert,
        ["baseline: alphas, 0.6.18 static, own", "baseline: alphas, 0.6.18 static, k=5"],
    ),
]


@pytest.mark.parametrize(("name", "owner", "attribute", "wrong", "expected"), PLANTED)
def test_the_regression_names_a_broken_backend(
    bench, capsys, monkeypatch, name, owner, attribute, wrong, expected
):
    monkeypatch.setattr(owner, attribute, wrong)
    assert bench.run() == 1
    lines = capsys.readouterr().out.splitlines()
    failed = [line for line in lines if line.startswith("FAIL")]
    for words in expected:
        assert any(line.startswith(f"FAIL {words}") for line in failed), (name, words, failed)
    if not any(words.startswith("law") for words in expected):
        assert not any(line.startswith("FAIL law") for line in failed)


def test_the_sound_backend_passes_the_same_bench(bench):
    assert bench.run() == 0
