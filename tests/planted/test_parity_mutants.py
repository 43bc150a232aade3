"""Mutants of the parity harness: each must make the named test fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tests.parity import (
    faults,
    test_arms,
    test_judge,
    test_kernel,
    test_layout,
    test_parity_run,
    test_routing,
)
from tests.parity.stand_in import KernelFault
from trtllm_b12x_fix.integrations import trtllm_gen
from trtllm_b12x_fix.layer import Activation
from trtllm_b12x_fix.parity import (
    arms,
    call,
    contract,
    judge,
    judge_weights,
    kernel,
    layout,
    result,
    routing,
    run,
    run_kernels,
)
from trtllm_b12x_fix.parity.call import Path
from trtllm_b12x_fix.parity.result import Verdict
from trtllm_b12x_fix.parity.routing import Routes


@dataclass(frozen=True)
class Mutant:
    name: str
    owner: Any
    attribute: str
    wrong: Any
    guard: Callable[[], None]


_row_index, _keys, _compute = layout.row_index, routing._keys, kernel.compute
_inside, _scalars_of, _store_rows = routing.inside_kernel, contract.scalars_of, layout.store_rows
_conclude, _launch = arms.conclude, kernel.launch


def _other_gate_first(rows, kind):
    swapped = kind.but(gate=layout.GateMap.ALTERNATING_GATE_UP)
    return _row_index(rows, kind if kind.gate is layout.GateMap.NONE else swapped)


def _inverse_rows(rows, kind):
    return _row_index(rows, kind).argsort()


def _interleaved_by_columns(linear):
    return linear.t().reshape(-1)


def _biased_weights(router, recovery):
    routes = _inside(router, recovery)
    weights = _keys(router).gather(1, routes.expert_ids)
    return Routes(
        routes.expert_ids, (weights / weights.sum(1, keepdim=True) * router.scale).bfloat16()
    )


def _scaled_after(sums, scalars, experts, activation):
    before = scalars.before_activation[experts].unsqueeze(1)
    after = scalars.after_activation[experts].unsqueeze(1)
    if activation is Activation.RELU2:
        return sums.clamp(min=0).square() * before * after
    up, gate = sums.chunk(2, dim=-1)
    return (up * after) * torch.nn.functional.silu(gate)


def _unweighted(weights, scalars, tokens, routes, activation):
    equal = torch.full_like(routes.weights, 1 / routes.weights.shape[1])
    return _compute(weights, scalars, tokens, replace(routes, weights=equal), activation)


def _replay_forgotten(this, *args, **more):
    return _launch(replace(this, routing_replay_out=None), *args, **more)


def _first_experts_only(this, layer):
    return tuple(judge_weights._judge_experts(this, layer, 0)) if layer.experts < 16 else ()


def _accepts_anything(path, arguments):
    taken = {name: value for name, value in arguments.items() if name in call._TAKEN}
    return call.KernelCall(path=path, arguments=dict(arguments), **taken)


def _trusts_every_control(results):
    return _conclude([one for one in results if one.arm is not arms.Arm.CUTLASS])


def _good_if_nothing_was_judged(report):
    wrong = any(case.faults for case in report.cases)
    return Verdict.FINDING if wrong else Verdict.GOOD


def _planted(name):
    fault = next(one for one in faults.FAULTS if one.name == name)
    return lambda: test_judge.test_a_planted_fault_is_named(fault, fault.activations[0])


def _kernel_fault(fault, suspect, words):
    return lambda: test_arms.test_a_fault_of_the_kernel_is_named(fault, suspect, words)


def _emulator():
    test_kernel.test_the_emulator_reads_a_call_as_the_oracle_does(Activation.RELU2, Path.MODULAR)


def _gated_emulator():
    test_kernel.test_the_emulator_reads_a_call_as_the_oracle_does(Activation.SILU, Path.MODULAR)


_Suspect = test_arms.Suspect

MUTANTS = (
    Mutant(
        "the gate's row first",
        layout,
        "row_index",
        _other_gate_first,
        lambda: test_layout.test_rows_are_stored_where_the_documented_map_says(128, True),
    ),
    Mutant(
        "rows moved the other way",
        layout,
        "row_index",
        _inverse_rows,
        lambda: test_layout.test_rows_are_stored_where_the_documented_map_says(128, False),
    ),
    Mutant(
        "the stand-in interleaves otherwise",
        test_layout.vllm_host,
        "interleave",
        _interleaved_by_columns,
        lambda: test_layout.test_scales_are_interleaved_at_the_documented_offset(256, 12),
    ),
    Mutant(
        "the bias in the weights",
        routing,
        "inside_kernel",
        _biased_weights,
        lambda: test_routing.test_near_biases_leave_the_kernel_right_in_both_versions(
            routing.WeightRecovery.RECOMPUTED
        ),
    ),
    Mutant(
        "subtracting is never lossy",
        routing,
        "inside_kernel",
        lambda router, recovery: _inside(router, routing.WeightRecovery.RECOMPUTED),
        test_routing.test_far_biases_drown_the_weights_only_where_they_are_subtracted,
    ),
    Mutant(
        "no choice is wrong",
        routing,
        "wrong_choices",
        lambda router, routes: 0,
        lambda: test_routing.test_a_wrong_choice_is_counted([3, 2]),
    ),
    Mutant(
        "the choice ignores the bias",
        routing,
        "_keys",
        lambda router: torch.sigmoid(router.logits),
        test_routing.test_the_bias_chooses_but_does_not_weigh,
    ),
    Mutant("scalars after the activation", kernel, "_activate", _scaled_after, _emulator),
    Mutant("the gate is not scaled", kernel, "_activate", _scaled_after, _gated_emulator),
    Mutant("routes weigh the same", kernel, "compute", _unweighted, _emulator),
    Mutant(
        "replay is not written",
        kernel,
        "launch",
        _replay_forgotten,
        test_kernel.test_replay_holds_the_experts_and_changes_nothing,
    ),
    Mutant(
        "an unknown argument passes",
        test_kernel,
        "from_arguments",
        _accepts_anything,
        lambda: test_kernel.test_an_argument_that_is_not_modelled_is_refused_by_name(
            {"something_new": 3}
        ),
    ),
    Mutant(
        "every scalar is near",
        judge,
        "_near",
        lambda got, wanted: True,
        _planted("gated formula without a gate"),
    ),
    Mutant(
        "reciprocals are scalars",
        judge,
        "SCALAR_TOLERANCE",
        -1.0,
        _planted("gate scalar inverted"),
    ),
    Mutant(
        "activations are never far",
        judge,
        "ACTIVATION_LIMIT",
        1e9,
        _planted("activation scales swizzled"),
    ),
    Mutant("any weight of a route", judge, "WEIGHT_LIMIT", 1.0, _planted("weights not normalized")),
    Mutant(
        "no block differs",
        judge_weights,
        "_differing_blocks",
        lambda wanted, got: 0,
        _planted("rows not shuffled"),
    ),
    Mutant(
        "NaN is zero",
        judge_weights,
        "_NAN",
        0x55,  # no NaN
        _planted("padded scale groups are NaN"),
    ),
    Mutant(
        "only the first experts are compared",
        judge_weights,
        "judge_weights",
        _first_experts_only,
        test_judge.test_a_fault_in_the_last_expert_alone_is_found,
    ),
    Mutant(
        "gated scalars everywhere",
        contract,
        "scalars_of",
        lambda layer, wiring=None: _scalars_of(layer, contract.ScalarWiring.GATED_FORMULA),
        lambda: test_kernel.test_the_output_is_as_true_as_nvfp4_allows(Activation.RELU2),
    ),
    Mutant(
        "rows are stored unmoved",
        contract,
        "store_rows",
        lambda linear, kind: _store_rows(linear, kind.but(rows=layout.RowMap.UNMOVED)),
        lambda: test_judge.test_a_right_call_has_no_fault(Activation.RELU2, Path.MODULAR, 256),
    ),
    Mutant(
        "a control is always right",
        run_kernels,
        "conclude",
        _trusts_every_control,
        test_arms.test_nothing_follows_where_the_control_is_wrong,
    ),
    Mutant(
        "sizes tell nothing",
        arms,
        "_by_size",
        lambda cell, fault, cells: fault,
        test_arms.test_a_kernel_wrong_exactly_where_the_hidden_size_is_padded,
    ),
    Mutant(
        "any output of a kernel is right",
        run_kernels,
        "FIDELITY_LIMIT",
        1e9,
        lambda: _with_any_true_error(
            _kernel_fault(KernelFault.GATED_SCALARS, _Suspect.SCALARS, "gated formula")
        ),
    ),
    Mutant(
        "a CUDA error is a refusal",
        trtllm_gen,
        "_LOST",
        ("nothing like it",),
        test_arms.test_after_a_cuda_error_nothing_more_is_run,
    ),
    Mutant(
        "an unexplained output passes",
        run,
        "FIDELITY_LIMIT",
        1.0,
        test_parity_run.test_an_output_that_no_argument_explains_is_named,
    ),
    Mutant(
        "nothing judged is good",
        result.PreparationReport,
        "verdict",
        property(_good_if_nothing_was_judged),
        test_parity_run.test_a_preparation_that_refuses_everything_concludes_nothing,
    ),
)


def _with_any_true_error(guard):
    with pytest.MonkeyPatch.context() as patch:
        if run_kernels.FIDELITY_LIMIT > 1:
            patch.setattr(run_kernels, "TRUE_ERROR_RATIO", 1e9)
        guard()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_guard_fails_on_its_mutant(monkeypatch, mutant):
    mutant.guard()  # sound as it stands
    monkeypatch.setattr(mutant.owner, mutant.attribute, mutant.wrong)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        mutant.guard()
