"""New entries of ``_b12x_weights``: intact block scales, and who carries weight_scale_2.

Block scales stay where TensorRT-LLM loaded them: what the wrapper gets is a view of the parameters
that CUTLASS prefill reads, so the baked copy is freed and none takes its place.
"""

from __future__ import annotations

import enum
from typing import Any

import torch
from torch import Tensor

from trtllm_b12x_fix.formats import scale_layout
from trtllm_b12x_fix.integrations.trtllm_contract import (
    INPUT_GLOBAL_SCALE,
    ContractError,
    LayerView,
)
from trtllm_b12x_fix.repair import Strategy

#: Below this ``weight_scale_2``, dividing by its square leaves fp32's range.
_SMALLEST_RESCALE = 1e-19


class ScaleState(enum.Enum):
    """What upstream did to the block scales it hands to the wrapper."""

    BAKED = "baked"
    INTACT = "intact"
    UNKNOWN = "unknown"


def scale_state(view: LayerView) -> ScaleState:
    """By their bytes: one tile of rows of the first and the last expert, both projections.

    Raises:
        ContractError: the wrapper's layout of block scales is not the one known.
    """
    for key, scales in (
        ("w1_weight_sf", view.w1_block_scale),
        ("w2_weight_sf", view.w2_block_scale),
    ):
        _mma(view, key, scales)
    states = {
        _state(view.entries[key], scales, factor, expert)
        for key, scales, factor in (
            ("w1_weight_sf", view.w1_block_scale, view.fc1_alpha * view.fc1_reciprocal),
            ("w2_weight_sf", view.w2_block_scale, view.fc2_alpha * view.fc2_reciprocal),
        )
        for expert in {0, view.experts - 1}
    }
    return states.pop() if len(states) == 1 else ScaleState.UNKNOWN


def _state(entry: Tensor, scales: Tensor, factor: Tensor, expert: int) -> ScaleState:
    """``factor`` is upstream's own: an ulp beside the weight_scale_2 that some layers keep, and
    enough to round a tie the other way."""
    if entry.untyped_storage().data_ptr() == scales.untyped_storage().data_ptr():
        return ScaleState.INTACT
    mine = scales[expert : expert + 1, : scale_layout.ROW_TILE]
    baked = (mine.float() * factor[expert]).to(torch.float8_e4m3fn)
    handed = _bytes(entry.view(torch.uint8)[:, :, :1, ..., expert])
    # Baked first: where both agree (weight_scale_2 of 1), replacing changes nothing.
    for state, expected in ((ScaleState.BAKED, baked), (ScaleState.INTACT, mine)):
        if torch.equal(handed, _bytes(scale_layout.to_mma(expected.view(torch.uint8))[..., 0])):
            return state
    return ScaleState.UNKNOWN


def _bytes(scales: Tensor) -> Tensor:
    return scales.reshape(-1)


def new_entries(view: LayerView, strategy: Strategy) -> dict[str, Tensor]:
    """What to replace in ``_b12x_weights``; see :mod:`trtllm_b12x_fix.repair` for why.

    All tensors are ordinary ones, made outside inference mode: FlashInfer's wrapper asks for their
    version when it folds the alphas.

    Raises:
        ContractError: the wrapper's layout of block scales is not the one known.
    """
    with torch.inference_mode(False), torch.no_grad():
        entries = {
            "w1_weight_sf": _mma(view, "w1_weight_sf", view.w1_block_scale),
            "w2_weight_sf": _mma(view, "w2_weight_sf", view.w2_block_scale),
            "w2_alpha": _own(view.fc2_alpha),
        }
        weight_scale_2 = view.fc1_weight_scale_2
        if strategy is Strategy.ALPHAS:
            entries["w1_alpha"] = _own(weight_scale_2)
            entries[INPUT_GLOBAL_SCALE] = _own(1.0 / view.fc1_reciprocal)
            entries["fc2_input_scale"] = _own(1.0 / view.fc2_reciprocal)
        else:
            _check_range(view, weight_scale_2)
            scale = 1.0 / view.fc2_reciprocal
            entries["w1_alpha"] = _own((1.0 / view.fc1_reciprocal).expand(view.experts))
            # Divided twice: the square may leave fp32's range where the quotient does not.
            entries["fc2_input_scale"] = _own(scale / weight_scale_2 / weight_scale_2)
        return entries


def _mma(view: LayerView, key: str, scales: Tensor) -> Tensor:
    mine = scale_layout.to_mma(scales)
    upstream = view.entries[key]
    if (mine.shape, mine.dtype) != (upstream.shape, upstream.dtype):
        raise ContractError(
            f"{view.name}: FlashInfer's layout of block scales is {upstream.dtype} "
            f"{list(upstream.shape)}, known is {mine.dtype} {list(mine.shape)}"
        )
    return mine


def _own(tensor: Tensor) -> Tensor:
    """A small tensor of ours: contiguous, with a version, on nobody else's memory."""
    return tensor.to(torch.float32).clone(memory_format=torch.contiguous_format)


def _check_range(view: LayerView, weight_scale_2: Tensor) -> None:
    smallest, expert = weight_scale_2.min(dim=0)
    if float(smallest) < _SMALLEST_RESCALE:
        raise ContractError(
            f"{view.name}, expert {int(expert)}: weight_scale_2 {float(smallest):.3g} is too small "
            "to be carried by fc2_input_scale; use FlashInfer 0.6.17 or later"
        )


def carries_weight_scale_2(entries: dict[str, Any]) -> bool:
    """Whether an upstream that keeps block scales intact hands weight_scale_2 over elsewhere."""
    second = entries.get("fc2_input_scale")
    per_expert = isinstance(second, Tensor) and second.numel() > 1
    return entries.get(INPUT_GLOBAL_SCALE) is not None or per_expert
