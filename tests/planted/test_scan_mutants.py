"""Mutants of the scan: each must make the named test fail."""

from __future__ import annotations

import builtins
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
    test_scan_declared,
    test_scan_findings,
    test_scan_histogram,
    test_scan_html,
    test_scan_memory,
    test_scan_robust,
    test_scan_statistics,
    test_scan_wording,
)
from trtllm_b12x_fix.checkpoint import declared, files
from trtllm_b12x_fix.checkpoint.declared import Activations, Declaration, Scheme
from trtllm_b12x_fix.commands import scan as scan_command
from trtllm_b12x_fix.errors import B12xFixError
from trtllm_b12x_fix.report import scan_document, scan_html, scan_table
from trtllm_b12x_fix.scan import (
    checks,
    completeness,
    counting,
    decide_bake,
    findings,
    histogram,
    inventory,
    matrix,
    multipliers,
    reading,
    run,
    statistics,
    summarize,
    verdict,
)
from trtllm_b12x_fix.scan.bake import Bake
from trtllm_b12x_fix.scan.findings import RULES, Code, Notebook
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
            elif name == "folder" and hasattr(inspect.getmodule(self.guard), "as_table"):
                given[name] = test_scan_wording.folder._get_wrapped_function()(tmp_path)
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


def _add_without_details(self, code, where, detail="", blocks=0, *, places=1):
    add(self, code, where, "", blocks, places=places)


add = Notebook.add
merged = findings._merged


def _merged_with(**changed: Any) -> Any:
    """A finding that says less."""

    def wrong(code, seen):
        made = merged(code, seen)
        return replace(made, **{k: v(made) if callable(v) else v for k, v in changed.items()})

    return wrong


def _says_nothing_of(name: str) -> Any:
    document = scan_document._finding
    return lambda finding: {k: v for k, v in document(finding).items() if k != name}


def _truncating(values):
    return (np.ascontiguousarray(np.minimum(values, np.float32(448))) * 0).astype(np.uint8)


def _half_up(values):
    """Ties away from zero."""
    right = statistics_encode(values)
    up = statistics_encode(np.nextafter(values, np.float32(1e9)))
    return np.maximum(right, up)


statistics_encode = statistics.encode
tally = statistics.tally


def _mean_order(group, parts):
    """Ranked by the mean over experts."""
    made = projection(group, parts)
    return replace(made, result=replace(made.result, worst=made.result.worst[-1:]))


projection = summarize.projection
group = inventory._Taker._group
judge_scales = multipliers._judge
plan = multipliers._plan


flag = checks._flag
read_part = counting._Worker._read_part
count_pieces = counting._Worker._count
decide = decide_bake.decide_bakes


def _plan_with_copies(*arguments):
    planned = plan(*arguments)
    arguments[2].one_scale = False
    return planned


def _skips_last(self, scales, ends, rows, counts):
    counts[0] += np.bincount(scales[: scales.size // 8 * 8], minlength=256)


def _wraps(self, scales, ends, rows, counts):
    counts[0] += np.bincount(scales & 0x7F, minlength=256)


def _first_row(self, scales, ends, rows, counts):
    counts[rows[0]] += np.bincount(scales, minlength=256)


def _never_declared(checkpoint, declaration, groups, notebook):
    return decide(checkpoint, Declaration([]), groups, notebook)


def _take_layer_unknown(self, entry):
    self._usable = _Nothing()
    take_layer(self, entry)


take_layer = inventory._Taker.take_layer


class _Nothing(set):
    def __contains__(self, _):
        return False


class _EveryBake:
    YES = WEIGHT_ONLY = Bake.YES


class _AlwaysNvfp4(Declaration):
    def of(self, prefix):
        return Scheme("NVFP4", Activations.NVFP4)


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
D = test_scan_declared
M = test_scan_memory
W = test_scan_wording
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
    code_mutant(
        Code.LOST_INPUTS, D.test_a_layer_that_declares_nvfp4_and_has_no_input_scales,
        own=D.NVFP4, shared=None,
    ),
    code_mutant(Code.UNUSED_INPUTS, D.test_weight_only_with_input_scales_is_a_note),
    code_mutant(Code.SHAPES, F.test_an_expert_of_another_size, projection="down_proj"),
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
        lambda checkpoint, group, scale, notebook: judge_scales(
            checkpoint, group, scale._replace(read=scale.read & False), notebook
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
        multipliers, "_plan", _plan_with_copies,
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
        scan_document, "shown", lambda value: value,
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
        "pieces go to other matrices",
        counting._Worker, "_count",
        lambda self, scales, ends, rows: count_pieces(self, scales, ends, rows[::-1]),
        test_scan_histogram.test_files_are_counted_like_tensors,
        {"weights": False, "threads": 1},
    ),
    Mutant(
        "a buffer is of one matrix",
        histogram.NumpyCounter, "count", _first_row,
        test_scan_histogram.test_pieces_go_to_their_rows,
        {"backend": CountingBackend.NUMPY, "below": 127},
    ),
    Mutant(
        "all counts are kept",
        counting, "_bundles",
        lambda groups: [[counting._Part(group, 0, len(group)) for group in groups]],
        M.test_memory_does_not_grow_with_the_number_of_experts,
    ),
    Mutant(
        "places start anew in every part",
        counting.Counted, "end", property(lambda self: len(self.counts)),
        M.test_a_projection_in_parts_is_one_in_a_piece, {"weights": False},
    ),
    Mutant(
        "an expert is named by its place in a part",
        checks, "_flag",
        lambda group, first, notebook, code, blocks: flag(group, 0, notebook, code, blocks),
        M.test_findings_name_the_expert_wherever_the_parts_are_cut, {"fault": 0x7F},
    ),
    Mutant(
        "turned experts are straight",
        counting._Worker, "_turned_pieces", counting._Worker._pieces,
        M.test_turned_experts_are_read_in_pieces, {"piece": 48},
    ),
    Mutant(
        "a line is read from its start",
        counting._Worker, "_read_part",
        lambda self, span, width, first, many, part: read_part(
            self, span, width, first, many, slice(0, part.stop - part.start)
        ),
        M.test_turned_experts_are_read_in_pieces, {"piece": 7},
    ),
    Mutant(
        "files stay open",
        reading.Shards, "__exit__", lambda *_: None,
        M.test_more_shards_than_handles,
    ),
    Mutant(
        "fused experts are records",
        inventory.Group, "units", lambda self, first=0, end=None: iter(()),
        M.test_a_listing_keeps_fused_experts_as_one_record,
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
        run, "looks_swizzled", lambda scales: False,
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
        completeness, "_note_claim", lambda *_: None,
        F.test_a_config_of_another_model,
    ),
    Mutant(
        "W4A16 is baked",
        run, "decide_bakes", _never_declared,
        C.test_w4a16_by_name_with_input_scales,
    ),
    Mutant(
        "W4A16 is not known",
        declared, "_ALGORITHMS", {"NVFP4": Activations.NVFP4},
        D.test_weight_only_is_not_accused, {"own": D.W4A16, "shared": None},
    ),
    Mutant(
        "what nothing declares is NVFP4",
        run, "read_declaration", lambda _: _AlwaysNvfp4([]),
        D.test_what_nothing_declares_is_a_note, {"shared": None},
    ),
    Mutant(
        "config.json counts before ModelOpt's own file",
        declared, "reversed", lambda found: found,
        D.test_a_layer_that_declares_nvfp4_and_has_no_input_scales,
        {"own": D.NVFP4, "shared": D.groups(None)},
    ),
    Mutant(
        "a layer's own declaration is not read",
        Declaration, "_below", lambda self, prefix: iter(()),
        D.test_weight_only_is_not_accused,
        {"own": D.mixed(b5="W4A16_NVFP4", b6="NVFP4"), "shared": None},
    ),
    Mutant(
        "groups of a config are not read",
        declared, "_from_groups", lambda _: (Scheme(), {}),
        D.test_a_layer_that_declares_nvfp4_and_has_no_input_scales,
        {"own": None, "shared": D.groups(D.FP4)},
    ),
    Mutant(
        "groups that disagree are all like the last",
        declared, "_from_groups",
        lambda groups: (Scheme(None, Activations.NVFP4), {}),
        D.test_what_nothing_declares_is_a_note, {"shared": D.groups(D.FP4, None)},
    ),
    Mutant(
        "activations of any format are NVFP4",
        declared, "_activations", lambda entry: Activations.NVFP4,
        D.test_activations_that_b12x_does_not_take, {"own": None, "shared": D.groups(D.FP8)},
    ),
    Mutant(
        "wide blocks are broken NVFP4",
        completeness, "_is_sound", lambda *_: False,
        D.test_other_formats_with_wide_blocks_are_sound, {"own": None},
    ),
    Mutant(
        "wide blocks are not seen",
        inventory, "is_wide", lambda *_: False,
        D.test_other_formats_with_wide_blocks_are_sound, {"own": None},
    ),
    Mutant(
        "wide blocks in a usable layer are another format",
        inventory._Taker, "take_layer", _take_layer_unknown,
        D.test_one_matrix_with_wide_blocks_is_damage,
    ),
    Mutant(
        "a dense linear with wide blocks is none of ours",
        decide_bake, "_decide_wide", lambda *_: False,
        D.test_a_dense_linear_with_wide_blocks_in_nvfp4_is_damage,
    ),
    Mutant(
        "wide blocks are baked",
        inventory.Group, "is_wide", property(lambda self: False),
        D.test_wide_blocks_of_experts_under_unknown_names, {"own": None},
    ),
    Mutant(
        "wide blocks are sound wherever they are",
        completeness, "_is_sound", lambda *_: True,
        D.test_wide_blocks_in_nvfp4_are_damage,
    ),
    Mutant(
        "a quantization config that is no file is none",
        declared, "read_config", lambda *_: {},
        D.test_a_quantization_config_that_is_none_is_not_called_absent, {"kind": "folder"},
    ),
    Mutant(
        "what no index names is forgotten",
        files, "_strays", lambda *_: {},
        C.test_matrices_that_the_index_omits, {"stray": True},
    ),
    Mutant(
        "where a finding was is not said",
        findings, "_merged", _merged_with(message=lambda made: RULES[Code(made.code)].text),
        W.test_a_finding_has_all_of_it,
    ),
    Mutant(
        "the tensor is not named",
        findings, "_merged", _merged_with(tensor=""),
        W.test_a_finding_has_all_of_it,
    ),
    Mutant(
        "the layer is not named",
        findings, "_merged", _merged_with(layer=""),
        W.test_a_finding_has_all_of_it,
    ),
    Mutant(
        "the expert is not named",
        findings, "_merged", _merged_with(expert=None),
        W.test_a_finding_has_all_of_it,
    ),
    Mutant(
        "the file is not named",
        findings, "_merged", _merged_with(file=""),
        W.test_a_finding_has_all_of_it,
    ),
    Mutant(
        "every finding is one place",
        findings, "_merged", _merged_with(count=1),
        W.test_a_finding_has_all_of_it,
    ),
    Mutant(
        "nobody says what to do",
        findings, "_merged", _merged_with(advice=""),
        W.test_a_finding_has_all_of_it,
    ),
    Mutant(
        "how much of an expert is not said",
        Notebook, "add", _add_without_details,
        W.test_a_finding_has_all_of_it,
    ),
    Mutant(
        "the table keeps advice to itself",
        scan_table, "_finding", lambda finding: finding.code,
        W.test_every_report_says_it, {"report": "table"},
    ),
    Mutant(
        "the page has no findings",
        scan_html, "_findings", lambda result: "",
        W.test_every_report_says_it, {"report": "html"},
    ),
    Mutant(
        "JSON has no advice",
        scan_document, "_finding", _says_nothing_of("advice"),
        W.test_every_report_says_it, {"report": "json"},
    ),
    Mutant(
        "JSON has no message",
        scan_document, "_finding", _says_nothing_of("message"),
        W.test_every_report_says_it, {"report": "json"},
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
        "b12x bakes whatever a layer is",
        run, "Bake", _EveryBake,
        D.test_the_matrix_says_that_weight_only_is_not_rounded_twice,
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
    is_builtin = hasattr(builtins, mutant.attribute)
    if not hasattr(mutant.owner, mutant.attribute) and not is_builtin:
        pytest.fail(f"nothing is called {mutant.attribute}")
    monkeypatch.setattr(mutant.owner, mutant.attribute, mutant.wrong, raising=not is_builtin)
    with monkeypatch.context() as inner:
        # An error of ours, or a value missing where the test looks, is a failure of it, too.
        caught = (AssertionError, pytest.fail.Exception, B12xFixError, ValueError)
        with pytest.raises(caught):
            mutant.call(tmp_path, inner)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_scan_as_it_is_passes(mutant, monkeypatch, tmp_path):
    """The guards are called rightly: they fail for the mutant alone."""
    mutant.call(tmp_path, monkeypatch)
