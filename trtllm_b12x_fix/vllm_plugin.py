"""vLLM's plugin: what the entry point ``vllm.general_plugins`` names, called in each process.

Installing the package switches it on, TRTLLM_B12X_FIX=off switches it off. Nothing is patched and
nothing of vLLM or torch imported here: the hook waits for the modules of the few MoE backends that
are concerned, and vLLM imports those when it chooses a backend for an NVFP4 layer.
"""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from types import ModuleType

from trtllm_b12x_fix.import_hook import PostImportFinder
from trtllm_b12x_fix.integrations.targets import VLLM_B12X, VLLM_MODULES
from trtllm_b12x_fix.startup import is_asked

#: By name, as in target_hook.py.
HANDLER = "trtllm_b12x_fix.fix"

#: Below vLLM's own, which has a handler; the root logger has none there.
_LOG = logging.getLogger("vllm.trtllm_b12x_fix")


def register() -> None:
    """Wait for the MoE backends; any number of times is once."""
    FINDER.install()


def is_in_place() -> bool:
    """Whether an import of one of them would be noticed."""
    return FINDER in sys.meta_path


def _on_import(module: ModuleType, name: str) -> None:
    try:
        import_module(HANDLER).on_import(module, name)
    except Exception as error:
        # The b12x backend is imported for those alone who asked vLLM for it. The others are
        # imported on every GPU, and nobody there may lose vLLM to a fault of ours.
        if name == VLLM_B12X or is_asked():
            raise
        _LOG.warning(
            "trtllm-b12x-fix: %s is left as it is: %s: %s (TRTLLM_B12X_FIX=off silences this)",
            name,
            type(error).__name__,
            error,
        )


FINDER = PostImportFinder(VLLM_MODULES, _on_import)
