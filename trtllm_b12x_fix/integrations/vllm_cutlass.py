"""Taking one layer of vLLM off b12x: it computes with FlashInfer's CUTLASS experts instead.

vLLM prepares weights for both backends alike (rows [up; gate], swizzled scales, the layer's largest
input scale), so the experts object itself becomes the other class: whoever holds it keeps it.
"""

from __future__ import annotations

import importlib
from typing import Any

from trtllm_b12x_fix.integrations.trtllm_contract import ContractError
from trtllm_b12x_fix.integrations.vllm_layer import WAYS_OUT, layer_name

BACKEND = "FLASHINFER_CUTLASS"
_EXPERTS = "vllm.model_executor.layers.fused_moe.experts.flashinfer_cutlass_moe"
#: Of the b12x class: the scales it hands over, and what it calls with them.
_B12X_ATTRIBUTES = ("w1_sf_mma", "w2_sf_mma", "_fc2_input_scale", "_wrapper", "_ensure_wrapper")
_KEYS = "vllm.model_executor.layers.quantization.utils.quant_utils"


def cutlass_class() -> Any:
    """vLLM's class.

    Raises:
        ContractError: this vLLM has none.
    """
    try:
        return importlib.import_module(_EXPERTS).FlashInferExperts
    except Exception as error:
        raise ContractError(f"{_EXPERTS}.FlashInferExperts cannot be imported: {error}") from error


def why_not_cutlass(config: Any) -> str:
    """Why a layer cannot run on CUTLASS, or nothing."""
    try:
        owner, keys = cutlass_class(), importlib.import_module(_KEYS)
        supported, reason = owner.is_supported_config(
            owner, config, keys.kNvfp4Static, keys.kNvfp4Dynamic, owner.activation_format()
        )
    except Exception as error:  # whatever another version of it raises
        return f"{type(error).__name__}: {error}"
    return "" if supported else str(reason or "no reason given")


def become_cutlass(experts: Any, version: str, name: str = "a layer") -> None:
    """Turn an experts object into that of the CUTLASS backend, not prepared yet.

    Raises:
        ContractError: this vLLM cannot run the layer on CUTLASS.
    """
    config, quant = getattr(experts, "moe_config", None), getattr(experts, "quant_config", None)
    if words := why_not_cutlass(config):
        raise ContractError(
            f"vLLM {version}: {name} cannot run on {BACKEND} either ({words}): {WAYS_OUT}"
        )
    owner = cutlass_class()
    for attribute in _B12X_ATTRIBUTES:
        experts.__dict__.pop(attribute, None)
    experts.__class__ = owner
    owner.__init__(experts, moe_config=config, quant_config=quant)


def send_to_cutlass(experts: Any, layer: Any, version: str) -> None:
    """Take a layer off b12x; its tensors must be as they were before upstream's method.

    Raises:
        ContractError: this vLLM cannot run the layer on CUTLASS.
    """
    become_cutlass(experts, version, layer_name(layer))
    experts.process_weights_after_loading(layer)
