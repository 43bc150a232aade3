"""The CPU half: vLLM's prepared calls, judged and emulated, over the grid."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from trtllm_b12x_fix.emulator.moe import Routing
from trtllm_b12x_fix.emulator.quantize import Quantized
from trtllm_b12x_fix.emulator.reference import truth
from trtllm_b12x_fix.errors import InputError
from trtllm_b12x_fix.layer import Activation, MoELayer
from trtllm_b12x_fix.metrics import distance
from trtllm_b12x_fix.parity import contract, kernel, routing
from trtllm_b12x_fix.parity.call import KernelCall, Path
from trtllm_b12x_fix.parity.contract import Replay
from trtllm_b12x_fix.parity.judge import Case, judge_call, judge_replay
from trtllm_b12x_fix.parity.judge_weights import judge_weights
from trtllm_b12x_fix.parity.kernel import LinearWeights
from trtllm_b12x_fix.parity.result import FAR, NEAR, CaseResult, PreparationReport, Regime
from trtllm_b12x_fix.parity.routing import Router, Routes, WeightRecovery
from trtllm_b12x_fix.parity.suspects import Fault, Suspect

#: Fidelity of a right call: routing weights rounded to bf16 cost 0.1 to 0.3%.
FIDELITY_LIMIT = 0.01
#: The regime FAR is about routing alone: one count of tokens says it.
_FAR_TOKENS = 64

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Ran:
    """What came out, bf16 [T, H] unpadded, and the call that made it."""

    output: Tensor
    call: KernelCall


class Prepared(Protocol):
    """A layer that a backend has prepared."""

    def run(
        self, x: Tensor, router: Router, replay: Replay, kernel: Callable[[KernelCall], Tensor]
    ) -> Ran: ...


class Preparation(Protocol):
    """A backend's preparation, such as vLLM's."""

    version: str
    flashinfer_version: str
    recovery: WeightRecovery
    stand_ins: tuple[str, ...]

    def prepare(self, layer: MoELayer, path: Path, top_k: int) -> Prepared: ...


@dataclass(frozen=True)
class Grid:
    """What is run; every combination of the first five."""

    activations: tuple[Activation, ...]
    hidden: tuple[int, ...]
    intermediate: tuple[int, ...]
    tokens: tuple[int, ...]
    paths: tuple[Path, ...]
    experts: int
    top_k: int
    seed: int

    def layers(self) -> Iterator[tuple[Activation, int, int]]:
        """(activation, hidden, intermediate) of every layer."""
        return itertools.product(self.activations, self.hidden, self.intermediate)


#: (activation, hidden, intermediate) to a layer and bf16 activations [at least max tokens, H].
Source = Callable[[Activation, int, int], tuple[MoELayer, Tensor]]


def run(
    grid: Grid, source: Source, preparation: Preparation, progress: Progress = lambda _: None
) -> PreparationReport:
    """Judge every call of the grid.

    Raises:
        UnsupportedVersionError: the backend is not what is known here.
    """
    cases: list[CaseResult] = []
    for shape in grid.layers():
        progress(describe(*shape))
        layer, x = source(*shape)
        subject = _Subject(grid, layer, x, preparation)
        for path in grid.paths:
            cases += subject.run(path)
    return PreparationReport(
        preparation.version,
        preparation.flashinfer_version,
        preparation.recovery,
        preparation.stand_ins,
        grid.experts,
        grid.top_k,
        tuple(cases),
    )


def describe(activation: Activation, hidden: int, intermediate: int) -> str:
    """A layer of the grid in words."""
    return f"{activation.value}, hidden {hidden}, intermediate {intermediate}"


def make_router(regime: Regime, grid: Grid, tokens: int) -> Router:
    """A router of this regime; fewer tokens are the head of more."""
    generator = torch.Generator().manual_seed(grid.seed)
    bias = torch.randn(grid.experts, generator=generator) * regime.bias[1] + regime.bias[0]
    logits = torch.randn(max(grid.tokens), grid.experts, generator=generator)[:tokens]
    return Router(logits * regime.logits[1] + regime.logits[0], bias, grid.top_k)


class _Subject:
    """One layer; keeps what its cases share."""

    def __init__(self, grid: Grid, layer: MoELayer, x: Tensor, preparation: Preparation) -> None:
        self._grid, self._layer, self._x = grid, layer, x
        self._preparation = preparation
        self._yardsticks: dict[tuple[Regime, int], tuple[Routes, Tensor, Tensor]] = {}

    def run(self, path: Path) -> Iterator[CaseResult]:
        wanted = list(self._cases(path))
        try:
            prepared = self._preparation.prepare(self._layer, path, self._grid.top_k)
        except InputError as error:
            yield from (replace(case, refused=str(error)) for case in wanted)
            return
        weights = _Weights(self._layer)
        for case in wanted:
            try:
                yield self._one(case, prepared, weights)
            except InputError as error:
                yield replace(case, refused=str(error))

    def _cases(self, path: Path) -> Iterator[CaseResult]:
        layer = self._layer
        first = CaseResult(
            layer.activation, layer.hidden, layer.intermediate, 0, path, Replay.ABSENT, NEAR
        )
        for tokens in self._grid.tokens:
            yield replace(first, tokens=tokens)
        most = max(self._grid.tokens)
        if path is Path.MONOLITHIC:
            yield replace(first, tokens=most, replay=Replay.GIVEN)
        yield replace(first, tokens=min(most, _FAR_TOKENS), regime=FAR)

    def _one(self, case: CaseResult, prepared: Prepared, weights: _Weights) -> CaseResult:
        recovery = self._preparation.recovery
        x = self._x[: case.tokens]
        router = make_router(case.regime, self._grid, case.tokens)
        subject = Case(self._layer, x, router, recovery)
        ran = prepared.run(
            x, router, case.replay, lambda call: kernel.launch(call, recovery, weights.read(call))
        )
        faults = [*weights.faults(ran.call), *judge_call(ran.call, subject)]
        faults += judge_replay(ran.call, subject)
        if case.replay is Replay.GIVEN and ran.call.routing_replay_out is None:
            faults.append(Fault(Suspect.ROUTING_REPLAY, "routing_replay_out was asked for"))
        routes = kernel.routes_of(ran.call, recovery)
        emulated, true = self._yardstick(case, x, routing.exact_for(router, routes))
        fidelity = distance(ran.output, emulated)
        if not faults and not fidelity.relative_rms <= FIDELITY_LIMIT:
            faults.append(_unexplained(fidelity.relative_rms))
        return replace(
            case,
            padded_hidden=ran.call.hidden,
            padded_intermediate=ran.call.intermediate_size,
            faults=tuple(faults),
            fidelity=fidelity,
            true_error=distance(ran.output, true),
            emulation_error=distance(emulated, true),
        )

    def _yardstick(self, case: CaseResult, x: Tensor, routes: Routes) -> tuple[Tensor, Tensor]:
        """The emulation and the truth; both paths share them unless their experts differ."""
        key = (case.regime, case.tokens)
        kept = self._yardsticks.get(key)
        if kept is not None and _same_experts(kept[0], routes):
            return kept[1], kept[2]
        tokens = contract.quantize(self._layer, x, self._layer.hidden)
        emulated = emulate(self._layer, tokens, routes)
        true = truth(self._layer, x, Routing(routes.expert_ids, routes.weights))
        self._yardsticks[key] = (routes, emulated, true)
        return emulated, true


class _Weights:
    """A prepared layer's weights, read and judged once."""

    def __init__(self, layer: MoELayer) -> None:
        self._layer = layer
        self._read: LinearWeights | None = None
        self._faults: tuple[Fault, ...] | None = None

    def read(self, call: KernelCall) -> LinearWeights:
        if self._read is None:
            self._read = kernel.read_weights(call)
        return self._read

    def faults(self, call: KernelCall) -> tuple[Fault, ...]:
        if self._faults is None:
            self._faults = judge_weights(call, self._layer)
        return self._faults


def emulate(layer: MoELayer, tokens: Quantized, routes: Routes) -> Tensor:
    """The kernel's arithmetic on the layer as it is, nothing padded or moved: bf16 [T, H]."""
    weights = LinearWeights(
        layer.fc1.packed, layer.fc1.block_scale, layer.fc2.packed, layer.fc2.block_scale
    )
    return kernel.compute(weights, contract.scalars_of(layer), tokens, routes, layer.activation)


def _same_experts(one: Routes, other: Routes) -> bool:
    first, second = (each.expert_ids.sort(dim=1).values for each in (one, other))
    return torch.equal(first, second)


def _unexplained(off: float) -> Fault:
    far = "not finite" if math.isnan(off) else f"{off:.1%} from the emulation"
    return Fault(Suspect.KERNEL, f"every argument reads right, and the emulated output is {far}")


def faults_by_suspect(cases: Sequence[CaseResult]) -> dict[Suspect, list[tuple[CaseResult, Fault]]]:
    """Every fault with its case, by suspect."""
    found: dict[Suspect, list[tuple[CaseResult, Fault]]] = {}
    for case in cases:
        for fault in case.faults:
            found.setdefault(fault.suspect, []).append((case, fault))
    return found
