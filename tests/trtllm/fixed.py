"""Set-ups for tests/trtllm/worker.py: switch the fix on in that process."""

from __future__ import annotations

import importlib

import trtllm_b12x_fix
from trtllm_b12x_fix.integrations import tensorrt_llm
from trtllm_b12x_fix.integrations.targets import TARGET_MODULES
from trtllm_b12x_fix.settings import Settings


def install() -> None:
    """Patch the stand-in that is on the path now, as the import hook would."""
    for name in TARGET_MODULES:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        for patch in tensorrt_llm.on_import(module, Settings.from_environment()).patches:
            patch.install()


def hook() -> None:
    """Switch the fix on as a launch script does; the patch comes with the import."""
    trtllm_b12x_fix.apply()
