"""Faults planted into a right call: what a wrong preparation would hand the kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from trtllm_b12x_fix.formats import scale_layout
from trtllm_b12x_fix.layer import Activation
from trtllm_b12x_fix.parity import contract, routing
from trtllm_b12x_fix.parity.call import KernelCall, Path
from trtllm_b12x_fix.parity.contract import Options, Replay
from trtllm_b12x_fix.parity.judge import Case
from trtllm_b12x_fix.parity.layout import (
    GateMap,
    RowMap,
    ScaleMap,
    store_rows,
    store_scales,
)
from trtllm_b12x_fix.parity.suspects import Suspect

Plant = Callable[[KernelCall, Case], KernelCall]
_BOTH = tuple(Activation)
_GATED = (Activation.SILU,)
_PLAIN = (Activation.RELU2,)


@dataclass(frozen=True)
class PlantedFault:
    name: str
    suspect: Suspect
    words: str
    plant: Plant
    activations: tuple[Activation, ...] = _BOTH
    options: Options = Options()  # noqa: RUF009 - frozen


def _e4m3(scales):
    return scales.contiguous().view(torch.float8_e4m3fn)


def _linear(call, case):
    return contract.linear_weights(case.layer, call.hidden, call.intermediate_size)


def _laid_out(codes=None, scales=None):
    """FC1 and FC2 stored by another layout: changes of codes' and of scales' layout."""

    def plant(call, case):
        linear = _linear(call, case)
        fc1 = contract.contract(gated=case.layer.activation.is_gated)
        fc2 = contract.contract(gated=False)
        changed = {}
        if codes:
            changed["gemm1_weights"] = store_rows(linear.fc1_packed, fc1.but(**codes))
            if "gate" not in codes:
                changed["gemm2_weights"] = store_rows(linear.fc2_packed, fc2.but(**codes))
        if scales:
            changed["gemm1_weights_scale"] = _e4m3(
                store_scales(linear.fc1_scale, fc1.but(**scales))
            )
            if "gate" not in scales:
                changed["gemm2_weights_scale"] = _e4m3(
                    store_scales(linear.fc2_scale, fc2.but(**scales))
                )
        return replace(call, **changed)

    return plant


def _relaid(change):
    """FC1 rebuilt from a changed linear matrix: change(codes, scales, case)."""

    def plant(call, case):
        linear = _linear(call, case)
        fc1 = contract.contract(gated=case.layer.activation.is_gated)
        codes, scales = change(linear.fc1_packed.clone(), linear.fc1_scale.clone(), case)
        return replace(
            call,
            gemm1_weights=store_rows(codes, fc1),
            gemm1_weights_scale=_e4m3(store_scales(scales, fc1)),
        )

    return plant


def _garbage_columns(codes, scales, case):
    codes[:, :, case.layer.hidden // 2 :] = 0x22
    scales[:, :, case.layer.hidden // 16 :] = 0x38
    return codes, scales


def _nan_scales(codes, scales, case):
    scales[:, :, case.layer.hidden // 16 :] = 0x7F
    return codes, scales


def _padded_in_front(codes, scales, case):
    return codes, scales.roll(scales.shape[2] - case.layer.hidden // 16, 2)


def _groups_without_gaps(codes, scales, case):
    flat = torch.zeros_like(scales).flatten(1)
    source = case.layer.fc1.block_scale.flatten(1)
    flat[:, : source.shape[1]] = source
    return codes, flat.view(scales.shape)


def _padded_together(codes, scales, case):
    real = case.layer.fc1
    for room, source in ((codes, real.packed), (scales, real.block_scale)):
        room.zero_()
        room[:, : source.shape[1], : source.shape[2]] = source
    return codes, scales


def _one_code(codes, scales, case):
    codes[1, 3, 5] ^= 0x07
    return codes, scales


def _one_scale_baked(codes, scales, case):
    scales[:, : case.layer.fc1.rows // 2] -= 8  # half of every scale, exactly
    return codes, scales


def _scaled(field, change):
    def plant(call, case):
        a1, a2 = case.layer.fc1.largest_input_scale, case.layer.fc2.largest_input_scale
        return replace(call, **{field: change(getattr(call, field), a1, a2)})

    return plant


def _quantized_by(reciprocal):
    def plant(call, case):
        x = torch.nn.functional.pad(case.x, (0, call.hidden - case.layer.hidden))
        from trtllm_b12x_fix.formats import e2m1

        rows = contract.quantize_by(x, reciprocal(case.layer.fc1.largest_input_scale))
        return replace(
            call,
            hidden_states=e2m1.pack(rows.codes),
            hidden_states_scale=_e4m3(rows.block_scale),
        )

    return plant


def _swizzled_activations(call, case):
    linear = call.hidden_states_scale.view(torch.uint8)
    return replace(call, hidden_states_scale=_e4m3(scale_layout.swizzle(linear)))


def _activation_padding(call, case):
    states = call.hidden_states.clone()
    states[:, case.layer.hidden // 2 :] = 0x11
    return replace(call, hidden_states=states)


def _routed(change):
    def plant(call, case):
        return replace(call, topk_ids=routing.pack(change(routing.unpack(call.topk_ids))))

    return plant


def _set(**changes):
    return lambda call, case: replace(call, **changes)


def _bias(change):
    return lambda call, case: replace(call, routing_bias=change(call.routing_bias))


_INSIDE = Options(path=Path.MONOLITHIC)
_REPLAYED = Options(path=Path.MONOLITHIC, replay=Replay.GIVEN)

FAULTS = (
    PlantedFault(
        "padded columns hold values", Suspect.PADDING, "not zero", _relaid(_garbage_columns)
    ),
    PlantedFault("padded scale groups are NaN", Suspect.PADDING, "not zero", _relaid(_nan_scales)),
    PlantedFault(
        "scale groups padded in front", Suspect.PADDING, "in front", _relaid(_padded_in_front)
    ),
    PlantedFault(
        "scale groups at the unpadded stride",
        Suspect.PADDING,
        "without a gap",
        _relaid(_groups_without_gaps),
        _PLAIN,
    ),
    PlantedFault(
        "gate and up padded together",
        Suspect.PADDING,
        "padded together",
        _relaid(_padded_together),
        _GATED,
    ),
    PlantedFault(
        "activations padded with values", Suspect.PADDING, "hidden_states", _activation_padding
    ),
    PlantedFault(
        "rows not shuffled",
        Suspect.ROW_SHUFFLE,
        "not moved",
        _laid_out({"rows": RowMap.UNMOVED}, {"rows": RowMap.UNMOVED}),
    ),
    PlantedFault(
        "rows shuffled for another tile",
        Suspect.ROW_SHUFFLE,
        "blocks of 16",
        _laid_out({"rows": RowMap.BLOCK_16}),
    ),
    PlantedFault(
        "rows of scales not shuffled",
        Suspect.ROW_SHUFFLE,
        "block scales: rows are not moved",
        _laid_out(None, {"rows": RowMap.UNMOVED}),
    ),
    PlantedFault(
        "scales not interleaved",
        Suspect.SCALE_INTERLEAVE,
        "linear order",
        _laid_out(None, {"scales": ScaleMap.LINEAR}),
    ),
    PlantedFault(
        "gate first",
        Suspect.GATE_ROWS,
        "gate first",
        _laid_out({"gate": GateMap.ALTERNATING_GATE_UP}, {"gate": GateMap.ALTERNATING_GATE_UP}),
        _GATED,
    ),
    PlantedFault(
        "halves not alternating",
        Suspect.GATE_ROWS,
        "up half, then gate half",
        _laid_out({"gate": GateMap.HALVES_UP_GATE}, {"gate": GateMap.HALVES_UP_GATE}),
        _GATED,
    ),
    PlantedFault("one byte of codes off", Suspect.WEIGHTS, "FC1 codes", _relaid(_one_code)),
    PlantedFault("scales halved", Suspect.WEIGHTS, "FC1 block scales", _relaid(_one_scale_baked)),
    PlantedFault(
        "gated formula without a gate",
        Suspect.SCALARS,
        "formula of a gated layer",
        lambda call, case: replace(
            call,
            output1_scale_scalar=call.output1_scale_scalar * call.output1_scale_gate_scalar,
        ),
        _PLAIN,
    ),
    PlantedFault(
        "formula without a gate in a gated layer",
        Suspect.SCALARS,
        "formula of a layer without a gate",
        lambda call, case: replace(
            call,
            output1_scale_scalar=(1 / case.layer.fc2.largest_input_scale).expand(
                case.layer.experts
            ),
        ),
        _GATED,
    ),
    PlantedFault(
        "input scale missing",
        Suspect.SCALARS,
        "input scale is missing",
        _scaled("output1_scale_gate_scalar", lambda s, a1, a2: s / a1),
    ),
    PlantedFault(
        "input scale folded twice",
        Suspect.SCALARS,
        "in it twice",
        _scaled("output2_scale_scalar", lambda s, a1, a2: s * a2),
    ),
    PlantedFault(
        "scalars of other experts",
        Suspect.SCALARS,
        "mixed up",
        _scaled("output2_scale_scalar", lambda s, a1, a2: s.roll(1)),
    ),
    PlantedFault(
        "output scalar of half precision",
        Suspect.SCALARS,
        "float16",
        _scaled("output2_scale_scalar", lambda s, a1, a2: s.half()),
    ),
    PlantedFault(
        "output1_scale_scalar inverted",
        Suspect.RECIPROCALS,
        "output1_scale_scalar",
        _scaled("output1_scale_scalar", lambda s, a1, a2: 1 / s),
    ),
    PlantedFault(
        "gate scalar inverted",
        Suspect.RECIPROCALS,
        "output1_scale_gate_scalar",
        _scaled("output1_scale_gate_scalar", lambda s, a1, a2: 1 / s),
    ),
    PlantedFault(
        "activations quantized by the scale itself",
        Suspect.RECIPROCALS,
        "hidden_states",
        _quantized_by(lambda a1: a1),
    ),
    PlantedFault(
        "activation scales swizzled",
        Suspect.ACTIVATION_SCALES,
        "swizzled",
        _swizzled_activations,
    ),
    PlantedFault(
        "activations of another scale",
        Suspect.ACTIVATION_SCALES,
        "from the activations",
        _quantized_by(lambda a1: 1 / (a1 * 2)),
    ),
    PlantedFault(
        "experts off by one",
        Suspect.ROUTING,
        "not the top-k",
        _routed(lambda r: replace(r, expert_ids=(r.expert_ids + 1) % 4)),
    ),
    PlantedFault(
        "weights not normalized",
        Suspect.ROUTING,
        "sigmoid over their sum",
        _routed(lambda r: replace(r, weights=r.weights * 1.1)),
    ),
    PlantedFault(
        "ids that no expert has",
        Suspect.ROUTING,
        "are routed to",
        _routed(lambda r: replace(r, expert_ids=r.expert_ids + 4)),
    ),
    PlantedFault(
        "softmax routing", Suspect.ROUTING, "method", _set(routing_method_type=1), options=_INSIDE
    ),
    PlantedFault(
        "groups where there are none", Suspect.ROUTING, "n_group", _set(n_group=2), options=_INSIDE
    ),
    PlantedFault(
        "weights scaled twice",
        Suspect.ROUTING,
        "routed_scaling_factor",
        _set(routed_scaling_factor=2.5),
        options=_INSIDE,
    ),
    PlantedFault(
        "bias in bf16",
        Suspect.ROUTING,
        "routing_bias",
        _bias(lambda bias: bias.to(torch.bfloat16)),
        options=_INSIDE,
    ),
    PlantedFault(
        "no bias", Suspect.ROUTING, "routing_bias", _bias(lambda bias: None), options=_INSIDE
    ),
    PlantedFault(
        "replay buffer of int32",
        Suspect.ROUTING_REPLAY,
        "int32",
        lambda call, case: replace(call, routing_replay_out=call.routing_replay_out.int()),
        options=_REPLAYED,
    ),
    PlantedFault(
        "replay buffer too short",
        Suspect.ROUTING_REPLAY,
        "int16",
        lambda call, case: replace(call, routing_replay_out=call.routing_replay_out[:1]),
        options=_REPLAYED,
    ),
)
CASES = [(fault, activation) for fault in FAULTS for activation in fault.activations]
IDS = [f"{fault.name}, {activation.value}" for fault, activation in CASES]
