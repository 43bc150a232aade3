"""Mutants of the fix inside TensorRT-LLM: each must make the named fast test fail."""

from __future__ import annotations

import functools
import inspect
import weakref
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.trtllm_layers import VERSION, Bench, make_bench
from tests.unit import test_b12x_dispatch as dispatch_tests
from tests.unit import test_trtllm_contract as contract_tests
from tests.unit import test_trtllm_verify as verify_tests
from trtllm_b12x_fix.emulator import moe
from trtllm_b12x_fix.errors import B12xFixError
from trtllm_b12x_fix.formats import scale_layout
from trtllm_b12x_fix.integrations import (
    b12x_dispatch,
    tensorrt_llm,
    trtllm_contract,
    trtllm_entries,
    trtllm_layer,
    trtllm_report,
    trtllm_verify,
)
from trtllm_b12x_fix.integrations.b12x_dispatch import DispatchHold
from trtllm_b12x_fix.integrations.trtllm_contract import INPUT_GLOBAL_SCALE
from trtllm_b12x_fix.integrations.trtllm_decode import THRESHOLD
from trtllm_b12x_fix.integrations.trtllm_entries import ScaleState
from trtllm_b12x_fix.integrations.trtllm_report import Reporter
from trtllm_b12x_fix.integrations.trtllm_summary import Summary
from trtllm_b12x_fix.integrations.trtllm_verify import Verification, VerifyState
from trtllm_b12x_fix.layer import Activation
from trtllm_b12x_fix.repair import Strategy, arguments
from trtllm_b12x_fix.settings import Verify


@dataclass(frozen=True)
class Mutant:
    """A wrong value in the place of ``owner.attribute``, and the test that must notice."""

    name: str
    owner: Any
    attribute: str
    wrong: Any
    guard: Any
    arguments: dict[str, Any] = field(default_factory=dict)

    def call(self, fixtures: dict[str, Any]) -> None:
        """Run the test with the fixtures it asks for."""
        wanted = inspect.signature(self.guard).parameters
        given = {name: value for name, value in fixtures.items() if name in wanted}
        self.guard(**given, **self.arguments)


def _nothing(*_: Any) -> None:
    return None


# ---- wrong arguments for the kernel

_new_entries = trtllm_entries.new_entries


def _changed(**changes: Any) -> Any:
    """New entries of which some are computed wrongly; each change gets the view and the entries."""

    def new_entries(view, strategy):
        entries = _new_entries(view, strategy)
        return entries | {key: change(view, entries) for key, change in changes.items()}

    return new_entries


def _in_the_callers_mode(view, strategy):
    """Whatever mode the layer was made in."""
    entries = _new_entries(view, strategy)
    with torch.inference_mode(view.fc1_alpha.is_inference()):
        return {
            key: tensor.clone() if tensor.dim() < 2 else tensor for key, tensor in entries.items()
        }


def _baked_in_place(view, strategy):
    """Scales that CUTLASS reads, too, multiplied where they lie."""
    with torch.no_grad():
        first = view.w1_block_scale[0]
        first.copy_((first.float() * 0.5).to(first.dtype))
    return _new_entries(view, strategy)


def _replaced_before_it_is_checked(view, strategy):
    view.entries["w1_weight_sf"] = scale_layout.to_mma(view.w1_block_scale)
    return _new_entries(view, strategy)


def _divided_once(view, entries):
    return 1.0 / view.fc2_reciprocal / view.fc1_weight_scale_2


def _divided_by_the_square(view, entries):
    # As a GPU has it that flushes subnormals.
    square = view.fc1_weight_scale_2.double().square().float()
    square[square < 2.0**-126] = 0
    return 1.0 / view.fc2_reciprocal / square


def _alpha_alone(contract, which, experts):
    return contract.tensor(f"{which}_alpha")


def _recovered_always(contract, which, experts):
    return contract.tensor(f"{which}_alpha") * contract.tensor(f"{which}_input_scale")


ARGUMENTS = [
    Mutant(
        "weight_scale_2 is the alpha, without the reciprocal",
        trtllm_contract,
        "_weight_scale_2",
        _alpha_alone,
        contract_tests.test_alphas_are_computed_right,
    ),
    Mutant(
        "w1_alpha is alpha: the input scale counts twice",
        trtllm_layer,
        "new_entries",
        _changed(w1_alpha=lambda view, _: view.fc1_alpha.clone()),
        contract_tests.test_alphas_are_computed_right,
    ),
    Mutant(
        "weight_scale_2 is recovered where the layer keeps it",
        trtllm_contract,
        "_weight_scale_2",
        _recovered_always,
        contract_tests.test_weight_scale_2_that_the_layer_keeps_is_used,
    ),
    Mutant(
        "input_global_scale is the reciprocal",
        trtllm_layer,
        "new_entries",
        _changed(input_global_scale=lambda view, _: view.fc1_reciprocal.clone()),
        contract_tests.test_alphas_are_computed_right,
    ),
    Mutant(
        "input_global_scale is the reciprocal, seen by its output",
        trtllm_layer,
        "new_entries",
        _changed(input_global_scale=lambda view, _: view.fc1_reciprocal.clone()),
        contract_tests.test_decode_is_the_emulated_repair_bit_for_bit,
        {"version": "0.7.4", "activation": Activation.SILU},
    ),
    Mutant(
        "fc2_input_scale is the reciprocal",
        trtllm_layer,
        "new_entries",
        _changed(fc2_input_scale=lambda view, _: view.fc2_reciprocal.clone()),
        contract_tests.test_alphas_are_computed_right,
    ),
    Mutant(
        "FC1's block scales are handed as FC2's",
        trtllm_layer,
        "new_entries",
        _changed(w2_weight_sf=lambda _, entries: entries["w1_weight_sf"]),
        contract_tests.test_block_scales_are_the_parameters_own_memory,
        {"version": "0.6.18"},
    ),
    Mutant(
        "FC1's block scales are handed as FC2's, seen by its output",
        trtllm_layer,
        "new_entries",
        _changed(w2_weight_sf=lambda _, entries: entries["w1_weight_sf"]),
        contract_tests.test_decode_is_the_emulated_repair_bit_for_bit,
        {"version": "0.6.16", "activation": Activation.RELU2},
    ),
    Mutant(
        "w2_alpha is weight_scale_2 alone",
        trtllm_layer,
        "new_entries",
        _changed(w2_alpha=lambda view, _: view.fc2_weight_scale_2.clone()),
        contract_tests.test_alphas_are_computed_right,
    ),
    Mutant(
        "w2_alpha is weight_scale_2 alone, on the old kernels",
        trtllm_layer,
        "new_entries",
        _changed(w2_alpha=lambda view, _: view.fc2_weight_scale_2.clone()),
        contract_tests.test_rescaled_scales_are_computed_right,
    ),
    Mutant(
        "fp32-rescale divides once",
        trtllm_layer,
        "new_entries",
        _changed(fc2_input_scale=_divided_once),
        contract_tests.test_rescaled_scales_are_computed_right,
    ),
    Mutant(
        "fp32-rescale divides by a square that underflows",
        trtllm_layer,
        "new_entries",
        _changed(fc2_input_scale=_divided_by_the_square),
        contract_tests.test_the_smallest_weight_scale_2_stays_finite_as_its_square_would_not,
    ),
    Mutant(
        "fp32-rescale hands over input_global_scale, too",
        trtllm_layer,
        "new_entries",
        _changed(input_global_scale=lambda view, _: 1.0 / view.fc1_reciprocal),
        contract_tests.test_fp32_rescale_can_be_asked_for,
        {"version": "0.7.4"},
    ),
    Mutant(
        "the range of fp32-rescale is not looked at",
        trtllm_entries,
        "_check_range",
        _nothing,
        contract_tests.test_weight_scale_2_too_small_to_be_squared_is_refused,
        {"expert": 2},
    ),
]

# ---- memory

MEMORY = [
    Mutant(
        "arguments keep the layer's inference mode",
        trtllm_layer,
        "new_entries",
        _in_the_callers_mode,
        contract_tests.test_arguments_have_versions_even_when_the_layer_was_made_in_inference_mode,
        {"version": "0.6.18", "dynamic": False},
    ),
    Mutant(
        "the clone out of inference mode is forgotten",
        trtllm_entries,
        "_own",
        lambda tensor: tensor.to(torch.float32).contiguous(),
        contract_tests.test_arguments_have_versions_even_when_the_layer_was_made_in_inference_mode,
        {"version": "0.6.18", "dynamic": True},
    ),
    Mutant(
        "fc2_alpha is handed over itself",
        trtllm_entries,
        "_own",
        lambda tensor: tensor.to(torch.float32).contiguous(),
        contract_tests.test_small_arguments_are_nobody_elses_memory,
        {"version": "0.6.18", "dynamic": False},
    ),
    Mutant(
        "a kept weight_scale_2 is handed over itself",
        trtllm_layer,
        "new_entries",
        _changed(w1_alpha=lambda view, _: view.fc1_weight_scale_2),
        contract_tests.test_small_arguments_are_nobody_elses_memory,
        {"version": "0.6.18", "dynamic": True},
    ),
    Mutant(
        "an expanded scalar stays expanded",
        trtllm_entries,
        "_own",
        lambda tensor: tensor.clone(memory_format=torch.preserve_format).as_strided(
            tensor.shape, tensor.stride()
        ),
        contract_tests.test_small_arguments_are_nobody_elses_memory,
        {"version": "0.6.16", "dynamic": False},
    ),
    Mutant(
        "block scales are copied",
        trtllm_entries,
        "_mma",
        lambda view, key, scales: scale_layout.to_mma(scales.clone()),
        contract_tests.test_block_scales_are_the_parameters_own_memory,
        {"version": "0.6.18"},
    ),
    Mutant(
        "any layout of block scales is taken",
        trtllm_entries,
        "_mma",
        lambda view, key, scales: scale_layout.to_mma(scales),
        contract_tests.test_another_layout_of_block_scales_is_refused,
    ),
    Mutant(
        "parameters are changed in place",
        trtllm_layer,
        "new_entries",
        _baked_in_place,
        contract_tests.test_parameters_keep_every_byte,
        {"version": "0.6.18"},
    ),
    Mutant(
        "replaced before it is checked",
        trtllm_layer,
        "new_entries",
        _replaced_before_it_is_checked,
        contract_tests.test_weight_scale_2_too_small_to_be_squared_is_refused,
        {"expert": 0},
    ),
    Mutant(
        "FC1's bytes alone are counted",
        trtllm_layer,
        "baked_bytes",
        lambda module: module._b12x_weights["w1_weight_sf"].numel(),
        contract_tests.test_freed_bytes_are_those_of_the_baked_copies,
        {"activation": Activation.SILU},
    ),
    Mutant(
        "what was never a copy counts as freed",
        contract_tests,
        "baked_bytes",
        lambda module: sum(module._b12x_weights[f"w{i}_weight_sf"].numel() for i in (1, 2)),
        contract_tests.test_only_copies_are_freed,
    ),
]

# ---- what may not be repaired


def _first_expert_alone(view):
    scales = view.w1_block_scale, view.fc1_weight_scale_2
    return trtllm_entries._state(view.entries["w1_weight_sf"], *scales, 0)


def _only_nan(name, what, scales):
    if bool(((scales.view(torch.uint8) & 0x7F) == 0x7F).any()):
        _check_block_scales(name, what, scales)


def _without_sign(name, what, alpha):
    _check_usable(name, what, alpha.abs())


_check_block_scales = trtllm_contract._check_block_scales
_check_usable = trtllm_contract._check_usable


REFUSALS = [
    Mutant(
        "the sign of alphas is not looked at",
        trtllm_contract,
        "_check_usable",
        _without_sign,
        contract_tests.test_an_alpha_no_kernel_can_use_is_refused_by_expert,
        {"name": "fc2_alpha", "value": -0.5, "expert": 2},
    ),
    Mutant(
        "the first expert's alpha stands for all",
        trtllm_contract,
        "_check_usable",
        lambda name, what, alpha: _check_usable(name, what, alpha[:1]),
        contract_tests.test_an_alpha_no_kernel_can_use_is_refused_by_expert,
        {"name": "fc31_alpha", "value": 0.0, "expert": 3},
    ),
    Mutant(
        "the sign of block scales is not looked at",
        trtllm_contract,
        "_check_block_scales",
        _only_nan,
        contract_tests.test_a_block_scale_no_kernel_can_use_is_refused_by_expert,
        {"name": "w2_weight_scale", "byte": 0x81, "word": "negative", "expert": 2},
    ),
    Mutant(
        "zero block scales are refused, as padding has them",
        trtllm_contract,
        "_check_block_scales",
        lambda name, what, scales: _check_block_scales(
            name, what, torch.where(scales.view(torch.uint8) == 0, 0x7F, scales.view(torch.uint8))
        ),
        contract_tests.test_zero_and_the_largest_block_scale_are_legitimate,
        {"name": "w3_w1_weight_scale", "byte": 0},
    ),
    Mutant(
        "an alpha of 1 is an alpha",
        trtllm_contract,
        "_NEVER_LOADED",
        None,
        contract_tests.test_an_alpha_that_was_never_loaded_is_refused_by_expert,
        {"name": "fc31_alpha", "expert": 2},
    ),
    Mutant(
        "an input scale of 1 is an input scale",
        trtllm_contract,
        "_NEVER_LOADED",
        None,
        contract_tests.test_an_input_scale_that_was_never_loaded_is_refused,
        {"name": "fc2_input_scale"},
    ),
    Mutant(
        "scales are not looked at",
        trtllm_contract,
        "_check_scales",
        _nothing,
        contract_tests.test_an_input_scale_no_kernel_can_use_is_refused,
        {"name": "fc2_input_scale", "value": -2.0},
    ),
    Mutant(
        "the arguments are not looked at",
        trtllm_contract,
        "_check_entries",
        _nothing,
        contract_tests.test_alphas_of_another_kind_are_named,
        {"key": "w1_alpha", "change": torch.Tensor.double},
    ),
    Mutant(
        "the wrapper's sizes are not looked at",
        trtllm_contract,
        "_check_sizes",
        _nothing,
        contract_tests.test_a_wrapper_told_other_sizes_is_refused,
        {"name": "hidden_size"},
    ),
    Mutant(
        "the wrapper's signature is not looked at",
        trtllm_layer,
        "_check_wrapper",
        _nothing,
        contract_tests.test_a_signature_against_the_files_is_refused,
        {"files": "0.6.18", "wrapper": "0.6.16", "words": "does not take"},
    ),
    Mutant(
        "displaced halves are taken",
        trtllm_layer,
        "_check_wrapper",
        _nothing,
        contract_tests.test_displaced_halves_are_refused,
    ),
    Mutant(
        "the logical size is taken",
        trtllm_layer,
        "_check_wrapper",
        _nothing,
        contract_tests.test_a_wrapper_told_the_logical_size_is_refused,
    ),
    Mutant(
        "fp16 is taken",
        trtllm_layer,
        "_refuse_half",
        _nothing,
        contract_tests.test_fp16_is_refused,
    ),
    Mutant(
        "forced W4A16 is taken",
        trtllm_layer,
        "_refuse_forced_w4a16",
        _nothing,
        contract_tests.test_forced_w4a16_is_refused,
    ),
    Mutant(
        "W4A16 is repaired",
        trtllm_layer,
        "is_weight_only",
        lambda module: False,
        contract_tests.test_w4a16_is_left_alone,
        {"algorithm": "W4A16_NVFP4"},
    ),
    Mutant(
        "intact scales need no carrier",
        trtllm_layer,
        "carries_weight_scale_2",
        lambda entries: True,
        contract_tests.test_intact_scales_without_a_carrier_are_refused,
        {"upstream": contract_tests.Upstream.INTACT_COPY},
    ),
    Mutant(
        "input_global_scale alone is a carrier",
        trtllm_layer,
        "carries_weight_scale_2",
        lambda entries: entries.get(INPUT_GLOBAL_SCALE) is not None,
        contract_tests.test_an_fc2_input_scale_per_expert_is_a_carrier,
    ),
    Mutant(
        "a carrier is enough to be left alone",
        trtllm_layer,
        "scale_state",
        lambda view: ScaleState.INTACT,
        contract_tests.test_a_bake_with_a_carrier_is_still_a_bake,
    ),
    Mutant(
        "every upstream bakes",
        trtllm_layer,
        "scale_state",
        lambda view: ScaleState.BAKED,
        contract_tests.test_intact_scales_with_a_carrier_are_left_alone,
        {"upstream": contract_tests.Upstream.INTACT_COPY},
    ),
    Mutant(
        "FC1's first expert stands for all",
        trtllm_layer,
        "scale_state",
        _first_expert_alone,
        contract_tests.test_a_bake_of_some_experts_is_refused,
        {"key": "w2_weight_sf", "expert": -1},
    ),
    Mutant(
        "the older hook wins",
        tensorrt_llm,
        "HOOKS",
        ("post_load_weights", "transform_weights"),
        contract_tests.test_the_hook_that_the_class_itself_defines_is_patched,
        {
            "defined": ["post_load_weights", "transform_weights"],
            "inherited": [],
            "patched": "transform_weights",
        },
    ),
]

# ---- the process


def _on_the_class(module, version):
    setattr(type(module), THRESHOLD, 0)
    module._b12x_weights = None
    module.b12x_wrapper = None
    return 0


def _keeping_the_weights(module, version):
    setattr(module, THRESHOLD, 0)
    return 0


def _always_cutlass(self, module, error):
    tensorrt_llm.send_to_cutlass(module, self.version)
    return tensorrt_llm.LayerOutcome("a layer", None, str(error))


def _upstreams_errors_are_unknowns(self, upstream):
    def prepare(method, module):
        try:
            upstream(method, module)
        except Exception:
            tensorrt_llm.send_to_cutlass(module, self.version)
            return
        self._after(module)

    return functools.wraps(upstream)(prepare)


def _widened_too_late(self, upstream):
    def prepare(method, module):
        upstream(method, module)
        self._before(module)
        self._after(module)

    return functools.wraps(upstream)(prepare)


def _checks_all(self, module, outcome):
    self.reporter.verified(tensorrt_llm.verify_layer(module, outcome, self.contract))


def _warns_alone(self, module, outcome):
    if self.settings.verify is not Verify.OFF and not self._verified:
        self._verified += 1
        self.reporter.verified(tensorrt_llm.verify_layer(module, outcome, self.contract))


def _repeats(self, words):
    trtllm_report._logger().warning(words)


UNKNOWN_FLASHINFER = {"lacking": contract_tests.with_unknown_flashinfer}

PROCESS = [
    Mutant(
        "families to keep out are not kept out",
        tensorrt_llm,
        "changes_for",
        lambda *_: {},
        contract_tests.test_direct_micro_is_held_where_it_misreads,
        {"version": "0.6.18"},
    ),
    Mutant(
        "families to keep out are not kept out, seen by the output",
        tensorrt_llm,
        "changes_for",
        lambda *_: {},
        contract_tests.test_decode_is_the_emulated_repair_bit_for_bit,
        {"version": "0.6.18", "activation": Activation.SILU},
    ),
    Mutant(
        "direct micro is kept out everywhere",
        tensorrt_llm,
        "changes_for",
        lambda *_: {"_DIRECT_MICRO_MAX_N": 0},
        contract_tests.test_direct_micro_is_held_where_it_misreads,
        {"version": "0.7.4"},
    ),
    Mutant(
        "the threshold is set on the class",
        tensorrt_llm,
        "send_to_cutlass",
        _on_the_class,
        contract_tests.test_damage_sends_its_layers_decode_to_cutlass_and_no_others,
    ),
    Mutant(
        "the threshold is set on the class where no form is exact",
        trtllm_layer,
        "send_to_cutlass",
        _on_the_class,
        contract_tests.test_no_exact_form_sends_decode_to_cutlass_whatever_the_policy,
    ),
    Mutant(
        "the baked weights are kept",
        tensorrt_llm,
        "send_to_cutlass",
        _keeping_the_weights,
        contract_tests.test_flashinfer_missing_or_unknown_sends_decode_to_cutlass,
        UNKNOWN_FLASHINFER,
    ),
    Mutant(
        "any backend can be sent to CUTLASS",
        tensorrt_llm,
        "send_to_cutlass",
        _keeping_the_weights,
        contract_tests.test_a_backend_that_decides_otherwise_is_refused,
        {"name": THRESHOLD},
    ),
    Mutant(
        "once on CUTLASS, always on CUTLASS",
        tensorrt_llm,
        "restore_decode",
        _nothing,
        contract_tests.test_the_next_preparation_decides_anew,
    ),
    Mutant(
        "what is unknown never stops the start",
        tensorrt_llm.Process,
        "_unknown",
        _always_cutlass,
        contract_tests.test_flashinfer_missing_or_unknown_stops_the_start,
        UNKNOWN_FLASHINFER,
    ),
    Mutant(
        "upstream's errors follow our policy",
        tensorrt_llm.Process,
        "replacement",
        _upstreams_errors_are_unknowns,
        contract_tests.test_upstreams_error_passes_through_and_nothing_is_replaced,
    ),
    Mutant(
        "static's band is widened after the wrapper was made",
        tensorrt_llm.Process,
        "replacement",
        _widened_too_late,
        contract_tests.test_fp32_sums_are_asked_for_before_the_wrapper_is_made,
    ),
    Mutant(
        "a layer counts at each preparation",
        Summary,
        "strategy_of",
        lambda self, module: None,
        contract_tests.test_a_layer_prepared_twice_counts_once,
    ),
    Mutant(
        "the same warning is repeated",
        Reporter,
        "warn",
        _repeats,
        contract_tests.test_fp32_sums_that_do_not_exist_are_told_once,
    ),
    Mutant(
        "the version that was read is not the one recorded",
        tensorrt_llm.Process,
        "contract_version",
        "unknown",
        contract_tests.test_one_line_and_one_record_say_what_was_done,
    ),
]

# ---- the live check

_output = trtllm_verify._Arms.output


def _arms_swapped(self, strategy, order=None):
    other = Strategy.ALPHAS if strategy is Strategy.BAKED else Strategy.BAKED
    return _output(self, other, order)


def _the_same_order(self, strategy, order=None):
    return _output(self, strategy)


def _with_direct_micro(self, strategy, order=None):
    scales = self.layer.fc1.largest_input_scale, self.layer.fc2.largest_input_scale
    launch = arguments(strategy, self.layer, *scales, self.contract).launch(self.layer)
    arithmetic = self.contract.arithmetic(self.contract.select(self.shape), self.shape)
    return moe.run(launch, self.x, self.routing, arithmetic, order).output


def _by_distance_alone(from_repaired, from_baked, apart, noise):
    if from_repaired > trtllm_verify.FAILED_BEYOND or from_baked < from_repaired:
        return VerifyState.FAILED
    return VerifyState.PASSED


def _errors_fail(module, outcome, contract):
    try:
        return trtllm_verify._verify(module, outcome, contract)
    except Exception as error:
        return Verification(outcome.name, VerifyState.FAILED, str(error))


def _errors_raise(module, outcome, contract):
    return trtllm_verify._verify(module, outcome, contract)


VERIFICATION = [
    Mutant(
        "the live output is judged against the bake",
        trtllm_verify._Arms,
        "output",
        _arms_swapped,
        verify_tests.test_a_repaired_layer_passes,
        {"version": "0.7.4", "activation": Activation.RELU2},
    ),
    Mutant(
        "a baked output passes as the repair",
        trtllm_verify._Arms,
        "output",
        _arms_swapped,
        verify_tests.test_a_wrong_output_fails,
        {"version": "0.7.4", "misbehaviour": verify_tests.Misbehaviour.BAKED},
    ),
    Mutant(
        "the arms run in a family that was kept out",
        trtllm_verify._Arms,
        "output",
        _with_direct_micro,
        verify_tests.test_a_repaired_layer_passes,
        {"version": "0.6.18", "activation": Activation.SILU},
    ),
    Mutant(
        "the family's noise is not looked at",
        trtllm_verify._Arms,
        "output",
        _the_same_order,
        verify_tests.test_noise_of_the_family_that_exceeds_the_damage,
        {"misbehaviour": verify_tests.Misbehaviour.NONE},
    ),
    Mutant(
        "half of it off is near enough",
        trtllm_verify,
        "FAILED_BEYOND",
        0.5,
        verify_tests.test_a_wrong_output_fails,
        {"version": "0.7.4", "misbehaviour": verify_tests.Misbehaviour.TOO_LARGE},
    ),
    Mutant(
        "a tenth of a percent is too far",
        trtllm_verify,
        "FAILED_BEYOND",
        0.001,
        verify_tests.test_another_order_of_adds_passes,
        {"version": "0.6.18"},
    ),
    Mutant(
        "arms that cannot be told apart are judged",
        trtllm_verify,
        "_state",
        _by_distance_alone,
        verify_tests.test_weights_so_large_that_baking_costs_nothing,
        {"misbehaviour": verify_tests.Misbehaviour.BAKED},
    ),
    Mutant(
        "an error of the check is a failure",
        verify_tests,
        "verify_layer",
        _errors_fail,
        verify_tests.test_a_wrapper_that_raises_is_not_verified,
        {"misbehaviour": verify_tests.Misbehaviour.OUT_OF_MEMORY},
    ),
    Mutant(
        "an error of the check stops the start",
        tensorrt_llm,
        "verify_layer",
        _errors_raise,
        verify_tests.test_a_check_that_could_not_be_made_serves_on,
    ),
    Mutant(
        "every layer is checked",
        tensorrt_llm.Process,
        "_verify",
        _checks_all,
        verify_tests.test_so_many_layers_are_checked,
        {"wanted": Verify.FIRST},
    ),
    Mutant(
        "a failed check is a warning",
        tensorrt_llm.Process,
        "_verify",
        _warns_alone,
        verify_tests.test_a_failed_check_stops_the_start,
        {"misbehaviour": verify_tests.Misbehaviour.BAKED},
    ),
    Mutant(
        "a failed check leaves decode on b12x",
        tensorrt_llm.Process,
        "_verify",
        _warns_alone,
        verify_tests.test_a_failed_check_sends_decode_to_cutlass,
        {"misbehaviour": verify_tests.Misbehaviour.NAN},
    ),
]

# ---- the dispatch


def _remembers_its_own(self, changes):
    self._module = b12x_dispatch.importlib.import_module(b12x_dispatch.DISPATCH)
    for name, value in changes.items():
        self._before[name] = getattr(self._module, name)
        setattr(self._module, name, value)
        self.held[name] = value


def _puts_all_back(self):
    for name, value in self._before.items():
        setattr(self._module, name, value)
    self.held.clear()
    self._before.clear()


def _makes_names_up(self, changes):
    self._module = b12x_dispatch.importlib.import_module(b12x_dispatch.DISPATCH)
    for name, value in changes.items():
        setattr(self._module, name, value)


def _always_widens(contract, top_k, accumulate):
    b12x_dispatch.os.environ[b12x_dispatch.CUTOVER] = str(63 * top_k)
    return ""


DISPATCH = [
    Mutant(
        "a second hold remembers the first",
        DispatchHold,
        "hold",
        _remembers_its_own,
        dispatch_tests.test_holding_again_remembers_what_was_there_first,
    ),
    Mutant(
        "what others set is put back, too",
        DispatchHold,
        "release",
        _puts_all_back,
        dispatch_tests.test_what_others_changed_meanwhile_is_theirs,
    ),
    Mutant(
        "nothing is put back",
        DispatchHold,
        "release",
        _nothing,
        dispatch_tests.test_held_names_are_set_and_put_back,
    ),
    Mutant(
        "names that FlashInfer lacks are made up",
        DispatchHold,
        "hold",
        _makes_names_up,
        dispatch_tests.test_a_name_that_flashinfer_lacks_is_refused_by_name,
    ),
    Mutant(
        "what is held is remembered, not looked at",
        DispatchHold,
        "changed_by_others",
        lambda self: [],
        dispatch_tests.test_every_name_is_looked_at_again,
        {"name": "_DIRECT_MICRO_MAX_N"},
    ),
    Mutant(
        "a band that was asked for is overwritten",
        dispatch_tests,
        "widen_static",
        _always_widens,
        dispatch_tests.test_a_band_asked_for_that_is_wide_enough_stays,
        {"asked": "4096"},
    ),
    Mutant(
        "64 tokens are decode, too",
        b12x_dispatch,
        "DECODE_TOKENS",
        64,
        dispatch_tests.test_the_band_covers_63_tokens,
        {"version": "0.7.4", "top_k": 22, "band": "2016"},
    ),
    Mutant(
        "every FlashInfer sums in fp32",
        b12x_dispatch,
        "sums_in_fp32",
        lambda contract: True,
        dispatch_tests.test_a_version_without_fp32_sums_says_so,
        {"version": "0.6.18"},
    ),
]

MEMORY_OF_THE_PROCESS = [
    Mutant(
        "an undone patch lets the dispatch go",
        tensorrt_llm,
        "_let_go",
        lambda: tensorrt_llm._HOLD.release(),
        contract_tests.test_layers_repaired_before_keep_the_dispatch_when_the_patch_is_undone,
    ),
    Mutant(
        "nothing is ever put back",
        tensorrt_llm,
        "_let_go",
        _nothing,
        contract_tests.test_without_a_repaired_layer_the_dispatch_is_put_back,
    ),
    Mutant(
        "layers loaded before are not looked for",
        tensorrt_llm.Process,
        "tell_of_earlier_layers",
        _nothing,
        contract_tests.test_a_layer_loaded_before_the_fix_is_told_and_fails_the_status,
    ),
    Mutant(
        "what the layer keeps is believed",
        trtllm_contract,
        "_check_agreement",
        _nothing,
        contract_tests.test_a_kept_weight_scale_2_that_is_not_the_alphas_is_refused,
        {"factor": 2.0},
    ),
    Mutant(
        "a failed check is forgotten",
        tensorrt_llm.Process,
        "_condemned",
        property(lambda self: "", lambda self, value: None),
        verify_tests.test_the_next_layers_do_not_run_on_a_kernel_proved_wrong,
        {"misbehaviour": verify_tests.WRONG[0]},
    ),
]

MUTANTS = [
    *ARGUMENTS,
    *MEMORY_OF_THE_PROCESS,
    *MEMORY,
    *REFUSALS,
    *PROCESS,
    *VERIFICATION,
    *DISPATCH,
]


CAUGHT = (AssertionError, pytest.fail.Exception, B12xFixError, torch.cuda.OutOfMemoryError)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Small products, often on a busy machine: a second thread costs more than it brings."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def fixtures(monkeypatch, tmp_path) -> dict[str, Any]:
    """What the guards ask for."""
    bench: Bench = make_bench(monkeypatch, tmp_path)
    monkeypatch.setattr(tensorrt_llm.metadata, "version", {"tensorrt_llm": VERSION}.__getitem__)
    monkeypatch.setattr(tensorrt_llm, "_HOLD", DispatchHold())
    monkeypatch.setattr(tensorrt_llm, "_REPAIRED", weakref.WeakSet())
    bench.use("0.6.18")
    return {
        "bench": bench,
        "shared": bench,
        "monkeypatch": monkeypatch,
        "tmp_path": tmp_path,
        "installed_version": None,
    }


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_wrong_fix_is_caught(mutant, fixtures):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mutant.owner, mutant.attribute, mutant.wrong)
        # An error where the test expects none is a failure of that test, too.
        with pytest.raises(CAUGHT):
            mutant.call(fixtures)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_fix_as_it_is_passes(mutant, fixtures):
    """The guards are called rightly: they fail for the mutant alone."""
    mutant.call(fixtures)
