"""Mutants of the checkpoint reader: each must make the named test fail."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.checkpoints import GATED
from tests.unit import (
    test_checkpoint_damage,
    test_checkpoint_files,
    test_discovery,
    test_from_checkpoint,
    test_header,
)
from trtllm_b12x_fix.checkpoint import (
    config,
    conventions,
    damage,
    discovery,
    files,
    header,
    json_files,
    layers,
    own_router,
    recorded,
    shards,
    stored,
)
from trtllm_b12x_fix.checkpoint.findings import Finding, Severity
from trtllm_b12x_fix.checkpoint.layers import Stack
from trtllm_b12x_fix.commands import check_layer
from trtllm_b12x_fix.errors import InputError
from trtllm_b12x_fix.report import files as report_files
from trtllm_b12x_fix.report import listing

_NOTHING = re.compile(r"(?!)")


@dataclass(frozen=True)
class Mutant:
    """A wrong value in the place of ``owner.attribute``, and the test that must notice."""

    name: str
    owner: Any
    attribute: str
    wrong: Any
    guard: Any
    arguments: dict[str, Any] = field(default_factory=dict)

    def call(self, **fixtures: Any) -> None:
        """Run the test."""
        code = self.guard.__code__
        wanted = code.co_varnames[: code.co_argcount]
        given = {name: value for name, value in fixtures.items() if name in wanted}
        self.guard(**given, **self.arguments)


def _zeros_do_not_matter(_checkpoint, _prefix, spelled):
    return {int(name): set(found) for name, found in spelled.items()}


def _first_match(everything, wanted):
    return [entry for entry in everything if str(entry.number) == wanted][:1]


def _side_stacks_have_numbers(everything, wanted):
    same = [entry for entry in everything if str(entry.number) == wanted]
    return [entry for entry in same if entry.stack is Stack.MODEL] or same


def _six_digits(pattern):
    return re.compile(pattern.pattern.replace("[0-9]+", "[0-9]{1,6}"), re.DOTALL)


MUTANTS = [
    Mutant(
        "a layer is NVFP4 if one matrix is",
        stored,
        "_require_all_nvfp4",
        lambda *_: None,
        test_discovery.test_one_projection_in_bf16_makes_the_layer_no_fused_kernels,
        {"plain": "gate_proj", "scaled": True},
    ),
    Mutant(
        "experts.01 is experts.1",
        stored,
        "_expert_numbers",
        _zeros_do_not_matter,
        test_discovery.test_an_expert_spelled_with_a_leading_zero_is_no_other_expert,
    ),
    Mutant(
        "biases are not looked at",
        conventions,
        "REFUSED_SUFFIXES",
        {},
        test_discovery.test_experts_with_a_bias_are_not_what_b12x_computes,
        {"bias": "0.up_proj.bias"},
    ),
    Mutant(
        "a predictor is a block like others",
        conventions,
        "PREDICTOR_MARK",
        _NOTHING,
        test_discovery.test_a_predictor_in_the_models_own_stack_is_told_by_its_projection,
        {"mark": "eh_proj.weight"},
    ),
    Mutant(
        "every block is a predictor",
        discovery,
        "_stack",
        lambda *_: Stack.SIDE,
        test_discovery.test_a_predictor_in_the_models_own_stack_is_told_by_its_projection,
        {"mark": None},
    ),
    Mutant(
        "a number means whatever has it first",
        layers,
        "_matches",
        _first_match,
        test_discovery.test_two_stacks_with_one_number_must_be_told_apart,
    ),
    Mutant(
        "any JSON is parsed",
        header,
        "_MAX_STRUCTURE",
        10**9,
        test_header.test_json_that_would_swell_in_memory_is_refused_unparsed,
        {"filler": b"0,"},
    ),
    Mutant(
        "few tensors are allowed",
        header,
        "_MAX_STRUCTURE",
        100_000,
        test_header.test_a_header_of_many_tensors_is_read,
    ),
    Mutant(
        "names are not looked at",
        header,
        "require_text",
        lambda *_: None,
        test_header.test_a_name_that_is_not_text_is_refused,
        {"name": "\ud800"},
    ),
    Mutant(
        "names in an index are not looked at",
        json_files,
        "require_text",
        lambda *_: None,
        test_checkpoint_files.test_an_index_whose_tensor_name_is_not_text_is_refused,
    ),
    Mutant(
        "SwiGLU is SwiGLU",
        config.ModelConfig,
        "_changed_swiglu",
        lambda *_: "",
        test_checkpoint_files.test_a_swiglu_of_its_own_is_refused_unless_the_activation_is_given,
        {"key": "swiglu_limit"},
    ),
    Mutant(
        "AWQ's scales of inputs are not looked at",
        conventions,
        "REFUSED_SUFFIXES",
        {"bias": "biases"},
        test_discovery.test_tensors_that_change_what_experts_compute_are_refused,
        {"where": "3.up_proj.", "suffix": "pre_quant_scale", "word": "AWQ"},
    ),
    Mutant(
        "unknown tensors of experts are left alone",
        stored,
        "_unread",
        lambda *_: (),
        test_discovery.test_unknown_tensors_of_experts_are_a_note,
        {"name": "0.up_proj.strange"},
    ),
    Mutant(
        "scales without codes are left alone",
        stored,
        "_require_codes",
        lambda *_: None,
        test_discovery.test_scales_without_their_codes_are_an_error,
        {"lost": ".gate_proj."},
    ),
    Mutant(
        "without any codes it is another format",
        conventions,
        "is_broken_nvfp4",
        lambda *_: False,
        test_discovery.test_scales_without_their_codes_are_an_error,
        {"lost": "."},
    ),
    Mutant(
        "experts of seven digits are dropped",
        conventions,
        "SPLIT_EXPERT",
        _six_digits(conventions.SPLIT_EXPERT),
        test_discovery.test_an_expert_of_a_long_number_is_not_dropped,
    ),
    Mutant(
        "the first of two copies counts",
        stored,
        "_require_one_copy",
        lambda *_: None,
        test_discovery.test_two_copies_of_one_matrix_are_refused,
    ),
    Mutant(
        "split experts hide fused ones",
        stored,
        "_require_one_copy",
        lambda *_: None,
        test_discovery.test_split_and_fused_experts_of_one_layer_are_refused,
    ),
    Mutant(
        "any block scales will do",
        conventions,
        "SCALE_DTYPES",
        ("F8_E4M3", "U8", "BF16", "F32"),
        test_discovery.test_int8_and_int4_experts_are_not_nvfp4,
        {"dtype": torch.uint8, "scale": torch.ones(32, 4).bfloat16(), "packed": "weight"},
    ),
    Mutant(
        "codes of another dtype are another format",
        conventions,
        "UNPACKED_DTYPES",
        conventions.UNPACKED_DTYPES | {"I8"},
        test_discovery.test_nvfp4_scales_over_codes_of_another_dtype_are_unusable,
        {"dtype": torch.int8},
    ),
    Mutant(
        "a number may mean a side stack",
        layers,
        "_matches",
        _side_stacks_have_numbers,
        test_discovery.test_a_number_never_means_a_side_stack,
    ),
    Mutant(
        "a draft model is the model",
        conventions,
        "SIDE_STACK",
        re.compile(r"(?:^|\.)(?:mtp|nextn|eagle|vision\w*|visual)\b"),
        test_discovery.test_a_family_is_found,
        {
            "prefix": "draft_model.layers.2.mlp.experts",
            "names": GATED,
            "number": 2,
            "stack": Stack.SIDE,
        },
    ),
    Mutant(
        "unknown models route as known ones",
        config.ModelConfig,
        "unknown_routing",
        lambda _: "",
        test_from_checkpoint.test_a_model_whose_router_was_not_compared_is_routed_at_random,
        {"model_type": "phimoe"},
    ),
    Mutant(
        "no model is a model",
        config.ModelConfig,
        "names_a_model",
        True,
        test_from_checkpoint.test_without_a_model_type_routing_is_random,
        {"config": None},
    ),
    Mutant(
        "tensors beside the router do not matter",
        own_router,
        "_unread",
        lambda *_: "",
        test_from_checkpoint.test_a_router_with_another_tensor_is_not_emulated,
        {"name": "expert_bias"},
    ),
    Mutant(
        "any other size is latent",
        own_router,
        "_latent",
        lambda *_: "a latent MoE",
        test_from_checkpoint.test_a_latent_moe_routes_at_random_and_says_why,
        {"said": "nowhere"},
    ),
    Mutant(
        "fewer experts than the config says are a note",
        config,
        "_contradiction",
        lambda _what, _claimed, _actual, entry: Finding(
            Severity.NOTE, "config-contradicts-tensors", "", layer=entry.prefix
        ),
        test_from_checkpoint.test_a_whole_missing_last_expert_is_damage,
        {"key": "num_experts"},
    ),
    Mutant(
        "a colon is not needed",
        recorded,
        "_WHERE",
        re.compile(r"(?P<path>.*\.safetensors):?(?P<tensor>.+)?", re.DOTALL),
        test_from_checkpoint.test_inputs_of_another_kind_are_named,
    ),
    Mutant(
        "input scales are not compared",
        damage,
        "of_input_scales",
        lambda *_: [],
        test_checkpoint_damage.test_gate_and_up_input_scales_that_differ_are_a_note,
    ),
    Mutant(
        "an input scale may be anything",
        damage,
        "_FAR",
        1e9,
        test_checkpoint_damage.test_an_input_scale_far_from_all_others_is_a_note,
        {"factor": 200.0},
    ),
    Mutant(
        "a rounding is damage",
        damage,
        "_ROUNDING",
        1.0,
        test_checkpoint_damage.test_scales_that_differ_by_a_rounding_are_a_note,
    ),
    Mutant(
        "findings are lost with the result",
        listing,
        "said",
        lambda _: "",
        test_checkpoint_damage.test_findings_are_shown_where_there_is_nothing_to_compare,
    ),
    Mutant(
        "one shard is a checkpoint",
        files.Checkpoint,
        "require_whole",
        lambda *_: None,
        test_checkpoint_files.test_one_shard_of_several_says_so,
    ),
    Mutant(
        "names of shards say nothing",
        shards,
        "absent_by_name",
        lambda _: [],
        test_checkpoint_files.test_without_an_index_the_names_say_that_there_are_more,
        {"folder": True},
    ),
    Mutant(
        "copies in other files do not matter",
        shards,
        "copies",
        lambda *_: [],
        test_checkpoint_files.test_a_copy_in_a_file_that_does_not_count_is_a_note,
        {"name": "stray.safetensors"},
    ),
    Mutant(
        "a config that is no file is none",
        files,
        "read_config",
        lambda _: {},
        test_checkpoint_files.test_a_config_that_is_no_file_is_not_called_absent,
        {"kind": "link"},
    ),
    Mutant(
        "file names go into JSON as they are",
        files,
        "shown",
        str,
        test_checkpoint_files.test_a_file_name_that_is_not_utf8_leaves_json_valid,
    ),
    Mutant(
        "reports are written over anything",
        report_files,
        "check_apart",
        lambda *_: None,
        test_checkpoint_files.test_a_report_does_not_take_the_place_of_what_is_read,
        {"option": "--json", "name": "config.json"},
    ),
    Mutant(
        "a list takes any option",
        check_layer,
        "_check_list_options",
        lambda _: None,
        test_checkpoint_files.test_a_list_takes_no_options_of_a_check,
        {"option": ("--layer", "0")},
    ),
    Mutant(
        "metadata may be anything",
        header,
        "_require_metadata",
        lambda *_: None,
        test_header.test_metadata_of_another_kind_is_refused_as_by_the_library,
        {"metadata": {"a": 1}},
    ),
    Mutant(
        "bytes may belong to no tensor",
        header,
        "_require_covered",
        lambda *_: None,
        test_header.test_bytes_that_belong_to_no_tensor_are_refused_as_by_the_library,
        {"spans": ((0, 1),)},
    ),
    Mutant(
        "values are shown in full",
        config,
        "brief",
        lambda value: "x" * 10_000 + str(value)[:10],
        test_checkpoint_files.test_a_huge_config_value_does_not_fill_the_terminal,
        {"key": "hidden_act", "value": "x" * 100_000},
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_wrong_reader_is_caught(mutant, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(mutant.owner, mutant.attribute, mutant.wrong)
    # An error of ours where the test expects none is a failure of that test, too, and so is
    # unpacking the one finding where there is none (ValueError).
    with pytest.raises((AssertionError, pytest.fail.Exception, InputError, ValueError)):
        mutant.call(tmp_path=tmp_path, capsys=capsys)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_reader_as_it_is_passes(mutant, tmp_path, capsys):
    """The guards are called rightly: they fail for the mutant alone."""
    mutant.call(tmp_path=tmp_path, capsys=capsys)
