"""The live check of a repaired layer of vLLM: :mod:`.trtllm_verify`, with vLLM's names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from trtllm_b12x_fix.emulator.contract import KernelContract
from trtllm_b12x_fix.integrations.trtllm_contract import LayerView
from trtllm_b12x_fix.integrations.trtllm_layer import LayerOutcome
from trtllm_b12x_fix.integrations.trtllm_verify import Verification, VerifyState, verify_layer
from trtllm_b12x_fix.integrations.vllm_layer import Originals
from trtllm_b12x_fix.repair import InputScales, Strategy, input_scales
from trtllm_b12x_fix.settings import ActScale


def verify(
    wrapper: Any,
    before: Originals,
    entries: dict[str, Tensor],
    strategy: Strategy,
    scale: ActScale,
    contract: KernelContract,
) -> Verification:
    """Run FlashInfer's own wrapper on two tokens and compare; see :func:`verify_layer`.

    Args:
        wrapper: the wrapper itself, nothing of ours around it.
        entries: what the repair passes to it.
    """
    if not before.is_emulated:
        words = f"not verified: {before.activation_name} cannot be emulated"
        return Verification(before.name, VerifyState.NOT_VERIFIED, words)
    view = _view(before, entries, scale)
    module = SimpleNamespace(
        b12x_wrapper=wrapper, w3_w1_weight=before.fc1.weight, w2_weight=before.fc2.weight
    )
    return verify_layer(module, LayerOutcome(before.name, strategy, "", view=view), contract)


def _view(before: Originals, entries: dict[str, Tensor], scale: ActScale) -> LayerView:
    layer = before.moe_layer(scale)
    with torch.inference_mode(False), torch.no_grad():
        fc1_scale, fc2_scale = input_scales(layer, InputScales.LAYER)
        return LayerView(
            name=before.name,
            activation=before.activation,
            experts=layer.experts,
            hidden=layer.hidden,
            fc1_rows=layer.fc1.rows,
            intermediate=layer.intermediate,
            w1_block_scale=before.fc1.block_scale,
            w2_block_scale=before.fc2.block_scale,
            fc1_reciprocal=1.0 / fc1_scale,
            fc2_reciprocal=1.0 / fc2_scale,
            fc1_alpha=layer.fc1.weight_scale_2 * fc1_scale,
            fc2_alpha=layer.fc2.weight_scale_2 * fc2_scale,
            fc1_weight_scale_2=layer.fc1.weight_scale_2,
            fc2_weight_scale_2=layer.fc2.weight_scale_2,
            entries={"w1_weight": before.fc1.weight, "w2_weight": before.fc2.weight, **entries},
        )
