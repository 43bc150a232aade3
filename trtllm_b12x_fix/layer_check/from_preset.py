"""A preset's layer as input of a layer check, and its published figures beside what came out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trtllm_b12x_fix.checkpoint.router import random_routing
from trtllm_b12x_fix.emulator.moe import Routing
from trtllm_b12x_fix.errors import InputError
from trtllm_b12x_fix.layer import Activation, pad_activations, pad_to_tiles
from trtllm_b12x_fix.layer_check.arms import Arm
from trtllm_b12x_fix.layer_check.result import (
    ArmResult,
    FamilyResult,
    MeasuredFigure,
    PresetReport,
)
from trtllm_b12x_fix.layer_check.run import LayerInput
from trtllm_b12x_fix.layer_check.scales import ScaleDamage
from trtllm_b12x_fix.presets import generate
from trtllm_b12x_fix.presets.published import Quantity
from trtllm_b12x_fix.presets.shapes import PRESETS, LayerShape, Preset


@dataclass(frozen=True)
class Request:
    """Which preset to make, for how many tokens; ``None`` keeps the preset's own size."""

    name: str
    tokens: int
    seed: int
    hidden: int | None = None
    intermediate: int | None = None
    experts: int | None = None
    top_k: int | None = None
    activation: Activation | None = None


@dataclass(frozen=True)
class Loaded:
    """The layer check's input, and the preset that its report speaks of."""

    subject: LayerInput
    preset: Preset
    shape: LayerShape


def load(request: Request, progress: Callable[[str], None] = lambda _: None) -> Loaded:
    """Make the experts that the tokens are routed to, and nothing else.

    Raises:
        InputError: an unknown preset, or sizes that do not fit.
    """
    preset = _preset(request.name)
    shape = _shape(preset, request)
    x = generate.tokens(shape, request.seed, request.tokens)
    chosen, weights = random_routing(
        request.tokens, shape.experts, shape.top_k, generate.stream(request.seed, "routing")
    )
    used, local = chosen.unique(return_inverse=True)
    layer = generate.make_layer(preset, shape, used.tolist(), request.seed, progress)
    padded = pad_to_tiles(layer)
    subject = LayerInput(
        padded,
        pad_activations(x, padded.hidden),
        Routing(local, weights),
        f"N(0,1), input scales calibrated on {generate.CALIBRATION_TOKENS} other such tokens and "
        "one for all experts; random routing (a made-up layer has no router)",
        model_experts=shape.experts,
    )
    return Loaded(subject, preset, shape)


def _preset(name: str) -> Preset:
    if name not in PRESETS:
        raise InputError(f"no preset {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]


def _shape(preset: Preset, request: Request) -> LayerShape:
    own = preset.shape
    experts = _or_own(request.experts, own.experts)
    if request.top_k is None and own.top_k > experts >= 1:
        raise InputError(
            f"preset {preset.name} routes a token to {own.top_k} experts, more than --experts "
            f"{experts}: give --top-k as well"
        )
    return LayerShape(
        hidden=_or_own(request.hidden, own.hidden),
        intermediate=_or_own(request.intermediate, own.intermediate),
        experts=experts,
        top_k=_or_own(request.top_k, own.top_k),
        activation=own.activation if request.activation is None else request.activation,
    )


def _or_own(asked: int | None, own: int) -> int:
    # Not `asked or own`: a zero that was asked for must be refused, not replaced.
    return own if asked is None else asked


def compare(
    loaded: Loaded,
    fc1: ScaleDamage,
    results: tuple[ArmResult, ...],
    families: tuple[FamilyResult, ...],
) -> PresetReport:
    """Set the published figures beside what was measured on the made-up layer.

    Args:
        fc1: damage of FC1's block scales, over the experts that were made.
    """
    return PresetReport(
        name=loaded.preset.name,
        origin=loaded.preset.origin,
        caveat=loaded.preset.caveat,
        changed=_changed(loaded),
        experts_made=loaded.subject.layer.experts,
        experts=loaded.shape.experts,
        figures=tuple(
            MeasuredFigure(figure, _measured(figure.quantity, fc1, results))
            for figure in loaded.preset.figures
        ),
        true_error_ratios=_true_error_ratios(results, families),
    )


def _changed(loaded: Loaded) -> tuple[str, ...]:
    """Sizes that are not the published ones, in words."""
    own, used = loaded.preset.shape, loaded.shape
    pairs = (
        ("hidden", own.hidden, used.hidden),
        ("intermediate", own.intermediate, used.intermediate),
        ("experts", own.experts, used.experts),
        ("top-k", own.top_k, used.top_k),
        ("activation", own.activation.value, used.activation.value),
    )
    return tuple(f"{name} {new}, not {old}" for name, old, new in pairs if old != new)


def _measured(
    quantity: Quantity, fc1: ScaleDamage, results: tuple[ArmResult, ...]
) -> tuple[float, float] | None:
    """Smallest and largest value seen, ``None`` where the run has none."""
    if quantity is Quantity.MEAN_ERROR:
        return fc1.mean_relative_error, fc1.mean_relative_error
    if quantity is Quantity.ZERO_FRACTION:
        return fc1.zero_fraction, fc1.zero_fraction
    if quantity is Quantity.WEIGHT_SCALE_2:
        return fc1.weight_scale_2_min, fc1.weight_scale_2_max
    # Where a kernel misreads its input scales, the error is not that of block scales.
    seen = [
        result.fidelity.relative_rms
        for result in results
        if result.arm is Arm.BAKED and result.fidelity and not result.trap
    ]
    return (min(seen), max(seen)) if seen else None


def _true_error_ratios(
    results: tuple[ArmResult, ...], families: tuple[FamilyResult, ...]
) -> tuple[tuple[int, float], ...]:
    """Baked true error over that of exact scales in the same kernel, by row count."""
    exact = {(f.rows, f.family): f.true_error.relative_rms for f in families}
    ratios = []
    for result in results:
        best = exact.get((result.rows, result.family)) if result.family else None
        if result.arm is Arm.BAKED and result.true_error and not result.trap and best:
            ratios.append((result.rows, result.true_error.relative_rms / best))
    return tuple(ratios)
