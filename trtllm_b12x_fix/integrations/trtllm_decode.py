"""Sending one layer's decode to CUTLASS, which reads the untouched parameters.

The backend class compares the number of tokens with ``_PREFILL_VIA_CUTLASS_THRESHOLD``, a class
attribute that it reads through ``self``: 0 on the layer itself sends every call of that layer to
CUTLASS and leaves all others alone.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from trtllm_b12x_fix.integrations.trtllm_contract import ContractError, layer_name

THRESHOLD = "_PREFILL_VIA_CUTLASS_THRESHOLD"
ROUTE = "_route_to_cutlass"
#: On a layer that was sent there: its own threshold before, or that it had none.
_BEFORE = "_trtllm_b12x_fix_threshold"


def send_to_cutlass(module: Any, version: str) -> int:
    """Make the layer's decode leave b12x, and drop what only b12x needs.

    Returns:
        Bytes of baked block scales given back.

    Raises:
        ContractError: this TensorRT-LLM decides in another way.
    """
    kind = type(module)
    if not isinstance(getattr(kind, THRESHOLD, None), int) or not hasattr(kind, ROUTE):
        raise ContractError(
            f"TensorRT-LLM {version}: {kind.__name__} has no {THRESHOLD} or no {ROUTE}, so decode "
            f"of {layer_name(module)} cannot be sent to CUTLASS: set moe_config.backend: CUTLASS"
        )
    if _BEFORE not in module.__dict__:
        setattr(module, _BEFORE, module.__dict__.get(THRESHOLD))
    setattr(module, THRESHOLD, 0)
    freed = baked_bytes(module)
    # Its scales are baked, and nothing calls it any more.
    module._b12x_weights = None
    module.b12x_wrapper = None
    return freed


def baked_bytes(module: Any) -> int:
    """Of a layer's b12x block scales that lie in no parameter; 0 where it is not as known."""
    entries = getattr(module, "_b12x_weights", None)
    if not isinstance(entries, dict):
        return 0
    freed = 0
    for key, parameter in (
        ("w1_weight_sf", "w3_w1_weight_scale"),
        ("w2_weight_sf", "w2_weight_scale"),
    ):
        scales, own = entries.get(key), getattr(module, parameter, None)
        if isinstance(scales, Tensor) and isinstance(own, Tensor):
            apart = scales.untyped_storage().data_ptr() != own.untyped_storage().data_ptr()
            freed += scales.numel() * scales.element_size() if apart else 0
    return freed


def restore_decode(module: Any) -> None:
    """Take back what an earlier preparation of the layer decided, and nothing else."""
    if _BEFORE not in module.__dict__:
        return
    own = module.__dict__.pop(_BEFORE)
    module.__dict__.pop(THRESHOLD, None)
    if own is not None:
        setattr(module, THRESHOLD, own)


def goes_to_cutlass(module: Any) -> bool:
    """Whether the layer's decode was sent to CUTLASS here."""
    return module.__dict__.get(THRESHOLD) == 0
