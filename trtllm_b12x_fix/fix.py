"""Switch the repair on and off in this process, and tell what is true.

The hook (startup.py, vllm_plugin.py) calls :func:`on_import` when a module of a serving stack was
imported; the integration plans, the patches are installed here, and the ledger is told. ``apply``
does the same for a module that is there already.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from trtllm_b12x_fix import patching, stacks, startup, vllm_plugin
from trtllm_b12x_fix.errors import InputError
from trtllm_b12x_fix.fix_state import FixState, SymbolStatus, TargetStatus, overall
from trtllm_b12x_fix.ledger import Ledger
from trtllm_b12x_fix.ledger_entries import ProcessStatus, read_processes
from trtllm_b12x_fix.patching import Patch, PatchConflictError, PatchState, TargetPlan
from trtllm_b12x_fix.settings import MODE, MODES, Mode, Settings, ledger_directory, mode_of

_LONGEST_NOTE = 400


@dataclass(frozen=True)
class _Treated:
    """What was done to one target when it was last imported."""

    module: ModuleType
    settings: Settings
    plan: TargetPlan = field(default_factory=TargetPlan)
    failure: str = ""


_treated: dict[str, _Treated] = {}
#: What apply() put into the environment, for remove() to take out again.
_variable_set: str | None = None


@dataclass(frozen=True)
class FixStatus:
    """What the repair is, in this process and in all that left a record."""

    state: FixState
    note: str
    mode: Mode | None
    """What the environment asks for now; None if its value is not known."""
    targets: tuple[TargetStatus, ...]
    processes: tuple[ProcessStatus, ...]
    ledger_problem: str = ""
    """Why other processes cannot be told of."""

    def __str__(self) -> str:
        return f"{self.state.value} ({self.note})" if self.note else self.state.value


def apply(mode: Mode | str | None = None) -> FixStatus:
    """Ask for the repair, here and in child processes; safe to call any number of times.

    TRTLLM_B12X_FIX has the last word where it is set: whoever starts a server can switch the
    repair off without touching code. Where it is unset, it becomes ``mode`` (auto), so that
    children inherit it.

    Raises:
        InputError: ``mode`` or a variable has a value that is not known.
        B12xFixError: TensorRT-LLM or vLLM is imported already and cannot be repaired.
    """
    asked = Mode.AUTO if mode is None else _mode(mode)
    said = mode_of(os.environ)
    if said is Mode.NOT_ASKED:
        _set_variable(asked)
    elif mode is not None and asked is not said:
        warnings.warn(
            f"apply({asked.value!r}) changes nothing: {MODE}={said.value} has the last word",
            stacklevel=2,
        )
    startup.arm()
    if stacks.VLLM.root in sys.modules:
        vllm_plugin.register()
    for name in (*stacks.TENSORRT_LLM.modules, *stacks.VLLM.modules):
        module = sys.modules.get(name)
        if module is not None and not _is_up_to_date(name, module):
            on_import(module, name)
    Ledger.for_process().write()
    return status()


def remove() -> FixStatus:
    """Put every original back and stop waiting for imports; layers loaded before stay repaired.

    Raises:
        PatchConflictError: someone else replaced or wrapped a replacement. Theirs was left alone;
            everything else was removed.
    """
    global _variable_set
    startup.uninstall()
    vllm_plugin.FINDER.uninstall()
    if _variable_set is not None and os.environ.get(MODE) == _variable_set:
        del os.environ[MODE]
    _variable_set = None
    kept = _undo(tuple(one.patch for one in patching.installed()))
    if _treated:
        Ledger.for_process().write()
    if kept:
        raise PatchConflictError("; ".join(kept))
    return status()


def status() -> FixStatus:
    """What is true now: attributes are looked at, and so is whether other processes still run."""
    found = _targets()
    speaks = overall(found)
    if _treated:
        Ledger.for_process().write()
    processes: tuple[ProcessStatus, ...] = ()
    problem = ""
    try:
        processes = read_processes(ledger_directory())
    except (InputError, OSError) as error:
        problem = str(error)
    return FixStatus(speaks.state, speaks.note, _mode_now(), found, processes, problem)


def on_import(module: ModuleType, name: str) -> None:
    """A target was just imported: do to it what the environment asks for, or fail its import.

    Raises:
        InputError: a variable has a value that is not known.
        B12xFixError: the repair was asked for and cannot be made.
    """
    settings = Settings()
    before = _treated.get(name)
    try:
        settings = _settings_for(name)
        if before is not None and before.settings != settings:
            _require_undone(before.plan.patches)
        _treated[name] = _Treated(module, settings, _treat(name, module, settings))
    except Exception as error:
        message = f"{type(error).__name__}: {error}"[:_LONGEST_NOTE]
        _treated[name] = _Treated(module, settings, failure=message)
        raise
    finally:
        Ledger.for_process().write()


def _settings_for(name: str) -> Settings:
    return Settings.from_environment(unset=stacks.stack_of(name).unset)


def _treat(name: str, module: ModuleType, settings: Settings) -> TargetPlan:
    if not settings.mode.wants_repair:
        return TargetPlan()
    plan = _integration(name)(module, settings)
    done: list[Patch] = []
    try:
        for patch in plan.patches:
            patch.install()
            done.append(patch)
    except BaseException:
        _undo(tuple(done))  # half a repair is worse than none
        raise
    return plan


def _integration(name: str) -> Any:
    module, _, function = stacks.stack_of(name).callback().partition(":")
    return getattr(importlib.import_module(module), function)


def _undo(patches: tuple[Patch, ...]) -> list[str]:
    """Undo in reverse order; returns what someone else stands before."""
    kept = []
    for patch in reversed(patches):
        try:
            patch.undo()
        except PatchConflictError as error:
            kept.append(str(error))
    return kept


def _require_undone(patches: tuple[Patch, ...]) -> None:
    kept = _undo(patches)
    if kept:
        raise PatchConflictError("; ".join(kept))


def _is_up_to_date(name: str, module: ModuleType) -> bool:
    before = _treated.get(name)
    if before is None or before.module is not module or before.failure:
        return False
    if any(not patch.state().in_effect for patch in before.plan.patches):
        return False
    return before.settings == _settings_for(name)


def _targets() -> tuple[TargetStatus, ...]:
    return tuple(_target(name) for stack in stacks.here() for name in stack.modules)


def _target(name: str) -> TargetStatus:
    module, done = sys.modules.get(name), _treated.get(name)
    if done is not None and done.failure:
        return TargetStatus(name, FixState.FAILED, done.failure)
    if module is None:
        return _not_imported(name)
    if done is None or done.module is not module:
        way_in = stacks.stack_of(name).way_in
        note = f"imported before or past the hook; {way_in} would repair it"
        return TargetStatus(name, FixState.MISSED, note)
    if done.settings.mode is Mode.NOT_ASKED:
        return TargetStatus(name, FixState.NOT_ASKED, f"{MODE} was unset when it was imported")
    if done.settings.mode is Mode.OFF:
        return TargetStatus(name, FixState.OFF, f"{MODE}=off")
    return _planned(name, done.plan)


def _not_imported(name: str) -> TargetStatus:
    stack = stacks.stack_of(name)
    if not stack.is_hooked():
        note = f"{stack.way_in} would put it in place"
        return TargetStatus(name, FixState.UNHOOKED, note)
    mode = _mode_now(stack.unset)
    if mode is Mode.NOT_ASKED:
        return TargetStatus(name, FixState.WAITING, f"{MODE} is unset: nothing would be patched")
    if mode is Mode.OFF:
        return TargetStatus(name, FixState.WAITING, f"{MODE}=off: nothing would be patched")
    if mode is None:
        return TargetStatus(name, FixState.WAITING, f"{MODE} has an unknown value: it would fail")
    return TargetStatus(name, FixState.WAITING)


def _planned(name: str, plan: TargetPlan) -> TargetStatus:
    symbols = tuple(SymbolStatus(patch.symbol, patch.describe()) for patch in plan.patches)
    states = {patch.state() for patch in plan.patches}
    if not states and plan.refusal:
        return TargetStatus(name, FixState.OUT_OF_REACH, plan.refusal)
    if not states:
        return TargetStatus(name, FixState.NOT_NEEDED, plan.note)
    bad = [one.state for one, patch in zip(symbols, plan.patches, strict=True) if not _works(patch)]
    if PatchState.REPLACED_BY_OTHERS in states:
        return TargetStatus(name, FixState.REPLACED, "; ".join(bad), symbols)
    if bad:
        return TargetStatus(name, FixState.REMOVED, "; ".join(bad), symbols)
    wrapped = [one.state for one in symbols if one.state != PatchState.ACTIVE.value]
    if plan.refusal:
        note = f"any layer would be refused: {plan.refusal}"
        return TargetStatus(name, FixState.WOULD_REFUSE, note, symbols)
    note = "; ".join(part for part in (plan.note, *wrapped) if part)
    return TargetStatus(name, FixState.ACTIVE, note, symbols)


def _works(patch: Patch) -> bool:
    return patch.state().in_effect


def _describe_now() -> dict[str, Any]:
    """The part of this process's record that must never be remembered, only looked up."""
    found = _targets()
    speaks = overall(found)
    done = next(iter(reversed(_treated.values())), None)
    mode = done.settings.mode if done else _mode_now()
    return {
        "mode": "" if mode is None else mode.value,
        "state": speaks.state.value,
        "note": speaks.note,
        "targets": [target.as_json() for target in found],
        "versions": {
            package: version
            for one in _treated.values()
            for package, version in one.plan.versions.items()
        },
    }


def _mode_now(unset: Mode = Mode.NOT_ASKED) -> Mode | None:
    try:
        return mode_of(os.environ, unset)
    except InputError:
        return None


def _mode(mode: Mode | str) -> Mode:
    for allowed in MODES:
        if mode in (allowed, allowed.value):
            return allowed
    names = ", ".join(one.value for one in MODES)
    raise InputError(f"apply({mode!r}): the mode may be {names}")


def _set_variable(mode: Mode) -> None:
    global _variable_set
    os.environ[MODE] = _variable_set = mode.value


Ledger.set_probe(_describe_now)
