"""Mutants of what the fix says and refuses: each must make the named fast test fail."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import threading
from typing import Any

import pytest
import torch

from tests import fake_trtllm
from tests.planted.test_fix_mutants import CAUGHT, Mutant
from tests.unit import test_trtllm_process as process_tests
from tests.unit import test_trtllm_refusal as refusal_tests
from tests.unit import test_trtllm_summary as summary_tests
from trtllm_b12x_fix import patching, startup
from trtllm_b12x_fix.errors import UnsupportedVersionError
from trtllm_b12x_fix.integrations import (
    tensorrt_llm,
    trtllm_halves,
    trtllm_refusal,
    trtllm_summary,
)
from trtllm_b12x_fix.integrations.trtllm_summary import QuietPeriod, Summary
from trtllm_b12x_fix.settings import OnUnknown

# ---- the one line

_layer = Summary.layer


def _at_the_first_layer(self, *arguments):
    _layer(self, *arguments)
    self.loading_ended()


def _at_every_end(self):
    self._logger().info(self._words())


def _without_looking(self):
    checks, self.checks_at_end = self.checks_at_end, []
    _loading_ended(self)
    self.checks_at_end = checks


def _looking_last(self):
    _without_looking(self)
    for check in self.checks_at_end:
        check()


def _logging_while_locked(self):
    with self._lock:
        if not self._told and self._has_news:
            self._told = True
            self._logger().info(self._words())


def _counting_each_time(self, module, *arguments):
    self._strategies.pop(module, None)
    _layer(self, module, *arguments)


@contextlib.contextmanager
def _never_busy(self):
    self._stop()
    yield
    self._start()


@contextlib.contextmanager
def _after_success_alone(self):
    with self._lock:
        self._busy += 1
        self._stop()
    yield
    with self._lock:
        self._busy -= 1
        self._start()


def _raising(self):
    for check in self.checks_at_end:
        check()
    _without_looking(self)


def _start_unguarded(self):
    self._timer = threading.Timer(self._seconds, self._callback)
    self._timer.daemon = True
    self._timer.start()


def _start_undaemonic(self):
    self._stop()
    self._timer = threading.Timer(self._seconds, self._callback)
    with contextlib.suppress(RuntimeError):
        self._timer.start()


_loading_ended = Summary.loading_ended
_UNWATCHED = summary_tests.PROGRAM.replace("watch(summary)", "")
_FORKS_UNSEEN = summary_tests.PROGRAM.replace(
    "watch(summary)", "import atexit; atexit.register(summary.quiet.finish)"
)

LINE = [
    Mutant(
        "the line comes with the first layer",
        Summary,
        "layer",
        _at_the_first_layer,
        summary_tests.test_the_line_comes_once_it_is_quiet,
    ),
    Mutant(
        "each reload has a line",
        Summary,
        "loading_ended",
        _at_every_end,
        summary_tests.test_loading_again_adds_no_line,
    ),
    Mutant(
        "a line without a layer",
        Summary,
        "loading_ended",
        _at_every_end,
        summary_tests.test_an_upstream_that_raises_leaves_no_line,
    ),
    Mutant(
        "a layer that takes long is quiet",
        QuietPeriod,
        "interrupted",
        _never_busy,
        summary_tests.test_the_last_of_several_threads_starts_the_period,
    ),
    Mutant(
        "an error leaves it busy for ever",
        QuietPeriod,
        "interrupted",
        _after_success_alone,
        summary_tests.test_an_upstream_that_raises_leaves_no_line,
    ),
    Mutant(
        "the end of the interpreter tells nothing",
        QuietPeriod,
        "finish",
        lambda self: None,
        summary_tests.test_the_end_of_the_interpreter_does_not_wait_for_quiet,
    ),
    Mutant(
        "the line is written under the lock",
        Summary,
        "loading_ended",
        _logging_while_locked,
        summary_tests.test_a_log_that_blocks_does_not_block_the_end,
    ),
    Mutant(
        "no thread, no server",
        QuietPeriod,
        "_start",
        _start_unguarded,
        summary_tests.test_what_cannot_be_done_is_done_without,
        {"broken": "timer"},
    ),
    Mutant(
        "a look that raises takes the line with it",
        Summary,
        "loading_ended",
        _raising,
        summary_tests.test_what_cannot_be_done_is_done_without,
        {"broken": "check"},
    ),
    Mutant(
        "a thread that outlives the program",
        QuietPeriod,
        "_start",
        _start_undaemonic,
        summary_tests.test_the_period_is_longer_than_what_lies_between_two_layers_and_no_thread_outlives_it,
    ),
    Mutant(
        "a period as long as a layer",
        QuietPeriod.__init__,
        "__defaults__",
        (0.5,),
        summary_tests.test_the_period_is_longer_than_what_lies_between_two_layers_and_no_thread_outlives_it,
    ),
    Mutant(
        "warnings come below the line",
        Summary,
        "loading_ended",
        _looking_last,
        summary_tests.test_whoever_wants_a_last_look_gets_one_each_time,
    ),
    Mutant(
        "a layer counts at each preparation",
        Summary,
        "layer",
        _counting_each_time,
        summary_tests.test_a_layer_prepared_again_counts_once_as_it_is_now,
    ),
    Mutant(
        "the last check stands for all",
        trtllm_summary,
        "_gravity",
        lambda verification: (0, 0.0),
        summary_tests.test_the_worst_of_several_checks_is_shown_and_all_are_counted,
    ),
    Mutant(
        "a process that ends is not watched",
        summary_tests,
        "PROGRAM",
        _UNWATCHED,
        summary_tests.test_a_process_that_ends_at_once_leaves_its_line,
        {"end": ""},
    ),
    Mutant(
        "a child has its parent's news",
        summary_tests,
        "PROGRAM",
        _FORKS_UNSEEN,
        summary_tests.test_a_child_says_nothing_of_its_parents_layers,
    ),
    Mutant(
        "reasons of any length",
        trtllm_summary,
        "_cut",
        lambda text: text,
        summary_tests.test_a_long_reason_is_cut,
    ),
]

# ---- layers past the fix, graphs


def _all_that_were_loaded(self):
    for layer in list(self._awaited):
        self.reporter.bypassed(layer)


PROCESS = [
    Mutant(
        "nothing is called before a capture",
        tensorrt_llm,
        "prime",
        lambda module, view: "",
        process_tests.test_the_fold_is_made_before_the_first_call_of_serving,
    ),
    Mutant(
        "the checked layer alone is primed",
        tensorrt_llm,
        "prime",
        lambda module, view: "",
        process_tests.test_every_layer_is_primed_not_the_checked_one_alone,
    ),
    Mutant(
        "layers past the fix are not looked for",
        tensorrt_llm.Process,
        "tell_of_bypassed_layers",
        lambda self: None,
        process_tests.test_a_subclass_that_does_not_is_told_once_loading_has_ended,
    ),
    Mutant(
        "layers are not awaited",
        tensorrt_llm.Process,
        "loaded",
        lambda self, module: None,
        process_tests.test_a_process_with_such_layers_alone_is_told_of_them,
    ),
    Mutant(
        "every layer that was loaded is called baked",
        tensorrt_llm.Process,
        "tell_of_bypassed_layers",
        _all_that_were_loaded,
        process_tests.test_layers_that_no_bake_reached_are_none,
        {"how": "intact"},
    ),
    Mutant(
        "W4A16 is called baked",
        tensorrt_llm,
        "_is_baked",
        lambda layer: bool(tensorrt_llm.baked_bytes(layer)),
        process_tests.test_layers_that_no_bake_reached_are_none,
        {"how": "W4A16"},
    ),
    Mutant(
        "modules may raise",
        tensorrt_llm,
        "_is_baked",
        lambda layer: bool(tensorrt_llm.baked_bytes(layer)),
        process_tests.test_modules_that_raise_when_asked_do_not_stop_apply,
    ),
]


def _forgetful(module):
    module.__dict__.pop("_PREFILL_VIA_CUTLASS_THRESHOLD", None)


def _unguarded(self, upstream):
    def prepare(method, module):
        upstream(method, module)
        self._after(module)

    return prepare


PROCESS += [
    Mutant(
        "whatever threshold a layer has is ours",
        tensorrt_llm,
        "restore_decode",
        _forgetful,
        process_tests.test_a_threshold_that_the_layer_has_itself_is_kept,
        {"own": 16},
    ),
    Mutant(
        "an interrupt leaves baked scales",
        tensorrt_llm.Process,
        "replacement",
        _unguarded,
        process_tests.test_an_interrupt_half_way_leaves_nothing_to_decode_with,
    ),
    Mutant(
        "a refusal leaves baked scales",
        tensorrt_llm.Process,
        "replacement",
        _unguarded,
        process_tests.test_a_layer_that_cannot_be_sent_to_cutlass_cannot_decode_baked,
        {"name": "_route_to_cutlass"},
    ),
    Mutant(
        "the base is patched",
        tensorrt_llm,
        "watching",
        lambda owner, loaded: trtllm_halves.watching(process_tests.base_of(owner), loaded),
        process_tests.test_loading_of_other_classes_layers_is_not_watched,
    ),
]

# ---- refusals


def _fails_the_import(owner, words, reporter, policy):
    raise UnsupportedVersionError(words)


def _refuses_nothing(owner, words, reporter):
    return patching.Patch(
        owner, "__init__", lambda upstream: lambda *a, **k: None, found=patching.Found.ANYWHERE
    )


_refusing = trtllm_refusal.refusing


def _whatever_the_policy(owner, words, reporter, policy):
    return _refusing(owner, words, reporter, OnUnknown.FAIL)


RENAMED = {"change": refusal_tests.RENAMED}

REFUSALS = [
    Mutant(
        "an unknown class fails the import",
        tensorrt_llm,
        "refusing",
        _fails_the_import,
        refusal_tests.test_where_the_class_is_never_built_nothing_happens,
        {**RENAMED, "era": refusal_tests.STAGED[0], "policy": OnUnknown.FAIL},
    ),
    Mutant(
        "whatever the class has is a hook",
        tensorrt_llm,
        "HOOKS",
        ("transform_weights", "post_load_weights", "prepare_b12x"),
        refusal_tests.test_the_first_layer_stops_the_start,
        RENAMED,
    ),
    Mutant(
        "an unknown class is built",
        trtllm_refusal,
        "_refusing_to_be_built",
        _refuses_nothing,
        refusal_tests.test_the_first_layer_stops_the_start,
        RENAMED,
    ),
    Mutant(
        "an unknown signature is known",
        tensorrt_llm,
        "takes_a_module",
        lambda upstream: None,
        refusal_tests.test_the_first_layer_stops_the_start,
        {"change": refusal_tests.ONE_MORE},
    ),
    Mutant(
        "a static method is a method",
        tensorrt_llm,
        "takes_a_module",
        lambda upstream: _takes_a_module(getattr(upstream, "__func__", upstream)),
        refusal_tests.test_every_other_hook_is_refused_when_the_class_is_built,
        {"name": "transform_weights", "hook": staticmethod(lambda self, module: None)},
    ),
    Mutant(
        "the policy is not asked",
        tensorrt_llm,
        "refusing",
        _whatever_the_policy,
        refusal_tests.test_or_its_layers_decode_goes_to_cutlass,
        RENAMED,
    ),
    Mutant(
        "decode stays where it was",
        trtllm_refusal,
        "_decode_elsewhere",
        lambda module, words, reporter: None,
        refusal_tests.test_or_its_layers_decode_goes_to_cutlass,
        RENAMED,
    ),
    Mutant(
        "W4A16 is sent to CUTLASS",
        trtllm_refusal,
        "is_weight_only",
        lambda module: False,
        refusal_tests.test_w4a16_goes_on_where_the_layer_can_be_told,
        {"policy": OnUnknown.CUTLASS},
    ),
    Mutant(
        "any create_weights gets the layer",
        trtllm_refusal,
        "_gets_the_layer",
        lambda method: True,
        refusal_tests.test_without_a_way_to_the_layer_cutlass_cannot_be_had,
        {"creating": lambda self: None},
    ),
    Mutant(
        "b12x that is prepared elsewhere is not looked for",
        tensorrt_llm,
        "wrapper_maker",
        lambda folder: None,
        refusal_tests.test_a_backend_that_prepares_b12x_itself_is_out_of_reach,
    ),
    Mutant(
        "b12x is prepared everywhere",
        tensorrt_llm,
        "wrapper_maker",
        lambda folder: "quantization.py",
        refusal_tests.test_a_release_of_before_b12x_needs_nothing,
    ),
    Mutant(
        "FlashInfer is looked at when the module is imported",
        tensorrt_llm,
        "_unknown_work",
        lambda owner, name: str(tensorrt_llm.installed_contract() or "FlashInfer is missing"),
        refusal_tests.test_a_missing_flashinfer_is_no_matter_before_a_layer_is_prepared,
        {"era": refusal_tests.Era.MOE_TRANSFORM},
    ),
]
_takes_a_module = tensorrt_llm.takes_a_module

MUTANTS = [*LINE, *PROCESS, *REFUSALS]


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Small products, often on a busy machine: a second thread costs more than it brings."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def made_for(mutant, monkeypatch, tmp_path, capsys) -> dict[str, Any]:
    """What the guard asks for; made when the mutant is in place."""
    given: dict[str, Any] = {"monkeypatch": monkeypatch, "tmp_path": tmp_path, "capsys": capsys}
    asked = inspect.signature(mutant.guard).parameters
    if "told" in asked:
        given["told"] = summary_tests.Told()
    if "summary" in asked:
        monkeypatch.setattr(summary_tests.ByHand, "made", [])
        monkeypatch.setattr(threading, "Timer", summary_tests.ByHand)
        told = given.get("told", summary_tests.Told())
        given["summary"] = Summary(lambda: told)
    if mutant in PROCESS:
        given["bench"] = process_tests.isolate(monkeypatch, tmp_path)
    if mutant in REFUSALS:
        given["ledger"] = refusal_tests.isolate(monkeypatch, tmp_path)
    return given


@pytest.fixture(autouse=True)
def _clean():
    yield
    startup.uninstall()
    fake_trtllm.forget_package()
    importlib.invalidate_caches()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_wrong_report_is_caught(mutant, monkeypatch, tmp_path, capsys):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mutant.owner, mutant.attribute, mutant.wrong)
        given = made_for(mutant, monkeypatch, tmp_path, capsys)
        # An error where the test expects none is a failure of that test, too.
        with pytest.raises((*CAUGHT, RuntimeError, ValueError)):
            mutant.call(given)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_report_as_it_is_passes(mutant, monkeypatch, tmp_path, capsys):
    """The guards are called rightly: they fail for the mutant alone."""
    mutant.call(made_for(mutant, monkeypatch, tmp_path, capsys))
