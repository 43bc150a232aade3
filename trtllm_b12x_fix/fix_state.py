"""What the repair is in a process, per target module and as a whole."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any


class FixState(Enum):
    """From best to worst: of several imported targets, the worst speaks for the process."""

    WAITING = "waiting for the import"
    NOT_NEEDED = "not needed"
    ACTIVE = "active"
    WOULD_REFUSE = "unknown version: would be refused"
    """Nothing is repaired, and a layer that would need it stops the start or goes to CUTLASS."""
    UNHOOKED = "not waiting: no hook"
    NOT_ASKED = "off: not asked for"
    OFF = "off"
    REMOVED = "removed"
    MISSED = "imported without the hook"
    OUT_OF_REACH = "unknown version: out of reach"
    """b12x is prepared where nothing can be patched: on SM120 and SM121 its layers are baked."""
    REPLACED = "replaced by someone else"
    FAILED = "failed"
    UNKNOWN = "unknown"
    """Said by another version of this package."""

    @property
    def is_good(self) -> bool:
        """Whether a process in this state computes with exact scales (or not at all, yet)."""
        good = (FixState.WAITING, FixState.NOT_NEEDED, FixState.ACTIVE, FixState.WOULD_REFUSE)
        return self in good

    @classmethod
    def of(cls, text: object) -> FixState:
        """Back from a record."""
        return next((state for state in cls if state.value == text), cls.UNKNOWN)


@dataclass(frozen=True)
class SymbolStatus:
    """One patched attribute."""

    symbol: str
    state: str
    """In words, as the attribute is now; names whoever replaced it."""


@dataclass(frozen=True)
class TargetStatus:
    """One target module in this process."""

    module: str
    state: FixState
    note: str = ""
    symbols: tuple[SymbolStatus, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """For a record."""
        return {
            "module": self.module,
            "state": self.state.value,
            "note": self.note,
            "symbols": [{"symbol": one.symbol, "state": one.state} for one in self.symbols],
        }


def overall(targets: Iterable[TargetStatus]) -> TargetStatus:
    """The target that speaks for the process; an older path that was never imported does not."""
    order = list(FixState)
    return max(targets, key=lambda target: order.index(target.state))
