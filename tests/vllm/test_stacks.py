"""Plugin, apply, remove and status in one process, on a vllm that is only the classes to patch."""

from __future__ import annotations

import functools
import importlib
import json
import logging
import sys
from pathlib import Path

import pytest

from tests import fake_trtllm
from trtllm_b12x_fix import fix, stacks, startup, vllm_plugin
from trtllm_b12x_fix.errors import InputError
from trtllm_b12x_fix.fix_state import FixState
from trtllm_b12x_fix.integrations import targets, vllm_report
from trtllm_b12x_fix.integrations.targets import VLLM_B12X, VLLM_GUARDED

B12X = """
class FlashInferB12xExperts:
    def process_weights_after_loading(self, layer):
        return "baked"
"""
GUARDED = """
class TrtLlmExperts:
    @staticmethod
    def is_supported_config(cls, config, *rest):
        return True, None
"""


@pytest.fixture(autouse=True)
def ledger(monkeypatch, tmp_path):
    found = fake_trtllm.isolate(monkeypatch, tmp_path)
    monkeypatch.setattr(vllm_report, "SAID", set())
    for name, source in ((VLLM_B12X, B12X), *((one, GUARDED) for one in VLLM_GUARDED)):
        fake_trtllm.write_package(tmp_path / "site", name, source)
    forget()
    yield found
    vllm_plugin.FINDER.uninstall()
    startup.uninstall()
    forget()
    fake_trtllm.forget_package()


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


def load(name: str = VLLM_B12X):
    return importlib.import_module(name)


def states() -> dict[str, FixState]:
    return {one.module: one.state for one in fix.status().targets}


def recorded(ledger: Path) -> dict:
    (file,) = ledger.glob("*.json")
    return json.loads(file.read_text())


def test_registering_is_asking(ledger):
    vllm_plugin.register()
    assert states() == dict.fromkeys(targets.VLLM_MODULES, FixState.WAITING)
    assert not ledger.exists()
    load()
    assert states()[VLLM_B12X] is FixState.ACTIVE
    assert recorded(ledger)["state"] == "active"
    assert recorded(ledger)["mode"] == "auto"


def test_any_number_of_times_and_late_is_once():
    module = load()
    original = module.FlashInferB12xExperts.process_weights_after_loading
    for _ in range(3):
        vllm_plugin.register()
    made = module.FlashInferB12xExperts.process_weights_after_loading
    assert made.__wrapped__ is original
    assert fix.status().state is FixState.ACTIVE


def test_off_patches_nothing_and_says_so(monkeypatch):
    monkeypatch.setenv("TRTLLM_B12X_FIX", "off")
    vllm_plugin.register()
    assert "TRTLLM_B12X_FIX=off" in fix.status().targets[0].note
    owner = load().FlashInferB12xExperts
    assert owner().process_weights_after_loading(None) == "baked"
    assert fix.status().state is FixState.OFF


def test_remove_gives_everything_back_and_apply_takes_it_again():
    vllm_plugin.register()
    module, guarded = load(), load(VLLM_GUARDED[0])
    assert fix.status().state is FixState.ACTIVE
    fix.remove()
    owner = module.FlashInferB12xExperts
    assert owner().process_weights_after_loading(None) == "baked"
    assert not hasattr(vars(guarded.TrtLlmExperts)["is_supported_config"], "__trtllm_b12x_fix__")
    assert not vllm_plugin.is_in_place()
    assert fix.apply().state is FixState.ACTIVE
    assert vllm_plugin.is_in_place()


def test_a_replacement_by_others_is_seen(ledger):
    vllm_plugin.register()
    owner = load().FlashInferB12xExperts
    ours = owner.process_weights_after_loading

    @functools.wraps(ours)
    def theirs(self, layer):
        return ours(self, layer)

    owner.process_weights_after_loading = theirs
    assert fix.status().state is FixState.ACTIVE
    assert "wrapped by someone else" in fix.status().note
    owner.process_weights_after_loading = lambda self, layer: None
    assert fix.status().state is FixState.REPLACED
    assert recorded(ledger)["state"] == "replaced by someone else"


def test_imported_without_the_plugin_is_not_good():
    load()
    found = {one.module: one for one in fix.status().targets}[VLLM_B12X]
    assert found.state is FixState.MISSED
    assert "vllm_plugin.register()" in found.note


def test_each_process_speaks_of_the_stack_it_runs():
    assert stacks.here() == (stacks.TENSORRT_LLM,)
    vllm_plugin.register()
    assert stacks.here() == (stacks.VLLM,)
    startup.arm()
    importlib.import_module(targets.TARGET_MODULES[0])
    assert stacks.here() == (stacks.TENSORRT_LLM, stacks.VLLM)


def test_tensorrt_llm_is_still_only_repaired_where_it_was_asked_for():
    vllm_plugin.register()
    startup.install()
    importlib.import_module(targets.TARGET_MODULES[0])
    assert states()[targets.TARGET_MODULES[0]] is FixState.NOT_ASKED


def test_a_bad_value_stops_b12x_alone(monkeypatch, caplog):
    """The guarded modules are imported on every GPU."""
    monkeypatch.setenv("TRTLLM_B12X_FIX_ACT_SCALE", "half")
    vllm_plugin.register()
    with caplog.at_level(logging.WARNING, logger="vllm.trtllm_b12x_fix"):
        guarded = load(VLLM_GUARDED[0])
    assert guarded.TrtLlmExperts.is_supported_config(None, None) == (True, None)
    assert "calibrated, unit" in caplog.text
    with pytest.raises(InputError, match="TRTLLM_B12X_FIX_ACT_SCALE"):
        load()


def test_an_unasked_fault_is_told_and_stops_nobody(monkeypatch, caplog):
    monkeypatch.setattr(targets, "VLLM_CALLBACK", "no_such_module:on_import")
    vllm_plugin.register()
    with caplog.at_level(logging.WARNING, logger="vllm.trtllm_b12x_fix"):
        load(VLLM_GUARDED[0])
    assert "no_such_module" in caplog.text
    assert "TRTLLM_B12X_FIX=off" in caplog.text
    forget()
    monkeypatch.setenv("TRTLLM_B12X_FIX", "auto")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        load(VLLM_GUARDED[0])
