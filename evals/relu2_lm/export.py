"""Folders that other programs read: ModelOpt's NVFP4 export, and an intact or baked twin."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from evals.relu2_lm import checkpoint, quantize, tokenizer
from evals.relu2_lm.arms import Magnitude, baked_weights_only, standing_in, weights_only
from evals.relu2_lm.problems import Split, generate

if TYPE_CHECKING:
    from torch import nn

#: Fed to ModelOpt, whose amax is then replaced by the kept one.
_FED_PROBLEMS = 4


class Twin(enum.Enum):
    """Which experts a bf16 folder holds."""

    INTACT = "intact"  # the NVFP4 weights as they are
    BAKED = "baked"  # what the bake leaves of them where weight_scale_2 is near 2e-5


def write_twin(twin: Twin, source: Path, folder: Path) -> None:
    """A bf16 checkpoint whose experts hold dequantized weights: any server of the model runs it.

    Intact and baked differ in what the bake did to block scales and in nothing else. Activations
    are not quantized.
    """
    model = checkpoint.load(source, torch.device("cpu"), torch.float32)
    amax = checkpoint.load_calibration(source)
    experts: dict[int, nn.Module] = {}
    for number, moe in model.moe_layers():
        own = quantize.plain_experts(moe)
        layer = quantize.quantize_layer(own, amax[number], str(source))
        experts[number] = (
            weights_only(layer, own)
            if twin is Twin.INTACT
            else baked_weights_only(layer, Magnitude.REPORTED.powers(layer), own)
        )
    with standing_in(model, experts):
        checkpoint.save(model, amax, folder)


def write_nvfp4(source: Path, folder: Path) -> None:
    """ModelOpt's export of the model with its routed experts in NVFP4 (W4A4).

    Needs transformers and nvidia-modelopt. Input scales are those of ``calibration.json``, so that
    the folder has the bytes that the evaluation ran on.
    """
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    model.eval()

    def feed(quantized: Any) -> None:
        for ids in _calibration_ids():
            quantized(input_ids=ids)

    mtq.quantize(model, mtq.NVFP4_EXPERTS_ONLY_CFG, feed)
    _use_kept_calibration(model, checkpoint.load_calibration(source))
    export_hf_checkpoint(model, export_dir=folder)
    tokenizer.save(folder)


def _calibration_ids() -> Iterator[torch.Tensor]:
    for problem in generate(Split.TRAIN, quantize.CALIBRATION_SEED, _FED_PROBLEMS):
        text = problem.prompt + problem.solution
        yield torch.tensor([[tokenizer.BEGIN_ID, *tokenizer.build().encode(text).ids]])


def _use_kept_calibration(model: Any, amax: dict[int, quantize.InputAmax]) -> None:
    for number, layer in amax.items():
        experts = model.model.layers[number].mixer.experts
        for name, value in (("up_proj", layer.fc1), ("down_proj", layer.fc2)):
            quantizer = getattr(experts, f"{name}_input_quantizer")
            quantizer.amax = torch.full_like(quantizer.amax, value)
