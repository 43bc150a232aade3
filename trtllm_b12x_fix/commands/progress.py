"""One line of progress on a terminal's standard error; nothing elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType


class ProgressLine:
    """Call it with what is being done; leaving the ``with`` block wipes the line."""

    def __init__(self, name: str, *, quiet: bool) -> None:
        self._name = name
        self._active = not quiet and sys.stderr is not None and sys.stderr.isatty()
        self._start = time.monotonic()

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._active:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def __call__(self, doing: str) -> None:
        if self._active:
            seconds = time.monotonic() - self._start
            sys.stderr.write(f"\r\x1b[K{self._name}: {doing} ({seconds:.0f} s)")
            sys.stderr.flush()
