"""The GPU half's arms: each differs from another by one suspect; what they tell together."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from trtllm_b12x_fix.layer import Activation
from trtllm_b12x_fix.metrics import Distance
from trtllm_b12x_fix.parity.call import Path
from trtllm_b12x_fix.parity.contract import ActivationScales, Options, Replay, ScalarWiring
from trtllm_b12x_fix.parity.layout import padded
from trtllm_b12x_fix.parity.result import Verdict
from trtllm_b12x_fix.parity.suspects import Fault, Suspect

#: vLLM's alignment is 256; the report of flashinfer#3168 points at multiples of 512.
_SUSPECT_MULTIPLE = 512


class Arm(enum.Enum):
    """One way of running a layer; names as in reports."""

    #: the control: another kernel family, seen correct on B200
    CUTLASS = "cutlass"
    #: prepared by us as the contract says, hidden padded to 256, routed outside
    MODULAR = "modular"
    MONOLITHIC = "monolithic"
    MONOLITHIC_REPLAY = "monolithic, routing_replay_out"
    PAD_128 = "modular, hidden padded to 128"
    PAD_512 = "modular, hidden padded to 512"
    SWIZZLED = "modular, swizzled activation scales"
    GATED_SCALARS = "modular, scalars of a gated layer"
    VLLM_MODULAR = "vLLM modular"
    VLLM_MONOLITHIC = "vLLM monolithic"


#: How the arms that we prepare differ.
OPTIONS = {
    Arm.MODULAR: Options(),
    Arm.MONOLITHIC: Options(path=Path.MONOLITHIC),
    Arm.MONOLITHIC_REPLAY: Options(path=Path.MONOLITHIC, replay=Replay.GIVEN),
    Arm.PAD_128: Options(hidden_multiple=128),
    Arm.PAD_512: Options(hidden_multiple=512),
    Arm.SWIZZLED: Options(activation_scales=ActivationScales.SWIZZLED),
    Arm.GATED_SCALARS: Options(scalars=ScalarWiring.GATED_FORMULA),
}
#: The arms that vLLM prepares, and ours that must give the same.
VLLM = {Arm.VLLM_MODULAR: Path.MODULAR, Arm.VLLM_MONOLITHIC: Path.MONOLITHIC}
_COUNTERPARTS = {Arm.VLLM_MODULAR: Arm.MODULAR, Arm.VLLM_MONOLITHIC: Arm.MONOLITHIC}


class Status(enum.Enum):
    """What became of an arm."""

    RIGHT = "right"
    WRONG = "wrong"
    #: the kernel or its caller raised
    REFUSED = "refused"
    #: the arm says nothing here, such as swizzled scales of 8 tokens
    NOT_APPLICABLE = "not applicable"
    #: an earlier CUDA error ended all work on the GPU
    LOST = "lost"


@dataclass(frozen=True)
class Cell:
    """Where an arm ran."""

    activation: Activation
    hidden: int
    intermediate: int
    tokens: int

    def as_run(self, arm: Arm) -> int:
        """The padded hidden size."""
        options = OPTIONS.get(arm, Options())
        return padded(self.hidden, options.hidden_multiple)


@dataclass(frozen=True)
class ArmResult:
    """One arm in one cell.

    Attributes:
        fidelity: against the emulation of the call's own quantized tokens with exact routing.
        true_error, emulation_error: of the output and of that emulation, against fp64.
        noise: distance between two runs.
        faults: arguments that read wrong; vLLM's arms only.
    """

    cell: Cell
    arm: Arm
    status: Status
    fidelity: Distance | None = None
    true_error: Distance | None = None
    emulation_error: Distance | None = None
    noise: float | None = None
    faults: tuple[Fault, ...] = ()
    detail: str = ""


@dataclass(frozen=True)
class KernelReport:
    """The GPU half: what ran on which device, and the suspects that follow."""

    device: str
    flashinfer: str
    vllm: str
    arms: tuple[ArmResult, ...]
    named: tuple[Fault, ...]
    controls_failed: tuple[Cell, ...]

    @property
    def verdict(self) -> Verdict:
        if self.named:
            return Verdict.FINDING
        judged = [one for one in self.arms if one.status in (Status.RIGHT, Status.WRONG)]
        modular = [one for one in judged if one.arm is not Arm.CUTLASS]
        lost = any(one.status is Status.LOST for one in self.arms)
        if self.controls_failed or lost or not modular:
            return Verdict.INCONCLUSIVE
        return Verdict.GOOD


def conclude(arms: Sequence[ArmResult]) -> tuple[tuple[Fault, ...], tuple[Cell, ...]]:
    """The suspects that the arms name, each once, and the cells whose control is wrong."""
    cells: dict[Cell, dict[Arm, ArmResult]] = {}
    for result in arms:
        cells.setdefault(result.cell, {})[result.arm] = result
    failed = tuple(cell for cell, ran in cells.items() if _is(ran, Arm.CUTLASS, Status.WRONG))
    sound = {cell: ran for cell, ran in cells.items() if cell not in failed}
    found = [(cell, fault) for cell, ran in sound.items() for fault in name(cell, ran)]
    found = [(cell, _by_size(cell, fault, sound)) for cell, fault in found]
    return tuple(_once(found)), failed


def name(cell: Cell, ran: Mapping[Arm, ArmResult]) -> list[Fault]:
    """The suspects that the arms of one cell name."""
    faults = _base(cell, ran)
    base_right = _is(ran, Arm.MODULAR, Status.RIGHT)
    if base_right and _is(ran, Arm.MONOLITHIC, Status.WRONG):
        text = "right where the caller routes, wrong where the kernel does"
        faults.append(Fault(Suspect.ROUTING, text))
    if _is(ran, Arm.MONOLITHIC, Status.RIGHT) and _is(ran, Arm.MONOLITHIC_REPLAY, Status.WRONG):
        text = "right without routing_replay_out, wrong with it"
        faults.append(Fault(Suspect.ROUTING_REPLAY, text))
    for arm, counterpart in _COUNTERPARTS.items():
        if _is(ran, arm, Status.WRONG) and _is(ran, counterpart, Status.RIGHT):
            unexplained = f"{arm.value} is wrong where our call is right; its arguments read right"
            faults += ran[arm].faults or [Fault(Suspect.KERNEL, unexplained)]
    return faults


def _base(cell: Cell, ran: Mapping[Arm, ArmResult]) -> list[Fault]:
    """What follows from the modular arms alone."""
    as_run = cell.as_run(Arm.MODULAR)
    others = [arm for arm in (Arm.PAD_512, Arm.PAD_128) if cell.as_run(arm) != as_run]
    if _is(ran, Arm.MODULAR, Status.RIGHT):
        return [
            Fault(
                Suspect.PADDING,
                f"hidden {cell.hidden} right at {as_run}, wrong padded to {cell.as_run(arm)}",
            )
            for arm in others
            if _is(ran, arm, Status.WRONG)
        ]
    if not _is(ran, Arm.MODULAR, Status.WRONG):
        return []
    faults = []
    if _is(ran, Arm.GATED_SCALARS, Status.RIGHT):
        text = "the kernel wants the gated formula of output1_scale_scalar without a gate, too"
        faults.append(Fault(Suspect.SCALARS, text))
    if _is(ran, Arm.SWIZZLED, Status.RIGHT):
        text = "the kernel wants swizzled activation scales, its contract linear ones"
        faults.append(Fault(Suspect.ACTIVATION_SCALES, text))
    for arm in others:
        if _is(ran, arm, Status.RIGHT):
            text = f"hidden {cell.hidden} wrong at {as_run}, right padded to {cell.as_run(arm)}"
            faults.append(Fault(Suspect.PADDING, text))
    if not faults:
        text = f"hidden {cell.hidden}, run at {as_run}: wrong however it is called"
        faults.append(Fault(Suspect.KERNEL, text))
    return faults


def _is(ran: Mapping[Arm, ArmResult], arm: Arm, status: Status) -> bool:
    return arm in ran and ran[arm].status is status


def _by_size(cell: Cell, fault: Fault, cells: Mapping[Cell, Mapping[Arm, ArmResult]]) -> Fault:
    """A kernel that is wrong at some sizes only: say at which, and blame padding if it is that."""
    if fault.suspect is not Suspect.KERNEL:
        return fault
    alike = [other for other in cells if other.activation is cell.activation]
    wrong = [other for other in alike if _is(cells[other], Arm.MODULAR, Status.WRONG)]
    right = [other for other in alike if _is(cells[other], Arm.MODULAR, Status.RIGHT)]
    if not right or not wrong:
        return fault
    ran_at = {other: other.as_run(Arm.MODULAR) for other in alike}
    if all(ran_at[other] != other.hidden for other in wrong) and all(
        ran_at[other] == other.hidden for other in right
    ):
        text = f"{cell.activation.value}: wrong exactly where the hidden size is padded"
        return Fault(Suspect.PADDING, text)
    if all(ran_at[other] % _SUSPECT_MULTIPLE for other in wrong) and not any(
        ran_at[other] % _SUSPECT_MULTIPLE for other in right
    ):
        text = (
            f"{cell.activation.value}: wrong exactly where the hidden size as run is no multiple "
            f"of {_SUSPECT_MULTIPLE}"
        )
        return replace(fault, detail=text)
    return fault


def _once(found: list[tuple[Cell, Fault]]) -> list[Fault]:
    places: dict[tuple[Suspect, str], list[Cell]] = {}
    for cell, fault in found:
        places.setdefault((fault.suspect, fault.detail), []).append(cell)
    return [
        Fault(suspect, f"{detail} ({_where(cells)})") for (suspect, detail), cells in places.items()
    ]


def _where(cells: list[Cell]) -> str:
    activations = ", ".join(dict.fromkeys(cell.activation.value for cell in cells))
    hidden = ", ".join(dict.fromkeys(str(cell.hidden) for cell in cells))
    inner = ", ".join(dict.fromkeys(str(cell.intermediate) for cell in cells))
    tokens = ", ".join(dict.fromkeys(str(cell.tokens) for cell in cells))
    return f"{activations}; hidden {hidden}; intermediate {inner}; tokens {tokens}"
