"""Records of the real kernels' arms: plain data, rendered by ``report``."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from trtllm_b12x_fix.emulator.arithmetic import KernelFamily
from trtllm_b12x_fix.layer_check.arms import Arm
from trtllm_b12x_fix.metrics import Distance


class RunStatus(enum.Enum):
    """Whether the real kernels ran."""

    NOT_RUN = "not run"
    RAN = "ran"
    #: a CUDA error made the device unusable for this process; later arms are "skipped"
    STOPPED = "stopped"


class ArmStatus(enum.Enum):
    """What came of one arm."""

    OK = "ok"
    #: finite, but further from the emulated output than order and rounding explain
    DISAGREES = "disagrees"
    NOT_FINITE = "not finite"
    FAILED = "failed"  # FlashInfer or CUDA raised
    NOT_SELECTABLE = "not selectable"  # the family cannot be forced for this call
    SKIPPED = "skipped"  # after a CUDA error

    @property
    def is_wrong(self) -> bool:
        """Whether the arm ran and came out wrong."""
        return self in (ArmStatus.DISAGREES, ArmStatus.NOT_FINITE, ArmStatus.FAILED)


@dataclass(frozen=True)
class RealArm:
    """One arm at one row count on the real kernels.

    Attributes:
        forced: the family asked for, ``None`` for the dispatch's own choice.
        family: the family whose kernel getter was called last, ``None`` where nothing was launched.
        detail: why the status is not ``ok``.
        noise: largest relative RMS distance between two runs on the same input.
        vs_emulated: the first run against the emulated kernel, same family and arguments.
        true_error: the first run against fp64 on dequantized weights and unquantized activations.
        time_s: median over calls, warm-up excluded.
        first_call_s: host time of the first call, with the kernel's compilation if it was new.
        peak_bytes: most memory above what was allocated before the wrapper was built.
    """

    arm: Arm
    rows: int
    forced: KernelFamily | None
    status: ArmStatus
    detail: str = ""
    family: KernelFamily | None = None
    noise: float | None = None
    vs_emulated: Distance | None = None
    true_error: Distance | None = None
    time_s: float | None = None
    first_call_s: float | None = None
    peak_bytes: int | None = None

    @property
    def status_text(self) -> str:
        """Status with its reason."""
        return f"{self.status.value}: {self.detail}" if self.detail else self.status.value


@dataclass(frozen=True)
class RealKernelsResult:
    """All arms on the real kernels, or why they did not run."""

    status: RunStatus
    why_not: str = ""
    device: str = ""
    flashinfer: str = ""
    arms: tuple[RealArm, ...] = ()

    @property
    def findings(self) -> tuple[RealArm, ...]:
        """Arms of the fix that came out wrong; what the baked arm does is only a note."""
        return tuple(a for a in self.arms if a.arm is Arm.FIX and a.status.is_wrong)


def not_run(reason: str) -> RealKernelsResult:
    """The result where the real kernels cannot run, which is no error of the check."""
    return RealKernelsResult(RunStatus.NOT_RUN, reason)
