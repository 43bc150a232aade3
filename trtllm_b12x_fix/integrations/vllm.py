"""vLLM: what to patch in a module that was just imported.

Two modules of trtllm-gen and CuTe-DSL experts, imported wherever an NVFP4 layer is built, get the
guard of :mod:`.vllm_guard`. The b12x experts, imported for those who asked vLLM for that backend,
get the repair of :mod:`.vllm_b12x`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from importlib import metadata
from types import ModuleType
from typing import Any

from trtllm_b12x_fix.errors import UnsupportedVersionError
from trtllm_b12x_fix.integrations.targets import VLLM_B12X
from trtllm_b12x_fix.integrations.vllm_cutlass import BACKEND, become_cutlass
from trtllm_b12x_fix.integrations.vllm_guard import plan_guard
from trtllm_b12x_fix.integrations.vllm_report import Reporter
from trtllm_b12x_fix.patching import Found, Patch, TargetPlan
from trtllm_b12x_fix.settings import OnUnknown, Settings

CLASS = "FlashInferB12xExperts"
_CONSTRUCTOR = "__init__"


def on_import(module: ModuleType, settings: Settings) -> TargetPlan:
    """What to patch in a module of vLLM's experts.

    Raises:
        UnsupportedVersionError: the b12x module has no such class.
    """
    reporter = Reporter(vllm_version())
    if module.__name__ == VLLM_B12X:
        return _plan_b12x(module, settings, reporter)
    return plan_guard(module, reporter, settings.on_unknown)


def vllm_version() -> str:
    """Version of the installed vLLM, from its metadata."""
    try:
        return metadata.version("vllm")
    except Exception:  # absent, or metadata that cannot be read: it is for messages alone
        return "of unknown version"


def _plan_b12x(module: ModuleType, settings: Settings, reporter: Reporter) -> TargetPlan:
    # Not at the top: the guard alone has no use for the repair's numerics.
    from trtllm_b12x_fix.integrations import vllm_b12x
    from trtllm_b12x_fix.integrations.vllm_layer import WAYS_OUT

    versions = {"vllm": reporter.version}
    owner = getattr(module, CLASS, None)
    if not isinstance(owner, type):
        raise UnsupportedVersionError(
            f"vLLM {reporter.version}: {module.__name__} has no class {CLASS}: {WAYS_OUT}"
        )
    if words := _unknown_work(owner, vllm_b12x.PREPARING):
        words = f"vLLM {reporter.version}: {words}: {WAYS_OUT}"
        return TargetPlan(
            (_refusing(owner, words, reporter, settings.on_unknown),),
            versions=versions,
            refusal=words,
        )
    process = vllm_b12x.Process(settings, reporter.version)
    if not getattr(module.__spec__, "_initializing", False):
        process.tell_of_earlier_layers(owner)
    patch = Patch(owner, vllm_b12x.PREPARING, process.replacement, undone=vllm_b12x.let_go)
    return TargetPlan((patch,), f"{CLASS}.{vllm_b12x.PREPARING}", versions)


def _unknown_work(owner: type, name: str) -> str:
    """What is not as known about the method that prepares b12x, or nothing."""
    method = vars(owner).get(name)
    if method is None:
        return f"{CLASS} does not define {name}, so where it prepares b12x's scales is not known"
    try:
        if not inspect.isfunction(method):
            raise TypeError
        signature = inspect.signature(method)
    except (TypeError, ValueError):
        return f"{CLASS}.{name} is a {type(method).__name__}, known is a method (self, layer)"
    parameters = list(signature.parameters.values())
    needed = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(parameters) == len(needed) == 2 and needed[1].name == "layer":
        return ""
    return f"{CLASS}.{name} takes {signature}, known is (self, layer)"


def _refusing(owner: type, words: str, reporter: Reporter, policy: OnUnknown) -> Patch:
    """A class whose work is not known: built for those who asked for it, and refused then."""

    def replacement(upstream: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(upstream)
        def __init__(experts: Any, *args: Any, **kwargs: Any) -> None:
            if policy is OnUnknown.FAIL:
                reporter.failed("a layer", words)
                raise UnsupportedVersionError(
                    f"{words}. (TRTLLM_B12X_FIX_ON_UNKNOWN=cutlass would run such layers on "
                    f"{BACKEND})"
                )
            upstream(experts, *args, **kwargs)
            become_cutlass(experts, reporter.version)
            reporter.warn(f"{words} (its layers run on {BACKEND})")

        return __init__

    return Patch(owner, _CONSTRUCTOR, replacement, found=Found.ANYWHERE)
