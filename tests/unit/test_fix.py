"""apply, remove and status in one process, on a tensorrt_llm that is only the class to patch."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import warnings

import pytest

import trtllm_b12x_fix
from tests import fake_trtllm
from tests.fake_trtllm import CLASS, NEW, OLD, convert
from trtllm_b12x_fix import fix, startup
from trtllm_b12x_fix.errors import B12xFixError, InputError, UnsupportedVersionError
from trtllm_b12x_fix.fix_state import FixState, TargetStatus, overall
from trtllm_b12x_fix.patching import PatchConflictError
from trtllm_b12x_fix.settings import Mode


@pytest.fixture(autouse=True)
def ledger(monkeypatch, tmp_path):
    yield fake_trtllm.isolate(monkeypatch, tmp_path)
    startup.uninstall()
    fake_trtllm.forget_package()


def load(name=NEW):
    return importlib.import_module(name)


def recorded(ledger):
    (record,) = fake_trtllm.records(ledger)
    return record


def test_before_anything_there_is_no_hook_and_status_says_so(ledger):
    assert fix.status().state is FixState.UNHOOKED
    assert not ledger.exists()


def test_the_guard_alone_patches_nothing_and_says_why(ledger):
    startup.install()
    assert str(fix.status()).startswith("waiting for the import (TRTLLM_B12X_FIX is unset")
    load()
    assert convert() == "baked"
    assert fix.status().state is FixState.NOT_ASKED
    assert recorded(ledger)["state"] == "off: not asked for"


def test_apply_before_the_import(ledger):
    assert fix.apply().state is FixState.WAITING
    assert recorded(ledger)["state"] == "waiting for the import"
    load()
    assert convert() == "repaired baked"
    assert fix.status().state is FixState.ACTIVE
    assert recorded(ledger)["state"] == "active"
    assert recorded(ledger)["versions"] == {"tensorrt_llm": "1.4.0rc1"}
    assert recorded(ledger)["layers"] == {"alphas": 1}


@pytest.mark.parametrize("name", [NEW, OLD])
def test_apply_after_the_import_reaches_who_imported_the_class_before(name, tmp_path):
    fake_trtllm.write_package(tmp_path / "site", name)
    method = getattr(load(name), CLASS)
    assert fix.apply().state is FixState.ACTIVE
    assert method().transform_weights(None) == "repaired baked"


def test_apply_any_number_of_times():
    for _ in range(3):
        fix.apply()
    load()
    for _ in range(3):
        assert fix.apply().state is FixState.ACTIVE
    assert convert() == "repaired baked"
    assert len(sys.modules["b12x_placeholder"].LOG) == 1


def test_apply_sets_the_variable_for_children_and_remove_takes_it_back():
    fix.apply()
    assert os.environ["TRTLLM_B12X_FIX"] == "auto"
    fix.remove()
    assert "TRTLLM_B12X_FIX" not in os.environ


@pytest.mark.parametrize("mode", ["alphas", Mode.FP32_RESCALE])
def test_apply_takes_a_mode(mode):
    fix.apply(mode)
    load()
    ((_, settings),) = sys.modules["b12x_placeholder"].LOG
    assert settings.mode.value == os.environ["TRTLLM_B12X_FIX"] == getattr(mode, "value", mode)


@pytest.mark.parametrize("mode", ["on", "", "not asked for", Mode.NOT_ASKED, True])
def test_an_unknown_mode_is_refused(mode):
    with pytest.raises(InputError, match="auto, alphas, fp32-rescale, off"):
        fix.apply(mode)
    assert "TRTLLM_B12X_FIX" not in os.environ


def test_the_variable_has_the_last_word(monkeypatch):
    monkeypatch.setenv("TRTLLM_B12X_FIX", "off")
    with pytest.warns(UserWarning, match="TRTLLM_B12X_FIX=off has the last word"):
        fix.apply("auto")
    load()
    assert convert() == "baked"
    assert fix.status().state is FixState.OFF
    fix.remove()
    assert os.environ["TRTLLM_B12X_FIX"] == "off"


def test_apply_without_a_mode_follows_the_variable_silently(monkeypatch):
    monkeypatch.setenv("TRTLLM_B12X_FIX", "off")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "TRTLLM_B12X_FIX=off" in str(fix.apply())


def test_off_is_recorded(monkeypatch, ledger):
    monkeypatch.setenv("TRTLLM_B12X_FIX", "off")
    startup.install()
    load()
    assert recorded(ledger)["state"] == "off"
    assert "b12x_placeholder" not in sys.modules


def test_the_variable_is_read_at_the_import_and_not_before(monkeypatch):
    monkeypatch.setenv("TRTLLM_B12X_FIX", "bogus")
    startup.install()
    assert "unknown value" in str(fix.status())
    monkeypatch.setenv("TRTLLM_B12X_FIX", "auto")
    load()
    assert convert() == "repaired baked"


def test_an_unknown_value_fails_the_import_until_it_is_corrected(monkeypatch, ledger):
    monkeypatch.setenv("TRTLLM_B12X_FIX", "yes")
    startup.install()
    for _ in range(2):
        with pytest.raises(InputError, match="TRTLLM_B12X_FIX='yes' is not known: it may be auto"):
            load()
        assert NEW not in sys.modules
        assert fix.status().state is FixState.FAILED
        assert recorded(ledger)["state"] == "failed"
        assert "yes" in recorded(ledger)["note"]
    monkeypatch.setenv("TRTLLM_B12X_FIX", "auto")
    load()
    assert convert() == "repaired baked"
    assert recorded(ledger)["state"] == "active"


def test_apply_with_an_unknown_value_set_is_refused(monkeypatch):
    monkeypatch.setenv("TRTLLM_B12X_FIX", "yes")
    with pytest.raises(InputError, match="'yes'"):
        fix.apply()


def break_integration(monkeypatch, error):
    def on_import(module, settings):
        raise error

    module = importlib.import_module("b12x_placeholder")
    monkeypatch.setattr(module, "on_import", on_import)
    return module


def test_an_integration_that_fails_fails_the_import_each_time(monkeypatch, ledger):
    fix.apply()
    with monkeypatch.context() as broken:
        break_integration(broken, UnsupportedVersionError("FlashInfer 9 is not known"))
        for _ in range(2):
            with pytest.raises(UnsupportedVersionError):
                load()
        assert "FlashInfer 9 is not known" in recorded(ledger)["note"]
    load()
    assert convert() == "repaired baked"


def test_a_fault_of_ours_does_not_fail_who_did_not_ask(monkeypatch):
    monkeypatch.setattr(fix, "on_import", lambda module, name: 1 / 0)
    startup.install()
    load()
    assert convert() == "baked"
    assert fix.status().state is FixState.MISSED
    fake_trtllm.forget_package()
    monkeypatch.setenv("TRTLLM_B12X_FIX", "auto")
    with pytest.raises(ZeroDivisionError):
        load()


def test_a_package_lost_from_disk_does_not_fail_who_did_not_ask(monkeypatch):
    startup.install()
    monkeypatch.setitem(sys.modules, "trtllm_b12x_fix.target_hook", None)
    load()
    assert convert() == "baked"


def test_a_package_lost_from_disk_fails_who_asked(monkeypatch):
    startup.install()
    monkeypatch.setenv("TRTLLM_B12X_FIX", "auto")
    monkeypatch.setitem(sys.modules, "trtllm_b12x_fix.target_hook", None)
    with pytest.raises(ImportError):
        load()


def test_half_of_the_patches_is_none(monkeypatch):
    module = importlib.import_module("b12x_placeholder")
    complete = module.on_import

    def with_another(target, settings):
        plan = complete(target, settings)
        missing = module.Patch(plan.patches[0].owner, "no_such_method", module.repaired)
        return module.TargetPlan((*plan.patches, missing))

    monkeypatch.setattr(module, "on_import", with_another)
    load()
    with pytest.raises(UnsupportedVersionError, match="no_such_method does not exist"):
        fix.apply()
    assert convert() == "baked"
    assert fix.status().state is FixState.FAILED


def test_a_module_without_the_class_needs_nothing(ledger, tmp_path):
    fake_trtllm.write_package(tmp_path / "site", NEW, "")
    fix.apply()
    load()
    assert str(fix.status()) == "not needed (class absent: nothing to fix)"
    assert recorded(ledger)["state"] == "not needed"


def test_a_reloaded_module_is_patched_again_and_once():
    fix.apply()
    module = load()
    old = getattr(module, CLASS)
    importlib.reload(module)
    assert getattr(module, CLASS) is not old
    assert convert() == "repaired baked"
    assert fix.status().state is FixState.ACTIVE
    fix.remove()
    assert convert() == "baked"
    assert old().transform_weights(None) == "baked"


def test_status_tells_when_others_replaced_it(ledger):
    fix.apply()
    method = getattr(load(), CLASS)
    theirs = method.transform_weights = lambda self, module: "theirs"
    status = fix.status()
    assert status.state is FixState.REPLACED
    assert "<lambda>" in status.note
    assert recorded(ledger)["state"] == "replaced by someone else"
    for act in (fix.apply, fix.remove):
        with pytest.raises(PatchConflictError, match="<lambda>"):
            act()
        assert method.transform_weights is theirs


def test_status_tells_when_others_wrapped_it():
    fix.apply()
    method = getattr(load(), CLASS)
    ours = method.transform_weights
    method.transform_weights = functools.wraps(ours)(lambda self, module: ours(self, module))
    assert fix.status().state is FixState.ACTIVE
    assert "wrapped by someone else" in fix.status().note
    assert fix.apply().state is FixState.ACTIVE


def test_apply_repairs_what_was_put_back_to_the_original():
    method = getattr(load(), CLASS)
    original = method.transform_weights
    fix.apply()
    method.transform_weights = original
    assert fix.status().state is FixState.REPLACED
    assert fix.apply().state is FixState.ACTIVE
    assert convert() == "repaired baked"


def test_remove_restores_everything_and_apply_comes_back(ledger):
    before = list(sys.meta_path)
    fix.apply()
    original = load()
    assert fix.remove().state is FixState.REMOVED
    assert convert() == "baked"
    assert sys.meta_path == before
    assert recorded(ledger)["state"] == "removed"
    assert fix.remove().state is FixState.REMOVED
    assert load() is original
    assert fix.apply().state is FixState.ACTIVE
    assert convert() == "repaired baked"


def test_removed_before_the_import_nothing_waits():
    fix.apply()
    fix.remove()
    load()
    assert convert() == "baked"
    assert fix.status().state is FixState.MISSED


def test_switched_off_by_the_variable_later_the_next_apply_undoes_it(monkeypatch):
    fix.apply()
    load()
    monkeypatch.setenv("TRTLLM_B12X_FIX", "off")
    assert fix.apply().state is FixState.OFF
    assert convert() == "baked"


def test_imported_past_the_hook_is_not_called_repaired():
    fix.apply()
    load()
    fake_trtllm.forget_package()
    hook = sys.meta_path.pop(0)
    load()
    sys.meta_path.insert(0, hook)
    assert fix.status().state is FixState.MISSED
    assert fix.apply().state is FixState.ACTIVE


def test_both_paths_may_have_one_class(tmp_path):
    fake_trtllm.write_package(tmp_path / "site", OLD, f"from {NEW} import *")
    fix.apply()
    load(OLD)
    assert convert(OLD) == convert(NEW) == "repaired baked"
    assert [target.state for target in fix.status().targets] == [FixState.ACTIVE] * 2
    fix.remove()
    assert convert() == "baked"


def test_a_ledger_that_cannot_be_used_does_not_hide_the_state(ledger):
    fix.apply()
    load()
    ledger.rename(ledger.parent / "real")
    ledger.symlink_to(ledger.parent / "real")
    status = fix.status()
    assert status.state is FixState.ACTIVE
    assert "is a link" in status.ledger_problem


def test_status_lists_this_process():
    fix.apply()
    load()
    (process,) = fix.status().processes
    assert (process.pid, process.state) == (os.getpid(), FixState.ACTIVE)


def test_importing_auto_is_apply(monkeypatch):
    monkeypatch.delitem(sys.modules, "trtllm_b12x_fix.auto", raising=False)
    importlib.import_module("trtllm_b12x_fix.auto")
    load()
    assert convert() == "repaired baked"


def test_the_package_offers_the_three_lazily():
    assert trtllm_b12x_fix.apply is fix.apply
    assert trtllm_b12x_fix.remove is fix.remove
    assert trtllm_b12x_fix.status is fix.status
    with pytest.raises(AttributeError, match="no_such_thing"):
        trtllm_b12x_fix.no_such_thing  # noqa: B018


def test_the_guard_installs_once_and_leaves_no_trace():
    before = list(sys.meta_path)
    startup.install()
    startup.install()
    assert len(sys.meta_path) == len(before) + 1
    fix.apply()
    startup.install()
    assert len(sys.meta_path) == len(before) + 1
    startup.uninstall()
    assert sys.meta_path == before
    assert not startup.is_in_place()


def test_the_guard_steps_in_when_tensorrt_llm_was_there_first():
    importlib.import_module("tensorrt_llm")
    os.environ["TRTLLM_B12X_FIX"] = "auto"
    startup.install()
    load()
    assert convert() == "repaired baked"


def test_the_worst_target_speaks_for_the_process():
    states = list(FixState)
    for worse in states[1:]:
        pair = (TargetStatus("a", FixState.WAITING), TargetStatus("b", worse))
        assert overall(pair).state is overall(pair[::-1]).state is worse
    bad = [state for state in FixState if not state.is_good]
    assert states[-len(bad) :] == bad


def test_every_error_is_one_of_ours():
    assert issubclass(PatchConflictError, B12xFixError)


def test_a_test_that_applies_leaves_no_variable_behind(tmp_path):
    """Or processes that later tests start would be repaired, too."""
    with pytest.MonkeyPatch.context() as patch:
        fake_trtllm.isolate(patch, tmp_path / "another")
        fix.apply()
        assert os.environ["TRTLLM_B12X_FIX"] == "auto"
        startup.uninstall()
    assert "TRTLLM_B12X_FIX" not in os.environ
