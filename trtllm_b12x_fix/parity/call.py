"""One call of trtllm-gen's NVFP4 MoE, as FlashInfer's two entries take it.

Names are those of ``flashinfer.fused_moe.trtllm_fp4_block_scale_moe`` and of
``trtllm_fp4_block_scale_routed_moe`` in the wheels 0.6.16.post3 and 0.7.2.post1.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from trtllm_b12x_fix.errors import ShapeError, UnsupportedVersionError
from trtllm_b12x_fix.formats.nvfp4 import BLOCK
from trtllm_b12x_fix.layer import Activation

#: ``RoutingMethodType.DeepSeekV3`` of flashinfer/tllm_enums.py.
DEEPSEEK_V3 = 2
#: ``ActivationType`` of flashinfer/tllm_enums.py.
ACTIVATION_TYPES = {Activation.SILU: 3, Activation.RELU2: 6}


class Path(enum.Enum):
    """Who routes: the kernel, or its caller. The values are vLLM's words."""

    MONOLITHIC = "monolithic"
    MODULAR = "modular"


@dataclass(frozen=True)
class KernelCall:
    """The arguments that decide the output.

    Attributes:
        path: which entry.
        hidden_states: uint8 [T, H/2], packed E2M1 codes.
        hidden_states_scale: float8_e4m3fn [T, H/16], linear by contract.
        gemm1_weights, gemm2_weights: uint8 [E, R, H/2] and [E, H, I/2], stored as
            :mod:`.layout` says; R = I, or 2I where gated.
        gemm1_weights_scale, gemm2_weights_scale: float8_e4m3fn [E, R, H/16] and [E, H, I/16].
        output1_scale_scalar: fp32 [E]. Not gated: 1 / a2. Gated: a1 * weight_scale_2 / a2.
        output1_scale_gate_scalar: fp32 [E], a1 * weight_scale_2 of FC1, before the activation.
        output2_scale_scalar: fp32 [E], a2 * weight_scale_2 of FC2. a1 and a2 are the input scales.
        routing_logits, routing_bias: [T, E] and [E], monolithic only.
        topk_ids: modular only: int32 [T, K] packed, or a pair (ids, weights).
        routing_replay_out: int16 [at least T, K], which the kernel fills, or ``None``.
        arguments: everything, as it was passed.
    """

    path: Path
    hidden_states: Tensor
    hidden_states_scale: Tensor
    gemm1_weights: Tensor
    gemm1_weights_scale: Tensor
    gemm2_weights: Tensor
    gemm2_weights_scale: Tensor
    output1_scale_scalar: Tensor
    output1_scale_gate_scalar: Tensor
    output2_scale_scalar: Tensor
    num_experts: int
    top_k: int
    intermediate_size: int
    local_expert_offset: int
    local_num_experts: int
    routing_method_type: int
    activation_type: int
    n_group: int | None = None
    topk_group: int | None = None
    routed_scaling_factor: float | None = None
    routing_logits: Tensor | None = None
    routing_bias: Tensor | None = None
    topk_ids: Tensor | tuple[Tensor, Tensor] | None = None
    routing_replay_out: Tensor | None = None
    arguments: Mapping[str, object] = field(default_factory=dict, repr=False)

    @property
    def tokens(self) -> int:
        return self.hidden_states.shape[0]

    @property
    def hidden(self) -> int:
        return self.hidden_states.shape[1] * 2

    @property
    def activation(self) -> Activation:
        """The activation meant by ``activation_type``.

        Raises:
            UnsupportedVersionError: one that is not known here.
        """
        for activation, number in ACTIVATION_TYPES.items():
            if number == self.activation_type:
                return activation
        raise UnsupportedVersionError(
            f"activation_type {self.activation_type}: only "
            f"{', '.join(f'{n} ({a.value})' for a, n in ACTIVATION_TYPES.items())} are judged here"
        )


_TAKEN = {one.name for one in fields(KernelCall)} - {"path", "arguments"}
#: Arguments that change nothing of what is judged here.
_NEUTRAL = {
    "do_finalize": True,
    "enable_pdl": ...,
    "output": ...,
    "tune_max_num_tokens": ...,
    "norm_topk_prob": True,
    "num_fused_shared_experts": (None, 0),
}


def from_arguments(path: Path, arguments: Mapping[str, object]) -> KernelCall:
    """Read the keywords of a call.

    Raises:
        UnsupportedVersionError: an argument that would change the arithmetic and is not modelled.
        ShapeError: sizes that contradict each other.
    """
    for name, value in arguments.items():
        if name in _TAKEN or value is None:
            continue
        allowed = _NEUTRAL.get(name)
        values = allowed if isinstance(allowed, tuple) else (allowed,)
        if name not in _NEUTRAL or (allowed is not ... and value not in values):
            raise UnsupportedVersionError(
                f"{_entry(path)} was called with {name}={_short(value)}, which is not modelled "
                "here: the call cannot be judged"
            )
    taken = {name: value for name, value in arguments.items() if name in _TAKEN}
    try:
        call = KernelCall(path=path, arguments=dict(arguments), **taken)  # type: ignore[arg-type]
    except TypeError as error:
        raise UnsupportedVersionError(
            f"{_entry(path)} was called without an argument: {error}"
        ) from error
    _check_shapes(call)
    return call


def _entry(path: Path) -> str:
    name = "trtllm_fp4_block_scale"
    return f"{name}_moe" if path is Path.MONOLITHIC else f"{name}_routed_moe"


def _short(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)}"
    return repr(value)[:40]


def _check_shapes(call: KernelCall) -> None:
    rows = call.activation.fc1_rows(call.intermediate_size)
    experts, hidden, inner = call.local_num_experts, call.hidden, call.intermediate_size
    want = {
        "gemm1_weights": (experts, rows, hidden // 2),
        "gemm1_weights_scale": (experts, rows, hidden // BLOCK),
        "gemm2_weights": (experts, hidden, inner // 2),
        "gemm2_weights_scale": (experts, hidden, inner // BLOCK),
        "output1_scale_scalar": (experts,),
        "output1_scale_gate_scalar": (experts,),
        "output2_scale_scalar": (experts,),
    }
    for name, shape in want.items():
        got = tuple(getattr(call, name).shape)
        if got != shape:
            raise ShapeError(
                f"{_entry(call.path)}: {name} must be {shape} for hidden {hidden} and "
                f"intermediate {inner}, got {got}"
            )
    if call.hidden_states_scale.numel() * BLOCK < call.tokens * hidden:
        raise ShapeError(
            f"{_entry(call.path)}: hidden_states_scale {tuple(call.hidden_states_scale.shape)} "
            f"does not cover hidden_states of {call.tokens} tokens and hidden {hidden}"
        )


def as_bytes(tensor: Tensor) -> Tensor:
    """One-byte tensors as uint8, without a copy."""
    return tensor.view(torch.uint8)
