"""A layer of vLLM as its own ModelOpt method makes it, from the tensors of a checkpoint.

``create_weights``, ``process_weights_after_loading`` and the experts are vLLM's; the module that
holds the parameters is a plain one, with the few attributes that those read.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from tests.vllm import harness

#: What upstream's method changes, or others read.
PARAMETERS = (
    "w13_weight",
    "w13_weight_scale",
    "w13_weight_scale_2",
    "w13_input_scale",
    "w2_weight",
    "w2_weight_scale",
    "w2_weight_scale_2",
    "w2_input_scale",
)
_QUANTIZATION = "vllm.model_executor.layers.quantization"
#: The one that was made last.
_LOADED: list[Layer] = []


def moe_config(job: dict[str, Any]) -> Any:
    """vLLM's configuration of a layer.

    Args:
        job: ``activation`` ("relu2", "silu", "gelu_tanh"), ``hidden``, ``intermediate``,
            ``experts``, ``top_k``; optionally ``backend`` and ``dtype``.
    """
    config: Any = harness.module("config")
    activation: Any = harness.module("activation").MoEActivation
    kinds = {"relu2": "RELU2_NO_MUL", "silu": "SILU", "gelu_tanh": "GELU_TANH"}
    return config.FusedMoEConfig(
        num_experts=job["experts"],
        experts_per_token=job["top_k"],
        hidden_dim=job["hidden"],
        intermediate_size=job["intermediate"],
        num_local_experts=job["experts"],
        num_logical_experts=job["experts"],
        activation=getattr(activation, kinds[job["activation"]]),
        device="cpu",
        routing_method=config.RoutingMethodType.DeepSeekV3,
        moe_parallel_config=config.FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=getattr(torch, job.get("dtype", "bfloat16")),
        moe_backend=job.get("backend", "flashinfer_b12x"),
        max_num_tokens=job.get("max_num_tokens", 64),
    )


class Layer(nn.Module):
    """What vLLM's RoutedExperts is to a quantization method."""

    def __init__(self, method: Any, config: Any, name: str) -> None:
        super().__init__()
        self.quant_method = method
        self.moe_config = config
        self.activation = config.activation
        self.layer_name = name
        self.global_num_experts = config.num_experts
        self.expert_map = None
        self.apply_router_weight_on_input = False

    def _expert_routing_tables(self) -> None:
        return None


def make_layer(job: dict[str, Any]) -> Layer:
    """A layer with its weights loaded, not processed.

    Args:
        job: of :func:`moe_config`, and ``weights``: the parameters' contents by name, as a loader
            leaves them (rows [gate; up], scales per shard); optionally ``name`` and ``a16``.
    """
    modelopt: Any = importlib.import_module(f"{_QUANTIZATION}.modelopt")
    config = moe_config(job)
    quant = SimpleNamespace(
        quant_method="W4A16_NVFP4" if job.get("a16") else "NVFP4",
        is_checkpoint_nvfp4_serialized=True,
        group_size=16,
        moe_activation_override=None,
    )
    method = modelopt.ModelOptNvFp4FusedMoE(quant, config)
    layer = Layer(method, config, job.get("name", "model.layers.3.mlp.experts"))
    with torch.no_grad():
        method.create_weights(
            layer,
            config.num_experts,
            config.hidden_dim,
            config.intermediate_size_per_partition,
            torch.bfloat16,
            global_num_experts=config.num_experts,
            weight_loader=lambda *_: None,
        )
        _LOADED[:] = [layer]
        for name, value in job["weights"].items():
            parameter = getattr(layer, name)
            parameter.data.copy_(
                value.view(parameter.dtype) if value.dtype == torch.uint8 else value
            )
    return layer


def process(layer: Layer) -> Any:
    """Run the method's own end of loading; returns its experts object."""
    layer.quant_method.process_weights_after_loading(layer)
    return layer.quant_method.moe_kernel.fused_experts


@contextlib.contextmanager
def watched(record: dict[str, Any]) -> Iterator[None]:
    """Keep what the layer's parameters are when the experts object is made, which prepares next."""
    modelopt: Any = importlib.import_module(f"{_QUANTIZATION}.modelopt")
    make = modelopt.make_nvfp4_moe_kernel

    def kept(*args: Any, moe_quant_config: Any, **named: Any) -> Any:
        (layer,) = _LOADED
        record["before"] = parameters(layer)
        record["places"] = {name: getattr(layer, name).data_ptr() for name in PARAMETERS}
        record["a2_gscale before"] = moe_quant_config.a2_gscale.clone()
        return make(*args, moe_quant_config=moe_quant_config, **named)

    with mock.patch.object(modelopt, "make_nvfp4_moe_kernel", kept):
        yield


def run(layer: Layer, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The layer's output, by the experts' own ``apply``."""
    experts = layer.quant_method.moe_kernel.fused_experts
    output = torch.empty_like(x)
    with torch.inference_mode():
        experts.apply(
            output=output,
            hidden_states=x,
            w1=layer.w13_weight,
            w2=layer.w2_weight,
            topk_weights=weights,
            topk_ids=ids,
            activation=layer.activation,
            global_num_experts=layer.global_num_experts,
            expert_map=None,
            a1q_scale=None,
            a2_scale=experts.a2_scale,
            workspace13=None,
            workspace2=None,
            expert_tokens_meta=None,
            apply_router_weight_on_input=False,
        )
    return output


def parameters(layer: Layer) -> dict[str, Tensor]:
    """Copies of all parameters."""
    return {name: getattr(layer, name).detach().clone() for name in PARAMETERS}


def forget_experts() -> None:
    """As if no module of experts had been imported: the next choice of a backend imports them."""
    prefix = "vllm.model_executor.layers.fused_moe.experts."
    for name in [name for name in sys.modules if name.startswith(prefix)]:
        del sys.modules[name]
