"""Gate and up whose ``weight_scale_2`` differ: seen while loading, reported with the layer.

TensorRT-LLM takes the larger for both without rescaling the other half's blocks, and its warning
names no layer. The scales it staged are gone when a layer is prepared for b12x, so they are looked
at before ``process_weights_after_loading`` uses them up. Nothing is changed: CUTLASS has the same
weights, and a repair here would make decode and prefill disagree.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from trtllm_b12x_fix.patching import Found, Patch

LOADING = "process_weights_after_loading"
#: Expert to {"w1": scale, "w3": scale, "w2": scale}, while a layer is being loaded.
STAGED = "tmp_weight_scale_2"
_FOUND = "_trtllm_b12x_fix_differing"


def watching(owner: type, loaded: Callable[[Any], None]) -> Patch | None:
    """What looks at a layer's weights while they are loaded; ``None`` where no place is known.

    On the class itself, though it inherits the method: CUTLASS's layers, on every GPU, have the
    base's.

    Args:
        loaded: told of each layer of the class or a subclass: it is to be prepared next.
    """
    if not inspect.isfunction(inspect.getattr_static(owner, LOADING, None)):
        return None
    inherited = LOADING not in vars(owner)

    def replacement(upstream: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(upstream)
        def process_weights_after_loading(
            method: Any, module: Any, *args: Any, **kwargs: Any
        ) -> Any:
            loaded(module)
            try:
                found = _look(getattr(module, STAGED, None))
                if found is not None:
                    setattr(module, _FOUND, found)
            except Exception:  # a look must never stop a load; upstream warns in any case
                setattr(module, _FOUND, None)
            if inherited and isinstance(method, owner):
                # Looked up anew: others may have patched the base since.
                return getattr(super(owner, method), LOADING)(module, *args, **kwargs)
            return upstream(method, module, *args, **kwargs)

        return process_weights_after_loading

    return Patch(owner, LOADING, replacement, found=Found.ANYWHERE)


def _look(staged: Any) -> tuple[int, int, float] | None:
    """Experts that differ, of how many, and the largest ratio; ``None`` where nothing is staged."""
    if not staged:
        return None
    pairs = [(e["w1"], e["w3"]) for e in staged.values() if "w1" in e and "w3" in e]
    if not pairs:
        return None
    gate, up = (torch.stack([pair[i].float().reshape(()).cpu() for pair in pairs]) for i in (0, 1))
    ratio = torch.maximum(gate, up) / torch.minimum(gate, up)
    differ = gate != up
    largest = float(ratio[differ].max()) if bool(differ.any()) else 1.0
    return int(differ.sum()), len(pairs), largest


def differing(module: Any) -> str:
    """What was seen on this layer, in words, or nothing."""
    found = getattr(module, _FOUND, None)
    if not found or not found[0]:
        return ""
    count, experts, ratio = found
    return (
        f"weight_scale_2 of gate and up differ in {count} of {experts} experts, by up to "
        f"{ratio:.4g} times: TensorRT-LLM uses the larger for both, on every backend; the "
        "checkpoint should be exported with one scale for both"
    )
