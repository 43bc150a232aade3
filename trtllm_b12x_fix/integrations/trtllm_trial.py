"""Calling a layer's live wrapper once, before serving does.

Two things must not happen for the first time inside a CUDA graph capture: FlashInfer's fold of
``w1_alpha`` and ``input_global_scale`` (0.6.17 on), whose result would live in the graph's own
memory, and its copies of padded experts. One eager call has them done.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trtllm_b12x_fix.formats.nvfp4 import CALIBRATION_MAX
from trtllm_b12x_fix.integrations.trtllm_contract import LayerView

#: As many as show that rows do not mix.
TOKENS = 2


@dataclass(frozen=True)
class Trial:
    """Made-up input: x bf16 [T, H], ids int64 [T, K], routing weights fp32 [T, K]."""

    x: Tensor
    ids: Tensor
    weights: Tensor


def make_trial(view: LayerView, top_k: int) -> Trial:
    """N(0,1) at the calibrated amax, to experts drawn at random; the same for the same layer."""
    generator = torch.Generator().manual_seed(0)
    device = view.fc1_alpha.device
    chosen = torch.randn(TOKENS, view.experts, generator=generator).topk(top_k, dim=1)
    x = torch.randn(TOKENS, view.hidden, generator=generator).to(device)
    x = x * (CALIBRATION_MAX / view.fc1_reciprocal / x.abs().max())
    return Trial(
        x.to(torch.bfloat16), chosen.indices.to(device), chosen.values.softmax(dim=1).to(device)
    )


def call(module: Any, view: LayerView, trial: Trial) -> Tensor:
    """The live wrapper's output, copied from the buffer that the next call may reuse.

    Raises:
        Exception: whatever FlashInfer, the compiler or the device brings up.
    """
    # As the forward pass does: FlashInfer keeps workspaces, and what inference mode made cannot be
    # written outside it.
    with torch.inference_mode():
        out: Tensor = module.b12x_wrapper.run(
            x=trial.x,
            token_selected_experts=trial.ids.to(torch.int32),
            token_final_scales=trial.weights,
            **view.entries,
        )
        return out.clone()


def prime(module: Any, view: LayerView) -> str:
    """Have everything done that a graph capture must not do; returns why not, or nothing.

    Without CUDA graphs there is nothing to prime.
    """
    if not getattr(module.b12x_wrapper, "use_cuda_graph", False):
        return ""
    try:
        with torch.inference_mode(False), torch.no_grad():
            call(module, view, make_trial(view, int(module.b12x_wrapper.top_k)))
    except Exception as error:
        words = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return (
            f"{view.name}: the call that prepares b12x for CUDA graphs failed ({words}); warm up "
            "before capturing"
        )
    return ""
