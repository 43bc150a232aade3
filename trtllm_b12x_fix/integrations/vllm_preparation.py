"""vLLM's own preparation of an NVFP4 MoE layer for trtllm-gen, run for real, up to the kernel.

What runs is vLLM's: ``ModelOptNvFp4FusedMoE`` (create_weights, process_weights_after_loading,
apply, apply_monolithic), the expert classes below it, the runner's padding of activations, and
``grouped_topk`` where the caller routes. FlashInfer's entry is replaced by a recorder that hands
the call to whatever kernel is given. Tried with vLLM 0.27.0 and 0.33.0.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from trtllm_b12x_fix.errors import UnsupportedVersionError
from trtllm_b12x_fix.formats.gate_order import GateOrder, reorder
from trtllm_b12x_fix.integrations import vllm_host
from trtllm_b12x_fix.integrations.trtllm_gen_routing import weight_recovery
from trtllm_b12x_fix.integrations.vllm_host import refusals, replaced, symbol
from trtllm_b12x_fix.layer import Activation, MoELayer
from trtllm_b12x_fix.parity.call import KernelCall, Path, from_arguments
from trtllm_b12x_fix.parity.contract import Replay
from trtllm_b12x_fix.parity.routing import Router
from trtllm_b12x_fix.parity.run import Ran

#: Versions whose preparation has been run here.
TRIED = ("0.27.0", "0.33.0")
#: vLLM's own default of max_num_batched_tokens on large GPUs; sizes its replay buffer.
_MOST_TOKENS = 8192
_MOE = "vllm.model_executor.layers.fused_moe"
_MODELOPT = "vllm.model_executor.layers.quantization.modelopt"
_ENTRIES = {
    Path.MONOLITHIC: "trtllm_fp4_block_scale_moe",
    Path.MODULAR: "trtllm_fp4_block_scale_routed_moe",
}
_CLASSES = {
    Path.MONOLITHIC: "TrtLlmNvFp4ExpertsMonolithic",
    Path.MODULAR: "TrtLlmNvFp4ExpertsModular",
}

Kernel = Callable[[KernelCall], Tensor]


class VllmPreparation:
    """The installed vLLM and FlashInfer, imported."""

    def __init__(self, device: torch.device) -> None:
        """
        Raises:
            InputError: they are not installed, or cannot be imported.
            UnsupportedVersionError: a symbol is missing.
        """
        vllm_host.make_importable()
        # Its modules import each other in a circle: this one has to come first.
        symbol(_MOE, "__name__")
        self._device = device
        self.version = version("vllm")
        self.flashinfer_version = version("flashinfer-python")
        self.recovery = weight_recovery()
        self.stand_ins: tuple[str, ...] = vllm_host.STAND_INS if device.type == "cpu" else ()
        self._classes = {
            path: symbol(f"{_MOE}.experts.trtllm_nvfp4_moe", name)
            for path, name in _CLASSES.items()
        }
        self._method = symbol(_MODELOPT, "ModelOptNvFp4FusedMoE")
        self._workspace()

    def _workspace(self) -> None:
        init = symbol("vllm.v1.worker.workspace", "init_workspace_manager")
        with refusals("making its workspace"):
            init(self._device)

    def prepare(self, layer: MoELayer, path: Path, top_k: int) -> PreparedByVllm:
        """Load a layer into vLLM's parameters and let it process them.

        Args:
            layer: its tensors are copied: vLLM works in place.

        Raises:
            InputError: vLLM refuses the layer.
            UnsupportedVersionError: vLLM is not what is known here.
        """
        config = self._config(layer, top_k)
        backend = symbol(f"{_MOE}.oracle.nvfp4", "NvFp4MoeBackend").FLASHINFER_TRTLLM
        choice = (backend, self._classes[path])
        module = importlib.import_module(_MODELOPT)
        chosen = (module, "select_nvfp4_moe_backend", lambda **_: choice)
        with refusals("preparing a layer"), self._stand_ins(chosen):
            own = module.ModelOptNvFp4Config(is_checkpoint_nvfp4_serialized=True)
            method = self._method(own, config)
            holder = self._holder(method, config, layer)
            method.process_weights_after_loading(holder)
        return PreparedByVllm(self, method, holder, config, layer, path)

    def _stand_ins(self, *more: tuple[Any, str, Any]) -> AbstractContextManager[None]:
        return replaced(*vllm_host.stand_ins(self._device), *more)

    def _config(self, layer: MoELayer, top_k: int) -> Any:
        make = symbol(f"{_MOE}.config", "FusedMoEConfig")
        parallel = symbol(f"{_MOE}.config", "FusedMoEParallelConfig")
        with refusals("configuring a layer"), self._stand_ins():
            return make(
                num_experts=layer.experts,
                experts_per_token=top_k,
                hidden_dim=layer.hidden,
                intermediate_size=layer.intermediate,
                num_local_experts=layer.experts,
                num_logical_experts=layer.experts,
                activation=self._activation(layer.activation),
                device=self._device,
                routing_method=self._routing_method(top_k),
                moe_parallel_config=parallel.make_no_parallel(),
                in_dtype=torch.bfloat16,
                router_logits_dtype=torch.float32,
                max_num_tokens=_MOST_TOKENS,
            )

    def _activation(self, activation: Activation) -> Any:
        names = {Activation.RELU2: "RELU2_NO_MUL", Activation.SILU: "SILU"}
        return getattr(symbol(f"{_MOE}.activation", "MoEActivation"), names[activation])

    def _routing_method(self, top_k: int) -> Any:
        """vLLM's own answer for sigmoid, bias, renormalized, one group."""
        return symbol(f"{_MOE}.config", "get_routing_method_type")(
            scoring_func="sigmoid",
            top_k=top_k,
            renormalize=True,
            num_expert_group=1,
            has_e_score_bias=True,
        )

    def _holder(self, method: Any, config: Any, layer: MoELayer) -> torch.nn.Module:
        """What vLLM calls the layer: its parameters and the few attributes its method reads."""
        holder = torch.nn.Module()
        method.create_weights(
            holder,
            layer.experts,
            layer.hidden,
            layer.intermediate,
            torch.bfloat16,
            weight_loader=None,
            global_num_experts=layer.experts,
        )
        for name, value in _parameters(layer).items():
            parameter = getattr(holder, name)
            if parameter.shape != value.shape or parameter.dtype != value.dtype:
                raise UnsupportedVersionError(
                    f"vLLM {self.version}: {name} is {parameter.dtype} {tuple(parameter.shape)}, "
                    f"expected {value.dtype} {tuple(value.shape)}"
                )
            parameter.data = value.clone()
        attributes = {
            "activation": config.activation,
            "moe_config": config,
            "_expert_routing_tables": lambda: None,
            "global_num_experts": layer.experts,
            "expert_map": None,
            "apply_router_weight_on_input": False,
            "num_expert_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "routing_sink": None,
            "e_score_correction_bias": None,
        }
        for name, value in attributes.items():
            object.__setattr__(holder, name, value)
        return holder


def _parameters(layer: MoELayer) -> dict[str, Tensor]:
    """The layer under vLLM's names; checkpoints have the gate first."""
    gated = layer.activation.is_gated
    codes, scales = layer.fc1.packed, layer.fc1.block_scale
    if gated:
        codes = reorder(codes, GateOrder.UP_GATE, GateOrder.GATE_UP)
        scales = reorder(scales, GateOrder.UP_GATE, GateOrder.GATE_UP)
    shards = 2 if gated else 1
    return {
        "w13_weight": codes,
        "w13_weight_scale": scales.view(torch.float8_e4m3fn),
        "w13_weight_scale_2": layer.fc1.weight_scale_2.unsqueeze(1).repeat(1, shards),
        "w13_input_scale": layer.fc1.input_scale.unsqueeze(1).repeat(1, shards),
        "w2_weight": layer.fc2.packed,
        "w2_weight_scale": layer.fc2.block_scale.view(torch.float8_e4m3fn),
        "w2_weight_scale_2": layer.fc2.weight_scale_2,
        "w2_input_scale": layer.fc2.input_scale,
    }


@dataclass
class PreparedByVllm:
    """A layer in vLLM's hands; :meth:`run` sends tokens through it."""

    vllm: VllmPreparation
    method: Any
    holder: torch.nn.Module
    config: Any
    layer: MoELayer
    path: Path

    def run(self, x: Tensor, router: Router, replay: Replay, kernel: Kernel) -> Ran:
        """vLLM's forward of the routed experts, with ``kernel`` in the kernel's place.

        Args:
            x: bf16 [T, H], unpadded.
            kernel: gets the call, gives bf16 [T, padded H].

        Raises:
            InputError: vLLM refuses.
            UnsupportedVersionError: vLLM is not what is known here, or its call is not.
        """
        calls: list[KernelCall] = []

        def entry(**arguments: Any) -> list[Tensor]:
            calls.append(from_arguments(self.path, arguments))
            output = kernel(calls[-1])
            buffer = arguments.get("output")
            if buffer is None:
                return [output]
            buffer.copy_(output)
            return [buffer]

        moe = importlib.import_module("flashinfer.fused_moe")
        with (
            refusals("running a layer"),
            self.vllm._stand_ins((moe, _ENTRIES[self.path], entry)),
            torch.no_grad(),
        ):
            output = self._forward(x, router, replay)
        if len(calls) != 1:
            raise UnsupportedVersionError(
                f"vLLM {self.vllm.version} called {_ENTRIES[self.path]} {len(calls)} times"
            )
        return Ran(output, calls[0])

    def _forward(self, x: Tensor, router: Router, replay: Replay) -> Tensor:
        hidden, width = self._pad(x)
        if self.path is Path.MODULAR:
            weights, ids = self._route(x, router)
            output = self.method.apply(self.holder, hidden, weights, ids, None, None)
        else:
            object.__setattr__(self.holder, "e_score_correction_bias", router.bias)
            self._set_replay(replay)
            output = self.method.apply_monolithic(self.holder, hidden, router.logits)
        return output[..., :width]

    def _pad(self, x: Tensor) -> tuple[Tensor, int]:
        """The runner's own padding of activations, and the width that it keeps of the output."""
        runner = symbol(f"{_MOE}.runner.moe_runner", "MoERunner")
        stand_in = SimpleNamespace(
            _quant_method=self.method, moe_config=self.config, routed_output_transform=None
        )
        hidden, _, width = runner._maybe_pad_hidden_states(stand_in, None, x)
        return hidden, hidden.shape[-1] if width is None else width

    def _route(self, x: Tensor, router: Router) -> tuple[Tensor, Tensor]:
        route = symbol(f"{_MOE}.router.grouped_topk_router", "grouped_topk")
        torch.compiler.set_stance("force_eager")
        try:
            weights, ids = route(
                hidden_states=x,
                gating_output=router.logits,
                topk=router.top_k,
                renormalize=True,
                num_expert_group=1,
                topk_group=1,
                scoring_func="sigmoid",
                routed_scaling_factor=router.scale,
                e_score_correction_bias=router.bias,
            )
        finally:
            torch.compiler.set_stance("default")
        return weights, ids

    def _set_replay(self, replay: Replay) -> None:
        """vLLM's own switch for recording experts, in either version's place."""
        wanted = replay is Replay.GIVEN
        experts = self.method.moe_kernel.fused_experts
        if hasattr(experts, "set_capture_fn"):  # 0.27.0
            experts.set_capture_fn((lambda _: None) if wanted else None)
            return
        sink = None
        if wanted:
            make = symbol(f"{_MOE}.routed_experts_capturer", "RoutedExpertsSink")
            sink = make(self.config, lambda _: None)
        object.__setattr__(self.holder, "routing_sink", sink)
