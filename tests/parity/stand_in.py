"""FlashInfer's three entries on a CPU, healthy and with a fault in the kernel."""

from __future__ import annotations

import enum
from dataclasses import replace
from types import SimpleNamespace

import torch

from tests.parity import layers
from trtllm_b12x_fix.emulator.quantize import Quantized
from trtllm_b12x_fix.formats import e2m1, scale_layout
from trtllm_b12x_fix.integrations.trtllm_gen import TrtllmGenKernels
from trtllm_b12x_fix.layer import Activation
from trtllm_b12x_fix.parity import contract, kernel
from trtllm_b12x_fix.parity.call import Path, from_arguments
from trtllm_b12x_fix.parity.judge import Case
from trtllm_b12x_fix.parity.kernel import LinearWeights, Scalars
from trtllm_b12x_fix.parity.routing import Routes, WeightRecovery
from trtllm_b12x_fix.parity.run import Ran

ActivationType = SimpleNamespace(Relu2=Activation.RELU2, Swiglu=Activation.SILU)


class KernelFault(enum.Enum):
    """What the stand-in does wrong."""

    NONE = "none"
    #: the last 256 columns are lost unless K is a multiple of 512
    K_TAIL = "k tail"
    #: any zero scale group spoils the sums
    PADDING = "padding"
    #: output1_scale_scalar is read by the gated formula
    GATED_SCALARS = "gated scalars"
    #: activation scales are read as 128x4-swizzled
    SWIZZLED = "swizzled"
    #: routing in the kernel forgets the bias
    NO_BIAS = "no bias"
    #: passing routing_replay_out shifts the experts
    REPLAY = "replay"
    #: the replay buffer stays as it was
    REPLAY_EMPTY = "replay empty"
    #: everything at 512 is wrong
    PAD_512 = "pad 512"
    REFUSES = "refuses"
    CUDA_ERROR = "cuda error"
    CONTROL = "control"


class FlashInfer:
    """What :class:`TrtllmGenKernels` takes for ``flashinfer.fused_moe``."""

    def __init__(self, fault: KernelFault) -> None:
        self.fault = fault
        self.calls = 0

    def trtllm_fp4_block_scale_moe(self, **arguments):
        return [self._launch(Path.MONOLITHIC, arguments)]

    def trtllm_fp4_block_scale_routed_moe(self, **arguments):
        return [self._launch(Path.MODULAR, arguments)]

    def _launch(self, path, arguments):
        self.calls += 1
        if self.fault is KernelFault.REFUSES and path is Path.MONOLITHIC:
            raise ValueError("No valid config found for the given problem shape")
        if self.fault is KernelFault.CUDA_ERROR and self.calls > 3:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return _wrong(self.fault, from_arguments(path, arguments))

    def cutlass_fused_moe(self, **a):
        hidden = a["input"].shape[1] * 2
        unswizzle = scale_layout.unswizzle
        tokens = Quantized(
            e2m1.unpack(a["input"]),
            unswizzle(a["input_sf"], a["input"].shape[0], hidden // 16),
        )
        fc1, fc2 = (
            a[name].view(torch.uint8) for name in ("fc1_expert_weights", "fc2_expert_weights")
        )
        scales = [a["quant_scales"][i].view(torch.uint8) for i in (1, 4)]
        weights = LinearWeights(
            fc1,
            unswizzle(scales[0], fc1.shape[1], fc1.shape[2] // 8),
            fc2,
            unswizzle(scales[1], fc2.shape[1], fc2.shape[2] // 8),
        )
        before, inner = a["quant_scales"][2], a["quant_scales"][3]
        gated = a["activation_type"].is_gated
        scalars = Scalars(before, before * inner if gated else inner, a["quant_scales"][5])
        routes = Routes(a["token_selected_experts"].long(), a["token_final_scales"])
        output = kernel.compute(weights, scalars, tokens, routes, a["activation_type"])
        a["output"].copy_(-output if self.fault is KernelFault.CONTROL else output)


def _wrong(fault: KernelFault, call):
    if fault is KernelFault.K_TAIL and call.hidden % 512:
        scales = call.hidden_states_scale.view(torch.uint8).clone()
        scales.view(call.tokens, -1)[:, -16:] = 0
        call = replace(call, hidden_states_scale=scales.view(torch.float8_e4m3fn))
    if fault is KernelFault.SWIZZLED:
        scales = call.hidden_states_scale.view(torch.uint8)
        rows, groups = scale_layout.padded_shape(call.tokens, call.hidden // 16)
        room = torch.zeros(rows * groups, dtype=torch.uint8)
        room[: scales.numel()] = scales.flatten()
        linear = scale_layout.unswizzle(room.view(rows, groups), call.tokens, groups)
        call = replace(call, hidden_states_scale=linear.view(torch.float8_e4m3fn))
    if fault is KernelFault.GATED_SCALARS and not call.activation.is_gated:
        after = call.output1_scale_scalar / call.output1_scale_gate_scalar
        call = replace(call, output1_scale_scalar=after)
    if fault is KernelFault.NO_BIAS and call.routing_bias is not None:
        # A bias of the other sign: small ones would hardly change a choice.
        call = replace(call, routing_bias=call.routing_bias - call.routing_logits.mean(0) * 9)
    if fault is KernelFault.REPLAY_EMPTY:
        call = replace(call, routing_replay_out=None)
    if fault is KernelFault.REPLAY and call.routing_replay_out is not None:
        call = replace(call, routing_logits=call.routing_logits.roll(1, dims=1))
    output = kernel.launch(call)
    if fault is KernelFault.PADDING and bool((call.gemm1_weights_scale.float() == 0).any()):
        output = output * 0.5 if _padded(call) else output
    if fault is KernelFault.PAD_512 and call.hidden % 512 == 0:
        output = output.flip(0)
    return output


def _padded(call) -> bool:
    """Whether whole columns of FC1 are zero, as padding the hidden size makes them."""
    scales = kernel.read_weights(call).fc1_scale
    return bool((scales == 0).all(dim=(0, 1)).any())


def kernels(fault: KernelFault = KernelFault.NONE, device: str = "cpu") -> TrtllmGenKernels:
    """The package's own caller on top of the stand-in."""
    core = SimpleNamespace(ActivationType=ActivationType)
    return TrtllmGenKernels(torch.device(device), (FlashInfer(fault), core))


class Preparation:
    """Stands in for vLLM's preparation: ours, with a fault planted or not."""

    version, flashinfer_version = "0.0.0", "0.0.0"
    recovery = WeightRecovery.RECOMPUTED
    stand_ins = ("all of it",)

    def __init__(self, plant=lambda call, case: call, error: Exception | None = None) -> None:
        self._plant, self._error = plant, error

    def prepare(self, layer, path, top_k):
        if self._error is not None:
            raise self._error
        return _Prepared(layer, path, self._plant)


class _Prepared:
    def __init__(self, layer, path, plant) -> None:
        self._layer, self._path, self._plant = layer, path, plant

    def run(self, x, router, replay, kernel):
        options = contract.Options(path=self._path, replay=replay)
        call = contract.make_call(contract.prepare(self._layer, options), x, router)
        case = Case(self._layer, x, router)
        call = self._plant(call, case)
        return Ran(kernel(call)[:, : self._layer.hidden], call)


def source(activation, hidden, intermediate):
    """Layers of the grid; the intermediate size is the shared one's."""
    del intermediate
    return layers.make_layer(activation, hidden), layers.make_tokens(128, hidden)
