"""The GPU half: real kernels against the emulation and the truth, arm by arm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trtllm_b12x_fix.emulator.moe import Routing
from trtllm_b12x_fix.emulator.quantize import Quantized
from trtllm_b12x_fix.emulator.reference import truth
from trtllm_b12x_fix.errors import B12xFixError, InputError
from trtllm_b12x_fix.formats.nvfp4 import BLOCK
from trtllm_b12x_fix.formats.scale_layout import ROW_TILE
from trtllm_b12x_fix.layer import Activation, MoELayer
from trtllm_b12x_fix.metrics import distance
from trtllm_b12x_fix.parity import contract, kernel, routing
from trtllm_b12x_fix.parity.arms import (
    OPTIONS,
    VLLM,
    Arm,
    ArmResult,
    Cell,
    KernelReport,
    Status,
    conclude,
)
from trtllm_b12x_fix.parity.call import KernelCall
from trtllm_b12x_fix.parity.contract import Replay
from trtllm_b12x_fix.parity.judge import Case, judge_call, judge_replay
from trtllm_b12x_fix.parity.judge_weights import judge_weights
from trtllm_b12x_fix.parity.kernel import LinearWeights
from trtllm_b12x_fix.parity.result import NEAR
from trtllm_b12x_fix.parity.routing import Router, Routes
from trtllm_b12x_fix.parity.run import (
    Grid,
    Preparation,
    Prepared,
    Progress,
    Source,
    describe,
    emulate,
    make_router,
)
from trtllm_b12x_fix.parity.suspects import Fault

#: A right kernel adds in another order than the emulation, which flips codes of FC2's input.
FIDELITY_LIMIT = 0.05
#: And is as true as the emulation; a tenth more is room for the same flips.
TRUE_ERROR_RATIO = 1.1


class KernelRefusedError(B12xFixError):
    """The kernel, or its caller, refused a call; the next may work."""


class KernelLostError(B12xFixError):
    """A CUDA error: nothing will work in this process again."""


class Kernels(Protocol):
    """FlashInfer's real kernels on one device.

    ``launch`` and ``cutlass`` raise :class:`KernelRefusedError` and :class:`KernelLostError`.
    """

    device: torch.device
    device_name: str
    flashinfer_version: str

    def launch(self, call: KernelCall) -> Tensor: ...

    def cutlass(self, call: CutlassCall) -> Tensor: ...


@dataclass(frozen=True)
class CutlassCall:
    """The control's arguments: linear rows ([up; gate]), linear scales, which its caller swizzles.

    Attributes:
        tokens: quantized rows [T, H].
        weights: padded in the intermediate size only.
        input_reciprocal, inner_reciprocal: fp32 [], 1 / a1 and 1 / a2.
        fc1_alpha, fc2_alpha: fp32 [E], input scale times weight_scale_2.
    """

    tokens: Quantized
    routes: Routes
    weights: LinearWeights
    input_reciprocal: Tensor
    inner_reciprocal: Tensor
    fc1_alpha: Tensor
    fc2_alpha: Tensor
    activation: Activation


def run(
    grid: Grid,
    source: Source,
    kernels: Kernels,
    preparation: Preparation | None,
    progress: Progress = lambda _: None,
) -> KernelReport:
    """Run every arm in every cell, until a CUDA error ends it.

    Args:
        preparation: vLLM's, where it is installed.
    """
    results: list[ArmResult] = []
    lost = ""
    for shape in grid.layers():
        progress(describe(*shape))
        subject = None
        if not lost:
            layer, x = source(*shape)
            subject = _Layer(grid, layer.to(kernels.device), x.to(kernels.device), kernels)
        for result in _cells(grid, shape, subject, preparation, lost):
            results.append(result)
            lost = lost or (result.detail if result.status is Status.LOST else "")
    named, failed = conclude(results)
    return KernelReport(
        kernels.device_name,
        kernels.flashinfer_version,
        preparation.version if preparation else "",
        tuple(results),
        named,
        failed,
    )


def _cells(
    grid: Grid,
    shape: tuple[Activation, int, int],
    subject: _Layer | None,
    preparation: Preparation | None,
    lost: str,
) -> Iterator[ArmResult]:
    for arm in Arm:
        if arm in VLLM and preparation is None:
            continue
        run_arm = None if subject is None else subject.runner(arm, preparation)
        for tokens in grid.tokens:
            cell = Cell(*shape, tokens)
            if lost or run_arm is None:
                yield ArmResult(cell, arm, Status.LOST, detail=lost)
                continue
            result = run_arm(cell)
            lost = result.detail if result.status is Status.LOST else ""
            yield result


_RunArm = Callable[[Cell], ArmResult]


class _Layer:
    """One layer on the GPU."""

    def __init__(self, grid: Grid, layer: MoELayer, x: Tensor, kernels: Kernels) -> None:
        self._grid, self._layer, self._x, self._kernels = grid, layer, x, kernels
        self._truths: dict[int, Tensor] = {}

    def runner(self, arm: Arm, preparation: Preparation | None) -> _RunArm:
        """A function that runs the arm in a cell; what is prepared is shared by its cells."""
        if not self._says_something(arm):
            return lambda cell: ArmResult(cell, arm, Status.NOT_APPLICABLE)
        try:
            run_arm = self._runner(arm, preparation)
        except InputError as error:
            detail = str(error)
            return lambda cell: ArmResult(cell, arm, Status.REFUSED, detail=detail)

        def guarded(cell: Cell) -> ArmResult:
            try:
                return run_arm(cell)
            except KernelLostError as error:
                return ArmResult(cell, arm, Status.LOST, detail=str(error))
            except (KernelRefusedError, InputError) as error:
                return ArmResult(cell, arm, Status.REFUSED, detail=str(error))

        return guarded

    def _runner(self, arm: Arm, preparation: Preparation | None) -> _RunArm:
        if arm is Arm.CUTLASS:
            return self._cutlass
        if arm in VLLM and preparation is not None:
            prepared = preparation.prepare(self._layer, VLLM[arm], self._grid.top_k)
            return lambda cell: self._vllm(cell, arm, prepared)
        ours = contract.prepare(self._layer, OPTIONS[arm])
        return lambda cell: self._ours(cell, arm, ours)

    def _says_something(self, arm: Arm) -> bool:
        """Whether the arm differs from the one it is compared with."""
        if arm is Arm.GATED_SCALARS:
            return not self._layer.activation.is_gated
        if arm in (Arm.PAD_128, Arm.PAD_512):
            cell = Cell(self._layer.activation, self._layer.hidden, self._layer.intermediate, 0)
            return cell.as_run(arm) != cell.as_run(Arm.MODULAR)
        return True

    def _router(self, cell: Cell) -> Router:
        router = make_router(NEAR, self._grid, cell.tokens)
        device = self._kernels.device
        return Router(router.logits.to(device), router.bias.to(device), router.top_k, router.scale)

    def _ours(self, cell: Cell, arm: Arm, prepared: contract.Prepared) -> ArmResult:
        if arm is Arm.SWIZZLED and cell.tokens % ROW_TILE:
            return ArmResult(cell, arm, Status.NOT_APPLICABLE)
        router, x = self._router(cell), self._x[: cell.tokens]
        call = contract.make_call(prepared, x, router)
        outputs = [self._kernels.launch(call)[:, : self._layer.hidden] for _ in range(2)]
        faults = judge_replay(call, Case(self._layer, x, router))
        return self._judge(cell, arm, outputs, self._tokens(x), faults)

    def _vllm(self, cell: Cell, arm: Arm, prepared: Prepared) -> ArmResult:
        router, x = self._router(cell), self._x[: cell.tokens]
        runs = [prepared.run(x, router, Replay.ABSENT, self._kernels.launch) for _ in range(2)]
        call = runs[0].call
        faults = (
            *judge_weights(call, self._layer),
            *judge_call(call, Case(self._layer, x, router)),
        )
        # vLLM's quantizer evaluates in an order of its own: its codes are taken, not ours.
        tokens = kernel.read_activations(call)
        hidden = self._layer.hidden
        tokens = Quantized(tokens.codes[:, :hidden], tokens.block_scale[:, : hidden // BLOCK])
        return self._judge(cell, arm, [ran.output for ran in runs], tokens, faults)

    def _cutlass(self, cell: Cell) -> ArmResult:
        layer = self._layer
        scalars = contract.scalars_of(layer)
        tokens = self._tokens(self._x[: cell.tokens])
        call = CutlassCall(
            tokens,
            routing.expected(self._router(cell)),
            contract.linear_weights(layer, layer.hidden, contract.padded_intermediate(layer)),
            1.0 / layer.fc1.largest_input_scale,
            1.0 / layer.fc2.largest_input_scale,
            scalars.before_activation,
            scalars.output,
            layer.activation,
        )
        outputs = [self._kernels.cutlass(call) for _ in range(2)]
        return self._judge(cell, Arm.CUTLASS, outputs, tokens, ())

    def _tokens(self, x: Tensor) -> Quantized:
        return contract.quantize(self._layer, x, self._layer.hidden)

    def _truth(self, tokens: int, routes: Routes) -> Tensor:
        """fp64 [T, H]; every arm is held against the same."""
        if tokens not in self._truths:
            chosen = Routing(routes.expert_ids, routes.weights)
            self._truths[tokens] = truth(self._layer, self._x[:tokens], chosen)
        return self._truths[tokens]

    def _judge(
        self,
        cell: Cell,
        arm: Arm,
        outputs: list[Tensor],
        tokens: Quantized,
        faults: tuple[Fault, ...],
    ) -> ArmResult:
        layer, routes = self._layer, routing.expected(self._router(cell))
        emulated = emulate(layer, tokens, routes)
        true = self._truth(cell.tokens, routes)
        fidelity, error = distance(outputs[0], emulated), distance(outputs[0], true)
        emulation_error = distance(emulated, true)
        right = (
            fidelity.relative_rms <= FIDELITY_LIMIT
            and error.relative_rms <= TRUE_ERROR_RATIO * emulation_error.relative_rms
            and not faults
        )
        return ArmResult(
            cell,
            arm,
            Status.RIGHT if right else Status.WRONG,
            fidelity,
            error,
            emulation_error,
            distance(outputs[1], outputs[0]).relative_rms,
            faults,
        )
