"""A class of TensorRT-LLM whose work is not known: refused when it is used, and not before.

The class is imported on every GPU and built on SM120 and SM121 alone, so failing its import would
stop servers that have nothing to do with it. What is patched instead is the first thing that
happens to it: ``__init__``, which stops the start, or ``create_weights``, the first method that
gets the layer, whose decode can then be sent to CUTLASS.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NoReturn

from trtllm_b12x_fix.integrations.trtllm_contract import ContractError, layer_name
from trtllm_b12x_fix.integrations.trtllm_decode import send_to_cutlass
from trtllm_b12x_fix.integrations.trtllm_layer import LayerOutcome, is_weight_only
from trtllm_b12x_fix.integrations.trtllm_report import Reporter
from trtllm_b12x_fix.patching import Found, Patch
from trtllm_b12x_fix.repair import Strategy
from trtllm_b12x_fix.settings import OnUnknown

CREATING = "create_weights"
CONSTRUCTOR = "__init__"


def refusing(owner: type, words: str, reporter: Reporter, policy: OnUnknown) -> Patch:
    """What makes the class refuse.

    Args:
        words: what is not known; names version, symbol and way out.
    """
    if policy is OnUnknown.FAIL:
        hint = "TRTLLM_B12X_FIX_ON_UNKNOWN=cutlass would send decode to CUTLASS"
        return _refusing_to_be_built(owner, f"{words}. ({hint})", reporter)
    if not _gets_the_layer(getattr(owner, CREATING, None)):
        hint = f"it has no {CREATING}(self, module), so decode cannot be sent to CUTLASS"
        return _refusing_to_be_built(owner, f"{words}. ({hint})", reporter)

    def replacement(upstream: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(upstream)
        def create_weights(method: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
            with reporter.summary.quiet.interrupted():
                made = upstream(method, module, *args, **kwargs)
                # By its name alone, before anything is prepared: W4A16 was never baked.
                if not is_weight_only(module):
                    _decode_elsewhere(module, words, reporter)
                return made

        return create_weights

    return Patch(owner, CREATING, replacement, found=Found.ANYWHERE)


def _refusing_to_be_built(owner: type, words: str, reporter: Reporter) -> Patch:
    def replacement(upstream: Callable[..., Any]) -> Callable[..., NoReturn]:
        @functools.wraps(upstream)
        def __init__(_method: Any, *_args: Any, **_kwargs: Any) -> NoReturn:
            reporter.failed("a layer", words)
            raise ContractError(words)

        return __init__

    return Patch(owner, CONSTRUCTOR, replacement, found=Found.ANYWHERE)


def _decode_elsewhere(module: Any, words: str, reporter: Reporter) -> None:
    send_to_cutlass(module, reporter.version)
    reporter.warn(f"{words} (decode of its layers goes to CUTLASS)")
    reason = f"decode goes to CUTLASS: {words}"
    outcome = LayerOutcome(layer_name(module), Strategy.CUTLASS, reason)
    reporter.layer(module, outcome, "of any version")


def _gets_the_layer(method: Any) -> bool:
    try:
        parameters = list(inspect.signature(method).parameters.values())
    except (TypeError, ValueError):
        return False
    return len(parameters) > 1 and parameters[1].name == "module"
