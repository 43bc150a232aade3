"""Mutants of the scan: each must make the named test fail."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoints import GATED
from tests.unit import (
    test_scan_command,
    test_scan_completeness,
    test_scan_findings,
    test_scan_histogram,
    test_scan_html,
    test_scan_robust,
    test_scan_statistics,
)
from trtllm_b12x_fix.commands import scan as scan_command
from trtllm_b12x_fix.errors import B12xFixError
from trtllm_b12x_fix.report import scan_document, scan_html, scan_table
from trtllm_b12x_fix.scan import (
    checks,
    claims,
    completeness,
    counting,
    histogram,
    inventory,
    matrix,
    multipliers,
    order,
    reading,
    run,
    statistics,
    summarize,
    verdict,
)
from trtllm_b12x_fix.scan.findings import Code, Notebook
from trtllm_b12x_fix.scan.histogram import CountingBackend
from trtllm_b12x_fix.scan.result import Kind, ScanResult


@dataclass(frozen=True)
class Mutant:
    """A wrong value in the place of ``owner.attribute``, and the test that must notice."""

    name: str
    owner: Any
    attribute: str
    wrong: Any
    guard: Any
    arguments: dict[str, Any] = field(default_factory=dict)

    def call(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Run the test with its fixtures and arguments."""
        fixtures = {
            "tmp_path": tmp_path,
            "monkeypatch": monkeypatch,
            "folder": tmp_path,
            "clean": None,
            "affected": None,
        }
        given = {}
        for name in inspect.signature(self.guard).parameters:
            if name in self.arguments:
                given[name] = self.arguments[name]
            elif name in ("clean", "affected"):
                module = inspect.getmodule(self.guard)
                given[name] = inspect.unwrap(getattr(module, name)._get_wrapped_function())(
                    tmp_path
                )
            else:
                given[name] = fixtures[name]
        self.guard(**given)


def _silent(*codes: Code) -> Any:
    original = Notebook.add

    def add(self, code, *arguments, **more):
        if code not in codes:
            original(self, code, *arguments, **more)

    return add


def _truncating(values):
    return (np.ascontiguousarray(np.minimum(values, np.float32(448))) * 0).astype(np.uint8)


def _half_up(values):
    """Ties away from zero."""
    right = statistics_encode(values)
    up = statistics_encode(np.nextafter(values, np.float32(1e9)))
    return np.maximum(right, up)


statistics_encode = statistics.encode
tally = statistics.tally


def _mean_order(group, counted):
    """Ranked by the mean over experts."""
    made = projection(group, counted)
    return replace(made, result=replace(made.result, worst=made.result.worst[-1:]))


projection = summarize.projection
group = inventory._Taker._group
judge_scales = multipliers._judge
plan = multipliers._plan


def one_scale_off(group):
    group.one_scale = False


def _skips_last(self, scales, counts):
    counts += np.bincount(scales[: scales.size // 8 * 8], minlength=256)


def _wraps(self, scales, counts):
    counts += np.bincount(scales & 0x7F, minlength=256)


def _counts_zero_blocks(self, scales, codes, nonzero, energy):
    nonzero += np.bincount(scales, minlength=256)


def _short_read(self, span, target):
    target[:] = 1


def code_mutant(code: Code, guard: Any, /, **arguments: Any) -> Mutant:
    return Mutant(
        f"{code.value} is not said", Notebook, "add", _silent(code), guard, dict(arguments)
    )


F = test_scan_findings
C = test_scan_completeness
MUTANTS = [
    code_mutant(
        Code.NAN_SCALE, F.test_bytes_that_no_block_scale_has,
        projection="up_proj", byte=0x7F, code="nan-block-scales",
    ),
    code_mutant(
        Code.NEGATIVE_SCALE, F.test_bytes_that_no_block_scale_has,
        projection="up_proj", byte=0x80, code="negative-block-scales",
    ),
    code_mutant(Code.ZERO_SCALES, F.test_zero_scales_need_codes_to_be_judged),
    code_mutant(Code.ZERO_OVER_WEIGHTS, F.test_zero_scales_need_codes_to_be_judged),
    code_mutant(Code.ALL_ZERO, F.test_all_scales_zero),
    code_mutant(Code.CONSTANT, F.test_one_byte_everywhere, byte=0x01),
    code_mutant(Code.SATURATED, F.test_saturated_blocks, many=16, found=True),
    code_mutant(Code.MANY_ONES, F.test_mostly_ones),
    code_mutant(
        Code.BAD_WEIGHT_SCALE_2, F.test_scales_that_no_kernel_can_use,
        short="weight_scale_2", word="0.0", value=0.0,
    ),
    code_mutant(
        Code.BAD_INPUT_SCALE, F.test_scales_that_no_kernel_can_use,
        short="input_scale", word="inf", value=float("inf"),
    ),
    code_mutant(Code.MISSING, F.test_missing_scales_of_whole_matrices, short="input_scale"),
    code_mutant(Code.GATE_UP_DIFFER, F.test_gate_and_up_that_differ, ratio=3.0),
    code_mutant(Code.GATE_UP_ROUNDED, F.test_gate_and_up_that_differ_by_a_rounding),
    code_mutant(Code.INPUTS_DIFFER, F.test_input_scales_of_gate_and_up),
    code_mutant(Code.RECIPROCAL, F.test_a_reciprocal),
    code_mutant(Code.OUTLIER, F.test_a_reciprocal),
    code_mutant(Code.IMPLAUSIBLE, F.test_weights_of_a_magnitude_that_cannot_be_true, scale=1e-12),
    code_mutant(Code.SAME_SCALE, F.test_one_weight_scale_for_all_experts),
    code_mutant(Code.SAME_EXPERTS, F.test_an_expert_written_twice),
    code_mutant(Code.DEFAULT_INPUT, F.test_a_layer_never_calibrated),
    code_mutant(
        Code.LARGE_INPUT, F.test_experts_that_were_never_calibrated,
        value=2.0**-9 * 101, found=["input-scale-far-above-others"],
    ),
    code_mutant(
        Code.SMALL_INPUT, F.test_experts_that_were_never_calibrated,
        value=2.0**-9 / 101, found=["input-scale-far-below-others"],
    ),
    code_mutant(
        Code.IMPLAUSIBLE_INPUT, F.test_experts_that_were_never_calibrated,
        value=50.0, found=["input-scale-far-above-others", "implausible-input-scale"],
    ),
    code_mutant(Code.UNFIT, F.test_codes_and_scales_that_do_not_fit, short="weight_scale"),
    code_mutant(Code.LOOK_SWIZZLED, F.test_swizzled_scales_of_the_same_size, few=True),
    code_mutant(Code.LAYER, F.test_missing_matrices_make_a_layer_unusable_and_are_still_scanned),
    code_mutant(Code.MISSING_SHARD, F.test_a_missing_shard),
    code_mutant(Code.CONFIG, F.test_a_config_of_another_model),
    code_mutant(
        Code.UNKNOWN_EXPERTS, F.test_experts_of_unknown_names_are_no_dense_linears,
        scale=2.0**-9,
    ),
    code_mutant(
        Code.UNREADABLE, F.test_a_dense_linear_whose_block_scales_are_none, dtype=torch.float32,
    ),
    code_mutant(Code.WEIGHT_SCALE_ELSEWHERE, C.test_multipliers_in_another_file),
    code_mutant(Code.INPUT_SCALE_ELSEWHERE, C.test_input_scales_in_another_file),
    code_mutant(Code.SPLIT_MATRIX, C.test_a_matrix_in_two_files),
    code_mutant(Code.CODES_LOST, C.test_codes_lost),
    code_mutant(Code.ASSUMPTION, C.test_powers_of_two_are_no_zero_blocks),
    code_mutant(Code.MISSING_EXPERTS, C.test_the_last_expert_is_missing, said="router"),
    code_mutant(Code.WEIGHT_ONLY, C.test_a_layer_without_input_scales),
    code_mutant(Code.NOT_RUN, C.test_layers_that_b12x_does_not_run, suffix="bias"),
    code_mutant(Code.OMITTED, C.test_matrices_that_the_index_omits, stray=True),
    Mutant(
        "what was not judged is clean",
        verdict, "_holes", lambda *_: [],
        C.test_nothing_counted_is_not_clean,
    ),
    Mutant(
        "a part passes for the whole",
        completeness, "is_one_shard", lambda _: False,
        C.test_one_shard_by_name_is_a_restriction,
    ),
    Mutant(
        "powers of two are zero blocks",
        test_scan_statistics, "assumed_zero_blocks", statistics.spike_at_one,
        test_scan_statistics.test_scales_that_are_powers_of_two_have_no_spike,
    ),
    Mutant(
        "matrices of zeros are sound where codes are read",
        Notebook, "add", _silent(Code.ALL_ZERO),
        C.test_codes_hide_no_damage, {"short": "weight_scale", "also": True},
    ),
    Mutant(
        "a NaN is a scale that was not there",
        multipliers, "_judge",
        lambda checkpoint, group, read, notebook: judge_scales(
            checkpoint, group, tuple(mask & False for mask in read), notebook
        ),
        C.test_every_nan_is_read,
    ),
    Mutant(
        "where zeros are is not said",
        verdict, "_place", lambda *_: "somewhere",
        C.test_a_clean_reason_names_zeros,
    ),
    Mutant(
        "shards that are not here are no matter",
        completeness, "check_files", lambda *_: None,
        C.test_missing_shards_without_an_index,
    ),
    Mutant(
        "a stack's one scale is copied",
        multipliers, "_plan", lambda *arguments: (plan(*arguments), one_scale_off(arguments[2])),
        C.test_stacks_under_other_names, {"each": False},
    ),
    Mutant(
        "a report may replace what it is about",
        scan_command, "_sources", lambda _: [],
        C.test_a_report_does_not_replace_the_checkpoint, {"name": "model.safetensors"},
    ),
    Mutant(
        "stacks of unknown names are dense",
        inventory._Taker, "_is_stack", lambda *_: False,
        C.test_stacks_under_other_names, {"each": True},
    ),
    Mutant(
        "any number of experts is believed",
        inventory, "MOST_FUSED", 1 << 40,
        C.test_an_absurd_number_of_experts,
    ),
    Mutant(
        "foreign codes are ours",
        inventory, "_FOREIGN", (),
        C.test_codes_of_other_formats, {"sibling": "absmax"},
    ),
    Mutant(
        "nothing but ones is damaged",
        checks, "only_ones", lambda counts: np.zeros(len(counts), np.bool_),
        C.test_nothing_but_ones_is_undecided,
    ),
    Mutant(
        "a lone surrogate is text",
        scan_document, "_encodable", lambda value: value,
        C.test_json_has_no_lone_surrogate,
    ),
    Mutant(
        "rounding is towards zero",
        statistics, "encode", _truncating,
        test_scan_statistics.test_a_histogram_gives_what_every_block_by_itself_gives,
    ),
    Mutant(
        "ties go up",
        test_scan_statistics, "encode", _half_up,
        test_scan_statistics.test_every_midpoint_and_its_neighbours_round_as_ml_dtypes_does,
    ),
    Mutant(
        "a zero block is one like others",
        statistics, "assumed_zero_blocks", lambda counts: np.zeros(len(counts), np.int64),
        test_scan_statistics.test_zero_blocks_of_modelopt_do_not_count_as_damage,
    ),
    Mutant(
        "nothing but ones is padding",
        test_scan_statistics, "assumed_zero_blocks", lambda counts: counts[:, 0x38],
        test_scan_statistics.test_zero_blocks_are_assumed_from_a_spike_at_one,
        {"ones": 1000, "beside": 0, "rest": 0, "assumed": 0},
    ),
    Mutant(
        "every energy is one",
        test_scan_statistics, "tally",
        lambda counts, scale, energy=None: tally(counts, scale, None if energy is None else counts),
        test_scan_statistics.test_damage_is_weighted_by_what_it_stands_over,
    ),
    Mutant(
        "the limit lies in the rounding",
        statistics, "LIMIT", 0.03,
        test_scan_statistics.test_rounding_normal_numbers_once_more_never_reaches_the_limit,
    ),
    Mutant(
        "the tail of a matrix is not counted",
        histogram.NumpyCounter, "count", _skips_last,
        test_scan_histogram.test_counts_are_numpys,
        {"backend": CountingBackend.NUMPY, "size": 4099, "below": 127},
    ),
    Mutant(
        "the sign of a byte is dropped",
        histogram.NumpyCounter, "count", _wraps,
        test_scan_histogram.test_one_high_byte_in_a_word_changes_no_other_count,
        {"backend": CountingBackend.NUMPY, "place": 0},
    ),
    Mutant(
        "zero codes count",
        histogram.NumpyCounter, "weigh", _counts_zero_blocks,
        test_scan_histogram.test_negative_zero_is_zero,
    ),
    Mutant(
        "pieces overlap",
        counting._Worker, "_count",
        lambda self, span, place: self._counter.count(
            np.zeros(span.size, np.uint8), self._tallies.counts[place]
        ),
        test_scan_histogram.test_files_are_counted_like_tensors,
        {"weights": False, "threads": 1},
    ),
    Mutant(
        "a short read is a read",
        reading.Shards, "read", _short_read,
        test_scan_robust.test_a_file_that_shrinks_after_its_header_was_read,
    ),
    Mutant(
        "the worst is a mean",
        summarize, "projection", _mean_order,
        F.test_one_destroyed_expert_among_64_leads, {"expert": 63},
    ),
    Mutant(
        "dense linears are experts",
        inventory._Taker, "_group",
        lambda self, layer, projection, kind: group(self, layer, projection, Kind.EXPERTS),
        F.test_dense_linears_stand_apart,
    ),
    Mutant(
        "reciprocals are multipliers",
        multipliers, "_judge", lambda *_: None,
        F.test_scales_that_no_kernel_can_use,
        {"short": "input_scale", "word": "nan", "value": float("nan")},
    ),
    Mutant(
        "order is never looked at",
        order, "looks_swizzled", lambda scales: False,
        F.test_swizzled_scales_of_the_same_size, {"few": True},
    ),
    Mutant(
        "every order looks wrong",
        run, "_is_swizzled", lambda *_: True,
        F.test_a_sound_checkpoint_is_clean_and_has_no_findings,
        {"names": GATED, "weights": False},
    ),
    Mutant(
        "the config is not compared",
        claims, "compare", lambda *_: None,
        F.test_a_config_of_another_model,
    ),
    Mutant(
        "W4A16 is baked",
        verdict, "W4A16", "another",
        C.test_w4a16_by_name_with_input_scales,
    ),
    Mutant(
        "a failed check is no exit code",
        ScanResult, "exit_code", lambda self, fail_on: 0,
        F.test_exit_codes,
    ),
    Mutant(
        "a clean result claims to have seen everything",
        scan_table, "BLIND", "All is well.",
        test_scan_command.test_what_cannot_be_seen_is_said_on_every_clean_result,
    ),
    Mutant(
        "names are markup",
        scan_html, "_text", str,
        test_scan_html.test_names_from_a_file_are_text,
    ),
    Mutant(
        "bars hang from the ceiling",
        scan_html, "_HEIGHT", 40,
        test_scan_html.test_bars_stand_for_what_is_baked,
    ),
    Mutant(
        "direct micro's trap is not told",
        matrix, "advisories_for", lambda *_: (),
        test_scan_command.test_traps_and_copies_follow_version_and_size,
    ),
    Mutant(
        "any size can be cut",
        matrix, "_BLOCK", 1,
        test_scan_command.test_a_shape_that_cannot_be_cut,
    ),
    Mutant(
        "nothing is ever said",
        Notebook, "add", lambda *_, **__: None,
        test_scan_robust.test_damaged_tensors,
    ),
    Mutant(
        "experts are not compared",
        checks, "_check_twins", lambda *_: None,
        F.test_an_expert_written_twice,
    ),
]  # fmt: skip


def test_every_code_has_a_mutant():
    names = {mutant.name for mutant in MUTANTS}
    assert not [code for code in Code if f"{code.value} is not said" not in names]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_wrong_scan_is_caught(mutant, monkeypatch, tmp_path):
    if not hasattr(mutant.owner, mutant.attribute):
        pytest.fail(f"nothing is called {mutant.attribute}")
    monkeypatch.setattr(mutant.owner, mutant.attribute, mutant.wrong)
    with monkeypatch.context() as inner:
        # An error of ours, or a value missing where the test looks, is a failure of it, too.
        caught = (AssertionError, pytest.fail.Exception, B12xFixError, ValueError)
        with pytest.raises(caught):
            mutant.call(tmp_path, inner)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_scan_as_it_is_passes(mutant, monkeypatch, tmp_path):
    """The guards are called rightly: they fail for the mutant alone."""
    mutant.call(tmp_path, monkeypatch)
