"""The one INFO line of a process: when it comes, what is in it, and that nothing breaks for it."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from trtllm_b12x_fix import __version__
from trtllm_b12x_fix.integrations import trtllm_summary
from trtllm_b12x_fix.integrations.trtllm_summary import QuietPeriod, Summary

ROOT = Path(__file__).parents[2]
VERSIONS = "TensorRT-LLM 1.4.0rc1, FlashInfer 0.7.4"


class Layer:
    """Anything that a weak reference can be made to."""


class Told(list):
    """A logger."""

    info = list.append


class ByHand(threading.Timer):
    """A timer that runs out when the test says so; a machine's pauses must not decide."""

    made: ClassVar[list[ByHand]] = []

    def start(self) -> None:
        ByHand.made.append(self)

    @classmethod
    def waiting(cls) -> list[ByHand]:
        return [one for one in cls.made if not one.finished.is_set()]

    @classmethod
    def run_out(cls) -> None:
        (timer,) = cls.waiting()
        timer.finished.set()
        timer.function()


def check(state: str, layer: str = "layer 1", figure: float | None = 0.001) -> Any:
    return SimpleNamespace(
        layer=layer,
        state=SimpleNamespace(value=state),
        words=f"live output {state}: {figure}",
        from_repaired=figure,
    )


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def summary(told, monkeypatch):
    monkeypatch.setattr(ByHand, "made", [])
    monkeypatch.setattr(threading, "Timer", ByHand)
    return Summary(lambda: told)


def load(summary: Summary, *strategies: str, freed: int = 2**20) -> list[Layer]:
    layers = []
    for strategy in strategies:
        with summary.quiet.interrupted():
            layers.append(Layer())
            summary.layer(layers[-1], strategy, f"why {strategy}", freed, VERSIONS)
    return layers


# ---- when


def test_the_line_comes_once_it_is_quiet(summary, told):
    load(summary, *["alphas"] * 40)
    assert told == []
    ByHand.run_out()
    (line,) = told
    assert ": alphas in 40 layers (why alphas); 40.0 MiB of baked scales given back; " in line


def test_a_real_timer_runs_out_by_itself(told):
    summary = Summary(lambda: told, lambda callback: QuietPeriod(callback, 0.05))
    with summary.quiet.interrupted():
        load(summary, "alphas", "alphas")
    deadline = time.monotonic() + 60
    while not told and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "alphas in 2 layers" in told[0]


def test_a_layer_that_takes_its_time_is_not_quiet(summary, told):
    load(summary, "alphas")
    with summary.quiet.interrupted():
        assert ByHand.waiting() == []
    load(summary, "alphas")
    ByHand.run_out()
    assert "alphas in 2 layers" in told[0]


def test_the_last_of_several_threads_starts_the_period(summary):
    with summary.quiet.interrupted():
        load(summary, "alphas")  # as another thread would
        assert ByHand.waiting() == []
    assert len(ByHand.waiting()) == 1


def test_loading_again_adds_no_line(summary, told):
    load(summary, "alphas")
    ByHand.run_out()
    load(summary, "cutlass")
    ByHand.run_out()
    summary.quiet.finish()
    assert len(told) == 1


def test_the_period_is_longer_than_what_lies_between_two_layers_and_no_thread_outlives_it(summary):
    load(summary, "alphas", "alphas")
    (timer,) = ByHand.waiting()
    assert timer.interval == trtllm_summary.QUIET_SECONDS >= 5
    assert timer.daemon


def test_an_upstream_that_raises_leaves_no_line(summary, told):
    with pytest.raises(RuntimeError), summary.quiet.interrupted():
        raise RuntimeError("flashinfer is missing")
    ByHand.run_out()
    summary.quiet.finish()
    assert told == []


def test_the_end_of_the_interpreter_does_not_wait_for_quiet(summary, told):
    load(summary, "alphas")
    summary.quiet.finish()
    assert len(told) == 1
    assert ByHand.waiting() == []
    summary.quiet.finish()
    assert len(told) == 1


def test_a_log_that_blocks_does_not_block_the_end(monkeypatch):
    monkeypatch.setattr(trtllm_summary, "_PATIENCE_SECONDS", 0.1)
    entered, release = threading.Event(), threading.Event()

    class Blocked:
        def info(self, _line: str) -> None:
            entered.set()
            release.wait(60)

    summary = Summary(Blocked, lambda callback: QuietPeriod(callback, 0.01))
    load(summary, "alphas")
    assert entered.wait(60)

    def go_on() -> None:
        summary.quiet.finish()
        load(summary, "alphas")  # nor a layer that is loaded meanwhile

    thread = threading.Thread(target=go_on)
    thread.start()
    thread.join(timeout=8)
    stuck = thread.is_alive()
    release.set()
    thread.join()
    assert not stuck


@pytest.mark.parametrize("broken", ["timer", "logger", "check"])
def test_what_cannot_be_done_is_done_without(summary, told, monkeypatch, broken):
    """No thread to be had (or the interpreter is ending), a log that raises, a look that does."""

    def fail(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    if broken == "timer":
        monkeypatch.setattr(ByHand, "start", fail)
    if broken == "logger":
        summary._logger = lambda: SimpleNamespace(info=fail)
    if broken == "check":
        summary.checks_at_end.append(fail)
    load(summary, "alphas", "alphas")
    summary.quiet.finish()
    assert len(told) == (broken != "logger")


def test_whoever_wants_a_last_look_gets_one_each_time(summary, told):
    looks: list[int] = []
    summary.checks_at_end.append(lambda: looks.append(len(told)))
    load(summary, "alphas")
    ByHand.run_out()
    with summary.quiet.interrupted():  # weights are loaded again
        pass
    ByHand.run_out()
    # Before the line, so that its warnings stand above it.
    assert looks == [0, 1]


# ---- what


def words(summary: Summary, told: Told) -> str:
    summary.loading_ended()
    (line,) = told
    return line


def test_all_of_it(summary, told):
    load(summary, "alphas", "unchanged", "alphas", freed=3 * 2**29)
    summary.verified(check("passed"))
    assert words(summary, told) == (
        f"trtllm-b12x-fix {__version__} on {VERSIONS}: alphas in 2 layers (why alphas), unchanged "
        "in 1 layer (why unchanged); 4,608.0 MiB of baked scales given back; layer 1: live output "
        "passed: 0.001. All processes: trtllm-b12x-fix status"
    )


def test_a_layer_prepared_again_counts_once_as_it_is_now(summary, told):
    kept = load(summary, "cutlass", "alphas")
    for layer in (*kept, kept[0]):
        summary.layer(layer, "alphas", "why", 2**20, VERSIONS)
    line = words(summary, told)
    assert ": alphas in 2 layers (why alphas); " in line
    assert "cutlass" not in line


def test_layers_that_are_gone_still_count(summary, told):
    """At the end of the interpreter the model may be freed already."""
    del load(summary, "alphas", "alphas")[:]
    assert "alphas in 2 layers" in words(summary, told)


def test_the_worst_of_several_checks_is_shown_and_all_are_counted(summary, told):
    load(summary, "alphas")
    for one in (
        check("passed", "layer 1", 0.05),
        check("not verified", "layer 2", None),
        check("passed", "layer 3", 0.001),
    ):
        summary.verified(one)
    line = words(summary, told)
    assert "; 3 live checks, 2 passed, 1 not verified; the worst is layer 2: live output" in line


def test_a_thousand_reloads_keep_one_check(summary):
    """Weights may be reloaded for days, each layer checked each time."""
    for figure in range(1000):
        summary.verified(check("passed", f"layer {figure}", figure / 1e6))
    kept = [value for value in vars(summary).values() if isinstance(value, (list, dict))]
    assert all(len(value) < 10 for value in kept)


def test_of_passed_checks_the_furthest_is_shown(summary, told):
    load(summary, "alphas")
    for figure in (0.01, 0.05, 0.02):
        summary.verified(check("passed", f"layer at {figure}", figure))
    assert "the worst is layer at 0.05" in words(summary, told)


def test_a_check_that_failed_before_any_layer_was_repaired_is_told(summary, told):
    summary.verified(check("failed"))
    line = words(summary, told)
    assert ": no layer repaired; 0.0 MiB" in line
    assert "layer 1: live output failed" in line


def test_without_checks_it_says_so(summary, told):
    load(summary, "alphas")
    assert "; no live check. All processes" in words(summary, told)


def test_a_long_reason_is_cut(summary, told):
    load(summary, "cutlass " + "x" * 1000)
    assert "..." in words(summary, told)
    assert len(told[0]) < 1600


# ---- processes


PROGRAM = """
import os, sys, time
from trtllm_b12x_fix.integrations.trtllm_summary import QuietPeriod, Summary, watch

class Layer: pass
class Log:
    def info(self, line): print(os.getpid(), line, flush=True)

summary = Summary(Log, lambda callback: QuietPeriod(callback, 3600.0))
watch(summary)
kept = []
def load(strategy):
    with summary.quiet.interrupted():
        kept.append(Layer())
        summary.layer(kept[-1], strategy, "why", 0, "versions")
load("alphas")
"""


def lines_of(program: str) -> list[list[str]]:
    done = subprocess.run(
        [sys.executable, "-S", "-c", PROGRAM + program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        check=True,
    )
    assert done.stderr == ""
    return [line.split(" ", 1) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("end", ["", "sys.exit(0)", "kept.clear()"])
def test_a_process_that_ends_at_once_leaves_its_line(end):
    ((_, line),) = lines_of(end)
    assert "alphas in 1 layer" in line


def test_a_child_says_nothing_of_its_parents_layers():
    program = """
if os.fork() == 0:
    sys.exit(0)
os.wait()
"""
    assert len(lines_of(program)) == 1


def test_a_child_that_loads_has_a_line_of_its_own():
    """Also where another thread of the parent held every lock at the time of the fork."""
    program = """
import threading
summary.quiet._lock.acquire(); summary._lock.acquire()
pid = os.fork()
if pid == 0:
    load("cutlass")
    sys.exit(0)
summary.quiet._lock.release(); summary._lock.release()
os.waitpid(pid, 0)
load("alphas")
"""
    (child, first), (parent, second) = lines_of(program)
    assert child != parent
    assert "alphas in 1 layer (why), cutlass in 1 layer (why)" in first
    assert "alphas in 2 layers" in second


def test_a_child_of_a_parent_that_has_told_may_tell_as_well():
    program = """
summary.loading_ended()
pid = os.fork()
if pid == 0:
    load("alphas")
    sys.exit(0)
os.waitpid(pid, 0)
"""
    (parent, _), (child, line) = lines_of(program)
    assert child != parent
    assert "alphas in 2 layers" in line


def test_without_tensorrt_llms_logger_pythons_is_used(caplog, monkeypatch):
    from trtllm_b12x_fix.integrations import trtllm_report

    monkeypatch.delitem(sys.modules, "tensorrt_llm.logger", raising=False)
    with caplog.at_level(logging.INFO, logger="trtllm_b12x_fix"):
        summary = Summary(trtllm_report._logger)
        load(summary, "alphas")
        summary.quiet.finish()
    assert [record.levelname for record in caplog.records] == ["INFO"]
