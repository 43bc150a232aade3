"""FlashInfer's NVFP4 MoE kernels of SM100/103, called as its API documents.

``trtllm_fp4_block_scale_moe``, ``trtllm_fp4_block_scale_routed_moe`` and, as the control,
``cutlass_fused_moe``; signatures read in the wheels 0.6.16.post3 and 0.7.2.post1.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from trtllm_b12x_fix.formats import e2m1, scale_layout
from trtllm_b12x_fix.layer import Activation
from trtllm_b12x_fix.parity.call import KernelCall, Path
from trtllm_b12x_fix.parity.run_kernels import CutlassCall, KernelLostError, KernelRefusedError

#: Members of ``flashinfer.fused_moe.core.ActivationType``.
_ACTIVATIONS = {Activation.RELU2: "Relu2", Activation.SILU: "Swiglu"}
_LOST = ("cuda error", "illegal memory access", "unspecified launch failure", "cudaerror")


class TrtllmGenKernels:
    """The kernels of the installed FlashInfer.

    Args:
        device: a GPU of capability 10.0 or 10.3; see :mod:`.trtllm_gen_availability`.
        modules: ``flashinfer.fused_moe`` and ``flashinfer.fused_moe.core``, imported if absent.
    """

    def __init__(
        self, device: torch.device, modules: tuple[ModuleType, ModuleType] | None = None
    ) -> None:
        if modules is None:
            names = ("flashinfer.fused_moe", "flashinfer.fused_moe.core")
            modules = (importlib.import_module(names[0]), importlib.import_module(names[1]))
        moe, core = modules
        # Kept from the start: vLLM's calls are recorded by replacing them.
        self._entries: dict[Path, Callable[..., Any]] = {
            Path.MONOLITHIC: moe.trtllm_fp4_block_scale_moe,
            Path.MODULAR: moe.trtllm_fp4_block_scale_routed_moe,
        }
        self._cutlass: Callable[..., Any] = moe.cutlass_fused_moe
        self._activation_type = core.ActivationType
        self.device = device
        self.device_name = (
            torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
        )
        self.flashinfer_version = _version()

    def launch(self, call: KernelCall) -> Tensor:
        """Run one call: bf16 [T, padded H].

        Raises:
            KernelRefusedError: FlashInfer raised.
            KernelLostError: a CUDA error; the process cannot go on.
        """
        arguments = dict(call.arguments) or keywords(call)
        with _failures(self._entries[call.path].__name__, self.device):
            # vLLM's own buffer would be both destination and source of a copy.
            arguments.pop("output", None)
            result = self._entries[call.path](**arguments)
            output: Tensor = result[0] if isinstance(result, (list, tuple)) else result
            return output.clone()

    def cutlass(self, call: CutlassCall) -> Tensor:
        """Run the control: bf16 [T, H].

        Raises:
            KernelRefusedError: FlashInfer raised.
            KernelLostError: a CUDA error; the process cannot go on.
        """
        experts = call.fc1_alpha.shape[0]
        weights = call.weights
        scales = [
            call.input_reciprocal.expand(experts).contiguous(),
            scale_layout.swizzle(weights.fc1_scale).view(torch.int32),
            call.fc1_alpha,
            call.inner_reciprocal.expand(experts).contiguous(),
            scale_layout.swizzle(weights.fc2_scale).view(torch.int32),
            call.fc2_alpha,
        ]
        tokens, hidden = call.tokens.codes.shape
        output = torch.empty(tokens, hidden, dtype=torch.bfloat16, device=self.device)
        name = _ACTIVATIONS[call.activation]
        with _failures("cutlass_fused_moe", self.device):
            self._cutlass(
                input=e2m1.pack(call.tokens.codes),
                token_selected_experts=call.routes.expert_ids.to(torch.int32),
                token_final_scales=call.routes.weights.float(),
                fc1_expert_weights=weights.fc1_packed.contiguous().view(torch.long),
                fc2_expert_weights=weights.fc2_packed.contiguous().view(torch.long),
                output_dtype=torch.bfloat16,
                quant_scales=scales,
                input_sf=scale_layout.swizzle(call.tokens.block_scale),
                output=output,
                activation_type=getattr(self._activation_type, name),
            )
            return output


def _version() -> str:
    try:
        return version("flashinfer-python")
    except PackageNotFoundError:
        return "not installed"


def keywords(call: KernelCall) -> dict[str, object]:
    """Our own call as keywords, with everything that the entries require."""
    shared: dict[str, object] = {
        "hidden_states": call.hidden_states,
        "hidden_states_scale": call.hidden_states_scale,
        "gemm1_weights": call.gemm1_weights,
        "gemm1_weights_scale": call.gemm1_weights_scale,
        "gemm1_bias": None,
        "gemm1_alpha": None,
        "gemm1_beta": None,
        "gemm1_clamp_limit": None,
        "gemm2_weights": call.gemm2_weights,
        "gemm2_weights_scale": call.gemm2_weights_scale,
        "gemm2_bias": None,
        "output1_scale_scalar": call.output1_scale_scalar,
        "output1_scale_gate_scalar": call.output1_scale_gate_scalar,
        "output2_scale_scalar": call.output2_scale_scalar,
        "num_experts": call.num_experts,
        "top_k": call.top_k,
        "n_group": call.n_group,
        "topk_group": call.topk_group,
        "intermediate_size": call.intermediate_size,
        "local_expert_offset": call.local_expert_offset,
        "local_num_experts": call.local_num_experts,
        "routed_scaling_factor": call.routed_scaling_factor,
        "routing_method_type": call.routing_method_type,
        "do_finalize": True,
        "activation_type": call.activation_type,
        "routing_bias": call.routing_bias,
    }
    if call.path is Path.MODULAR:
        return shared | {"topk_ids": call.topk_ids}
    monolithic = {
        "routing_logits": call.routing_logits,
        "routing_replay_out": call.routing_replay_out,
    }
    return shared | monolithic


@contextmanager
def _failures(entry: str, device: torch.device) -> Iterator[None]:
    try:
        yield
        if device.type == "cuda":
            # Kernels fail late: without this, the blame would fall on the next arm.
            torch.cuda.synchronize(device)
    except Exception as error:  # FlashInfer raises through TVM: any type
        words = f"{entry}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if any(mark in str(error).lower() for mark in _LOST):
            raise KernelLostError(words) from error
        raise KernelRefusedError(words) from error
