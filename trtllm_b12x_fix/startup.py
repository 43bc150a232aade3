"""What ``trtllm_b12x_fix.pth`` runs at every start of Python: it puts one small guard in place.

Nothing is patched and no variable is read here. TRTLLM... variables that a launch script sets
reach an MPI worker after its start-up, so the question is asked when the target is imported. The
guard waits for TensorRT-LLM's first import and then gives its place to the real hook.

Each import here would cost every Python process of the environment 0.1 to 0.3 ms: there is none.
"""

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

#: Read by settings.py as well, which would be too slow to import here.
VARIABLE = "TRTLLM_B12X_FIX"

_ROOT = "tensorrt_llm"


class _Guard:
    """A finder that finds nothing, and calls :func:`arm` when TensorRT-LLM is looked for."""

    def find_spec(
        self,
        fullname: str,
        path: "Sequence[str] | None" = None,  # noqa: ARG002 - the protocol's
        target: "ModuleType | None" = None,  # noqa: ARG002
    ) -> "ModuleSpec | None":
        if fullname.startswith(_ROOT):
            try:
                arm()
            except Exception:
                if is_asked():
                    raise
        return None


_GUARD = _Guard()


def install() -> None:
    """Wait for TensorRT-LLM; twice is once."""
    if is_in_place():
        return
    if _ROOT in sys.modules:
        arm()
    else:
        sys.meta_path.insert(0, _GUARD)


def arm() -> None:
    """Put the real hook in place; a target that is imported already is dealt with now.

    Raises:
        B12xFixError: it is, and cannot be repaired.
    """
    from trtllm_b12x_fix.target_hook import FINDER

    if _GUARD in sys.meta_path:
        # In place, by one assignment: an import may be walking this list right now.
        place = sys.meta_path.index(_GUARD)
        sys.meta_path[place : place + 1] = [] if FINDER in sys.meta_path else [FINDER]
    FINDER.install()


def uninstall() -> None:
    """Stop waiting."""
    if _GUARD in sys.meta_path:
        sys.meta_path.remove(_GUARD)
    hook = sys.modules.get("trtllm_b12x_fix.target_hook")
    if hook is not None:
        hook.FINDER.uninstall()


def is_in_place() -> bool:
    """Whether an import of TensorRT-LLM would be noticed."""
    hook = sys.modules.get("trtllm_b12x_fix.target_hook")
    return _GUARD in sys.meta_path or (hook is not None and hook.FINDER in sys.meta_path)


def is_asked() -> bool:
    """Whether a fault of ours may fail an import.

    Whoever did not ask for the repair must not lose TensorRT-LLM to a fault in it, such as this
    package being replaced on disk while the process runs.
    """
    import os

    return bool(os.environ.get(VARIABLE))
