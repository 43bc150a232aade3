"""Replace one attribute of one class, know at any time whether it is still replaced, undo it.

The attribute is set in the class's own ``__dict__``, so code that imported the class before sees
the replacement, too. What was meant is kept apart from what is: :meth:`Patch.state` looks at the
attribute each time. The marker on a replacement is for people; identity decides, because
``functools.wraps`` copies markers to other people's wrappers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any

from trtllm_b12x_fix import __version__
from trtllm_b12x_fix.errors import B12xFixError, UnsupportedVersionError

#: On each replacement, with the version of this package that made it.
MARKER = "__trtllm_b12x_fix__"

_MISSING = object()
_LONGEST_CHAIN = 100


class PatchConflictError(B12xFixError):
    """Someone else replaced what is patched here."""


class PatchState(Enum):
    """What the attribute is now."""

    ACTIVE = "active"
    WRAPPED = "wrapped by someone else"
    """Another wrapper stands before ours and names it in ``__wrapped__``."""
    REPLACED_BY_OTHERS = "replaced by someone else"
    REMOVED = "removed"
    NOT_INSTALLED = "not installed"

    @property
    def in_effect(self) -> bool:
        """Whether calls reach the replacement, as far as can be seen."""
        return self in (PatchState.ACTIVE, PatchState.WRAPPED)


class Found(Enum):
    """Where the attribute has to be for a patch to fit."""

    OWN = "defined by the class itself"
    ANYWHERE = "defined by the class, or inherited"
    """What was inherited is inherited again once the patch is undone."""


def as_it_is(_original: object) -> str | None:
    """The expectation of a patch that fits whatever it finds."""
    return None


@dataclass(frozen=True)
class Patch:
    """One attribute to replace.

    ``replacement`` is called with the original and returns what takes its place; ``expectation``
    is called with the original before that and returns None, or a sentence on what is not as
    known.
    """

    owner: type
    attribute: str
    replacement: Callable[[Any], Any]
    expectation: Callable[[Any], str | None] = as_it_is
    undone: Callable[[], None] = lambda: None
    """Called when the original is back: for what the replacement changed elsewhere."""
    found: Found = Found.OWN

    @property
    def symbol(self) -> str:
        """Full name of what is replaced."""
        return f"{self.owner.__module__}.{self.owner.__qualname__}.{self.attribute}"

    def install(self) -> PatchState:
        """Put the replacement in place; does nothing if it is there, wrapped or not.

        Raises:
            UnsupportedVersionError: the class does not define the attribute, or the expectation
                is not met.
            PatchConflictError: someone else replaced ours, or another copy of this package
                patched it.
        """
        state = self.state()
        if state.in_effect:
            return state
        current = self._current()
        if state is PatchState.REPLACED_BY_OTHERS and current is not _INSTALLED[self._key].original:
            raise PatchConflictError(f"{self.symbol} was {self.describe()}")
        self._require_original(current)
        inherits = current is _MISSING
        made = self.replacement(getattr(self.owner, self.attribute) if inherits else current)
        setattr(made, MARKER, __version__)
        # Not locked until here: what `replacement` imports may wait for another thread's import.
        with _LOCK:
            if self.state().in_effect:  # another thread was faster
                return self.state()
            if self._current() is not current:
                raise PatchConflictError(f"{self.symbol} changed while it was being replaced")
            setattr(self.owner, self.attribute, made)
            _INSTALLED[self._key] = Installed(self, current, made)
            _REMOVED.discard(self._key)
        return self.verify()

    def verify(self) -> PatchState:
        """The state, if the replacement is in effect.

        Raises:
            PatchConflictError: it is not.
        """
        state = self.state()
        if not state.in_effect:
            raise PatchConflictError(f"{self.symbol}: {self.describe()}")
        return state

    def undo(self) -> PatchState:
        """Put the original back; does nothing if the replacement was never, or is no longer, ours.

        Raises:
            PatchConflictError: someone else replaced or wrapped it: theirs is left alone.
        """
        with _LOCK:
            state = self.state()
            if state in (PatchState.NOT_INSTALLED, PatchState.REMOVED):
                return state
            installed = _INSTALLED[self._key]
            current = self._current()
            if current is not installed.made and current is not installed.original:
                raise PatchConflictError(f"{self.symbol} was {self.describe()}: left as it is")
            if installed.original is not _MISSING:
                setattr(self.owner, self.attribute, installed.original)
            elif current is not _MISSING:
                delattr(self.owner, self.attribute)
            del _INSTALLED[self._key]
            _REMOVED.add(self._key)
            installed.patch.undone()
        return self.state()

    def state(self) -> PatchState:
        """What the attribute is now: looked up, not remembered."""
        installed = _INSTALLED.get(self._key)
        if installed is None:
            return PatchState.REMOVED if self._key in _REMOVED else PatchState.NOT_INSTALLED
        current = self._current()
        if current is installed.made:
            return PatchState.ACTIVE
        if _reaches(current, installed.made):
            return PatchState.WRAPPED
        return PatchState.REPLACED_BY_OTHERS

    def describe(self) -> str:
        """The state in words; names whoever replaced or wrapped ours."""
        state = self.state()
        if state not in (PatchState.REPLACED_BY_OTHERS, PatchState.WRAPPED):
            return state.value
        current = self._current()
        if current is _INSTALLED[self._key].original:
            return f"{state.value}: the original was put back"
        if current is _MISSING:
            return f"{state.value}: the attribute was deleted"
        return f"{state.value}: {_name(current)}"

    @property
    def _key(self) -> tuple[type, str]:
        return self.owner, self.attribute

    def _current(self) -> Any:
        return vars(self.owner).get(self.attribute, _MISSING)

    def _require_original(self, current: object) -> None:
        if self.found is Found.ANYWHERE and current is _MISSING:
            current = getattr(self.owner, self.attribute, _MISSING)
        if current is _MISSING:
            raise UnsupportedVersionError(
                f"{self.symbol} does not exist: {self.owner.__qualname__} does not define it"
                + (" itself" if self.found is Found.OWN else " and inherits none")
            )
        for one in _chain(current):
            version = getattr(one, MARKER, None)
            if version is not None:
                raise PatchConflictError(
                    f"{self.symbol} is patched already, by another copy of this package "
                    f"(version {version})"
                )
        complaint = self.expectation(current)
        if complaint is not None:
            raise UnsupportedVersionError(f"{self.symbol} is not as known: {complaint}")


@dataclass(frozen=True)
class Installed:
    """A patch that was installed, with both sides of it."""

    patch: Patch
    original: Any
    made: Any


@dataclass(frozen=True)
class TargetPlan:
    """What an integration wants done to a module that was just imported.

    No patches and no refusal means that nothing needs a repair there; ``note`` says why.
    ``refusal`` says what is not known there: the patches refuse whoever builds such a layer, and
    without patches nothing can be refused.
    """

    patches: tuple[Patch, ...] = ()
    note: str = ""
    versions: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Package name to version, of what the plan depends on."""
    refusal: str = ""


_LOCK = threading.RLock()
_INSTALLED: dict[tuple[type, str], Installed] = {}
_REMOVED: set[tuple[type, str]] = set()


def installed() -> tuple[Installed, ...]:
    """All patches of this process, in the order they were installed."""
    return tuple(_INSTALLED.values())


def _chain(function: object) -> list[object]:
    """The object and whatever it says it wraps."""
    chain = [function]
    while len(chain) < _LONGEST_CHAIN:
        try:
            function = getattr(function, "__wrapped__", _MISSING)
        except Exception:  # other people's objects may do anything when asked
            break
        if function is _MISSING or any(function is one for one in chain):
            break
        chain.append(function)
    return chain


def _reaches(function: object, wanted: object) -> bool:
    return any(one is wanted for one in _chain(function))


def _name(thing: object) -> str:
    kind = type(thing)
    qualname = getattr(thing, "__qualname__", kind.__qualname__)
    module = getattr(thing, "__module__", kind.__module__)
    code = getattr(thing, "__code__", None)
    if code is not None:
        # functools.wraps copies the other two from ours; the file is the wrapper's own.
        return f"{qualname} of {module} ({code.co_filename}:{code.co_firstlineno})"
    return f"{qualname} of {module}"
