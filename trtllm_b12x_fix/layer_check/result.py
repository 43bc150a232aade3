"""Records of a layer check: plain data, rendered by ``report`` and judged by gates."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from trtllm_b12x_fix.checkpoint.findings import Finding
from trtllm_b12x_fix.emulator.arithmetic import KernelFamily
from trtllm_b12x_fix.layer_check.arms import Arm
from trtllm_b12x_fix.layer_check.real_result import RealKernelsResult
from trtllm_b12x_fix.layer_check.scales import ScaleDamage
from trtllm_b12x_fix.layer_check.stages import Stage
from trtllm_b12x_fix.metrics import Distance
from trtllm_b12x_fix.presets.published import Figure
from trtllm_b12x_fix.repair import InputScales, Strategy


class Verdict(enum.Enum):
    """Outcome of a check; a finding ends with exit code 1, the others with 0."""

    GOOD = "good"
    FINDING = "finding"
    #: no arm was held against a limit: figures only
    UNGATED = "ungated"


@dataclass(frozen=True)
class ArmResult:
    """One arm at one row count.

    Attributes:
        family: kernel family that ran, ``None`` where decode leaves b12x.
        unavailable: why the arm has no numbers, empty when it has.
        fidelity: against the same arithmetic with exact scales, the terms of the output added in
            the same order in fp32 on both sides: the family's own rounding of its adds is noise
            of the family, not an error of the arm.
        output_distance: the same for the bf16 outputs as the family adds them up, one order.
        true_error: output against fp64 on dequantized weights and unquantized activations.
        published: output against the published direct-division reference with an fp32 sum.
        codes_differing: E2M1 codes that differ from the reference's in FC1's and FC2's input.
        first_divergence: first stage that leaves the reference.
        trap: why the kernel misreads its input scales here, empty where it does not.
        note: what else a reader must know about this cell.
    """

    rows: int
    arm: Arm
    strategy: Strategy
    family: KernelFamily | None
    unavailable: str = ""
    fidelity: Distance | None = None
    output_distance: Distance | None = None
    true_error: Distance | None = None
    published: Distance | None = None
    codes_differing: int | None = None
    first_divergence: Stage | None = None
    trap: str = ""
    note: str = ""


@dataclass(frozen=True)
class FamilyResult:
    """What one kernel family does at one row count even with exact scales.

    Attributes:
        true_error: of the family with exact scales; what the arms' true error compares with.
        noise: between two random orders of the family's atomic adds; 0 where the order is fixed.
        evaluation_order: exact scales, the family's quantizer and an fp32 sum, against the
            published reference.
        summation: exact scales, the family's sum against an fp32 sum.
        input_scales: exact scales with the layer's largest input scale against the same with each
            expert's own.
    """

    rows: int
    family: KernelFamily
    true_error: Distance
    noise: float
    evaluation_order: float
    summation: float
    input_scales: float


@dataclass(frozen=True)
class Gate:
    """A limit on an arm's fidelity at every row count, as a fraction; ``None`` takes the arm's
    default: 1% where it is ``alphas``, 2.5% where it is ``fp32-rescale``."""

    arm: Arm
    limit: float | None = None


@dataclass(frozen=True)
class GateOutcome:
    """A gate applied: the worst fidelity seen and where, or why there is none."""

    arm: Arm
    limit: float
    worst: float
    worst_rows: int
    passed: bool
    reason: str


@dataclass(frozen=True)
class OwnMagnitude:
    """The same layer before its magnitude was moved: why small models look clean."""

    fc1: ScaleDamage
    fc2: ScaleDamage
    baked: ArmResult


@dataclass(frozen=True)
class MeasuredFigure:
    """A published figure and what the made-up layer has: smallest and largest value seen, or
    ``None`` where this run has none."""

    published: Figure
    measured: tuple[float, float] | None


@dataclass(frozen=True)
class PresetReport:
    """What a made-up layer may be compared with, and what may be concluded.

    Attributes:
        changed: sizes that are not the published ones, in words; published figures then belong to
            another layer.
        experts_made: experts that scale statistics are over, of ``experts``.
        true_error_ratios: (rows, true error baked / true error of exact scales).
    """

    name: str
    origin: str
    caveat: str
    changed: tuple[str, ...]
    experts_made: int
    experts: int
    figures: tuple[MeasuredFigure, ...]
    true_error_ratios: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class LayerCheckResult:
    """Everything one run found out."""

    verdict: Verdict
    source: str
    inputs: str
    shape: dict[str, int | str]
    flashinfer: str
    contract_origin: str
    contract_exceptions: tuple[str, ...]
    plan: str
    input_scales: InputScales
    device: str
    seed: int
    fc1: ScaleDamage
    fc2: ScaleDamage
    results: tuple[ArmResult, ...]
    families: tuple[FamilyResult, ...]
    gates: tuple[GateOutcome, ...]
    own_magnitude: OwnMagnitude | None = None
    findings: tuple[Finding, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    preset: PresetReport | None = None
    real_kernels: RealKernelsResult | None = None

    @property
    def ran_real_kernels(self) -> bool:
        """Whether a kernel of FlashInfer's ran, on hardware that has FP4."""
        return self.real_kernels is not None and any(
            arm.family is not None for arm in self.real_kernels.arms
        )
