"""Defects in the process machinery, each with the test that must notice.

As a pytest plugin this puts one of them in place: ``-p tests.planted.process_mutants`` with
PLANTED_MUTANT naming it. A process of its own for each, since these defects are in what a process
imports, patches and leaves behind.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Any

from trtllm_b12x_fix import (
    fix,
    import_hook,
    ledger,
    ledger_entries,
    ledger_folder,
    patching,
    processes,
    settings,
    startup,
    target_hook,
)
from trtllm_b12x_fix.commands import status
from trtllm_b12x_fix.fix_state import FixState, TargetStatus
from trtllm_b12x_fix.import_hook import PostImportFinder
from trtllm_b12x_fix.ledger import Ledger
from trtllm_b12x_fix.ledger_folder import LedgerFolder
from trtllm_b12x_fix.patching import MARKER, Patch, PatchState
from trtllm_b12x_fix.processes import Life

VARIABLE = "PLANTED_MUTANT"
_UNIT = "tests/unit/test_"


@dataclass(frozen=True)
class Mutant:
    """A wrong value in the place of ``owner.attribute``."""

    name: str
    guard: str
    owner: Any
    attribute: str
    wrong: Any


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


_true_notify = PostImportFinder.notify


def _used_up(self: Any, module: Any, name: str) -> None:
    try:
        _true_notify(self, module, name)
    except BaseException:
        self.uninstall()
        raise


def _swallowed(self: Any, module: Any, name: str) -> None:
    with contextlib.suppress(Exception):
        _true_notify(self, module, name)


def _kept_loader(self: Any, module: Any) -> None:
    self._loader.exec_module(module)
    self._finder.notify(module, self._name)


def _only_the_path(_self: Any, name: str, path: Any, target: Any) -> Any:
    from importlib.machinery import PathFinder

    return PathFinder.find_spec(name, path, target)


def _remembered(self: Patch) -> PatchState:
    return PatchState.ACTIVE if self._key in patching._INSTALLED else PatchState.NOT_INSTALLED


def _forced_undo(self: Patch) -> PatchState:
    setattr(self.owner, self.attribute, patching._INSTALLED[self._key].original)
    return PatchState.REMOVED


def _default(_environ: Any, _variable: str, _allowed: Any, default: Any) -> Any:
    return default


def _uncaught(self: Ledger) -> None:
    with LedgerFolder(settings.ledger_directory(), ledger_folder.Access.WRITE) as folder:
        folder.write("1-1.json", "{}")


_true_json = Ledger.as_json


def _first_state(self: Ledger) -> dict[str, Any]:
    record = _true_json(self)
    self.first = getattr(self, "first", record.get("state"))  # type: ignore[attr-defined]
    return {**record, "state": self.first}  # type: ignore[attr-defined]


def _follows_links(self: LedgerFolder) -> int:
    return os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)


def _in_place(self: LedgerFolder, name: str, text: str) -> None:
    handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600, dir_fd=self._handle)
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        stream.write(text)


def _by_number(pid: int, _started: int, _where: str, _program: str = "") -> Life:
    return Life.LIVE if processes.start_time(pid) else Life.ENDED


def _intent(name: str, plan: Any) -> TargetStatus:
    return TargetStatus(name, FixState.ACTIVE, plan.note)


def _any_count(record: Any, name: str) -> dict[str, int]:
    return {str(what): int(count) for what, count in record.get(name, {}).items()}


def _locked_fork(cls: Any) -> None:
    if cls._current._lock.acquire(timeout=1):
        cls._current._inherited()._write()


def _all_judged(found: Any) -> int:
    return 0 if all(process.is_good for process in found) else 1


def _naive_line(environment: Any, folder: Any) -> Any:
    import shutil

    folder.mkdir()
    shutil.copytree(environment.site / "trtllm_b12x_fix", folder / "trtllm_b12x_fix")
    (folder / "trtllm_b12x_fix.pth").write_text("import trtllm_b12x_fix.startup\n")
    return folder


_HOOK = f"{_UNIT}import_hook.py::test_"
_PATCHING = f"{_UNIT}patching.py::test_"
_LEDGER = f"{_UNIT}ledger.py::test_"
_FIX = f"{_UNIT}fix.py::test_"
_STATUS = f"{_UNIT}status_command.py::test_"
_FAILS_EACH_TIME = f"{_HOOK}a_callback_that_raises_fails_the_import_each_time"
_UNSAFE = f"{_LEDGER}a_folder_that_is_not_safe_is_refused_and_serving_goes_on"
_Loader = import_hook._NotifyingLoader

MUTANTS = [
    Mutant("a hook is used up", _FAILS_EACH_TIME, PostImportFinder, "notify", _used_up),
    Mutant("errors are swallowed", _FAILS_EACH_TIME, PostImportFinder, "notify", _swallowed),
    Mutant(
        "the loader stays",
        f"{_HOOK}loader_source_resources_and_pickle_are_the_originals",
        _Loader,
        "exec_module",
        _kept_loader,
    ),
    Mutant(
        "half-made modules are patched",
        f"{_HOOK}installed_while_another_thread_imports_it_waits_for_the_end",
        import_hook,
        "_wait_for_other_threads",
        _nothing,
    ),
    Mutant(
        "finders that came later win",
        f"{_HOOK}a_finder_that_came_later_and_answers_first_does_not_hide_the_target",
        PostImportFinder,
        "_move_to_front",
        _nothing,
    ),
    Mutant(
        "other finders are not asked",
        f"{_HOOK}other_finders_keep_their_order_and_are_all_asked",
        PostImportFinder,
        "_ask_others",
        _only_the_path,
    ),
    Mutant(
        "one finder hides another's hook",
        f"{_HOOK}two_finders_for_one_target_are_both_called",
        import_hook,
        "_notifies",
        lambda loader, _finder: isinstance(loader, _Loader),
    ),
    Mutant(
        "the state is remembered",
        f"{_PATCHING}a_replacement_by_others_is_seen_and_named",
        Patch,
        "state",
        _remembered,
    ),
    Mutant(
        "a marker is proof",
        f"{_PATCHING}a_copied_marker_does_not_make_a_replacement_ours",
        patching,
        "_reaches",
        lambda function, _wanted: hasattr(function, MARKER),
    ),
    Mutant(
        "patches stack",
        f"{_PATCHING}twice_is_once",
        PatchState,
        "in_effect",
        property(lambda _self: False),
    ),
    Mutant(
        "others are overwritten",
        f"{_PATCHING}what_others_put_there_is_left_alone",
        Patch,
        "undo",
        _forced_undo,
    ),
    Mutant(
        "inherited attributes count",
        f"{_PATCHING}what_the_class_does_not_define_itself_is_refused[inherited]",
        Patch,
        "_current",
        lambda self: getattr(self.owner, self.attribute, patching._MISSING),
    ),
    Mutant(
        "expectations are not asked",
        f"{_PATCHING}what_is_not_as_expected_is_refused_with_the_reason",
        Patch,
        "_require_original",
        _nothing,
    ),
    Mutant(
        "unknown values are the default",
        f"{_UNIT}settings.py::test_a_refusal_names_all_that_is_allowed",
        settings,
        "_choice",
        _default,
    ),
    Mutant(
        "the whole environment is recorded",
        f"{_LEDGER}the_environment_stays_out_but_for_our_variables",
        ledger,
        "own_variables",
        lambda: dict(os.environ),
    ),
    Mutant(
        "secrets are shown",
        f"{_LEDGER}arguments_are_shortened_and_secrets_hidden[argv1-shown1]",
        processes,
        "_SECRET_NAME",
        processes.re.compile("(?!)"),
    ),
    Mutant(
        "the first state is kept",
        f"{_LEDGER}the_state_is_looked_up_at_each_writing",
        Ledger,
        "as_json",
        _first_state,
    ),
    Mutant("a failed write breaks serving", f"{_UNSAFE}[link]", Ledger, "write", _uncaught),
    Mutant("links are followed", f"{_UNSAFE}[link]", LedgerFolder, "_open", _follows_links),
    Mutant(
        "anyone's folder will do", f"{_UNSAFE}[foreign]", LedgerFolder, "_require_ours", _nothing
    ),
    Mutant(
        "records are written in place",
        f"{_LEDGER}a_failed_write_leaves_the_old_record_and_no_rest",
        LedgerFolder,
        "write",
        _in_place,
    ),
    Mutant(
        "a number is a process",
        f"{_LEDGER}a_number_given_out_again_is_not_the_same_process",
        ledger_entries,
        "life",
        _by_number,
    ),
    Mutant(
        "long servers are forgotten",
        f"{_LEDGER}only_old_records_of_ended_processes_are_forgotten",
        ledger_entries,
        "life",
        lambda *_: Life.ENDED,
    ),
    Mutant(
        "any number is a count",
        f"{_LEDGER}a_record_with_wrong_content_is_unreadable_and_hides_no_other",
        ledger_entries,
        "_counts",
        _any_count,
    ),
    Mutant(
        "a program is not looked at",
        f"{_LEDGER}a_process_that_became_another_program_is_not_the_recorded_one",
        processes,
        "program",
        lambda _pid="self": "",
    ),
    Mutant(
        "another program is a live process",
        f"{_STATUS}a_process_that_became_another_program_is_shown_and_not_judged",
        ledger_entries,
        "life",
        lambda pid, started, where, _program="": processes.life(pid, started, where),
    ),
    Mutant(
        "a fork leaves nothing",
        f"{_LEDGER}a_forked_child_that_loads_nothing_has_a_record",
        Ledger,
        "_inherited",
        _nothing,
    ),
    Mutant(
        "a fork waits for the parent's lock",
        f"{_LEDGER}a_fork_waits_for_no_lock_and_says_nothing",
        Ledger,
        "_after_fork",
        classmethod(_locked_fork),
    ),
    Mutant(
        "every fork leaves a file",
        f"{_LEDGER}a_process_that_forks_often_does_not_fill_the_folder",
        Ledger,
        "_count_fork",
        classmethod(_nothing),
    ),
    Mutant(
        "any ledger will do",
        f"{_UNIT}settings.py::test_a_relative_ledger_is_refused_by_name",
        settings,
        "_absolute_ledger",
        lambda environ: settings.Path(environ[settings.LEDGER]),
    ),
    Mutant(
        "the status tells what was meant",
        f"{_FIX}status_tells_when_others_replaced_it",
        fix,
        "_planned",
        _intent,
    ),
    Mutant(
        "half of the patches stay",
        f"{_FIX}half_of_the_patches_is_none",
        fix,
        "_undo",
        lambda _patches: [],
    ),
    Mutant(
        "children are not asked",
        f"{_FIX}apply_sets_the_variable_for_children_and_remove_takes_it_back",
        fix,
        "_set_variable",
        _nothing,
    ),
    Mutant(
        "our faults fail everybody",
        f"{_FIX}a_fault_of_ours_does_not_fail_who_did_not_ask",
        target_hook,
        "is_asked",
        lambda: True,
    ),
    Mutant(
        "our faults fail nobody",
        f"{_FIX}an_unknown_value_fails_the_import_until_it_is_corrected",
        target_hook,
        "is_asked",
        lambda: False,
    ),
    Mutant(
        "a lost package is off in silence",
        f"{_FIX}a_package_lost_from_disk_fails_who_asked",
        startup,
        "is_asked",
        lambda: False,
    ),
    Mutant(
        "every exit code is good",
        f"{_STATUS}the_exit_code_follows_each_state",
        status,
        "exit_code",
        lambda _processes: 0,
    ),
    Mutant(
        "the dead are judged",
        f"{_STATUS}processes_that_ended_are_shown_and_not_judged",
        status,
        "exit_code",
        _all_judged,
    ),
]


def naive_start_up_file() -> Mutant:
    """A start-up line that may raise; apart, since its test builds environments."""
    from tests.integrations import test_startup

    guard = "tests/integrations/test_startup.py::test_a_damaged_package_breaks_no_start"
    return Mutant(
        "the start-up line may raise",
        f"{guard}[a module that raises]",
        test_startup,
        "copy_site",
        _naive_line,
    )


def find(name: str) -> Mutant:
    """By name."""
    return next(one for one in [*MUTANTS, naive_start_up_file()] if one.name == name)


def pytest_collection_finish(session: Any) -> None:
    """As a plugin: put the defect in place, once the tests are imported."""
    mutant = find(os.environ[VARIABLE])
    assert mutant.attribute in vars(mutant.owner)
    setattr(mutant.owner, mutant.attribute, mutant.wrong)
