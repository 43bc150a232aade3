"""Call a function each time one of a few modules has been imported, and hide all traces.

A finder at the head of ``sys.meta_path`` asks the other finders for the module, and lends their
answer a loader that calls back after the module's code ran. That loader hands itself back BEFORE
the code runs: the module, ``inspect``, ``importlib.resources`` and ``pickle`` only ever see the
original. The finder is never used up, so a callback that raised (and thereby failed the import)
is called again by the next attempt, and by ``importlib.reload``.

A namespace package has no code to wait for and is left alone.

Imported in the middle of other imports: nothing but built-in modules, and no ``__future__``.
"""

import sys
from _thread import get_ident

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any


class PostImportFinder:
    """Calls ``callback(module, name)`` once for each time a watched module is loaded."""

    def __init__(
        self, names: "Iterable[str]", callback: "Callable[[ModuleType, str], object]"
    ) -> None:
        self.names = tuple(names)
        self._callback = callback
        self._parents = _parents(self.names)
        self._searching: set[tuple[int, str]] = set()
        self._notified: dict[str, ModuleType] = {}

    def install(self) -> None:
        """Start watching; modules that are loaded already are called back at once.

        Raises:
            RuntimeError: called by the very import it should wait for.
        """
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        for name in self.names:
            self._catch_up(name)

    def uninstall(self) -> None:
        """Stop watching. What callbacks did stays done."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        self._notified.clear()

    def find_spec(
        self,
        fullname: str,
        path: "Sequence[str] | None" = None,
        target: "ModuleType | None" = None,
    ) -> "ModuleSpec | None":
        """What the other finders find, with a loader that calls back; None for other modules."""
        if fullname in self._parents:
            self._move_to_front()
            return None
        if fullname not in self.names:
            self._notice_missed()
            return None
        # Another hook may ask all finders again, this one included, while it is being asked.
        search = (get_ident(), fullname)
        if search in self._searching:
            return None
        self._searching.add(search)
        try:
            spec = self._ask_others(fullname, path, target)
        finally:
            self._searching.discard(search)
        # A finder may keep its specs, and hand out one that has our loader already.
        if spec and spec.loader is not None and not _notifies(spec.loader, self):
            spec.loader = _NotifyingLoader(spec.loader, fullname, self)  # type: ignore[assignment]
        return spec

    def notify(self, module: "ModuleType", name: str) -> None:
        """A watched module was loaded. Not for other callers."""
        if self in sys.meta_path:
            self._callback(module, name)
            self._notified[name] = module

    def _notice_missed(self) -> None:
        # A finder that arrived since the last package was looked for stands before this one and
        # has answered for the target. Once: an error must not fail each import from here on.
        for name in self.names:
            module = sys.modules.get(name)
            if module is None or self._notified.get(name) is module or _is_half_made(module):
                continue
            self._notified[name] = module
            self._callback(module, name)

    def _ask_others(
        self, fullname: str, path: "Sequence[str] | None", target: "ModuleType | None"
    ) -> "ModuleSpec | None":
        for finder in list(sys.meta_path):
            find_spec = getattr(finder, "find_spec", None)
            if finder is self or find_spec is None:
                continue
            spec: ModuleSpec | None = find_spec(fullname, path, target)
            if spec is not None:
                return spec
        return None

    def _move_to_front(self) -> None:
        # Finders that arrived later (editable installs, other hooks) stand before this one and
        # would answer for the target. The others keep their order, and an import that is walking
        # this list right now still meets each of them.
        if sys.meta_path[0] is not self:
            sys.meta_path[:] = [self, *(one for one in sys.meta_path if one is not self)]

    def _catch_up(self, name: str) -> None:
        # Only for a module that is there: whoever holds its lock may be waiting for a package that
        # this thread is importing.
        if _is_half_made(sys.modules.get(name)):
            _wait_for_other_threads(name)
        module = sys.modules.get(name)
        if module is None or self._notified.get(name) is module:
            return
        if _is_half_made(module):
            raise RuntimeError(f"{name} is being imported by the caller: ask before or after that")
        self.notify(module, name)


class _NotifyingLoader:
    """Stands in for a loader from the moment it is found until the module's code runs."""

    def __init__(self, loader: "Any", name: str, finder: PostImportFinder) -> None:
        self._loader = loader
        self._name = name
        self._finder = finder

    def create_module(self, spec: "ModuleSpec") -> "ModuleType | None":
        create = getattr(self._loader, "create_module", None)
        module: ModuleType | None = None if create is None else create(spec)
        return module

    def exec_module(self, module: "ModuleType") -> None:
        spec = getattr(module, "__spec__", None)
        if getattr(spec, "loader", None) is self:
            spec.loader = self._loader  # type: ignore[union-attr]
        if getattr(module, "__loader__", None) is self:
            module.__loader__ = self._loader
        if hasattr(self._loader, "exec_module"):
            self._loader.exec_module(module)
        else:  # a loader of before Python 3.4: it fills the module that sys.modules has
            self._loader.load_module(self._name)
        # A module may have put something else in its place.
        self._finder.notify(sys.modules.get(self._name, module), self._name)

    def __getattr__(self, name: str) -> "Any":
        # Not self._loader: on a half-made copy that would ask for itself for ever.
        return getattr(object.__getattribute__(self, "_loader"), name)


def _notifies(loader: "Any", finder: PostImportFinder) -> bool:
    while isinstance(loader, _NotifyingLoader):
        if loader._finder is finder:
            return True
        loader = loader._loader
    return False


def _parents(names: "Iterable[str]") -> frozenset[str]:
    found = set()
    for name in names:
        while "." in name:
            name = name.rpartition(".")[0]
            found.add(name)
    return frozenset(found)


def _is_half_made(module: "ModuleType | None") -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def _wait_for_other_threads(name: str) -> None:
    """Return once no other thread is importing ``name``; what the import statement itself does."""
    import _frozen_importlib

    wait = getattr(_frozen_importlib, "_lock_unlock_module", None)
    if wait is not None:
        wait(name)
