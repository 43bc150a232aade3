"""Run a layer check: every arm at every row count against its family's exact arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trtllm_b12x_fix.emulator import moe, reference
from trtllm_b12x_fix.emulator.arithmetic import (
    PUBLISHED,
    Arithmetic,
    KernelFamily,
    OutputSum,
    ScaleConvention,
)
from trtllm_b12x_fix.emulator.contract import InputQuantization, KernelContract, Shape
from trtllm_b12x_fix.errors import InputError, NoExactFormError
from trtllm_b12x_fix.layer import MoELayer
from trtllm_b12x_fix.layer_check.arms import Arm, ResolvedArm, resolve
from trtllm_b12x_fix.layer_check.result import ArmResult, FamilyResult
from trtllm_b12x_fix.layer_check.stages import first_divergence
from trtllm_b12x_fix.metrics import compare_codes, distance
from trtllm_b12x_fix.repair import (
    InputScales,
    KernelArguments,
    Strategy,
    arguments,
    input_scales,
)

Progress = Callable[[str], None]


@dataclass(frozen=True)
class LayerInput:
    """A layer with activations and routing to run it on.

    Attributes:
        layer: padded to what the kernels take.
        x: bf16 [N, H], padded likewise; a check of R rows uses the first R.
        routing: for the same N tokens.
        inputs: where activations and routing came from, in words.
        model_experts: experts of the layer in the model, which the dispatch looks at; ``None``
            where ``layer`` holds them all.
    """

    layer: MoELayer
    x: Tensor
    routing: moe.Routing
    inputs: str
    model_experts: int | None = None

    @property
    def experts(self) -> int:
        """Experts of the layer in the model."""
        return self.layer.experts if self.model_experts is None else self.model_experts

    def head(self, rows: int) -> tuple[Tensor, moe.Routing]:
        """The first ``rows`` tokens.

        Raises:
            InputError: there are fewer.
        """
        if not 1 <= rows <= self.x.shape[0]:
            raise InputError(f"rows must be 1 to {self.x.shape[0]} for this layer, got {rows}")
        ids, weights = self.routing.expert_ids[:rows], self.routing.weights[:rows]
        return self.x[:rows], moe.Routing(ids, weights)

    def to(self, device: torch.device) -> LayerInput:
        ids, weights = self.routing.expert_ids.to(device), self.routing.weights.to(device)
        return replace(
            self,
            layer=self.layer.to(device),
            x=self.x.to(device),
            routing=moe.Routing(ids, weights),
        )


@dataclass(frozen=True)
class Settings:
    """What to run. ``forced`` is a family, or ``None`` for the dispatch's own choice."""

    contract: KernelContract
    arms: tuple[Arm, ...]
    rows: tuple[int, ...]
    forced: KernelFamily | None
    input_scales: InputScales
    seed: int


class RowCheck:
    """All arms at one row count; a launch that several of them make is computed once.

    Args:
        prepared: kernel arguments by strategy, kept between row counts by the caller: baking all
            experts takes seconds. For one layer and one ``settings``.
    """

    def __init__(
        self,
        subject: LayerInput,
        settings: Settings,
        rows: int,
        prepared: dict[Strategy, KernelArguments] | None = None,
    ) -> None:
        self._settings = settings
        self._layer = subject.layer
        self._rows = rows
        self._x, self._routing = subject.head(rows)
        self._shape = Shape(
            tokens=rows,
            top_k=self._routing.expert_ids.shape[1],
            hidden=subject.layer.hidden,
            intermediate=subject.layer.intermediate,
            experts=subject.experts,
            activation=subject.layer.activation,
        )
        self._scales = input_scales(subject.layer, settings.input_scales)
        self._truth = reference.truth(subject.layer, self._x, self._routing)
        if not bool(torch.isfinite(self._truth).all() and self._truth.any()):
            raise InputError(
                "the layer's exact output is zero or not finite for these inputs: there is nothing "
                "to compare with"
            )
        self._exact = reference.exact_launch(subject.layer, *self._scales)
        self._prepared = {} if prepared is None else prepared
        self._traces: dict[object, tuple[moe.LaunchTensors, moe.MoETrace]] = {}
        self._published = self._run(self._exact, PUBLISHED)

    def arm(self, arm: Arm) -> ArmResult:
        """Run one arm."""
        contract = self._settings.contract
        resolved = resolve(arm, contract, self._shape, self._settings.forced)
        if resolved.family is None:
            return _unavailable(self._rows, resolved, resolved.note)
        try:
            args = self._arguments(resolved.strategy)
        except NoExactFormError as error:
            return _unavailable(self._rows, resolved, str(error))
        launch = args.launch(self._layer)
        arithmetic = contract.arithmetic(resolved.family, self._shape_of(launch))
        trace = self._run(launch, arithmetic)
        exact = self._exact_trace(arithmetic)
        return ArmResult(
            rows=self._rows,
            arm=arm,
            strategy=resolved.strategy,
            family=resolved.family,
            fidelity=distance(trace.unrounded, exact.unrounded),
            output_distance=distance(trace.output, exact.output),
            true_error=distance(trace.output, self._truth),
            published=distance(trace.output, self._published.output),
            codes_differing=_codes_differing(trace, exact),
            first_divergence=first_divergence(
                trace, exact, self._routing, args.fc1_unit, self._layer.activation
            ),
            trap=_trap(arithmetic, resolved.strategy),
            note=resolved.note,
        )

    def reference(self, family: KernelFamily) -> moe.MoETrace:
        """The family's arithmetic with exact scales, read as the API documents them."""
        return self._exact_trace(self._arithmetic(family))

    def _exact_trace(self, arithmetic: Arithmetic) -> moe.MoETrace:
        return self._run(self._exact, replace(arithmetic, convention=ScaleConvention.DIVISOR))

    def _arguments(self, strategy: Strategy) -> KernelArguments:
        if strategy not in self._prepared:
            contract = self._settings.contract
            self._prepared[strategy] = arguments(strategy, self._layer, *self._scales, contract)
        return self._prepared[strategy]

    def family(self, family: KernelFamily) -> FamilyResult:
        """What the family itself costs."""
        arithmetic = self._arithmetic(family)
        exact = self.reference(family)
        fp32_sum = replace(arithmetic, output_sum=OutputSum.FP32)
        unsummed = self._run(self._exact, fp32_sum)
        noise = 0.0
        if arithmetic.output_sum.has_random_order:
            other = self._run(self._exact, arithmetic, self._settings.seed + 1)
            noise = distance(other.output, exact.output).relative_rms
        layer_wide = reference.exact_launch(
            self._layer, *input_scales(self._layer, InputScales.LAYER)
        )
        own = reference.exact_launch(self._layer, *input_scales(self._layer, InputScales.FILE))
        return FamilyResult(
            rows=self._rows,
            family=family,
            true_error=distance(exact.output, self._truth),
            noise=noise,
            evaluation_order=distance(unsummed.output, self._published.output).relative_rms,
            summation=distance(exact.output, unsummed.output).relative_rms,
            input_scales=distance(
                self._run(layer_wide, arithmetic).output, self._run(own, arithmetic).output
            ).relative_rms,
        )

    def _arithmetic(self, family: KernelFamily) -> Arithmetic:
        shape = self._shape_of(self._exact)
        arithmetic = self._settings.contract.arithmetic(family, shape)
        return replace(arithmetic, convention=ScaleConvention.DIVISOR)

    def _shape_of(self, launch: moe.LaunchTensors) -> Shape:
        shared = launch.input_global_scale.numel() == 1
        sharing = InputQuantization.SHARED if shared else InputQuantization.PER_ROUTE
        return replace(self._shape, sharing=sharing)

    def _run(
        self, tensors: moe.LaunchTensors, arithmetic: Arithmetic, seed: int | None = None
    ) -> moe.MoETrace:
        order = self._settings.seed if seed is None else seed
        random = arithmetic.output_sum.has_random_order
        key = (_identity(tensors), arithmetic, order if random else None)
        if key not in self._traces:
            trace = moe.run(tensors, self._x, self._routing, arithmetic, order)
            # The launch is kept too: a freed tensor's address may be another's.
            self._traces[key] = tensors, trace
        return self._traces[key][1]


def run_arms(
    subject: LayerInput, settings: Settings, progress: Progress
) -> tuple[tuple[ArmResult, ...], tuple[FamilyResult, ...]]:
    """Every arm at every row count, and each kernel family that took part."""
    results: list[ArmResult] = []
    families: list[FamilyResult] = []
    prepared: dict[Strategy, KernelArguments] = {}
    for rows in settings.rows:
        check = RowCheck(subject, settings, rows, prepared)
        here: list[ArmResult] = []
        for arm in settings.arms:
            progress(f"{rows} rows, {arm.value}")
            here.append(check.arm(arm))
        used = {result.family for result in here if result.family and not result.unavailable}
        families += [check.family(family) for family in KernelFamily if family in used]
        results += here
    return tuple(results), tuple(families)


def _identity(tensors: moe.LaunchTensors) -> object:
    """Equal only for launches that hand a kernel the very same bits.

    Weights are the same memory; the few floats per expert are compared by value, since every
    strategy computes its own.
    """
    weights = (
        tensors.w1_packed,
        tensors.w1_block_scale,
        tensors.w2_packed,
        tensors.w2_block_scale,
    )
    scales = (
        tensors.w1_alpha,
        tensors.w2_alpha,
        tensors.input_global_scale,
        tensors.fc2_input_scale,
    )
    return (
        tensors.activation,
        *((tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in weights),
        *((scale.shape, scale.cpu().numpy().tobytes()) for scale in scales),
    )


def _unavailable(rows: int, resolved: ResolvedArm, reason: str) -> ArmResult:
    return ArmResult(rows, resolved.arm, resolved.strategy, resolved.family, unavailable=reason)


def _codes_differing(trace: moe.MoETrace, exact: moe.MoETrace) -> int:
    routes = exact.intermediate_quantized.codes.shape[0]
    total = 0
    for ours, theirs in (
        (trace.input.codes, exact.input.codes),
        (trace.intermediate_quantized.codes, exact.intermediate_quantized.codes),
    ):
        left, right = (t.repeat_interleave(routes // t.shape[0], 0) for t in (ours, theirs))
        total += compare_codes(left, right).differing
    return total


def _trap(arithmetic: Arithmetic, strategy: Strategy) -> str:
    # Scales of exactly 1.0 are their own reciprocals: that is what `unit` is for.
    if arithmetic.convention is ScaleConvention.MULTIPLIER and strategy is not Strategy.UNIT:
        return f"{arithmetic.name} multiplies by the input scales it should divide by"
    return ""
