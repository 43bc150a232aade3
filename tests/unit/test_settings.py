"""The variables: every allowed value, every refusal, and what is never read."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from trtllm_b12x_fix import settings, startup
from trtllm_b12x_fix.errors import InputError
from trtllm_b12x_fix.settings import Accumulate, Mode, OnUnknown, Settings, Verify

ON = {settings.MODE: "auto"}


def read(**variables: str) -> Settings:
    return Settings.from_environment(variables)


def test_nothing_set_is_not_asked_for():
    assert read() == Settings(
        Mode.NOT_ASKED, OnUnknown.FAIL, Accumulate.AUTO, Verify.FIRST, ledger=None
    )


@pytest.mark.parametrize("mode", settings.MODES, ids=lambda mode: mode.value)
def test_every_mode_can_be_asked_for(mode):
    assert read(TRTLLM_B12X_FIX=mode.value).mode is mode


@pytest.mark.parametrize(
    ("name", "field", "choices"),
    [
        (settings.ON_UNKNOWN, "on_unknown", OnUnknown),
        (settings.ACCUMULATE, "accumulate", Accumulate),
        (settings.VERIFY, "verify", Verify),
    ],
)
def test_every_choice_can_be_made(name, field, choices):
    for choice in choices:
        assert getattr(Settings.from_environment({**ON, name: choice.value}), field) is choice


@pytest.mark.parametrize(
    "name", [settings.MODE, settings.ON_UNKNOWN, settings.ACCUMULATE, settings.VERIFY]
)
@pytest.mark.parametrize("value", ["yes", "AUTO", " auto", "not asked for", "1"])
def test_an_unknown_value_is_refused_by_name(name, value):
    with pytest.raises(InputError) as caught:
        Settings.from_environment({**ON, name: value})
    assert name in str(caught.value)
    assert repr(value) in str(caught.value)
    assert (
        "auto" in str(caught.value) or "fail" in str(caught.value) or "first" in str(caught.value)
    )


def test_a_refusal_names_all_that_is_allowed():
    with pytest.raises(InputError, match="auto, alphas, fp32-rescale, off, or unset"):
        read(TRTLLM_B12X_FIX="on")


def test_a_long_value_is_cut():
    with pytest.raises(InputError) as caught:
        read(TRTLLM_B12X_FIX="x" * 10_000)
    assert len(str(caught.value)) < 200


def test_an_empty_variable_counts_as_unset():
    assert read(TRTLLM_B12X_FIX="", TRTLLM_B12X_FIX_VERIFY="", TRTLLM_B12X_FIX_LEDGER="") == read()


@pytest.mark.parametrize("mode", [{}, {settings.MODE: "off"}])
def test_with_the_repair_off_a_bad_detail_stops_nobody(mode):
    assert not Settings.from_environment({**mode, settings.VERIFY: "bogus"}).mode.wants_repair


def test_the_ledger_is_below_the_temporary_folder_of_this_user(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(settings.os, "getuid", lambda: 1234)
    assert settings.ledger_directory({}) == tmp_path / "trtllm-b12x-fix-1234"


def test_the_ledger_can_be_elsewhere():
    variables = {settings.LEDGER: "/srv/ledger"}
    assert settings.ledger_directory(variables) == Path("/srv/ledger")
    assert Settings.from_environment(variables).ledger == Path("/srv/ledger")


@pytest.mark.parametrize("value", ["ledger", "./ledger", "~/ledger", "../ledger"])
def test_a_relative_ledger_is_refused_by_name(value):
    variables = {settings.LEDGER: value}
    for read_it in (settings.ledger_directory, Settings.from_environment):
        with pytest.raises(InputError, match=f"TRTLLM_B12X_FIX_LEDGER={value!r} is a relative"):
            read_it({**ON, **variables})
    # Whoever did not ask for the repair is not stopped.
    for off in ({}, {settings.MODE: "off"}):
        assert not Settings.from_environment({**off, **variables}).mode.wants_repair


def test_only_our_own_variables_are_ever_told():
    environ = {**ON, "HF_TOKEN": "secret", "TRTLLM_B12X_FIX_SECRET": "x", settings.VERIFY: ""}
    assert settings.own_variables(environ) == ON


def test_the_guard_asks_for_the_same_variable():
    assert startup.VARIABLE == settings.MODE
