"""The experts in NVFP4 as ModelOpt makes them: max calibration, then weights.

Everything else of the model stays in bf16. The bytes are those of ``nvidia-modelopt``'s own
export (tested); this way needs neither it nor transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from evals.relu2_lm.data import Corpus, batch
from evals.relu2_lm.experts import Experts
from evals.relu2_lm.layers import MoE
from evals.relu2_lm.model import LanguageModel
from trtllm_b12x_fix.formats import nvfp4
from trtllm_b12x_fix.layer import Activation, ExpertMatrices, MoELayer

#: Seed of the training problems that the checkpoint was calibrated on.
CALIBRATION_SEED, CALIBRATION_PROBLEMS = 500, 512


@dataclass(frozen=True)
class InputAmax:
    """Largest magnitudes that a layer's experts were fed while calibrating, over all of them."""

    fc1: float
    fc2: float


def calibrate(model: LanguageModel, corpus: Corpus, size: int = 256) -> dict[int, InputAmax]:
    """Run the problems through the model and watch what its experts are fed; by layer number."""
    with torch.no_grad(), _watched(model) as largest:
        for rows in torch.arange(len(corpus), device=corpus.ids.device).split(size):
            model(batch(corpus, rows, int(corpus.lengths[rows].max())).inputs)
    return {number: InputAmax(float(fc1), float(fc2)) for number, (fc1, fc2) in largest.items()}


@contextmanager
def _watched(model: LanguageModel) -> Iterator[dict[int, list[Tensor]]]:
    largest: dict[int, list[Tensor]] = {}
    watched = []
    for number, moe in model.moe_layers():
        seen = largest[number] = [torch.zeros(()), torch.zeros(())]

        def observe(x: Tensor, intermediate: Tensor, seen: list[Tensor] = seen) -> None:
            for place, values in enumerate((x, intermediate)):
                seen[place] = torch.maximum(seen[place].to(values.device), values.abs().max())

        experts = plain_experts(moe)
        experts.observe = observe
        watched.append(experts)
    try:
        yield largest
    finally:
        for experts in watched:
            experts.observe = None


def plain_experts(moe: MoE) -> Experts:
    """The layer's own experts.

    Raises:
        TypeError: an emulation stands in their place.
    """
    if not isinstance(moe.experts, Experts):
        raise TypeError(f"experts are emulated: {type(moe.experts).__name__}")
    return moe.experts


def quantize(model: LanguageModel, amax: dict[int, InputAmax]) -> dict[int, MoELayer]:
    """The MoE layers in NVFP4, by layer number, on the model's device."""
    return {
        number: quantize_layer(plain_experts(moe), amax[number], f"relu2 LM, layer {number}")
        for number, moe in model.moe_layers()
    }


def quantize_layer(experts: Experts, amax: InputAmax, source: str) -> MoELayer:
    """One layer: each matrix with its own ``weight_scale_2``, one input scale for all experts."""
    up, down = experts.up_proj.detach(), experts.down_proj.detach()
    return MoELayer(
        fc1=_matrices(up, amax.fc1),
        fc2=_matrices(down, amax.fc2),
        activation=Activation.RELU2,
        source=source,
        logical_hidden=up.shape[2],
        logical_intermediate=up.shape[1],
    )


def _matrices(weights: Tensor, amax: float) -> ExpertMatrices:
    quantized = [nvfp4.quantize(weight) for weight in weights]
    input_scale = nvfp4.global_scale_from_amax(torch.tensor(amax, device=weights.device))
    return ExpertMatrices(
        packed=torch.stack([q.packed for q in quantized]),
        block_scale=torch.stack([q.block_scale for q in quantized]),
        weight_scale_2=torch.stack([q.global_scale for q in quantized]),
        input_scale=input_scale.expand(len(quantized)).contiguous(),
    )


def dequantize(matrices: ExpertMatrices, dtype: torch.dtype) -> Tensor:
    """[E, R, C] weights of these codes and scales."""
    values = nvfp4.operand(matrices.packed, matrices.block_scale)
    return (values * matrices.weight_scale_2[:, None, None]).to(dtype)
