"""Judges one program: guest and checker in a sandbox each, the verdict read from the checker alone.

Two processes, two sets of namespaces, and three pipes. The guest holds the reading end of the
calls and the writing end of the answers. The checker holds the other two ends and, alone, the pipe
that the verdict comes through: the guest has no descriptor, no process number and no file that
leads to it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from evals.sandbox.blocks import SandboxError
from evals.sandbox.bubblewrap import Sandbox
from evals.sandbox.inside.outcome import STARTED, CodeOutcome
from evals.sandbox.launch import Confined, Ending, readable
from evals.sandbox.limits import Limits

_GUEST = ("codec", "channel", "confine", "guest")
_CHECKER = ("codec", "channel", "confine", "outcome", "checker")
_LONGEST_REPORT = 1 << 16


@dataclass(frozen=True)
class FunctionTest:
    """A function to be written, and its test.

    Attributes:
        entry_point: the function's name.
        test: source that defines ``check(candidate)``.
        reference: source of the helpers that the test calls by name, and of a sound function: some
            tests compare with it. It comes from the data set and runs beside the test.
    """

    entry_point: str
    test: str
    reference: str


@dataclass(frozen=True)
class CodeVerdict:
    """What became of a program.

    Attributes:
        detail: words of the program or of the test; text from a model, to be shown escaped.
        calls: how often the test called the function.
    """

    outcome: CodeOutcome
    detail: str
    calls: int

    @property
    def passed(self) -> bool:
        return self.outcome is CodeOutcome.PASSED


def judge(
    sandbox: Sandbox, function_test: FunctionTest, program: str, limits: Limits
) -> CodeVerdict:
    """Run a program against a test; threads may call this at the same time.

    Args:
        program: source that defines the function; it is trusted in nothing.

    Raises:
        SandboxError: the sandbox failed, which says nothing about the program.
    """
    with ExitStack() as stack:
        requests, replies, reports = (stack.enter_context(_Pipe()) for _ in range(3))
        shared: dict[str, Any] = {
            "limits": asdict(limits),
            "entry_point": function_test.entry_point,
        }
        guest_job = {**shared, "program": program}
        guest_job |= {"requests": requests.reading, "replies": replies.writing}
        guest = Confined(sandbox, _GUEST, guest_job, [requests.reading, replies.writing])
        stack.callback(_end_quietly, guest)
        requests.close_reading()
        replies.close_writing()
        checker_job = {
            **shared,
            "test": function_test.test,
            "reference": function_test.reference,
            "requests": requests.writing,
            "replies": replies.reading,
            "report": reports.writing,
        }
        passed_on = [requests.writing, replies.reading, reports.writing]
        checker = Confined(sandbox, _CHECKER, checker_job, passed_on)
        stack.callback(_end_quietly, checker)
        requests.close_writing()
        replies.close_reading()
        reports.close_writing()
        watch = _Watch(guest, checker, reports.reading, limits)
        watch.run()
        return _conclude(watch, limits)


class _Pipe:
    """Both ends of a pipe; what is still open is closed at the end."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()

    def __enter__(self) -> _Pipe:
        return self

    def __exit__(self, *_: object) -> None:
        self.close_reading()
        self.close_writing()

    def close_reading(self) -> None:
        if self.reading >= 0:
            os.close(self.reading)
            self.reading = -1

    def close_writing(self) -> None:
        if self.writing >= 0:
            os.close(self.writing)
            self.writing = -1


def _end_quietly(confined: Confined) -> None:
    with contextlib.suppress(SandboxError, OSError):
        confined.end()


class _Watch:
    """Reads what comes until there is a verdict, an end, or no time left."""

    def __init__(self, guest: Confined, checker: Confined, reports: int, limits: Limits) -> None:
        self.guest, self.checker, self.limits = guest, checker, limits
        self.started = False
        self.out_of_time = False
        self._reports = reports
        self._report = b""
        self._began = time.monotonic()
        self._deadline = self._began + limits.start_seconds

    @property
    def seconds(self) -> float:
        """Since the first sign of life, by the clock."""
        return time.monotonic() - self._began

    @property
    def too_much_output(self) -> bool:
        return self.guest.printed > self.limits.output_bytes

    def run(self) -> None:
        """Return once nothing that could change the verdict is left to wait for."""
        sources = {self._reports, self.guest.output, self.checker.output}
        while self._reports in sources and not self.too_much_output and not self.out_of_time:
            for ready in self._ready(sources):
                more = self._read_report() if ready == self._reports else self._read(ready)
                if not more:
                    sources.discard(ready)
        if self.report().get("outcome") == CodeOutcome.CRASHED.value:
            self._await_guest(sources)

    def report(self) -> dict[str, str | int]:
        """The checker's verdict, empty without one."""
        _, _, line = self._report.partition(b"\n")
        with contextlib.suppress(ValueError):
            report: dict[str, str | int] = json.loads(line)
            return report
        return {}

    def _ready(self, sources: set[int]) -> Iterator[int]:
        left = self._deadline - time.monotonic()
        self.out_of_time = left <= 0
        yield from readable(sources, left)

    def _read(self, output: int) -> bool:
        return (self.guest if output == self.guest.output else self.checker).read_output()

    def _read_report(self) -> bool:
        part = os.read(self._reports, _LONGEST_REPORT)
        self._report += part
        if not self.started and self._report.startswith(STARTED.encode()):
            self.started = True
            self._began = time.monotonic()
            self._deadline = self._began + self.limits.wall_seconds
        return bool(part) and len(self._report) < _LONGEST_REPORT

    def _await_guest(self, sources: set[int]) -> None:
        """The guest's line is dead; how the guest itself ends tells why."""
        sources &= {self.guest.output}
        while self.guest.poll() is None and not self.out_of_time and not self.too_much_output:
            for ready in self._ready(sources) if sources else ():
                if not self._read(ready):
                    sources.clear()
            if not sources:
                self.out_of_time = time.monotonic() > self._deadline
                time.sleep(0.005)


def _conclude(watch: _Watch, limits: Limits) -> CodeVerdict:
    guest, checker = watch.guest.end(), watch.checker.end()
    report = watch.report()
    calls = int(report.get("calls", 0))

    def verdict(outcome: CodeOutcome, detail: str = "") -> CodeVerdict:
        return CodeVerdict(outcome, detail, calls)

    # Before all else: the guest may have printed this much before the checker was there.
    if watch.too_much_output:
        return verdict(CodeOutcome.OUTPUT_LIMIT, f"printed more than {limits.output_bytes:,} bytes")
    if not watch.started:
        raise SandboxError(f"the sandbox did not start: {_said(watch)}")
    if not report:
        if watch.out_of_time:
            return verdict(CodeOutcome.TIME_LIMIT, f"{limits.wall_seconds:g} s by the clock")
        if _spent(checker, watch.seconds, limits):
            return verdict(CodeOutcome.TIME_LIMIT, "the test could not finish with its answers")
        raise SandboxError(f"the checker ended with status {checker.status}: {_said(watch)}")
    outcome = CodeOutcome(report["outcome"])
    if outcome is CodeOutcome.CRASHED and _spent(guest, watch.seconds, limits):
        return verdict(CodeOutcome.TIME_LIMIT, f"{limits.cpu_seconds} s of CPU")
    if outcome is CodeOutcome.CRASHED:
        return verdict(outcome, _how(guest))
    return verdict(outcome, str(report["detail"]))


def _spent(ending: Ending, seconds: float, limits: Limits) -> bool:
    """Whether a process ended because its CPU time was up.

    One that ignores the soft limit's signal is killed at the hard limit, a second later; one that
    kills itself does so sooner.
    """
    hard = ending.by(signal.SIGKILL) and seconds > limits.cpu_seconds
    return ending.by(signal.SIGXCPU) or hard


def _how(guest: Ending) -> str:
    if guest.killed_here:
        return "it closed its channel and went on"
    if guest.status > 128:
        return f"ended by signal {guest.status - 128}"
    return f"ended with status {guest.status}"


def _said(watch: _Watch) -> str:
    kept = watch.checker.kept[-300:] + watch.guest.kept[-300:]
    return kept.decode("utf-8", "replace").strip() or "it said nothing"
