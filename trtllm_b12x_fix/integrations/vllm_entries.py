"""What vLLM's wrapper is called with once a layer is repaired."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trtllm_b12x_fix.emulator.contract import KernelContract
from trtllm_b12x_fix.formats import scale_layout
from trtllm_b12x_fix.integrations.trtllm_contract import INPUT_GLOBAL_SCALE, ContractError
from trtllm_b12x_fix.integrations.vllm_layer import WAYS_OUT, Originals
from trtllm_b12x_fix.repair import InputScales, Strategy, arguments, input_scales
from trtllm_b12x_fix.settings import ActScale

#: What upstream passes to ``B12xMoEWrapper.run`` and the repair replaces.
REPLACED = ("w1_weight_sf", "w2_weight_sf", "w1_alpha", "w2_alpha", "fc2_input_scale")
#: Below this ``weight_scale_2``, dividing by its square leaves fp32's range.
_SMALLEST_RESCALE = 1e-19


def new_entries(
    before: Originals, strategy: Strategy, scale: ActScale, contract: KernelContract
) -> dict[str, Tensor]:
    """The arguments of a strategy; see :mod:`trtllm_b12x_fix.repair` for why.

    Block scales are views of the layer's parameters; the alphas are small tensors of ours, made
    outside inference mode, since the wrapper asks for their version when it folds them.

    Raises:
        ContractError: a ``weight_scale_2`` that ``fp32-rescale`` cannot carry.
        NoExactFormError: the strategy has no exact form on this contract.
    """
    if strategy is Strategy.FP32_RESCALE:
        _check_range(before)
    layer = before.moe_layer(scale)
    with torch.inference_mode(False), torch.no_grad():
        made = arguments(strategy, layer, *input_scales(layer, InputScales.LAYER), contract)
        entries = {
            "w1_weight_sf": scale_layout.to_mma(before.fc1.block_scale),
            "w2_weight_sf": scale_layout.to_mma(before.fc2.block_scale),
            "w1_alpha": _own(made.w1_alpha),
            "w2_alpha": _own(made.w2_alpha),
            "fc2_input_scale": _own(made.fc2_input_scale),
        }
        if made.input_global_scale is not None:
            entries[INPUT_GLOBAL_SCALE] = _own(made.input_global_scale)
        return entries


def _own(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32).clone(memory_format=torch.contiguous_format)


def _check_range(before: Originals) -> None:
    smallest, expert = before.fc1.weight_scale_2.min(dim=0)
    if float(smallest) < _SMALLEST_RESCALE:
        raise ContractError(
            f"{before.name}, expert {int(expert)}: weight_scale_2 {float(smallest):.3g} is too "
            "small to be carried by fc2_input_scale; use FlashInfer 0.6.17 or later"
        )


class RepairedWrapper:
    """FlashInfer's wrapper, called with a repaired layer's scales whatever upstream passes."""

    def __init__(self, wrapper: Any, entries: dict[str, Tensor], version: str) -> None:
        self.wrapped = wrapper
        self.entries = entries
        self._version = version

    def run(self, *args: Any, **kwargs: Any) -> Tensor:
        """``B12xMoEWrapper.run``.

        Raises:
            ContractError: upstream no longer passes its scales by the names known.
        """
        if args or any(name not in kwargs for name in REPLACED):
            raise ContractError(
                f"vLLM {self._version}: FlashInferB12xExperts.apply calls B12xMoEWrapper.run "
                f"without {', '.join(REPLACED)} as keywords: {WAYS_OUT}"
            )
        kwargs.pop(INPUT_GLOBAL_SCALE, None)
        output: Tensor = self.wrapped.run(**{**kwargs, **self.entries})
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "wrapped"), name)
