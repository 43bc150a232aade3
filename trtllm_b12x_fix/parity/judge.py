"""Every argument of a call against the contract: faults by name, before anything is computed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_b12x_fix.emulator.quantize import Quantized
from trtllm_b12x_fix.errors import B12xFixError
from trtllm_b12x_fix.formats import e2m1, scale_layout
from trtllm_b12x_fix.formats.nvfp4 import BLOCK
from trtllm_b12x_fix.layer import MoELayer, pad_activations
from trtllm_b12x_fix.parity import contract, kernel, routing
from trtllm_b12x_fix.parity.call import DEEPSEEK_V3, KernelCall, Path, as_bytes
from trtllm_b12x_fix.parity.routing import Router, Routes, WeightRecovery
from trtllm_b12x_fix.parity.suspects import Fault, Suspect

#: Relative: a scalar is one to three fp32 operations from its exact value.
SCALAR_TOLERANCE = 1e-6
#: Relative RMS of quantized activations: NVFP4 itself costs 9-11% on Gaussian values.
ACTIVATION_LIMIT = 0.25
#: bf16 rounds a weight by at most 2^-9 of itself; this is the weight's own share at its largest.
WEIGHT_LIMIT = 2.0**-8
_LARGEST_SCALE = 0x7E  # 448


@dataclass(frozen=True)
class Case:
    """What a call should compute.

    Attributes:
        layer: the unpadded layer.
        x: bf16 [T, H].
        router: the model's routing.
        recovery: what this FlashInfer's kernel does with weights.
    """

    layer: MoELayer
    x: Tensor
    router: Router
    recovery: WeightRecovery = WeightRecovery.RECOMPUTED


def judge_call(call: KernelCall, case: Case) -> tuple[Fault, ...]:
    """Faults of everything but the weights (:func:`.judge_weights.judge_weights`)."""
    return (
        *_scalars(call, case.layer),
        *_activations(call, case),
        *_routing(call, case),
        *_replay(call),
    )


def _scalars(call: KernelCall, layer: MoELayer) -> list[Fault]:
    right = contract.scalars_of(layer)
    a1, a2 = layer.fc1.largest_input_scale, layer.fc2.largest_input_scale
    one = torch.ones_like(right.before_activation)
    alternatives = {
        "output1_scale_gate_scalar": (
            call.output1_scale_gate_scalar,
            right.before_activation,
            {"the input scale is missing": layer.fc1.weight_scale_2, "it is 1": one}
            | {"the input scale is in it twice": right.before_activation * a1},
        ),
        "output1_scale_scalar": (
            call.output1_scale_scalar,
            right.after_activation,
            {"the formula of a gated layer": right.before_activation / a2, "it is 1": one}
            | {"the formula of a layer without a gate": one / a2},
        ),
        "output2_scale_scalar": (
            call.output2_scale_scalar,
            right.output,
            {"the input scale is missing": layer.fc2.weight_scale_2, "it is 1": one}
            | {"the input scale is in it twice": right.output * a2},
        ),
    }
    faults = []
    for name, (got, wanted, known) in alternatives.items():
        if (fault := _scalar(name, got.detach(), wanted, known)) is not None:
            faults.append(fault)
    return faults


def _scalar(name: str, got: Tensor, wanted: Tensor, known: dict[str, Tensor]) -> Fault | None:
    if got.dtype != torch.float32:
        return Fault(Suspect.SCALARS, f"{name} is {got.dtype}, the kernel reads fp32")
    if _near(got, wanted):
        return None
    if _near(got, 1.0 / wanted):
        return Fault(Suspect.RECIPROCALS, f"{name} is the reciprocal of what the contract says")
    detail = f"{float(got[0]):.3g} where the contract says {float(wanted[0]):.3g} (expert 0)"
    for text, value in known.items():
        if _near(got, value):
            return Fault(Suspect.SCALARS, f"{name}: {text}; {detail}")
    if _near(got.sort().values, wanted.sort().values):
        return Fault(Suspect.SCALARS, f"{name}: experts are mixed up; {detail}")
    return Fault(Suspect.SCALARS, f"{name}: {detail}")


def _near(got: Tensor, wanted: Tensor) -> bool:
    return bool(((got - wanted).abs() <= SCALAR_TOLERANCE * wanted.abs()).all())


def _activations(call: KernelCall, case: Case) -> list[Fault]:
    layer = case.layer
    x = pad_activations(case.x, call.hidden).double()
    scale = layer.fc1.largest_input_scale.double()
    tokens = kernel.read_activations(call)
    error = _error(tokens, scale, x)
    faults = []
    padding = tokens.codes[:, layer.hidden :] & 0x7
    if bool(padding.any()):
        faults.append(Fault(Suspect.PADDING, "hidden_states: the padded columns are not zero"))
    if error <= ACTIVATION_LIMIT:
        return faults
    swizzled = _read_swizzled(call)
    if swizzled is not None and _error(swizzled, scale, x) <= ACTIVATION_LIMIT:
        text = "hidden_states_scale is 128x4-swizzled, the kernel reads it as linear"
        return [*faults, Fault(Suspect.ACTIVATION_SCALES, text)]
    if _quantized_by_the_reciprocal(tokens):
        text = "hidden_states were quantized with the input scale where its reciprocal belongs"
        return [*faults, Fault(Suspect.RECIPROCALS, text)]
    text = f"hidden_states and their scales are {error:.0%} from the activations"
    return [*faults, Fault(Suspect.ACTIVATION_SCALES, text)]


def _error(tokens: Quantized, scale: Tensor, x: Tensor) -> float:
    values = tokens.operand(torch.float64) * scale
    return float((values - x).norm() / x.norm())


def _read_swizzled(call: KernelCall) -> Quantized | None:
    groups = call.hidden // BLOCK
    rows, columns = scale_layout.padded_shape(call.tokens, groups)
    stored = as_bytes(call.hidden_states_scale).flatten()
    if stored.numel() < rows * columns:
        return None
    tiles = stored[: rows * columns].view(rows, columns)
    linear = scale_layout.unswizzle(tiles, call.tokens, groups)
    return Quantized(e2m1.unpack(call.hidden_states), linear)


def _quantized_by_the_reciprocal(tokens: Quantized) -> bool:
    """A quantizer fed g for 1/g, or 1/g for g, makes scales of nothing or of 448."""
    used = tokens.block_scale.unique()
    return bool(((used <= 1) | (used == _LARGEST_SCALE)).all())


def _routing(call: KernelCall, case: Case) -> list[Fault]:
    faults = _routing_arguments(call, case) if call.path is Path.MONOLITHIC else []
    try:
        routes = kernel.routes_of(call, case.recovery)
    except B12xFixError as error:
        return [*faults, Fault(Suspect.ROUTING, str(error))]
    return faults or _routes(case.router, routes)


def _routing_arguments(call: KernelCall, case: Case) -> list[Fault]:
    router = case.router
    wrong = []
    if call.routing_method_type != DEEPSEEK_V3:
        wrong.append(f"routing_method_type {call.routing_method_type}, not {DEEPSEEK_V3}")
    if (call.n_group or 0) > 1 or (call.topk_group or 0) > 1:
        wrong.append(f"n_group {call.n_group}, topk_group {call.topk_group} where there is one")
    if call.top_k != router.top_k or call.num_experts != router.logits.shape[1]:
        wrong.append(f"top-{call.top_k} of {call.num_experts} experts")
    if (call.routed_scaling_factor or 1.0) != router.scale:
        wrong.append(f"routed_scaling_factor {call.routed_scaling_factor}, not {router.scale}")
    if (call.local_expert_offset, call.local_num_experts) != (0, call.num_experts):
        wrong.append("only some experts are local")
    wrong += _compare("routing_bias", call.routing_bias, router.bias)
    wrong += _compare("routing_logits", call.routing_logits, router.logits)
    return [Fault(Suspect.ROUTING, text) for text in wrong]


def _compare(name: str, got: Tensor | None, wanted: Tensor) -> list[str]:
    if got is None:
        return [f"{name} is missing"]
    if got.shape != wanted.shape or not torch.equal(got.float(), wanted.float()):
        return [f"{name} is not the router's ({got.dtype}, {tuple(got.shape)})"]
    return []


def _routes(router: Router, routes: Routes) -> list[Fault]:
    faults = []
    if wrong := routing.wrong_choices(router, routes):
        text = f"{wrong} of {router.logits.shape[0]} tokens go to experts that are not the top-k"
        faults.append(Fault(Suspect.ROUTING, text))
    error = routing.weight_error(router, routes)
    if not error <= WEIGHT_LIMIT:
        text = f"weights are up to {error:.1%} of the largest from sigmoid over their sum"
        faults.append(Fault(Suspect.ROUTING, text))
    return faults


def _replay(call: KernelCall) -> list[Fault]:
    replay = call.routing_replay_out
    if replay is None:
        return []
    fits = replay.dim() == 2 and replay.shape[0] >= call.tokens and replay.shape[1] == call.top_k
    if replay.dtype is torch.int16 and fits and replay.is_contiguous():
        return []
    text = f"routing_replay_out is {replay.dtype} {tuple(replay.shape)}, not int16 [T, top-k]"
    return [Fault(Suspect.ROUTING_REPLAY, text)]


def judge_replay(call: KernelCall, case: Case) -> tuple[Fault, ...]:
    """After the launch: the buffer must hold the experts that were used."""
    if call.routing_replay_out is None:
        return ()
    ids = call.routing_replay_out[: call.tokens].long()
    in_range = bool(((ids >= 0) & (ids < call.num_experts)).all())
    if in_range and not routing.wrong_choices(case.router, Routes(ids, torch.ones_like(ids))):
        return ()
    text = "routing_replay_out does not hold the experts of the model's routing after the launch"
    return (Fault(Suspect.ROUTING_REPLAY, text),)
