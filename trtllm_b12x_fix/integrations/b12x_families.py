"""Holding FlashInfer's b12x dispatch to one kernel family, and seeing which one it launched.

What is replaced in FlashInfer's ``moe_dispatch`` for a while, and put back afterwards:

``_FORCED_BACKEND`` (0.6.17 and later, read at every call)
    names the family. FlashInfer itself raises where a shape or token count cannot take it.
``_STATIC_COMPACT_CUTOVER_PAIRS_CACHE`` (0.6.16, which has no such switch)
    holds what ``FLASHINFER_B12X_STATIC_COMPACT_CUTOVER_PAIRS`` gave at its first and only reading:
    0 leaves every call to dynamic, a huge number keeps dynamic out.
``_MICRO_COMPACT_CUTOVER_PAIRS``, ``_MICRO_COMPACT_CUTOVER_PAIRS_MULTI_TOPK`` (0.6.16)
    0 leaves micro's calls to static. Micro's own band is never widened: nobody ran it there.
``_DIRECT_MICRO_MAX_N`` (0.6.17 and later, read at every call)
    0 keeps direct micro out, as the fix does where it misreads input scales.
``_get_*_kernel``
    are observed: the last one called hands out the kernel that is then launched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from trtllm_b12x_fix.emulator.arithmetic import KernelFamily
from trtllm_b12x_fix.errors import B12xFixError, UnsupportedVersionError

#: More routed rows than any call has.
_ALL_PAIRS = 1 << 30

_GETTERS = {
    KernelFamily.DIRECT_MICRO: "_get_direct_micro_kernel",
    KernelFamily.MICRO: "_get_micro_kernel",
    KernelFamily.STATIC: "_get_static_kernel",
    KernelFamily.DYNAMIC: "_get_dynamic_kernel",
}


class NotSelectableError(B12xFixError):
    """The dispatch cannot be made to launch this family for this call."""


def selection(
    dispatch: Any, forced: KernelFamily | None, keep_out: frozenset[KernelFamily]
) -> dict[str, object]:
    """Names of moe_dispatch and the values that hold it to ``forced``."""
    if forced in keep_out:
        raise NotSelectableError("the fix keeps this family out")
    changes: dict[str, object] = {}
    if KernelFamily.DIRECT_MICRO in keep_out:
        changes["_DIRECT_MICRO_MAX_N"] = 0
    if forced is None:
        return changes
    if hasattr(dispatch, "_FORCED_BACKEND"):
        return {**changes, "_FORCED_BACKEND": forced.value.replace("-", "_")}
    if forced is KernelFamily.DIRECT_MICRO:
        raise NotSelectableError("this FlashInfer version never launches direct micro")
    pairs = 0 if forced is KernelFamily.DYNAMIC else _ALL_PAIRS
    changes["_STATIC_COMPACT_CUTOVER_PAIRS_CACHE"] = {"fp4": pairs}
    if forced is KernelFamily.STATIC:
        changes["_MICRO_COMPACT_CUTOVER_PAIRS"] = 0
        changes["_MICRO_COMPACT_CUTOVER_PAIRS_MULTI_TOPK"] = 0
    return changes


@contextmanager
def replaced(module: Any, values: Mapping[str, object]) -> Iterator[None]:
    """Set attributes of a module for a while; none of them may be missing."""
    missing = [name for name in values if not hasattr(module, name)]
    if missing:
        raise UnsupportedVersionError(f"{module.__name__} has no {', '.join(missing)}")
    saved = {name: getattr(module, name) for name in values}
    try:
        for name, value in values.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in saved.items():
            setattr(module, name, value)


class Observer:
    """Stands before the kernel getters and remembers which family was asked for last.

    The dispatch launches what the last getter hands out: direct micro's may be asked and its
    kernel found unfit for the GPU, then micro's or static's follows.
    """

    def __init__(self, dispatch: Any) -> None:
        self.launched: set[KernelFamily] = set()
        self._last: KernelFamily | None = None
        self.getters = {
            name: self._watch(family, getattr(dispatch, name))
            for family, name in _GETTERS.items()
            if hasattr(dispatch, name)
        }

    def _watch(self, family: KernelFamily, getter: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(getter)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self._last = family
            return getter(*args, **kwargs)

        return watched

    def begin(self) -> None:
        self._last = None

    def end(self) -> KernelFamily:
        if self._last is None:
            raise UnsupportedVersionError("the wrapper ran without asking for a known b12x kernel")
        self.launched.add(self._last)
        return self._last
