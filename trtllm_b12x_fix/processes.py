"""Who a process is: its number, when it started, where it runs, and its command without secrets."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Sequence
from enum import Enum
from pathlib import Path

_LONGEST_ARGUMENT = 80
_ARGUMENTS = 4
_SECRET_NAME = re.compile(r"key|token|secret|passw|credential|auth", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"^(hf_|sk-|nvapi-|ghp_|Bearer )")
_URL_LOGIN = re.compile(r"(://)[^/@\s]+@")
_HIDDEN = "***"


class Life(Enum):
    """Whether the process that left a record still runs."""

    LIVE = "live"
    ENDED = "ended"
    ELSEWHERE = "elsewhere"
    """Another host or container: its process numbers mean nothing here."""
    REPLACED = "became another program"
    """Number and start time outlive exec; what was recorded is of the program before."""


def start_time(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0 if there is no such process.

    Together with the number it names a process for good: numbers are given out again.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    # The command's name is in parentheses and may itself contain spaces and parentheses.
    fields = text.rpartition(")")[2].split()
    if fields[0] in ("Z", "X"):  # dead, and only waiting for its parent to look
        return 0
    return int(fields[19])


def program(pid: int | str = "self") -> str:
    """The file that a process runs; empty where that cannot be known.

    Not its command line: libraries that set a process's title overwrite that.
    """
    try:
        # An upgrade of Python unlinks the file that a long-running server was started from.
        return os.readlink(f"/proc/{pid}/exe").removesuffix(" (deleted)")
    except OSError:
        return ""


def age_seconds(started: int) -> float:
    """How long ago a start time was."""
    uptime = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    return max(0.0, uptime - started / os.sysconf("SC_CLK_TCK"))


def place() -> str:
    """Names the set of process numbers this process is counted in: host, and container if any."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = "pid:[unknown]"
    return f"{platform.node()} {namespace}"


def life(pid: int, started: int, where: str, recorded_program: str = "") -> Life:
    """Whether this very process runs, and neither another one under its number nor another program.

    ``recorded_program`` is what :func:`program` said in it; empty where that was not known.
    """
    if where != place():
        return Life.ELSEWHERE
    if not started or start_time(pid) != started:
        return Life.ENDED
    now = program(pid)
    if recorded_program and now and now != recorded_program:
        return Life.REPLACED
    return Life.LIVE


def shortened_arguments(argv: Sequence[str] | None = None) -> list[str]:
    """The first few words of the command line, cut, and without what looks like a secret."""
    argv = getattr(sys, "argv", []) if argv is None else argv
    shown: list[str] = []
    hide_next = False
    for word in argv[:_ARGUMENTS]:
        name, equals, _value = word.partition("=")
        is_option = word.startswith("-")
        if hide_next and not is_option:
            shown.append(_HIDDEN)
        elif equals and _SECRET_NAME.search(name):
            shown.append(f"{name[:_LONGEST_ARGUMENT]}={_HIDDEN}")
        elif _SECRET_VALUE.search(word):
            shown.append(_HIDDEN)
        else:
            shown.append(_cut(_URL_LOGIN.sub(rf"\1{_HIDDEN}@", word)))
        hide_next = is_option and not equals and bool(_SECRET_NAME.search(name))
    return shown


def _cut(word: str) -> str:
    return word if len(word) <= _LONGEST_ARGUMENT else word[: _LONGEST_ARGUMENT - 3] + "..."
