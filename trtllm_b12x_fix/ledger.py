"""Each process leaves word of what was done in it: one small file, replaced whole at each change.

A record is made by the process it tells about, and its state is read off the patched attribute at
the moment of writing. Nothing here may break serving: whatever goes wrong is one warning.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import platform
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from trtllm_b12x_fix import __version__
from trtllm_b12x_fix.ledger_folder import Access, LedgerFolder
from trtllm_b12x_fix.processes import place, program, shortened_arguments, start_time
from trtllm_b12x_fix.settings import ledger_directory, own_variables

SCHEMA = 1

#: The newest are kept; counts are of all.
_KEPT_CHECKS = 8
_KEPT_WARNINGS = 8
_LONGEST_TEXT = 400
#: A server that forks a helper each second must not fill the folder.
_CHILDREN_WRITTEN = 32

_LOG = logging.getLogger("trtllm_b12x_fix")


#: Values of an outcome that a reader of records knows; others are shown as they are.
PASSED, FAILED = "passed", "failed"


@dataclass(frozen=True)
class LayerCheck:
    """One layer checked after loading."""

    layer: str
    outcome: Enum
    """Its value is recorded: "passed", "failed", or in words why it is neither."""
    detail: str = ""


class Ledger:
    """The record of this process."""

    _current: Ledger | None = None
    #: What the repair is right now; set by fix.py, called at each writing.
    _probe: Callable[[], Mapping[str, Any]] | None = None
    #: Of this process, since its ledger was made.
    _forks = 0
    _watching = False

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.started = start_time(self.pid)
        self._lock = threading.Lock()
        self._facts: dict[str, Any] = {}
        self._versions: dict[str, str] = {}
        self._layers: dict[str, int] = {}
        self._bytes_freed = 0
        self._checks: dict[str, int] = {}
        self._last_checks: deque[dict[str, str]] = deque(maxlen=_KEPT_CHECKS)
        self._warnings: deque[str] = deque(maxlen=_KEPT_WARNINGS)
        self._complained = False

    @classmethod
    def for_process(cls) -> Ledger:
        """The one ledger of this process; a forked child gets its own, with what it inherited."""
        current = cls._current
        if current is None:
            current = cls._current = cls()
            cls._watch()
        elif current.pid != os.getpid():
            current = cls._current = current._inherited()
        return current

    @classmethod
    def set_probe(cls, probe: Callable[[], Mapping[str, Any]]) -> None:
        """``probe`` tells what the repair is at the time it is called."""
        cls._probe = staticmethod(probe)

    def record(self, *, versions: Mapping[str, str] | None = None, **facts: Any) -> None:
        """Keep versions of other packages and JSON-ready facts, by name, and write."""
        with self._lock:
            self._versions.update(versions or {})
            self._facts.update(facts)
        self.write()

    def record_layer(
        self,
        strategy: str,
        bytes_freed: int = 0,
        check: LayerCheck | None = None,
        warning: str = "",
        instead_of: str | None = None,
    ) -> None:
        """One more layer was loaded with this strategy; write.

        ``instead_of`` is the strategy that the same layer was recorded with before.
        """
        with self._lock:
            if instead_of is not None:
                self._layers[instead_of] -= 1
                if not self._layers[instead_of]:
                    del self._layers[instead_of]
            self._layers[strategy] = self._layers.get(strategy, 0) + 1
            self._bytes_freed += bytes_freed
        if check is not None:
            self._keep_check(check)
        if warning:
            self._keep_warning(warning)
        self.write()

    def record_check(self, check: LayerCheck) -> None:
        """A layer that was recorded before has been checked; write."""
        self._keep_check(check)
        self.write()

    def record_warning(self, warning: str) -> None:
        """Something a reader of the status should know; write."""
        self._keep_warning(warning)
        self.write()

    def write(self) -> None:
        """Replace this process's file; a failure is one warning per process."""
        try:
            self._write()
        except Exception as error:  # a full disk, a taken folder, a fact that is not JSON: serve on
            if not self._complained:
                self._complained = True
                _LOG.warning("`trtllm-b12x-fix status` will not see this process: %s", error)

    def _write(self) -> None:
        with self._lock:
            content = json.dumps(self.as_json(), indent=1, default=str)
            with LedgerFolder(ledger_directory(), Access.WRITE) as folder:
                folder.write(f"{self.pid}-{self.started}.json", content + "\n")

    def as_json(self) -> dict[str, Any]:
        """The whole record, its state re-read."""
        now = {} if Ledger._probe is None else dict(Ledger._probe())
        return {
            "schema": SCHEMA,
            "pid": self.pid,
            "started": self.started,
            "place": place(),
            "written_at": time.time(),
            "executable": sys.executable,
            "program": program(),
            "argv": shortened_arguments(),
            "package": __version__,
            "python": platform.python_version(),
            "variables": own_variables(),
            **now,
            "versions": {**now.get("versions", {}), **self._versions},
            "layers": dict(self._layers),
            "bytes_freed": self._bytes_freed,
            "checks": {"counts": dict(self._checks), "last": list(self._last_checks)},
            "warnings": list(self._warnings),
            "facts": dict(self._facts),
        }

    def _keep_check(self, check: LayerCheck) -> None:
        outcome = str(check.outcome.value)
        detail = check.detail[:_LONGEST_TEXT]
        with self._lock:
            self._checks[outcome] = self._checks.get(outcome, 0) + 1
            self._last_checks.append({"layer": check.layer, "outcome": outcome, "detail": detail})

    def _keep_warning(self, warning: str) -> None:
        with self._lock:
            self._warnings.append(warning[:_LONGEST_TEXT])

    def _inherited(self) -> Ledger:
        child = Ledger()
        child._facts = dict(self._facts)
        child._versions = dict(self._versions)
        child._layers = dict(self._layers)
        child._bytes_freed = self._bytes_freed
        child._checks = dict(self._checks)
        child._last_checks.extend(self._last_checks)
        child._warnings.extend(self._warnings)
        return child

    @classmethod
    def _watch(cls) -> None:
        """Once in a process and all its forks, which inherit both registrations."""
        if Ledger._watching:
            return
        Ledger._watching = True
        atexit.register(cls._write_last)
        os.register_at_fork(before=cls._count_fork, after_in_child=cls._after_fork)

    @classmethod
    def _count_fork(cls) -> None:
        Ledger._forks += 1

    @classmethod
    def _after_fork(cls) -> None:
        """A child computes with what it inherited, whether it loads a layer itself or not.

        Nothing is waited for: the child's ledger has a lock of its own, since another thread of the
        parent may have held the parent's. Nor is anything logged: handlers have locks, too.
        """
        parent = cls._current
        number, Ledger._forks = Ledger._forks, 0
        if parent is None or parent.pid == os.getpid():
            return
        try:
            child = cls._current = parent._inherited()
            if number <= _CHILDREN_WRITTEN:
                child._write()
        except Exception:  # a later write of the child will say why
            return

    @classmethod
    def _write_last(cls) -> None:
        # What others did to the attribute after the last layer was loaded would go unseen.
        if cls._current is not None and cls._current.pid == os.getpid():
            cls._current.write()
