"""The model against transformers' Nemotron-H, step by step and padded, and its training."""

import itertools

import pytest
import torch

from evals.relu2_lm import checkpoint, config, data, decode, tokenizer, train
from evals.relu2_lm.layers import Context
from evals.relu2_lm.problems import Split, generate
from evals.relu2_lm.quantize import InputAmax
from tests.relu2_lm.models import random_model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    model = random_model()
    amax = {number: InputAmax(4.0, 25.0) for number, _ in model.moe_layers()}
    checkpoint.save(model, amax, folder)
    return folder


@pytest.fixture(scope="module")
def ids():
    return torch.randint(4, 300, (3, 40), generator=torch.Generator().manual_seed(0))


def _transformers(folder):
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    return model.eval()


def test_transformers_computes_the_same_logits_from_the_folder(saved, ids):
    ours = checkpoint.load(saved, torch.device("cpu"), torch.float32)
    with torch.no_grad():
        theirs = _transformers(saved)(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(ours(ids), theirs, rtol=0, atol=2e-5)


def test_transformers_writes_the_same_answers_with_the_kept_checkpoint():
    model = checkpoint.load(checkpoint.KEPT, torch.device("cpu"), torch.float32)
    theirs = _transformers(checkpoint.KEPT)
    for problem in generate(Split.NEW_TEMPLATES, 11, 2):
        prompt = data.encode_prompt(problem)
        (ours,) = decode.greedy(model, [prompt], 60)
        written = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=60, do_sample=False, use_cache=True
        )[0, len(prompt) :]
        assert written.tolist()[:-1] == ours
        assert tokenizer.build().decode(ours) == problem.solution


def test_loading_gives_back_what_was_saved(saved):
    loaded = checkpoint.load(saved, torch.device("cpu"), torch.float32)
    for name, value in random_model().state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    assert config.from_transformers(config.to_transformers(config.full())) == config.full()
    assert checkpoint.load_calibration(saved)[1] == InputAmax(4.0, 25.0)


def test_the_routers_bias_is_not_rounded(saved):
    loaded = checkpoint.load(saved, torch.device("cpu"), torch.bfloat16)
    for (_, own), (_, moe) in zip(random_model().moe_layers(), loaded.moe_layers(), strict=True):
        assert moe.gate.e_score_correction_bias.dtype is torch.float32
        assert torch.equal(moe.gate.e_score_correction_bias, own.gate.e_score_correction_bias)
        assert moe.experts.up_proj.dtype is torch.bfloat16


def test_a_step_at_a_time_behind_padding_is_the_whole_sequence(ids):
    model = random_model()
    starts = (7, 0, 20)
    present = torch.ones(3, 40, dtype=torch.bool)
    for row, start in enumerate(starts):
        present[row, :start] = False
    states = model.empty_states(3, 40)
    with torch.no_grad():
        parts = [model(ids[:, :30], states, Context(present[:, :30], 0))]
        for at in range(30, 40):
            step = Context(present[:, : at + 1], at)
            parts.append(model(ids[:, at : at + 1], states, step))
        together = torch.cat(parts, 1)
        for row, start in enumerate(starts):
            alone = model(ids[row : row + 1, start:])[0]
            torch.testing.assert_close(together[row, start:], alone, rtol=0, atol=2e-5)


def test_prompts_that_end_leave_and_the_others_do_not_notice(monkeypatch):
    model = random_model(1)
    prompts = [data.encode_prompt(problem) for problem in generate(Split.TRAIN, 2, 5)]
    alone = [decode.greedy(model, [prompt], 30)[0] for prompt in prompts]
    ending = alone[0][4]  # a token that the prompts write sooner or later, or never
    monkeypatch.setattr(tokenizer, "END_ID", ending)
    expected = [row[: row.index(ending)] if ending in row else row for row in alone]
    assert decode.greedy(model, prompts, 30) == expected
    assert len({len(row) for row in expected}) > 1


def test_training_by_the_clock_learns_and_stops(monkeypatch):
    """A clock that ticks once a look: as many steps on every machine."""
    ticks = itertools.count()
    monkeypatch.setattr(train.time, "monotonic", lambda: next(ticks))
    corpus = data.encode(list(generate(Split.TRAIN, 1, 64)))
    entries = []
    recipe = train.Recipe(24.0, batch_size=16, log_every=1000, validate_every=0.9, balance=0.01)
    model = train.train(config.tiny(), recipe, corpus, corpus, torch.device("cpu"), entries.append)
    assert [entry.exact is not None for entry in entries] == [True, True]
    assert entries[-1].loss < 0.6 * 6.0  # 5.8 nats is uniform over the vocabulary
    assert entries[-1].step in range(20, 26)
    assert any(bool(moe.gate.e_score_correction_bias.any()) for _, moe in model.moe_layers())
    assert not model.training


def test_balancing_helps_those_with_less_than_their_share():
    model = random_model().requires_grad_(True)
    corpus = data.encode(list(generate(Split.TRAIN, 1, 2)))
    run = train._Run(model, train.Recipe(1.0, balance=0.25), corpus, corpus, lambda _: None)
    before = [moe.gate.e_score_correction_bias.clone() for _, moe in model.moe_layers()]
    for _, moe in model.moe_layers():
        moe.gate.load = torch.tensor([10, 0, 6, 4])
    run._balance()
    for (_, moe), bias in zip(model.moe_layers(), before, strict=True):
        moved = moe.gate.e_score_correction_bias - bias
        torch.testing.assert_close(moved, torch.tensor([-0.25, 0.25, -0.25, 0.25]))
    assert run._imbalance() == 2.0


def test_the_rate_rises_and_falls():
    recipe = train.Recipe(1.0)
    rates = [train.rate_at(done / 100, recipe) for done in range(101)]
    assert rates[3] == pytest.approx(recipe.peak_rate)
    assert rates[100] == pytest.approx(recipe.last_rate)
    assert all(a > b for a, b in itertools.pairwise(rates[3:]))
    assert rates[1] < rates[2] < rates[3]


def test_the_loss_counts_solutions_and_a_tenth_of_prompts():
    corpus = data.encode(list(generate(Split.TRAIN, 1, 4)))
    each = data.batch(corpus, torch.arange(4), int(corpus.lengths.max()))
    lengths, prompts = corpus.lengths.long(), corpus.prompts.long()
    assert each.solution.sum(1).tolist() == (lengths - prompts).tolist()
    size = config.full().vocabulary
    logits = torch.zeros(*each.targets.shape, size)
    logits[each.solution] = torch.nn.functional.one_hot(each.targets[each.solution], size) * 1e4
    prompt, solution = int((prompts - 1).sum()), int((lengths - prompts).sum())
    expected = torch.tensor(float(size)).log() * 0.1 * prompt / (0.1 * prompt + solution)
    torch.testing.assert_close(train.weighted_loss(logits, each), expected)


def test_an_epoch_has_every_problem_once():
    corpus = data.training_corpus(9, 64, workers=1)
    seen = [
        tuple(row)
        for each in data.batches(corpus, 16, torch.Generator().manual_seed(0))
        for row in torch.nn.functional.pad(
            each.inputs, (0, data.ROW - each.inputs.shape[1])
        ).tolist()
    ]
    assert len(seen) == len(set(seen)) == 64


def test_workers_do_not_change_the_corpus(monkeypatch):
    monkeypatch.setattr(data, "SHARE", 20)
    alone, two = (data.training_corpus(9, 50, workers) for workers in (1, 2))
    assert len(alone) == 50
    assert torch.equal(alone.ids, two.ids)
    assert torch.equal(alone.lengths, two.lengths)
