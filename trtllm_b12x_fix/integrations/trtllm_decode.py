"""Sending one layer's decode to CUTLASS, which reads the untouched parameters.

The backend class compares the number of tokens with ``_PREFILL_VIA_CUTLASS_THRESHOLD``, a class
attribute that it reads through ``self``: 0 on the layer itself sends every call of that layer to
CUTLASS and leaves all others alone.
"""

from __future__ import annotations

from typing import Any

from trtllm_b12x_fix.integrations.trtllm_contract import ContractError, layer_name

THRESHOLD = "_PREFILL_VIA_CUTLASS_THRESHOLD"
ROUTE = "_route_to_cutlass"


def send_to_cutlass(module: Any, version: str) -> None:
    """Make the layer's decode leave b12x, and drop what only b12x needs.

    Raises:
        ContractError: this TensorRT-LLM decides in another way.
    """
    kind = type(module)
    if not isinstance(getattr(kind, THRESHOLD, None), int) or not hasattr(kind, ROUTE):
        raise ContractError(
            f"TensorRT-LLM {version}: {kind.__name__} has no {THRESHOLD} or no {ROUTE}, so decode "
            f"of {layer_name(module)} cannot be sent to CUTLASS: set moe_config.backend: CUTLASS"
        )
    setattr(module, THRESHOLD, 0)
    # Its scales are baked, and nothing calls it any more.
    module._b12x_weights = None
    module.b12x_wrapper = None


def restore_decode(module: Any) -> None:
    """Take back what an earlier preparation of the layer decided."""
    module.__dict__.pop(THRESHOLD, None)


def goes_to_cutlass(module: Any) -> bool:
    """Whether the layer's decode was sent to CUTLASS here."""
    return module.__dict__.get(THRESHOLD) == 0
