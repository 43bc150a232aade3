"""Read what all processes recorded, say which of them still run, forget the old ones."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from trtllm_b12x_fix.errors import InputError
from trtllm_b12x_fix.fix_state import FixState
from trtllm_b12x_fix.ledger import FAILED, SCHEMA
from trtllm_b12x_fix.ledger_folder import Access, LedgerFolder
from trtllm_b12x_fix.processes import Life, age_seconds, life, place

FORGET_AFTER_SECONDS = 7 * 24 * 3600

#: More than any honest count: a reader must not print, or sum, what is none.
_LARGEST_COUNT = 10**9
_LONGEST_NOTE = 400

_NAME = re.compile(r"(?P<pid>\d{1,10})-(?P<started>\d{1,20})\.json")
_PART = re.compile(r"\.\d{1,10}-\d{1,20}\.json\.part")


@dataclass(frozen=True)
class ProcessStatus:
    """What one process recorded, and whether it still runs."""

    pid: int
    life: Life
    state: FixState
    note: str = ""
    age_s: float | None = None
    """Since it started; None if it has ended or runs elsewhere."""
    command: str = ""
    mode: str = ""
    layers: Mapping[str, int] = field(default_factory=dict)
    checks: Mapping[str, int] = field(default_factory=dict)
    """How many checks of loaded layers ended in which way."""
    warnings: tuple[str, ...] = ()
    checked: tuple[Mapping[str, Any], ...] = ()
    """The last of those checks: layer, outcome and detail."""
    recorded_s_ago: float | None = None
    record: Mapping[str, Any] = field(default_factory=dict)
    """All of it, as the process wrote it."""

    @property
    def is_good(self) -> bool:
        """Whether this process computes as it should, going by its record."""
        return self.state.is_good and not self.checks.get(FAILED)


def read_processes(folder: Path) -> tuple[ProcessStatus, ...]:
    """Every process with a record, live ones first; records of long-gone ones are deleted.

    Raises:
        InputError: the folder cannot be used.
    """
    try:
        with LedgerFolder(folder, Access.READ) as opened:
            found = [
                _read(opened, name, match)
                for name in opened.names()
                if (match := _NAME.fullmatch(name)) is not None
            ]
            _forget_old(opened)
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise InputError(f"ledger {folder} cannot be read: {error.strerror}") from error
    order = list(Life)
    processes = [process for process in found if process is not None]
    return tuple(sorted(processes, key=lambda one: (order.index(one.life), one.pid)))


def _read(folder: LedgerFolder, name: str, match: re.Match[str]) -> ProcessStatus | None:
    pid, started = int(match["pid"]), int(match["started"])
    try:
        record = json.loads(folder.read(name), parse_constant=_finite, parse_float=_finite)
        if not isinstance(record, dict):
            raise ValueError("it is not an object")
        return _interpret(record, pid, started)
    except FileNotFoundError:  # another reader has just forgotten it
        return None
    except Exception as error:  # whatever is in the file: one record hides no other, and no server
        # Its own file name still says whether anyone needs to care.
        alive = life(pid, started, place())
        note = f"record {name} is unreadable: {str(error) or type(error).__name__}"[:_LONGEST_NOTE]
        return ProcessStatus(pid, alive, FixState.UNKNOWN, note, _age(alive, started))


def _interpret(record: dict[str, Any], pid: int, started: int) -> ProcessStatus:
    if record.get("schema") != SCHEMA:
        shown = repr(record.get("schema"))[:40]
        raise ValueError(f"schema {shown} is not {SCHEMA}")
    alive = life(pid, started, _text(record, "place"), _text(record, "program", ""))
    checks = _object(record, "checks")
    return ProcessStatus(
        pid=pid,
        life=alive,
        state=FixState.of(record.get("state")),
        note=_text(record, "note", ""),
        age_s=_age(alive, started),
        command=" ".join(_listed(record, "argv", str)),
        mode=_text(record, "mode", ""),
        layers=_counts(record, "layers"),
        checks=_counts(checks, "counts"),
        warnings=tuple(_listed(record, "warnings", str)),
        checked=tuple(_listed(checks, "last", dict)),
        recorded_s_ago=max(0.0, time.time() - _seconds(record, "written_at")),
        record=record,
    )


_Item = TypeVar("_Item", str, dict[str, Any])


def _finite(text: str) -> float:
    """Python's parser takes NaN and Infinity, which are no JSON, and reads 1e999 as infinity."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no finite number")
    return value


def _text(record: Mapping[str, Any], name: str, default: str | None = None) -> str:
    found = record.get(name, default)
    if not isinstance(found, str):
        raise ValueError(f"{name} is not a text")
    return found


def _object(record: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = record.get(name, {})
    if not isinstance(found, dict):
        raise ValueError(f"{name} is not an object")
    return found


def _listed(record: Mapping[str, Any], name: str, kind: type[_Item]) -> list[_Item]:
    found = record.get(name, [])
    if not isinstance(found, list) or not all(isinstance(one, kind) for one in found):
        raise ValueError(f"{name} is not a list as known")
    return found


def _counts(record: Mapping[str, Any], name: str) -> dict[str, int]:
    found = _object(record, name)
    for what, count in found.items():
        # Python's True is an int, too.
        if type(count) is not int or not 0 <= count <= _LARGEST_COUNT:
            raise ValueError(f"{name} of {what[:40]!r} is not a count")
    return found


def _seconds(record: Mapping[str, Any], name: str) -> float:
    found = record.get(name)
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        raise ValueError(f"{name} is not a time")
    return float(found)


def _age(alive: Life, started: int) -> float | None:
    return age_seconds(started) if alive is Life.LIVE else None


def _forget_old(folder: LedgerFolder) -> None:
    here = place()
    for name in folder.names():
        match = _NAME.fullmatch(name)
        if match is None and _PART.fullmatch(name) is None:
            continue  # not ours to delete
        try:
            if time.time() - folder.changed_at(name) < FORGET_AFTER_SECONDS:
                continue
            # A server may run for weeks without writing again.
            if match and life(int(match["pid"]), int(match["started"]), here) is Life.LIVE:
                continue
            folder.delete(name)
        except OSError:
            continue  # a full or read-only disk does not make the rest untrue
