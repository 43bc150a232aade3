"""Mutants of the checkpoint reader: each must make the named test fail."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.unit import test_checkpoint_files, test_discovery, test_header
from trtllm_b12x_fix.checkpoint import config, conventions, discovery, files, header, layers
from trtllm_b12x_fix.checkpoint.layers import Stack
from trtllm_b12x_fix.errors import InputError

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

    def call(self, tmp_path: Path) -> None:
        """Run the test."""
        code = self.guard.__code__
        folder = {"tmp_path": tmp_path} if "tmp_path" in code.co_varnames else {}
        self.guard(**folder, **self.arguments)


def _zeros_do_not_matter(_checkpoint, _prefix, spelled):
    return {int(name): found for name, found in spelled.items()}


def _first_match(everything, wanted):
    return [entry for entry in everything if str(entry.number) == wanted][:1]


MUTANTS = [
    Mutant(
        "a layer is NVFP4 if one matrix is",
        discovery,
        "_require_all_nvfp4",
        lambda *_: None,
        test_discovery.test_one_projection_in_bf16_makes_the_layer_no_fused_kernels,
        {"plain": "gate_proj", "scaled": True},
    ),
    Mutant(
        "experts.01 is experts.1",
        discovery,
        "_expert_numbers",
        _zeros_do_not_matter,
        test_discovery.test_an_expert_spelled_with_a_leading_zero_is_no_other_expert,
    ),
    Mutant(
        "biases are not looked at",
        conventions,
        "EXPERT_BIAS",
        _NOTHING,
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
        files,
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
        "values are shown in full",
        config,
        "brief",
        lambda value: "x" * 10_000 + str(value)[:10],
        test_checkpoint_files.test_a_huge_config_value_does_not_fill_the_terminal,
        {"key": "hidden_act", "value": "x" * 100_000},
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_wrong_reader_is_caught(mutant, monkeypatch, tmp_path):
    monkeypatch.setattr(mutant.owner, mutant.attribute, mutant.wrong)
    # An error of ours where the test expects none is a failure of that test, too.
    with pytest.raises((AssertionError, pytest.fail.Exception, InputError)):
        mutant.call(tmp_path)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_reader_as_it_is_passes(mutant, tmp_path):
    """The guards are called rightly: they fail for the mutant alone."""
    mutant.call(tmp_path)
