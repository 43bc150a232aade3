"""The real kernels beside the emulated ones: which arms, how often, held against what.

FlashInfer is behind a protocol: nothing here knows a foreign symbol, and tests run it on a CPU.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Protocol

import torch
from torch import Tensor

from trtllm_b12x_fix.emulator import moe, reference
from trtllm_b12x_fix.emulator.arithmetic import KernelFamily
from trtllm_b12x_fix.emulator.contract import InputQuantization, KernelContract, Shape
from trtllm_b12x_fix.errors import InputError
from trtllm_b12x_fix.integrations.b12x_families import NotSelectableError
from trtllm_b12x_fix.integrations.b12x_wrapper import describe
from trtllm_b12x_fix.layer import MoELayer
from trtllm_b12x_fix.layer_check.arms import Arm
from trtllm_b12x_fix.layer_check.real_result import (
    ArmStatus,
    RealArm,
    RealKernelsResult,
    RunStatus,
)
from trtllm_b12x_fix.layer_check.run import LayerInput, Progress, Settings
from trtllm_b12x_fix.metrics import distance
from trtllm_b12x_fix.repair import (
    KernelArguments,
    Strategy,
    arguments,
    input_scales,
    plan,
)

#: Arms that are run, the fix first: a CUDA error of the other must not keep it from running.
ARMS = (Arm.FIX, Arm.BAKED)

#: Distance from the emulated output above which the two are not the same computation. Rounding
#: ties over a whole layer explain up to 5%, two random orders of bf16 adds up to 3.5% at top-22.
DISAGREEMENT = 0.10


class Meter(Protocol):
    """Clock and memory counter; see ``integrations.cuda_meter``."""

    def now(self) -> float: ...
    def synchronize(self) -> None: ...
    def times(self, call: Callable[[], object], count: int) -> list[float]: ...
    def start_peak(self) -> None: ...
    def peak_bytes(self) -> int | None: ...


class Call(Protocol):
    """One arm on one input, ready to be run again and again."""

    @property
    def families(self) -> frozenset[KernelFamily]: ...
    def output(self) -> Tensor: ...
    def launch(self) -> None: ...


class Kernels(Protocol):
    """Real kernels; see ``integrations.b12x_wrapper``."""

    @property
    def contract(self) -> KernelContract: ...
    @property
    def capacity(self) -> int | None: ...
    @property
    def meter(self) -> Meter: ...
    @property
    def device(self) -> str: ...
    def session(
        self,
        layer: MoELayer,
        arguments: KernelArguments,
        x: Tensor,
        routing: moe.Routing,
        forced: KernelFamily | None,
        keep_out: frozenset[KernelFamily],
    ) -> AbstractContextManager[Call]: ...


@dataclass(frozen=True)
class Counts:
    """How often each arm runs: ``repeats`` times for its noise, ``timed`` times for its time."""

    repeats: int = 5
    timed: int = 20


def run(
    subject: LayerInput,
    settings: Settings,
    kernels: Kernels,
    progress: Progress,
    counts: Counts | None = None,
) -> RealKernelsResult:
    """Every arm at every row count, on the dispatch's own family and on each forced one."""
    arms: list[RealArm] = []
    device, dead = kernels.device, ""  # asked for while CUDA still answers
    prepared: dict[Strategy, KernelArguments] = {}  # baking all experts takes seconds
    for rows in settings.rows:
        here = None
        if not dead:
            here = _Rows(subject, settings, kernels, rows, counts or Counts(), prepared)
        for arm, forced in _cases(settings, subject.layer):
            if here is None or dead:
                arms.append(RealArm(arm, rows, forced, ArmStatus.SKIPPED, dead))
                continue
            progress(f"real kernels: {rows} rows, {arm.value}, {forced.value if forced else 'own'}")
            result = here.arm(arm, forced)
            arms.append(result)
            if result.status is ArmStatus.FAILED:
                dead = _left_behind(kernels.meter)
    status = RunStatus.STOPPED if dead else RunStatus.RAN
    return RealKernelsResult(
        status,
        why_not=dead,
        device=device,
        flashinfer=kernels.contract.version,
        arms=tuple(arms),
    )


def _left_behind(meter: Meter) -> str:
    """The CUDA error that outlives a failed arm, if there is one."""
    try:
        meter.synchronize()
    except Exception as error:
        return f"not run after a CUDA error: {describe(error)}"
    return ""


def _cases(settings: Settings, layer: MoELayer) -> Iterator[tuple[Arm, KernelFamily | None]]:
    families = (None, *KernelFamily) if settings.forced is None else (settings.forced,)
    strategy = plan(settings.contract, layer.activation).strategy
    for arm in ARMS:
        if arm not in settings.arms:
            continue
        if arm is Arm.FIX and strategy is Strategy.CUTLASS:
            yield arm, None  # told once: there is no arm to force anywhere
            continue
        for forced in families:
            yield arm, forced


class _Rows:
    """The arms at one row count."""

    def __init__(
        self,
        subject: LayerInput,
        settings: Settings,
        kernels: Kernels,
        rows: int,
        counts: Counts,
        prepared: dict[Strategy, KernelArguments],
    ) -> None:
        self._layer = subject.layer
        self._settings = settings
        self._kernels = kernels
        self._counts = counts
        self._rows = rows
        self._prepared = prepared
        self._x, self._routing = subject.head(rows)
        self._truth = reference.truth(subject.layer, self._x, self._routing)
        self._emulated: dict[tuple[Arm, KernelFamily], Tensor] = {}

    def arm(self, arm: Arm, forced: KernelFamily | None) -> RealArm:
        """Run one arm; whatever is raised becomes its status."""
        chosen = plan(self._settings.contract, self._layer.activation)
        strategy = chosen.strategy if arm is Arm.FIX else Strategy.BAKED
        keep_out: frozenset[KernelFamily] = chosen.keep_out if arm is Arm.FIX else frozenset()
        if strategy is Strategy.CUTLASS:
            return self._failed(arm, forced, ArmStatus.NOT_SELECTABLE, chosen.reason)
        try:
            with torch.inference_mode(False), torch.no_grad():
                args = self._arguments(strategy)
                measured, outputs = self._measure(arm, args, forced, keep_out)
                return self._judge(measured, args, outputs)
        except NotSelectableError as error:
            return self._failed(arm, forced, ArmStatus.NOT_SELECTABLE, str(error))
        except Exception as error:  # FlashInfer, CuTe and CUDA raise anything, out of memory too
            return self._failed(arm, forced, ArmStatus.FAILED, describe(error))

    def _arguments(self, strategy: Strategy) -> KernelArguments:
        if strategy not in self._prepared:
            scales = input_scales(self._layer, self._settings.input_scales)
            contract = self._settings.contract
            self._prepared[strategy] = arguments(strategy, self._layer, *scales, contract)
        return self._prepared[strategy]

    def _failed(
        self, arm: Arm, forced: KernelFamily | None, status: ArmStatus, detail: str
    ) -> RealArm:
        return RealArm(arm, self._rows, forced, status, detail)

    def _measure(
        self,
        arm: Arm,
        args: KernelArguments,
        forced: KernelFamily | None,
        keep_out: frozenset[KernelFamily],
    ) -> tuple[RealArm, list[Tensor]]:
        meter = self._kernels.meter
        meter.start_peak()
        with self._kernels.session(
            self._layer, args, self._x, self._routing, forced, keep_out
        ) as call:
            start = meter.now()
            outputs = [call.output()]
            meter.synchronize()
            first = meter.now() - start
            outputs += [call.output() for _ in range(1, self._counts.repeats)]
            times = meter.times(call.launch, self._counts.timed)
            meter.synchronize()
            families = call.families
        _insist_on_own_memory(outputs)
        if len(families) != 1:
            names = ", ".join(sorted(family.value for family in families))
            raise InputError(f"the same call was served by several families: {names}")
        (family,) = families
        return (
            RealArm(
                arm,
                self._rows,
                forced,
                ArmStatus.OK,
                family=family,
                time_s=statistics.median(times),
                first_call_s=first,
                peak_bytes=meter.peak_bytes(),
            ),
            outputs,
        )

    def _judge(self, arm: RealArm, args: KernelArguments, outputs: list[Tensor]) -> RealArm:
        assert arm.family is not None
        first = outputs[0]
        emulated = self._emulate(arm.arm, arm.family, args)
        pairs = [distance(a, b).relative_rms for a, b in combinations(outputs, 2)]
        judged = replace(
            arm,
            noise=math.nan if any(map(math.isnan, pairs)) else max(pairs, default=0.0),
            vs_emulated=distance(first, emulated),
            true_error=distance(first, self._truth),
        )
        if not all(bool(torch.isfinite(output).all()) for output in outputs):
            return replace(judged, status=ArmStatus.NOT_FINITE, detail="output holds NaN or inf")
        gap = distance(first, emulated).relative_rms
        if not gap <= DISAGREEMENT:
            detail = f"more than {DISAGREEMENT:.0%} from the emulated output"
            return replace(judged, status=ArmStatus.DISAGREES, detail=detail)
        return judged

    def _emulate(self, arm: Arm, family: KernelFamily, args: KernelArguments) -> Tensor:
        if (arm, family) not in self._emulated:
            launch = args.launch(self._layer)
            arithmetic = self._settings.contract.arithmetic(family, self._shape(launch))
            trace = moe.run(launch, self._x, self._routing, arithmetic, self._settings.seed)
            self._emulated[arm, family] = trace.output
        return self._emulated[arm, family]

    def _shape(self, launch: moe.LaunchTensors) -> Shape:
        shared = launch.input_global_scale.numel() == 1
        return Shape(
            tokens=self._rows,
            top_k=self._routing.expert_ids.shape[1],
            hidden=self._layer.hidden,
            intermediate=self._layer.intermediate,
            # What the wrapper is told, also where only some of the model's experts were read.
            experts=self._layer.experts,
            activation=self._layer.activation,
            graph_capacity=self._kernels.capacity,
            sharing=InputQuantization.SHARED if shared else InputQuantization.PER_ROUTE,
        )


def _insist_on_own_memory(outputs: list[Tensor]) -> None:
    """Outputs that share one buffer are all the last one: no noise could ever show."""
    if len({output.untyped_storage().data_ptr() for output in outputs}) != len(outputs):
        raise InputError("outputs of different calls share one buffer: they were not copied")
