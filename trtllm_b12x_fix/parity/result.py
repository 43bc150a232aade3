"""Records of a parity run: plain data, rendered by ``report``."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from trtllm_b12x_fix.layer import Activation
from trtllm_b12x_fix.metrics import Distance
from trtllm_b12x_fix.parity.call import Path
from trtllm_b12x_fix.parity.contract import Replay
from trtllm_b12x_fix.parity.routing import WeightRecovery
from trtllm_b12x_fix.parity.suspects import Fault


class Verdict(enum.Enum):
    """Outcome; good ends with exit code 0, the others with 1."""

    GOOD = "good"
    FINDING = "finding"
    #: nothing was judged, or the control is not right either
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True)
class Regime:
    """How logits and biases of the made-up router are spread; normal, mean and deviation."""

    name: str
    logits: tuple[float, float]
    bias: tuple[float, float]
    origin: str


#: Sigmoids that a bias does not drown.
NEAR = Regime("near", (0.0, 1.0), (0.0, 0.1), "logits N(0, 1), bias N(0, 0.1)")
#: What flashinfer#3875 and sglang#31001 report of GLM-5.2.
FAR = Regime(
    "far",
    (-16.0, 1.0),
    (11.2, 0.05),
    "logits N(-16, 1), bias N(11.2, 0.05): sigmoids near 1e-7 under biases near 11, as reported of "
    "GLM-5.2 (flashinfer#3875, sglang#31001)",
)


@dataclass(frozen=True)
class CaseResult:
    """One call that vLLM prepared.

    Attributes:
        padded_hidden, padded_intermediate: as the kernel gets them, ``None`` where refused.
        faults: what reads otherwise than the contract says.
        fidelity: the emulated output against the same arithmetic on the unprepared layer with
            exact fp32 routing weights.
        true_error: against fp64 on dequantized weights and unquantized activations.
        emulation_error: the same of the emulation that ``fidelity`` compares with.
        refused: why vLLM did not run it.
    """

    activation: Activation
    hidden: int
    intermediate: int
    tokens: int
    path: Path
    replay: Replay
    regime: Regime
    padded_hidden: int | None = None
    padded_intermediate: int | None = None
    faults: tuple[Fault, ...] = ()
    fidelity: Distance | None = None
    true_error: Distance | None = None
    emulation_error: Distance | None = None
    refused: str = ""


@dataclass(frozen=True)
class PreparationReport:
    """What vLLM's preparation does, judged without the kernel."""

    vllm: str
    flashinfer: str
    recovery: WeightRecovery
    stand_ins: tuple[str, ...]
    experts: int
    top_k: int
    cases: tuple[CaseResult, ...]

    @property
    def verdict(self) -> Verdict:
        judged = [case for case in self.cases if not case.refused]
        if any(case.faults for case in judged):
            return Verdict.FINDING
        return Verdict.GOOD if judged else Verdict.INCONCLUSIVE
