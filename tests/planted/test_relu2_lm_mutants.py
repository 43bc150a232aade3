"""Mutants of the small language model and its evaluation: each must make its guard fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from evals.relu2_lm import (
    arms,
    checkpoint,
    data,
    decode,
    evaluate,
    experts,
    layers,
    mamba,
    problems,
    quantize,
    regress,
    statistics,
    train,
)
from evals.relu2_lm.arms import Magnitude
from tests.relu2_lm import models, test_arms, test_model, test_problems, test_regress
from trtllm_b12x_fix import law, repair


@dataclass(frozen=True)
class Mutant:
    name: str
    owner: Any
    attribute: str
    wrong: Any
    guard: Callable[[], None]


def _ids() -> torch.Tensor:
    return torch.randint(4, 300, (3, 40), generator=torch.Generator().manual_seed(0))


def _logits() -> torch.Tensor:
    with torch.no_grad():
        return models.random_model()(_ids())


#: What transformers computes (test_model holds the two against each other), before any mutant.
_SOUND = _logits()


def _same_function() -> None:
    torch.testing.assert_close(_logits(), _SOUND, rtol=0, atol=2e-5)


def _splits() -> dict[problems.Split, list[problems.Problem]]:
    return {split: list(problems.generate(split, 3, 200)) for split in problems.Split}


def _in_bits(case: evaluate.Emulated) -> Callable[[], None]:
    def guard() -> None:
        reference = test_arms._log_probabilities(test_arms.REFERENCE)
        test_arms.test_correct_paths_give_the_references_bits(reference, case)

    return guard


def _bake_is_seen() -> None:
    test_arms.test_the_bake_depends_on_magnitude(test_arms._log_probabilities(test_arms.REFERENCE))


def _all_judged() -> None:
    """What the judge looks at, on the random model: equal bits, and a bake that is one."""
    given = models.subject()
    base = decode.solution_log_probabilities(given.model, given.corpus)
    cases = (*regress.WRITTEN, *regress.FORCED)
    found = {case: regress._measure(given, case, base, writes=False) for case in cases}
    assert not [finding for finding in regress.judge(found) if "bits" in finding]


def _no_square(self, x, expert_ids, weights):
    tokens, top_k = expert_ids.shape
    rows = x.unsqueeze(1).expand(tokens, top_k, -1)
    h = torch.einsum("tkh,tkih->tki", rows, self.up_proj[expert_ids]).relu()
    y = torch.einsum("tki,tkhi->tkh", h, self.down_proj[expert_ids])
    return (y * weights.unsqueeze(-1)).sum(1)


def _bias_in_weights(self, x):
    scores = torch.nn.functional.linear(x.float(), self.weight.float()).sigmoid()
    chosen = (scores + self.e_score_correction_bias).topk(self.top_k, dim=-1)
    return chosen.indices, chosen.values / (chosen.values.sum(-1, keepdim=True) + 1e-20)


def _no_bias(self, x):
    scores = torch.nn.functional.linear(x.float(), self.weight.float()).sigmoid()
    chosen = scores.topk(self.top_k, dim=-1)
    return chosen.indices, chosen.values / (chosen.values.sum(-1, keepdim=True) + 1e-20)


def _sees_the_future(self, values, decay, b, c, state):
    return _scan(self, values.flip(1), decay.flip(1), b.flip(1), c.flip(1), state).flip(1)


def _largest_of_the_last(model, corpus, size=256):
    amax = _calibrate(model, corpus, size)
    return {n: replace(each, fc2=each.fc2 / 2) for n, each in amax.items()}


def _reads_the_first(text):
    found = problems.ANSWER.findall(text)
    return int(found[0]) if found else None


def _everything_belongs(problem, split):
    return True


def _one_scale_for_all(weights, amax):
    made = _matrices(weights, amax)
    return replace(made, weight_scale_2=torch.full_like(made.weight_scale_2, 1e-4))


def _unpaired(arm, baseline, seed=0):
    found = _compare(arm, baseline, seed)
    return replace(found, p_value=min(1.0, 4 * found.p_value))


def _padding_counts(x, present):
    return x


def _lost_routing(routing, powers):
    return routing


def _rounded_bias(folder, device, dtype):
    model = _load(folder, device, dtype)
    for _, moe in model.moe_layers():
        moe.gate.e_score_correction_bias = moe.gate.e_score_correction_bias.bfloat16().float()
    return model


_scan, _calibrate, _matrices = mamba.Mamba._scan, quantize.calibrate, quantize._matrices
_compare, _load = statistics.compare, checkpoint.load
_alphas = repair._alphas
_OWN = replace(test_arms.REFERENCE, magnitude=Magnitude.OWN)
_ALPHAS = regress.ALPHAS

MUTANTS = (
    Mutant("experts without the square", experts.Experts, "forward", _no_square, _same_function),
    Mutant("the bias weighs, too", layers.Router, "forward", _bias_in_weights, _same_function),
    Mutant("the bias does not choose", layers.Router, "forward", _no_bias, _same_function),
    Mutant("Mamba sees the future", mamba.Mamba, "_scan", _sees_the_future, _same_function),
    Mutant(
        "padding feeds Mamba",
        mamba,
        "_without_padding",
        _padding_counts,
        lambda: test_model.test_a_step_at_a_time_behind_padding_is_the_whole_sequence(_ids()),
    ),
    Mutant(
        "padding is attended to",
        layers,
        "_mask",
        lambda context, length, device: None,
        lambda: test_model.test_a_step_at_a_time_behind_padding_is_the_whole_sequence(_ids()),
    ),
    Mutant(
        "held-out numbers in training",
        problems,
        "_belongs",
        _everything_belongs,
        lambda: test_problems.test_training_sees_nothing_that_is_held_out(_splits()),
    ),
    Mutant(
        "held-out templates in training",
        problems,
        "_POOL",
        dict.fromkeys(problems.Split, problems.templates()),
        lambda: test_problems.test_training_sees_nothing_that_is_held_out(_splits()),
    ),
    Mutant(
        "the first number is the answer",
        test_problems,
        "extract_answer",
        _reads_the_first,
        test_problems.test_answers_are_read_as_gsm8k_writes_them,
    ),
    Mutant(
        "half the calibrated amax",
        quantize,
        "calibrate",
        _largest_of_the_last,
        test_arms.test_calibration_sees_the_largest_input,
    ),
    Mutant(
        "routing weights stay behind",
        arms,
        "move_routing",
        _lost_routing,
        _in_bits(_OWN),
    ),
    Mutant(
        "alphas without the input scale",
        repair,
        "_alphas",
        lambda layer, s1, s2: replace(
            _alphas(layer, s1, s2), input_global_scale=torch.ones_like(s1)
        ),
        _in_bits(_ALPHAS),
    ),
    Mutant(
        "alphas that bake: the judge sees it",
        repair,
        "_alphas",
        lambda layer, s1, s2: repair._baked(layer, s1, s2),
        _all_judged,
    ),
    Mutant(
        "a bake that loses nothing",
        repair,
        "bake",
        lambda matrices: matrices.block_scale,
        _bake_is_seen,
    ),
    Mutant(
        "nothing is moved",
        law,
        "_ldexp",
        lambda values, exponent, what: values,
        test_arms.test_magnitudes_are_where_they_say,
    ),
    Mutant(
        "the router's bias is rounded",
        checkpoint,
        "load",
        _rounded_bias,
        lambda: _with_saved(test_model.test_the_routers_bias_is_not_rounded),
    ),
    Mutant(
        "a looser p-value",
        test_regress,
        "compare",
        _unpaired,
        test_regress.test_pairing_is_exact,
    ),
    Mutant(
        "the prompt counts in full",
        train,
        "PROMPT_WEIGHT",
        1.0,
        test_model.test_the_loss_counts_solutions_and_a_tenth_of_prompts,
    ),
    Mutant(
        "experts are never balanced",
        train._Run,
        "_balance",
        lambda self: None,
        test_model.test_balancing_helps_those_with_less_than_their_share,
    ),
    Mutant(
        "an epoch repeats a batch",
        data,
        "batch",
        lambda corpus, rows, longest: _batch(corpus, rows * 0 + rows[0], longest),
        test_model.test_an_epoch_has_every_problem_once,
    ),
)
_batch = data.batch


def _with_saved(test: Callable[[Any], None]) -> None:
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        model = models.random_model()
        checkpoint.save(
            model, {n: quantize.InputAmax(4.0, 25.0) for n, _ in model.moe_layers()}, Path(folder)
        )
        test(Path(folder))


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_guard_fails_on_its_mutant(monkeypatch, mutant):
    mutant.guard()  # sound as it stands
    monkeypatch.setattr(mutant.owner, mutant.attribute, mutant.wrong)
    with pytest.raises(AssertionError):
        mutant.guard()
