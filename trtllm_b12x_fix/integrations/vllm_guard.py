"""SM100: non-gated NVFP4 layers stay off trtllm-gen until somebody has shown that it is right.

vllm#52308: Nemotron-3-Nano (relu2, no gate) on a B200 writes fluent, wrong text with the backend
that vLLM chooses. Refusing the monolithic class alone makes it choose the modular one, with the
same padding, shuffle and scalars; refusing both makes it choose FLASHINFER_CUTEDSL, which nobody
has seen right either. Only FLASHINFER_CUTLASS was, so for non-gated layers all before it in vLLM's
order refuse, as any class refuses a layer: ``is_supported_config`` says no, with a reason.

Gated layers are not touched, and a backend that was asked for by name is obeyed, with a warning.
On a GPU where upstream's own answer is no, nothing is asked at all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from trtllm_b12x_fix.errors import UnsupportedVersionError
from trtllm_b12x_fix.integrations.vllm_cutlass import BACKEND, cutlass_class
from trtllm_b12x_fix.integrations.vllm_report import OFF, Reporter
from trtllm_b12x_fix.patching import Found, Patch, TargetPlan
from trtllm_b12x_fix.settings import OnUnknown

ASKED = "is_supported_config"
#: Shown by vLLM wherever it says why it does not take a backend.
REASON = "non-gated layers, kept off until parity is shown (trtllm-b12x-fix, vllm#52308)"
_UNPROVEN = "not known to be right on SM100 (vllm#52308: fluent, wrong text)"
_AUTO = "auto"

Answer = tuple[bool, "str | None"]


def plan_guard(module: ModuleType, reporter: Reporter, policy: OnUnknown) -> TargetPlan:
    """What to patch in a module of experts that vLLM prefers to CUTLASS."""
    owners = [
        one
        for one in vars(module).values()
        if isinstance(one, type)
        and one.__module__ == module.__name__
        and callable(getattr(one, ASKED, None))
    ]
    versions = {"vllm": reporter.version}
    if not owners:
        words = (
            f"vLLM {reporter.version}: {module.__name__} has no class with {ASKED}, so non-gated "
            "NVFP4 layers are not kept off trtllm-gen. On SM100 set --moe-backend "
            "flashinfer_cutlass for them, or report the version"
        )
        reporter.warn(words)
        return TargetPlan(versions=versions, refusal=words)
    guard = _Guard(reporter, policy)
    patches = tuple(Patch(one, ASKED, guard.around(one), found=Found.ANYWHERE) for one in owners)
    names = ", ".join(one.__name__ for one in owners)
    note = f"{names}: non-gated NVFP4 layers go to {BACKEND} unless a backend is asked for"
    return TargetPlan(patches, note, versions)


class _Guard:
    """The replacement of ``is_supported_config`` on one class after another."""

    def __init__(self, reporter: Reporter, policy: OnUnknown) -> None:
        self._reporter = reporter
        self._policy = policy

    def around(self, owner: type) -> Callable[[Any], Any]:
        def replacement(found: Any) -> Any:
            upstream: Callable[..., Answer] = getattr(found, "__func__", found)

            @functools.wraps(upstream)
            def is_supported_config(*args: Any, **kwargs: Any) -> Any:
                answer = upstream(*args, **kwargs)
                return self._answer(owner, answer, args, kwargs)

            # Upstream's is a static method that is given the class.
            return staticmethod(is_supported_config)

        return replacement

    def _answer(
        self, owner: type, answer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not isinstance(answer, tuple) or len(answer) != 2:
            # Of no GPU in particular, so nobody is stopped.
            self._reporter.warn(str(self._unknown(owner)))
            return answer
        if not answer[0]:
            return answer
        config = _config_of(args, kwargs)
        if config is None:
            return self._refuse_all(owner)
        if config.is_act_and_mul:
            return answer
        name = owner.__name__
        if config.moe_backend != _AUTO:
            self._reporter.warn(
                f"--moe-backend {config.moe_backend} is obeyed: non-gated NVFP4 layers run on "
                f"{name}, {_UNPROVEN}; --moe-backend flashinfer_cutlass was seen right"
            )
            return answer
        if words := _why_not_cutlass(args, kwargs, owner):
            self._reporter.warn(
                f"non-gated NVFP4 layers run on {name}, {_UNPROVEN}: {BACKEND} does not take them "
                f"({words})"
            )
            return answer
        self._reporter.say(
            f"non-gated NVFP4 layers run on {BACKEND}: vLLM's own choice is {_UNPROVEN}. "
            f"--moe-backend NAME chooses another; {OFF}"
        )
        return False, f"kernel does not support {REASON}"

    def _refuse_all(self, owner: type) -> Answer:
        error = self._unknown(owner)
        if self._policy is OnUnknown.FAIL:
            self._reporter.failed("an NVFP4 layer", str(error))
            raise error
        self._reporter.warn(f"{error} ({owner.__name__} is not chosen for any layer)")
        return False, f"kernel does not support {REASON}"

    def _unknown(self, owner: type) -> UnsupportedVersionError:
        return UnsupportedVersionError(
            f"vLLM {self._reporter.version}: {owner.__name__}.{ASKED} answers in another way, or "
            "is not given what tells gated layers from others. Set TRTLLM_B12X_FIX=off and, for "
            "non-gated models on SM100, --moe-backend flashinfer_cutlass, or report the version"
        )


def _config_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """vLLM's FusedMoEConfig among the arguments, wherever it stands."""
    for one in (*args, *kwargs.values()):
        if not isinstance(one, type) and hasattr(one, "is_act_and_mul"):
            return one if hasattr(one, "moe_backend") else None
    return None


def _why_not_cutlass(args: tuple[Any, ...], kwargs: dict[str, Any], owner: type) -> str:
    """Why CUTLASS does not take the very layer that ``owner`` was asked about, or nothing."""

    def its_own(one: Any) -> Any:
        return cutlass if one is owner else one

    try:
        cutlass = cutlass_class()
        supported, reason = getattr(cutlass, ASKED)(
            *(its_own(one) for one in args), **{name: its_own(one) for name, one in kwargs.items()}
        )
    except Exception as error:  # whatever another version raises: nobody loses vLLM to a question
        return f"{type(error).__name__}: {error}"
    return "" if supported else str(reason or "no reason given")
