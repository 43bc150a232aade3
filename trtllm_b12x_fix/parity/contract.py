"""A call as the contract wants it, made by us from a layer; each knob is one suspect."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_b12x_fix.emulator.quantize import Quantized, quantize_rows
from trtllm_b12x_fix.errors import InputError
from trtllm_b12x_fix.formats import e2m1, scale_layout
from trtllm_b12x_fix.formats.nvfp4 import BLOCK
from trtllm_b12x_fix.layer import ExpertMatrices, MoELayer, pad_activations
from trtllm_b12x_fix.parity import routing
from trtllm_b12x_fix.parity.call import ACTIVATION_TYPES, DEEPSEEK_V3, KernelCall, Path
from trtllm_b12x_fix.parity.kernel import ARITHMETIC, LinearWeights, Scalars
from trtllm_b12x_fix.parity.layout import contract, padded, store_rows, store_scales
from trtllm_b12x_fix.parity.routing import Router, Routes

#: Alignment of the intermediate size, of each half where gated.
GATED_ALIGNMENT = 64
PLAIN_ALIGNMENT = 128
#: What vLLM pads the hidden size to.
HIDDEN_ALIGNMENT = 256


class ActivationScales(enum.Enum):
    """Layout of ``hidden_states_scale``; linear is the contract."""

    LINEAR = "linear"
    SWIZZLED = "swizzled"


class ScalarWiring(enum.Enum):
    """Formula of ``output1_scale_scalar``."""

    #: 1 / a2 without a gate, a1 * weight_scale_2 / a2 with one
    CONTRACT = "contract"
    #: the gated formula without a gate: right only if the kernel is not what its source says
    GATED_FORMULA = "gated formula"


class Replay(enum.Enum):
    """Whether ``routing_replay_out`` is passed."""

    ABSENT = "absent"
    GIVEN = "given"


@dataclass(frozen=True)
class Options:
    """How a call is made; the defaults are vLLM's way."""

    path: Path = Path.MODULAR
    hidden_multiple: int = HIDDEN_ALIGNMENT
    activation_scales: ActivationScales = ActivationScales.LINEAR
    scalars: ScalarWiring = ScalarWiring.CONTRACT
    replay: Replay = Replay.ABSENT


@dataclass(frozen=True)
class Prepared:
    """A layer's weights stored for the kernel; many calls share one.

    Attributes:
        stored1, stored1_scale, stored2, stored2_scale: as :class:`KernelCall` has them.
        scalars: by the layer's largest input scales.
        hidden, intermediate: padded sizes.
    """

    layer: MoELayer
    options: Options
    stored1: Tensor
    stored1_scale: Tensor
    stored2: Tensor
    stored2_scale: Tensor
    scalars: Scalars
    hidden: int
    intermediate: int


def linear_weights(layer: MoELayer, hidden: int, intermediate: int) -> LinearWeights:
    """Both matrices zero-padded to these sizes, each half of a gated FC1 by itself, not moved."""
    halves = 2 if layer.activation.is_gated else 1
    return LinearWeights(
        *_grow(layer.fc1, halves, intermediate, hidden), *_grow(layer.fc2, 1, hidden, intermediate)
    )


def padded_intermediate(layer: MoELayer) -> int:
    """The intermediate size that both kernel families need: 128 rows of FC1 together."""
    gated = layer.activation.is_gated
    return padded(layer.intermediate, GATED_ALIGNMENT if gated else PLAIN_ALIGNMENT)


def _grow(matrices: ExpertMatrices, halves: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    def grow(tensor: Tensor, width: int) -> Tensor:
        split = tensor.unflatten(1, (halves, -1))
        room = tensor.new_zeros(tensor.shape[0], halves, rows, width)
        room[:, :, : split.shape[2], : split.shape[3]] = split
        return room.flatten(1, 2)

    return grow(matrices.packed, columns // 2), grow(matrices.block_scale, columns // BLOCK)


def scalars_of(layer: MoELayer, wiring: ScalarWiring = ScalarWiring.CONTRACT) -> Scalars:
    """The three output scalars: fp32 [E], from the layer's largest input scales."""
    a1, a2 = layer.fc1.largest_input_scale, layer.fc2.largest_input_scale
    before = layer.fc1.weight_scale_2 * a1
    after = (1.0 / a2).expand(layer.experts).clone()
    if layer.activation.is_gated or wiring is ScalarWiring.GATED_FORMULA:
        after = before / a2
    return Scalars(before, after, layer.fc2.weight_scale_2 * a2)


def prepare(layer: MoELayer, options: Options) -> Prepared:
    """Store a layer's weights as the contract says.

    Raises:
        ShapeError: sizes that no tile divides.
    """
    gated = layer.activation.is_gated
    hidden = padded(layer.hidden, options.hidden_multiple)
    linear = linear_weights(layer, hidden, padded_intermediate(layer))
    fc1 = contract(gated=gated)
    fc2 = contract(gated=False)
    return Prepared(
        layer,
        options,
        store_rows(linear.fc1_packed, fc1),
        _as_e4m3(store_scales(linear.fc1_scale, fc1)),
        store_rows(linear.fc2_packed, fc2),
        _as_e4m3(store_scales(linear.fc2_scale, fc2)),
        scalars_of(layer, options.scalars),
        hidden=linear.fc2_packed.shape[1],
        intermediate=linear.fc2_packed.shape[2] * 2,
    )


def quantize(layer: MoELayer, x: Tensor, hidden: int) -> Quantized:
    """Tokens bf16 [T, H], zero-padded, quantized with the layer's largest input scale."""
    return quantize_by(pad_activations(x, hidden), 1.0 / layer.fc1.largest_input_scale)


def quantize_by(values: Tensor, reciprocal: Tensor) -> Quantized:
    """Quantize rows by the reciprocal of their global scale, as the entries' callers do.

    One function for all, since a last bit of the scale decides ties: calibrated scales make many.
    """
    return quantize_rows(values, 1.0 / reciprocal, ARITHMETIC)


def make_call(prepared: Prepared, x: Tensor, router: Router) -> KernelCall:
    """One call for these tokens.

    Args:
        x: bf16 [T, H] with the layer's own hidden size.
        router: routes by its own rule where the caller routes.

    Raises:
        InputError: swizzled scales of a token count that is no multiple of 128: the entries take
            no other size.
    """
    options, layer = prepared.options, prepared.layer
    tokens = quantize(layer, x, prepared.hidden)
    inside = options.path is Path.MONOLITHIC
    routes = routing.expected(router)
    return KernelCall(
        path=options.path,
        hidden_states=e2m1.pack(tokens.codes),
        hidden_states_scale=_scales(tokens.block_scale, options.activation_scales),
        gemm1_weights=prepared.stored1,
        gemm1_weights_scale=prepared.stored1_scale,
        gemm2_weights=prepared.stored2,
        gemm2_weights_scale=prepared.stored2_scale,
        output1_scale_scalar=prepared.scalars.after_activation,
        output1_scale_gate_scalar=prepared.scalars.before_activation,
        output2_scale_scalar=prepared.scalars.output,
        num_experts=layer.experts,
        top_k=router.top_k,
        intermediate_size=prepared.intermediate,
        local_expert_offset=0,
        local_num_experts=layer.experts,
        routing_method_type=DEEPSEEK_V3 if inside else 1,  # FlashInfer ignores it where routed
        activation_type=ACTIVATION_TYPES[layer.activation],
        n_group=1 if inside else 0,
        topk_group=1 if inside else 0,
        routed_scaling_factor=router.scale if inside else None,
        routing_logits=router.logits.float() if inside else None,
        routing_bias=router.bias.float() if inside else None,
        topk_ids=None if inside else routing.pack(routes),
        routing_replay_out=_replay(options, routes),
    )


def _scales(linear: Tensor, wanted: ActivationScales) -> Tensor:
    if wanted is ActivationScales.LINEAR:
        return _as_e4m3(linear)
    if linear.shape[0] % scale_layout.ROW_TILE:
        raise InputError(
            f"swizzled activation scales need whole tiles of {scale_layout.ROW_TILE} tokens, got "
            f"{linear.shape[0]}"
        )
    return _as_e4m3(scale_layout.swizzle(linear))


def _replay(options: Options, routes: Routes) -> Tensor | None:
    if options.replay is Replay.ABSENT or options.path is Path.MODULAR:
        return None
    return torch.full(
        routes.expert_ids.shape, -1, dtype=torch.int16, device=routes.expert_ids.device
    )


def _as_e4m3(scales: Tensor) -> Tensor:
    return scales.contiguous().view(torch.float8_e4m3fn)
