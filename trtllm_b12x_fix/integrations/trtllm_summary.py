"""The one INFO line of a process: what became of all its layers, written once loading has ended.

Nothing tells when that is: TensorRT-LLM's loader walks over the layers and goes on to other work.
So the line comes when no layer has been touched for a while, or when the interpreter ends, by
whichever is first. Loading again later changes the record that ``status`` reads, and adds no line.
Warnings and failures do not wait for this.

Nothing here may break loading or serving: what goes wrong costs the line, not the server.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from trtllm_b12x_fix import __version__

if TYPE_CHECKING:
    from trtllm_b12x_fix.integrations.trtllm_verify import Verification

#: Between two layers lies other layers' work, well under a second each. The live check of a layer
#: may compile for a minute, but that is time in which a layer is being worked on.
QUIET_SECONDS = 10.0
#: How long the end of the interpreter waits for a line that is being written.
_PATIENCE_SECONDS = 2.0
_LONGEST_REASON = 160

_PASSED, _FAILED = "passed", "failed"


class QuietPeriod:
    """Calls back when nothing has happened for a while; again if something happens after that."""

    def __init__(self, callback: Callable[[], None], seconds: float = QUIET_SECONDS) -> None:
        self._callback = callback
        self._seconds = seconds
        self.after_fork()

    def after_fork(self) -> None:
        """Start afresh: a child has neither its parent's timer nor the threads that held locks."""
        self._lock = threading.Lock()
        self._busy = 0
        self._timer: threading.Timer | None = None

    @contextlib.contextmanager
    def interrupted(self) -> Iterator[None]:
        """While this is open it is not quiet; the period begins anew when the last is closed."""
        with self._lock:
            self._busy += 1
            self._stop()
        try:
            yield
        finally:
            with self._lock:
                self._busy -= 1
                if not self._busy:
                    self._start()

    def finish(self) -> None:
        """The interpreter ends: call back now, if that is still to come."""
        with self._lock:
            timer = self._timer
            self._stop()
        if timer is not None and timer.is_alive():
            timer.join(_PATIENCE_SECONDS)  # it may be at it already
        self._callback()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start(self) -> None:
        self._stop()
        timer = threading.Timer(self._seconds, self._callback)
        timer.daemon = True
        timer.name = "trtllm-b12x-fix"
        self._timer = timer
        # No more threads, or the interpreter is ending: then finish() has it.
        with contextlib.suppress(RuntimeError):
            timer.start()


class Summary:
    """What became of the layers of this process, of all models and reloads."""

    def __init__(
        self,
        logger: Callable[[], Any],
        quiet: Callable[[Callable[[], None]], QuietPeriod] = QuietPeriod,
    ) -> None:
        self._logger = logger
        self.quiet = quiet(self.loading_ended)
        #: Looked at each time loading has ended: layers that nobody prepared in our sight.
        self.checks_at_end: list[Callable[[], None]] = []
        self._strategies: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._layers: Counter[str] = Counter()
        self._reasons: dict[str, str] = {}
        self._freed = 0
        self._states: Counter[str] = Counter()
        self._worst: Verification | None = None
        self._versions = ""
        self.after_fork()

    def after_fork(self) -> None:
        """A child has its parent's layers, and a line of its own as soon as it prepares one."""
        self._lock = threading.Lock()
        self._told = False
        self._has_news = False
        self.quiet.after_fork()

    def strategy_of(self, module: Any) -> str | None:
        """What was recorded for a layer before."""
        with self._lock:
            return self._strategies.get(module)

    def layer(self, module: Any, strategy: str, reason: str, freed: int, versions: str) -> None:
        """A layer was prepared, for the first time or again: it counts once, as it is now."""
        with self._lock:
            before = self._strategies.get(module)
            self._strategies[module] = strategy
            if before != strategy:
                self._layers[strategy] += 1
                self._layers -= Counter({before: 1} if before else {})
                self._freed += freed
            self._reasons.setdefault(strategy, reason)
            self._versions = versions
            self._has_news = True

    def verified(self, verification: Verification) -> None:
        """A layer was checked live."""
        with self._lock:
            self._states[verification.state.value] += 1
            if self._worst is None or _gravity(verification) > _gravity(self._worst):
                self._worst = verification
            self._has_news = True

    def loading_ended(self) -> None:
        """Look for what went past us, and write the line, if it was not written before."""
        for check in tuple(self.checks_at_end):
            with contextlib.suppress(Exception):  # on a thread of its own nobody would catch it
                check()
        with contextlib.suppress(Exception):
            with self._lock:
                if self._told or not self._has_news:
                    return
                self._told = True
                words = self._words()
            # Not locked: a log that blocks must not block the end of the interpreter.
            self._logger().info(words)

    def _words(self) -> str:
        parts = [
            f"{strategy} in {_count(count, 'layer')} ({_cut(self._reasons[strategy])})"
            for strategy, count in self._layers.items()
        ]
        on = f" on {self._versions}" if self._versions else ""
        return (
            f"trtllm-b12x-fix {__version__}{on}: {', '.join(parts) or 'no layer repaired'}; "
            f"{self._freed / 2**20:,.1f} MiB of baked scales given back; "
            f"{_checked(self._worst, self._states)}. All processes: trtllm-b12x-fix status"
        )


def _checked(worst: Verification | None, states: Counter[str]) -> str:
    if worst is None:
        return "no live check"
    words = f"{worst.layer}: {worst.words}"
    if states.total() == 1:
        return words
    counted = ", ".join(f"{count} {state}" for state, count in states.items())
    return f"{_count(states.total(), 'live check')}, {counted}; the worst is {words}"


def _gravity(verification: Verification) -> tuple[int, float]:
    state = verification.state.value
    rank = {_PASSED: 0, _FAILED: 2}.get(state, 1)
    return rank, verification.from_repaired or 0.0


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number:,} {what}s"


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 3] + "..."


def watch(summary: Summary) -> None:
    """Have the line written at the end of the interpreter, too, and forks start afresh."""
    atexit.register(summary.quiet.finish)
    os.register_at_fork(after_in_child=summary.after_fork)
