"""Mutants of the grouped products: each must make the named test fail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit import test_grouped
from trtllm_b12x_fix.emulator import grouped, packed_numba
from trtllm_b12x_fix.emulator.grouped import MatmulBackend, forced
from trtllm_b12x_fix.layer_check import run as layer_check_run


@dataclass(frozen=True)
class Mutant:
    name: str
    owner: Any
    attribute: str
    wrong: Any
    guard: Any


_table, _kernel, _tasks = packed_numba._table(), packed_numba._kernel(), packed_numba._tasks
_numba, _torch = packed_numba.grouped, grouped._torch_loop
_identity = layer_check_run._identity


def _swapped_nibbles():
    return _table.view(np.float32).reshape(256, 256, 2)[:, :, ::-1].copy().view(np.uint64)[..., 0]


def _nan_is_480():
    table = _table.copy()
    table[[0x7F, 0xFF]] = table[[0x7E, 0xFE]]
    return table


def _no_subnormals():
    table = _table.copy()
    table[1:8] = table[0]
    return table


def _one_wrong_byte():
    table = _table.copy()
    table[0x35, 0xA7] = table[0x35, 0xA6]
    return table


def _kernel_that(change):
    """The compiled loop, called with arguments that a wrong loop would amount to."""

    def wrong(values, source, routes, codes, scales, table, slices, out, first, last):
        arguments = change(values, source, routes, codes, scales, slices)
        _kernel(*arguments[:5], table, arguments[5], out, first, last)

    return lambda: wrong


def _ignores_slices(values, source, routes, codes, scales, slices):
    whole = np.array([(0, values.shape[1])] * len(slices))
    return values, source, routes, codes, scales, whole


def _ignores_rows(values, source, routes, codes, scales, slices):
    return values, routes, routes, codes, scales, slices


def _first_row_for_all(values, source, routes, codes, scales, slices):
    return values, np.full_like(source, source[0]), routes, codes, scales, slices


def _neighbouring_scale(values, source, routes, codes, scales, slices):
    return values, source, routes, codes, np.roll(scales, 1, axis=1), slices


def _drops_nan(*arguments):
    return torch.nan_to_num(_numba(*arguments))


def _single_precision(operand, *arguments):
    return _numba(operand.float(), *arguments).to(operand.dtype)


def _other_expert(operand, rows, packed, scales, groups, columns):
    return _torch(operand, rows, packed, scales.roll(1, 0), groups, columns)


def _loses_the_rest(counts, rows, threads):
    return [(group, first, last) for group, first, last in _tasks(counts, rows, threads) if first]


def _one_task_per_expert(counts, rows, threads):
    return [(group, 0, rows) for group, count in enumerate(counts) if count]


def _weights_only(tensors):
    return _identity(tensors)[:5]


def _with(backend, test, *arguments):
    def guard():
        with forced(backend):
            test(backend, *arguments)

    return guard


def _product(backend, shape=test_grouped.SHAPES[3], dtype=torch.float32):
    test = test_grouped.test_products_are_the_plain_formula
    return _with(backend, test, dtype, shape)


def _refusal(place, change, error, word):
    test = test_grouped.test_wrong_arguments_are_named
    return _with(MatmulBackend.TORCH, test, place, change, error, word)


_TABLE = _with(
    MatmulBackend.NUMBA,
    test_grouped.test_every_scale_byte_times_every_code_byte,
    torch.float32,
)
_NAN = _with(
    MatmulBackend.NUMBA, test_grouped.test_a_nan_scale_reaches_its_own_outputs_and_no_other
)

MUTANTS = (
    Mutant("high nibble first", packed_numba, "_table", _swapped_nibbles, _TABLE),
    Mutant("NaN bytes are numbers", packed_numba, "_table", _nan_is_480, _TABLE),
    Mutant("subnormal scales are zero", packed_numba, "_table", _no_subnormals, _TABLE),
    Mutant("one entry of 65,536 is wrong", packed_numba, "_table", _one_wrong_byte, _TABLE),
    Mutant("NaN bytes are lost", packed_numba, "_table", _nan_is_480, _NAN),
    Mutant("NaN outputs are lost", packed_numba, "grouped", _drops_nan, _NAN),
    Mutant(
        "every range is the whole row",
        packed_numba,
        "_kernel",
        _kernel_that(_ignores_slices),
        _product(MatmulBackend.NUMBA),
    ),
    Mutant(
        "a route's number taken for its row",
        packed_numba,
        "_kernel",
        _kernel_that(_ignores_rows),
        _product(MatmulBackend.NUMBA),
    ),
    Mutant(
        "an expert's first row for all",
        packed_numba,
        "_kernel",
        _kernel_that(_first_row_for_all),
        _product(MatmulBackend.NUMBA),
    ),
    Mutant(
        "the next block's scale",
        packed_numba,
        "_kernel",
        _kernel_that(_neighbouring_scale),
        _product(MatmulBackend.NUMBA),
    ),
    Mutant(
        "fp64 in fp32",
        packed_numba,
        "grouped",
        _single_precision,
        test_grouped.test_backends_give_the_same_truth,
    ),
    Mutant(
        "torch loop reads another expert's scales",
        grouped,
        "_torch_loop",
        _other_expert,
        _product(MatmulBackend.TORCH),
    ),
    Mutant(
        "tasks that lose weight rows",
        packed_numba,
        "_tasks",
        _loses_the_rest,
        lambda: test_grouped.test_tasks_hold_every_weight_row_once([1, 2], 2688),
    ),
    Mutant(
        "the busiest expert is one task",
        packed_numba,
        "_tasks",
        _one_task_per_expert,
        test_grouped.test_tasks_are_of_about_equal_cost,
    ),
    Mutant(
        "shapes are not checked",
        grouped,
        "_check",
        lambda *arguments: None,
        _refusal(5, lambda c: [slice(0, 24)], test_grouped.ShapeError, "whole blocks"),
    ),
    Mutant(
        "indices are not checked",
        grouped,
        "_check_indices",
        lambda *arguments: None,
        _refusal(4, lambda g: [*g, g[0]], test_grouped.InputError, "routes once"),
    ),
    Mutant(
        "numba is never used",
        grouped,
        "backend_for",
        lambda device, dtype, weights: MatmulBackend.TORCH,
        lambda: test_grouped.TestChoice().test_size_alone_decides(),
    ),
    Mutant(
        "launches told apart by their weights alone",
        layer_check_run,
        "_identity",
        _weights_only,
        test_grouped.test_launches_are_the_same_only_bit_for_bit,
    ),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_guard_fails_on_its_mutant(monkeypatch, mutant):
    mutant.guard()  # sound as it stands
    monkeypatch.setattr(mutant.owner, mutant.attribute, mutant.wrong)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        mutant.guard()
