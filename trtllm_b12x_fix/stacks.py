"""The serving stacks that a process may run: which modules are repaired in them, and when.

TensorRT-LLM is repaired where TRTLLM_B12X_FIX asks for it; the start-up file waits for it in every
process. vLLM calls its plugins itself, so there an installed package is asked already.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from trtllm_b12x_fix import startup
from trtllm_b12x_fix.integrations import targets
from trtllm_b12x_fix.settings import Mode

_PLUGIN = "trtllm_b12x_fix.vllm_plugin"


@dataclass(frozen=True)
class Stack:
    """One serving stack."""

    root: str
    """Its top-level package."""
    modules: tuple[str, ...]
    """What the hook waits for."""
    unset: Mode
    """The mode where TRTLLM_B12X_FIX says nothing."""
    is_hooked: Callable[[], bool]
    callback: Callable[[], str]
    """``module:function`` that plans the repair of a module."""
    way_in: str
    """What would put the hook in place, and repair what was imported without it."""


def _plugin_is_in_place() -> bool:
    plugin = sys.modules.get(_PLUGIN)
    return plugin is not None and plugin.is_in_place()


TENSORRT_LLM = Stack(
    "tensorrt_llm",
    targets.TARGET_MODULES,
    Mode.NOT_ASKED,
    startup.is_in_place,
    lambda: targets.CALLBACK,
    "trtllm_b12x_fix.apply()",
)
VLLM = Stack(
    "vllm",
    targets.VLLM_MODULES,
    Mode.AUTO,
    _plugin_is_in_place,
    lambda: targets.VLLM_CALLBACK,
    "trtllm_b12x_fix.vllm_plugin.register()",
)


def stack_of(module: str) -> Stack:
    """The stack that a target module belongs to."""
    return VLLM if module in VLLM.modules else TENSORRT_LLM


def here() -> tuple[Stack, ...]:
    """The stacks that this process has to do with; TensorRT-LLM's where it is neither."""
    vllm = VLLM.is_hooked() or any(name in sys.modules for name in VLLM.modules)
    if not vllm:
        return (TENSORRT_LLM,)
    return (TENSORRT_LLM, VLLM) if TENSORRT_LLM.root in sys.modules else (VLLM,)
