"""Choices held in FlashInfer's dispatch: set, kept over repetition, put back, and told if lost."""

from __future__ import annotations

import os
import sys

import pytest

from tests.trtllm_layers import MICRO_BANDS, Bench, make_bench
from trtllm_b12x_fix.emulator.arithmetic import KernelFamily
from trtllm_b12x_fix.emulator.contract import KNOWN_VERSIONS, contract_for
from trtllm_b12x_fix.errors import UnsupportedVersionError
from trtllm_b12x_fix.integrations.b12x_dispatch import (
    CUTOVER,
    DISPATCH,
    DispatchHold,
    changes_for,
    sums_in_fp32,
    widen_static,
)
from trtllm_b12x_fix.layer import Activation
from trtllm_b12x_fix.repair import plan
from trtllm_b12x_fix.settings import Accumulate

DIRECT_MICRO = "_DIRECT_MICRO_MAX_N"
NO_DIRECT_MICRO = {DIRECT_MICRO: 0}
EVERYTHING = {DIRECT_MICRO: 0, **dict.fromkeys(MICRO_BANDS, 0)}
BEFORE_070 = ("0.6.16", "0.6.17", "0.6.18")
FROM_070 = tuple(version for version in KNOWN_VERSIONS if version not in BEFORE_070)


@pytest.fixture
def bench(monkeypatch, tmp_path) -> Bench:
    return make_bench(monkeypatch, tmp_path)


def values(bench: Bench) -> dict[str, int]:
    return {name: getattr(bench.dispatch, name) for name in EVERYTHING}


BEFORE = {DIRECT_MICRO: 512, **MICRO_BANDS}


# ---- hold and release


def test_held_names_are_set_and_put_back(bench):
    hold = DispatchHold()
    hold.hold(EVERYTHING)
    assert values(bench) == EVERYTHING
    assert hold.held == EVERYTHING
    hold.release()
    assert values(bench) == BEFORE
    assert hold.held == {}


def test_holding_again_remembers_what_was_there_first(bench):
    hold = DispatchHold()
    for _ in range(3):
        hold.hold(NO_DIRECT_MICRO)
    hold.release()
    assert values(bench) == BEFORE


def test_holding_again_takes_back_what_others_changed(bench):
    hold = DispatchHold()
    hold.hold(NO_DIRECT_MICRO)
    bench.dispatch._DIRECT_MICRO_MAX_N = 64
    hold.hold(NO_DIRECT_MICRO)
    assert values(bench)[DIRECT_MICRO] == 0
    hold.release()
    assert values(bench) == BEFORE


def test_names_can_be_added(bench):
    hold = DispatchHold()
    hold.hold(NO_DIRECT_MICRO)
    hold.hold(dict.fromkeys(MICRO_BANDS, 0))
    assert hold.held == EVERYTHING
    hold.release()
    assert values(bench) == BEFORE


def test_what_others_changed_meanwhile_is_theirs(bench):
    hold = DispatchHold()
    hold.hold(EVERYTHING)
    bench.dispatch._DIRECT_MICRO_MAX_N = 64
    hold.release()
    assert values(bench) == BEFORE | {DIRECT_MICRO: 64}


def test_releasing_twice_or_without_a_hold_does_nothing(bench):
    hold = DispatchHold()
    hold.release()
    hold.hold(NO_DIRECT_MICRO)
    hold.release()
    bench.dispatch._DIRECT_MICRO_MAX_N = 7
    hold.release()
    assert values(bench)[DIRECT_MICRO] == 7


def test_nothing_to_hold_imports_nothing(bench):
    bench.patch.setitem(sys.modules, DISPATCH, None)
    hold = DispatchHold()
    hold.hold({})
    assert hold.changed_by_others() == []
    hold.release()


def test_a_name_that_flashinfer_lacks_is_refused_by_name(bench):
    del bench.dispatch._DIRECT_MICRO_MAX_N
    with pytest.raises(UnsupportedVersionError, match="moe_dispatch has no _DIRECT_MICRO_MAX_N"):
        DispatchHold().hold(NO_DIRECT_MICRO)
    assert not hasattr(bench.dispatch, DIRECT_MICRO)


def test_a_refused_hold_leaves_every_name_alone(bench):
    last = list(EVERYTHING)[-1]
    delattr(bench.dispatch, last)
    with pytest.raises(UnsupportedVersionError):
        DispatchHold().hold(EVERYTHING)
    for name in EVERYTHING.keys() - {last}:
        assert getattr(bench.dispatch, name) == BEFORE[name]


def test_a_dispatch_that_cannot_be_imported_is_an_unsupported_version(bench):
    bench.patch.setitem(sys.modules, DISPATCH, None)
    with pytest.raises(UnsupportedVersionError, match="moe_dispatch"):
        DispatchHold().hold(NO_DIRECT_MICRO)


# ---- changed by others


def test_a_hold_that_stands_has_no_changes(bench):
    hold = DispatchHold()
    assert hold.changed_by_others() == []
    hold.hold(EVERYTHING)
    assert hold.changed_by_others() == []


@pytest.mark.parametrize("name", EVERYTHING)
def test_every_name_is_looked_at_again(bench, name):
    hold = DispatchHold()
    hold.hold(EVERYTHING)
    setattr(bench.dispatch, name, 11)
    assert hold.changed_by_others() == [name]
    setattr(bench.dispatch, name, 0)
    assert hold.changed_by_others() == []
    delattr(bench.dispatch, name)
    assert hold.changed_by_others() == [name]


# ---- what the fix sets


@pytest.mark.parametrize("version", KNOWN_VERSIONS)
def test_direct_micro_is_kept_out_where_it_multiplies(version):
    contract = contract_for(version)
    keep_out = plan(contract, Activation.RELU2).keep_out
    wanted = NO_DIRECT_MICRO if version in ("0.6.17", "0.6.18", "0.7.0") else {}
    assert changes_for(contract, keep_out, Accumulate.AUTO) == wanted


@pytest.mark.parametrize("version", KNOWN_VERSIONS)
def test_fp32_sums_close_micro_where_static_has_them(version):
    contract = contract_for(version)
    wanted = dict.fromkeys(MICRO_BANDS, 0) if version in FROM_070 else {}
    assert changes_for(contract, frozenset(), Accumulate.FP32) == wanted
    assert sums_in_fp32(contract) == (version in FROM_070)


def test_both_at_once():
    keep_out = frozenset({KernelFamily.DIRECT_MICRO})
    assert changes_for(contract_for("0.7.0"), keep_out, Accumulate.FP32) == EVERYTHING


def test_nothing_else_is_changed():
    for family in set(KernelFamily) - {KernelFamily.DIRECT_MICRO}:
        assert changes_for(contract_for("0.7.0"), frozenset({family}), Accumulate.AUTO) == {}


# ---- static's band


@pytest.mark.parametrize("version", KNOWN_VERSIONS)
def test_nothing_is_widened_unless_asked(bench, version):
    assert widen_static(contract_for(version), 22, Accumulate.AUTO) == ""
    assert CUTOVER not in os.environ


@pytest.mark.parametrize("version", BEFORE_070)
def test_a_version_without_fp32_sums_says_so(bench, version):
    words = widen_static(contract_for(version), 22, Accumulate.FP32)
    for text in ("TRTLLM_B12X_FIX_ACCUMULATE=fp32", version, "0.7.0", "no effect"):
        assert text in words
    assert CUTOVER not in os.environ


@pytest.mark.parametrize("version", FROM_070)
@pytest.mark.parametrize(("top_k", "band"), [(1, "2016"), (22, "2016"), (32, "2016"), (40, "2520")])
def test_the_band_covers_63_tokens(bench, version, top_k, band):
    """Of this layer, and of a later one with up to 32 experts a token."""
    assert widen_static(contract_for(version), top_k, Accumulate.FP32) == ""
    assert os.environ.get(CUTOVER) == band


@pytest.mark.parametrize("asked", ["1386", "4096"])
def test_a_band_asked_for_that_is_wide_enough_stays(bench, asked):
    bench.patch.setenv(CUTOVER, asked)
    assert widen_static(contract_for("0.7.4"), 22, Accumulate.FP32) == ""
    assert os.environ[CUTOVER] == asked


@pytest.mark.parametrize("asked", ["640", "1385", "", "many", "-1"])
def test_a_band_asked_for_that_is_too_narrow_stays_and_is_told(bench, asked):
    bench.patch.setenv(CUTOVER, asked)
    words = widen_static(contract_for("0.7.4"), 22, Accumulate.FP32)
    assert f"{CUTOVER}={asked} " in words
    assert "1386" in words
    assert os.environ[CUTOVER] == asked


def test_widening_again_is_fine(bench):
    for _ in range(2):
        assert widen_static(contract_for("0.7.4"), 22, Accumulate.FP32) == ""
    assert os.environ[CUTOVER] == "2016"


@pytest.mark.parametrize("first", [17, 22])
def test_a_later_layer_with_more_experts_a_token_is_told(bench, first):
    """FlashInfer has read the variable by then."""
    widen_static(contract_for("0.7.4"), first, Accumulate.FP32)
    words = widen_static(contract_for("0.7.4"), 40, Accumulate.FP32)
    assert "2520" in words


@pytest.mark.parametrize("top_k", [1, 4, 8])
def test_a_narrow_band_is_told_for_few_routes_too(bench, top_k):
    bench.patch.setenv(CUTOVER, str(63 * top_k - 1))
    assert str(63 * top_k) in widen_static(contract_for("0.7.2"), top_k, Accumulate.FP32)
