"""What a scan found, as plain records."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from trtllm_b12x_fix.checkpoint.findings import Severity
from trtllm_b12x_fix.checkpoint.layers import Stack
from trtllm_b12x_fix.scan.bake import Bake
from trtllm_b12x_fix.scan.matrix import MatrixRow
from trtllm_b12x_fix.scan.statistics import BakeDamage


class Verdict(enum.Enum):
    """The answer for one checkpoint, the worst first."""

    BROKEN = "broken"  # the file itself is damaged or incomplete
    AFFECTED = "affected"  # sound, and the b12x bake would damage it
    CLEAN = "clean"  # sound, and the bake costs a second rounding at most
    NOT_APPLICABLE = "not-applicable"  # nothing in it goes through the bake


class Kind(enum.Enum):
    """What a matrix is part of."""

    EXPERTS = "experts"
    UNUSABLE = "unusable-layer"  # experts of a layer that no kernel can run as it is
    DENSE = "dense"  # not through b12x's MoE kernels


class FailOn(enum.Enum):
    """What ends the command with exit code 1."""

    DAMAGE = "damage"
    FINDINGS = "findings"
    NEVER = "never"


@dataclass(frozen=True)
class ScanFinding:
    """One kind of trouble in one projection.

    Attributes:
        code: short stable name.
        message: what is wrong, where, how much.
        advice: what to do.
        count: matrices (or layers, files) that have it.
        layer, tensor, expert, file: the first place; empty or ``None`` where it does not apply.
    """

    severity: Severity
    code: str
    message: str
    advice: str
    count: int = 1
    layer: str = ""
    tensor: str = ""
    expert: int | None = None
    file: str = ""


@dataclass(frozen=True)
class ExpertDamage:
    """One expert's matrix of a projection."""

    expert: int | None
    weight_scale_2: float
    damage: BakeDamage


@dataclass(frozen=True)
class ProjectionResult:
    """One projection of one layer, over its experts (a dense linear has one matrix).

    Attributes:
        layer: prefix up to ``experts``; a dense linear's name up to its last dot.
        number: block number, ``None`` where the prefix has none.
        matrices: how many were counted; ``affected`` of them lose more than the limit.
        damage: over all matrices whose weight_scale_2 can be used.
        worst: the worst matrices, worst first; empty where none can be used.
        weight_scale_2: smallest and largest, ``None`` where none can be used.
        counts: int64 [256], how often each byte is stored; ``baked`` int64 [127] what the bake
            makes of the blocks that count.
        saturated_fraction: share of blocks at 448, the largest scale there is.
        assumed_zero_blocks: left out as all zero by the look of the bytes; see ``statistics``.
        bake: whether the bake touches the layer; where it does not, no matrix is affected.
        undecided: matrices of nothing but scales of 1.0 whose codes were not read.
        judged: matrices whose weight_scale_2 can be used.
        most_zeros: the matrix with the largest share of scales baked to 0, where there are any.
        zero_blocks: left out as all zero because the codes are; ``None`` where they were not read.
    """

    layer: str
    number: int | None
    stack: Stack
    projection: str
    kind: Kind
    matrices: int
    affected: int
    damage: BakeDamage
    worst: tuple[ExpertDamage, ...]
    weight_scale_2: tuple[float, float] | None
    counts: npt.NDArray[np.int64] = field(repr=False, compare=False)
    baked: npt.NDArray[np.int64] = field(repr=False, compare=False)
    saturated_fraction: float
    assumed_zero_blocks: int
    zero_blocks: int | None
    bake: Bake = Bake.YES
    undecided: int = 0
    judged: int = 0
    most_zeros: ExpertDamage | None = None

    @property
    def severity(self) -> float:
        """What projections are ordered by: the worst matrix's RMS error."""
        return self.worst[0].damage.rms_error if self.worst else 0.0


@dataclass(frozen=True)
class LayerSummary:
    """All projections of one layer together."""

    layer: str
    number: int | None
    stack: Stack
    matrices: int
    affected: int
    damage: BakeDamage
    worst_projection: str
    worst_expert: int | None
    worst_rms_error: float


@dataclass(frozen=True)
class Totals:
    """Sums over the experts of usable and unusable layers, and what was read.

    Attributes:
        judged_matrices: those of experts whose damage is known; of the ``unjudged_matrices`` a
            part is unusable or not here; ``undecided_matrices`` have nothing but scales of 1.0.
    """

    layers: int
    projections: int
    matrices: int
    affected_projections: int
    affected_matrices: int
    damage: BakeDamage
    dense_matrices: int
    scale_bytes: int
    weight_bytes: int
    judged_matrices: int = 0
    unjudged_matrices: int = 0
    undecided_matrices: int = 0


@dataclass(frozen=True)
class ScanResult:
    """Everything about one checkpoint.

    Attributes:
        reason: the verdict in one sentence; ``advice``: what to do.
        dialects: who wrote it; ``quant_algo`` as ModelOpt's config names it.
        layers: worst first, as are ``projections`` and ``dense``.
        weights_read: whether codes were read (``--weights``).
        backend: who counted; ``threads`` how many.
        seconds: of the whole scan, for the rate.
    """

    source: str
    verdict: Verdict
    reason: str
    advice: tuple[str, ...]
    dialects: tuple[str, ...]
    quant_algo: str | None
    totals: Totals
    layers: tuple[LayerSummary, ...]
    projections: tuple[ProjectionResult, ...]
    dense: tuple[ProjectionResult, ...]
    findings: tuple[ScanFinding, ...]
    matrix: tuple[MatrixRow, ...]
    weights_read: bool
    backend: str
    threads: int
    seconds: float

    def exit_code(self, fail_on: FailOn) -> int:
        """0, or 1 where there is what ``fail_on`` names."""
        if fail_on is FailOn.NEVER:
            return 0
        bad = self.verdict in (Verdict.AFFECTED, Verdict.BROKEN)
        return int(bad or (fail_on is FailOn.FINDINGS and bool(self.findings)))


#: Said beside every clean verdict: what counts of bytes cannot show.
BLIND = (
    "Counts of scale bytes cannot see gate and up swapped or interleaved wrongly, nibbles swapped, "
    "scales in the wrong places of a matrix (their order is looked at in a sample only), or codes "
    "of other weights. The layer check is the way to see those: check-layer computes the layer's "
    "output, to be held against the unquantized model's."
)
