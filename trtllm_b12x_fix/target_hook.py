"""The import hook on TensorRT-LLM's MoE module: imported when TensorRT-LLM is, never before."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from trtllm_b12x_fix.import_hook import PostImportFinder
from trtllm_b12x_fix.integrations.targets import TARGET_MODULES
from trtllm_b12x_fix.startup import is_asked

#: By name: this module is imported while a package is being looked for, and should stay small.
HANDLER = "trtllm_b12x_fix.fix"


def _on_import(module: ModuleType, name: str) -> None:
    try:
        import_module(HANDLER).on_import(module, name)
    except Exception:
        if is_asked():
            raise


FINDER = PostImportFinder(TARGET_MODULES, _on_import)
