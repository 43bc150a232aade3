"""What the regression computes with: documents, scores, intervals, divergence of answers."""

from __future__ import annotations

import gzip
import json
import math

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, rel_entr

from evals.regress import documents, scoring, statistics
from evals.regress.documents import Document, Text
from evals.regress.generate import diverge
from evals.regress.scoring import TokenScores
from evals.regress.statistics import Columns, difference, estimate
from tests.regression.tiny import Characters
from trtllm_b12x_fix.errors import InputError


def document(length: int, scored_from: int, name: str = "") -> Document:
    return Document("gsm8k", name, tuple(range(length)), scored_from)


class TestDocuments:
    def test_a_token_belongs_to_the_solution_if_it_begins_there(self):
        text = Text("gsm8k", "0", "2+2?\n", "4")
        (found,) = documents.tokenize([text], Characters())
        assert found.scored_from == 5
        assert found.scored == 1
        assert found.tokens[found.scored_from] == ord("4")

    def test_a_token_across_the_boundary_belongs_to_the_prompt(self):
        class Pairs:
            def __call__(self, text, return_offsets_mapping):
                starts = range(0, len(text), 2)
                return {"input_ids": list(starts), "offset_mapping": [(s, s + 2) for s in starts]}

        (found,) = documents.tokenize([Text("gsm8k", "0", "abc", "def")], Pairs())
        assert (len(found.tokens), found.scored_from) == (3, 2)

    def test_texts_without_a_solution_are_left_out_and_the_first_token_is_never_scored(self):
        texts = [Text("gsm8k", "0", "a", ""), Text("gsm8k", "1", "", "xy")]
        (found,) = documents.tokenize(texts, Characters())
        assert (found.name, found.scored_from) == ("1", 1)

    def test_the_first_that_fit_are_chosen(self):
        found = [document(9, 1, "long"), document(5, 1, "a"), document(4, 1, "b")]
        assert [d.name for d in documents.choose(found, 2, 5)] == ["a", "b"]
        with pytest.raises(InputError, match=r"3 documents of at most 5 tokens .* 2 of 3"):
            documents.choose(found, 3, 5)

    def test_fingerprints_see_tokens_and_boundaries(self):
        one = documents.fingerprint([document(5, 2)])
        assert one == documents.fingerprint([document(5, 2, "another name")])
        assert one != documents.fingerprint([document(5, 3)])
        assert one != documents.fingerprint([document(6, 2)])

    def test_scored_items_of_the_sample_do_not_calibrate(self):
        items = documents.gsm8k(documents.GSM8K_SAMPLE)
        assert len(items) == 64
        assert 0 < documents.CALIBRATION_ITEMS < len(items)

    @pytest.mark.parametrize(
        ("content", "word"),
        [
            (b"not json", "JSON lines"),
            (b'{"question": "q"}', "record 1 needs text fields question, answer"),
            (b"[1]", "record 1"),
            (b"\xff\xfe", "JSON lines"),
            (gzip.compress(b'{"question": 1, "answer": 2}', mtime=0), "record 1"),
            (b"\x1f\x8bbroken", "JSON lines"),
        ],
    )
    def test_bad_files_are_named(self, tmp_path, content, word):
        path = tmp_path / "items.jsonl"
        path.write_bytes(content)
        with pytest.raises(InputError, match=word):
            documents.gsm8k(path)

    def test_a_missing_file_says_how_to_get_it(self, tmp_path):
        with pytest.raises(InputError, match="make oracles"):
            documents.human_eval(tmp_path / "none")

    def test_gzip_and_plain_are_the_same(self, tmp_path):
        record = {"task_id": "T/0", "prompt": "p", "canonical_solution": "s", "test": "x"}
        plain, packed = tmp_path / "a", tmp_path / "b"
        plain.write_text(json.dumps(record) + "\n\n")
        packed.write_bytes(gzip.compress(plain.read_bytes()))
        expected = [Text("humaneval", "T/0", "p", "s")]
        assert documents.human_eval(plain) == documents.human_eval(packed) == expected


class TestScores:
    def test_positions_point_at_the_state_before_each_scored_token(self):
        first, second = document(5, 3), Document("gsm8k", "", (7, 8, 9), 1)
        where = scoring.positions([first, second])
        assert where.states.tolist() == [2, 3, 5, 6]
        assert where.gold.tolist() == [3, 4, 8, 9]
        assert where.document.tolist() == [0, 0, 1, 1]

    def test_kl_and_surprise_are_scipys(self):
        torch.manual_seed(0)
        head = torch.randn(50, 16)
        base = torch.randn(6, 16).bfloat16()
        arm = (base.float() + 0.3 * torch.randn(6, 16)).bfloat16()
        where = scoring.positions([Document("gsm8k", "", (1, 2, 3, 4, 5, 49), 1)])
        found = scoring.score(arm, base, head, where, "hash")
        logits = [(s.double() @ head.t().double()).numpy()[where.states] for s in (base, arm)]
        logp, logq = (log_softmax(each, axis=1) for each in logits)
        # Direction matters: what the bf16 model expects and the arm does not.
        assert np.allclose(found.kl, rel_entr(np.exp(logp), np.exp(logq)).sum(axis=1), atol=1e-5)
        assert np.allclose(found.surprise, -logq[np.arange(5), where.gold], atol=1e-5)
        assert np.array_equal(found.choice, logq.argmax(axis=1))
        assert found.kl.min() > 0.001

    def test_long_texts_are_scored_in_blocks_with_the_same_result(self, monkeypatch):
        torch.manual_seed(1)
        head, base = torch.randn(20, 8), torch.randn(30, 8).bfloat16()
        arm = torch.randn(30, 8).bfloat16()
        where = scoring.positions([Document("gsm8k", "", tuple(range(20)) + tuple(range(10)), 1)])
        whole = scoring.score(arm, base, head, where, "")
        monkeypatch.setattr(scoring, "_BLOCK", 7)
        parts = scoring.score(arm, base, head, where, "")
        assert np.allclose(whole.kl, parts.kl, atol=1e-6)
        assert np.array_equal(whole.choice, parts.choice)


def columns(seed: int, documents: int = 20, spread: float = 1.0, shift: float = 0.0) -> Columns:
    """Tokens of a document resemble each other: that is why documents are drawn."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(20, 60, documents)
    number = np.repeat(np.arange(documents), sizes)
    of_document = rng.gamma(2, spread, documents)[number]
    kl = of_document * (1 + 0.1 * rng.random(len(number))) + shift
    base = TokenScores(0 * kl, rng.random(len(kl)), rng.integers(0, 4, len(kl)), "")
    arm = TokenScores(kl, base.surprise + 0.1 * kl, rng.integers(0, 4, len(kl)), "")
    return Columns(number, documents, arm, base, rng.integers(0, 4, len(kl)))


class TestIntervals:
    def test_values_are_plain_means_over_tokens(self):
        found = columns(0)
        values = {n: estimate(s, 20, 0).value for n, s in found.statistics().items()}
        was, now = found.base.choice == found.gold, found.arm.choice == found.gold
        expected = {
            "kl_mean": found.arm.kl.mean(),
            "kl_p99": np.quantile(found.arm.kl, 0.99, method="inverted_cdf"),
            "perplexity_change": math.exp((found.arm.surprise - found.base.surprise).mean()) - 1,
            "top1_agreement": (found.arm.choice == found.base.choice).mean(),
            "gold_lost": (was & ~now).mean(),
            "gold_gained": (~was & now).mean(),
        }
        assert values == pytest.approx(expected, abs=1e-12)

    def test_the_interval_of_a_mean_is_that_of_a_plain_bootstrap(self):
        found = columns(1)
        ours = estimate(found.statistics()["kl_mean"], 20, 0)
        groups = [found.arm.kl[found.document == n] for n in range(20)]
        rng = np.random.default_rng(5)
        drawn = [
            np.concatenate([groups[n] for n in rng.integers(0, 20, 20)]).mean() for _ in range(4000)
        ]
        low, high = np.quantile(drawn, [0.025, 0.975])
        width = high - low
        assert ours.low == pytest.approx(low, abs=0.06 * width)
        assert ours.high == pytest.approx(high, abs=0.06 * width)
        # Were tokens drawn, the interval would be a fifth as wide.
        assert width > 3 * 4 * found.arm.kl.std() / math.sqrt(len(found.arm.kl))

    def test_it_covers_the_truth_as_often_as_it_says(self):
        """95% nominal; a percentile bootstrap of 20 documents covers a little less."""
        truth = 2.0 * 1.05
        hits = [
            e.low <= truth <= e.high
            for e in (estimate(columns(s).statistics()["kl_mean"], 20, s) for s in range(200))
        ]
        assert 0.87 <= np.mean(hits) <= 0.98

    def test_the_difference_is_paired(self):
        one, other = columns(2), columns(2, shift=0.05)
        left, right = other.statistics()["kl_mean"], one.statistics()["kl_mean"]
        found = estimate(difference(left, right), 20, 0)
        assert found.value == pytest.approx(0.05)
        assert not found.overlaps_zero()
        apart = estimate(left, 20, 0)
        assert found.high - found.low < 0.01 * (apart.high - apart.low)

    def test_the_percentile_looks_further_where_a_draw_needs_it(self, monkeypatch):
        """All large values in one document, which a third of the draws leave out."""
        found = columns(3)
        kl = np.where(found.document == 0, 100.0, found.arm.kl)
        skewed = Columns(
            found.document, 20, TokenScores(kl, kl, found.gold, ""), found.base, found.gold
        )
        monkeypatch.setattr(statistics, "_TAIL", 0.001)
        short = estimate(skewed.statistics()["kl_p99"], 20, 0)
        monkeypatch.setattr(statistics, "_TAIL", 1.0)
        assert short == estimate(skewed.statistics()["kl_p99"], 20, 0)
        assert short.low < 20 < short.high

    def test_one_document_has_no_interval(self):
        found = columns(4, documents=1)
        single = estimate(found.statistics()["kl_mean"], 1, 0)
        assert single.low == single.value == single.high

    def test_the_seed_decides(self):
        statistic = columns(5).statistics()["kl_mean"]
        assert estimate(statistic, 20, 1) == estimate(statistic, 20, 1)
        assert estimate(statistic, 20, 1) != estimate(statistic, 20, 2)


class TestAnswers:
    @pytest.mark.parametrize(
        ("ours", "theirs", "first", "shift"),
        [
            ([1, 2, 3], [1, 2, 3], None, 0),
            ([1, 9, 3], [1, 2, 3], 1, 0),
            ([1, 2], [1, 2, 3], 2, -1),
            ([1, 2, 3, 4], [1, 2, 3], 3, 1),
            ([], [], None, 0),
        ],
    )
    def test_first_difference_and_length(self, ours, theirs, first, shift):
        found = diverge([ours], [theirs])
        assert (found.first, found.length_shift) == ([first], [shift])
        assert found.identical == (first is None)
