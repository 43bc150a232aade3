"""What differs between FlashInfer versions: selection bands, scale conventions, output sums.

A :class:`KernelContract` is plain data. :func:`contract_for` answers for a version number on a
laptop without FlashInfer; ``integrations.flashinfer.installed_contract`` builds the same record
from features of the installed package. 0.6.16, 0.6.18, 0.7.2 and 0.7.4 are tested against their
real dispatch run on a CPU (tests/flashinfer/bands.json); 0.6.17, 0.7.0 and 0.7.1 were only compared
by the features of their wheels' files, which is what ``read_contract`` looks at.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from packaging.version import InvalidVersion, Version

from trtllm_b12x_fix.emulator.arithmetic import (
    Arithmetic,
    KernelFamily,
    OutputSum,
    QuantMath,
    ScaleConvention,
    SigmoidMath,
    SubnormalDecode,
)
from trtllm_b12x_fix.errors import InputError, UnsupportedVersionError
from trtllm_b12x_fix.layer import Activation

TILE = 128
DEFAULT_VERSION = "0.6.18"


class ContractOrigin(enum.Enum):
    """Where a contract came from."""

    DATA = "data"  # this module's table
    INSTALLED = "installed"  # read from the installed package


class InputScaleArgument(enum.Enum):
    """How FC1's activation quantization scale reaches the kernel."""

    #: ``w1_alpha`` is both multiplier and quantization scale (below 0.6.17)
    IS_W1_ALPHA = "w1_alpha"
    #: ``input_global_scale`` of B12xMoEWrapper.run (from 0.6.17, flashinfer#3932)
    SEPARATE = "input_global_scale"


class DirectMicro(enum.Enum):
    """Direct micro's place in the dispatch and its reading of global scales."""

    NEVER_SELECTED = "never-selected"  # 0.6.16 ships it, nothing calls it
    MULTIPLIES = "multiplies"  # 0.6.17 to 0.7.1: the trap
    DIVIDES = "divides"  # from 0.7.2


class Quantizer(enum.Enum):
    """Activation quantizer of micro, static and dynamic."""

    #: fast for every activation, and misreads its own subnormal block scales
    FAST_MISREADING = "fast-misreading-subnormals"
    #: precise for relu2, fast for gated activations
    PRECISE_FOR_RELU2 = "precise-for-relu2"


class StaticBand(enum.Enum):
    """Largest number of routed rows that static takes from dynamic."""

    FLAT_640 = "640"
    FLAT_1024 = "1024"
    #: max(1024, 8 rows per expert), 16 per expert where the intermediate is not whole tiles
    PER_EXPERT = "per-expert"


class InputQuantization(enum.Enum):
    """How often FC1's input is quantized; a launch shares where its input scale is one number."""

    SHARED = "shared"  # a token once, for all its experts
    PER_ROUTE = "per-route"


class StaticGroups(enum.Enum):
    """How many 128-wide slices static sums in fp32 before its first rounding, from 0.7.0."""

    PAIRS = "pairs"
    #: three where the intermediate has three, top-k is above 1 and 1920 rows or more are routed
    PAIRS_OR_THREE = "pairs-or-three"


class GatedDynamic(enum.Enum):
    """Which dynamic kernel serves gated layers with an intermediate of at most 512."""

    GENERIC = "generic"
    RETAINED = "retained"  # _moe_dynamic/gated.py, where the M tile is 128


@dataclass(frozen=True)
class Shape:
    """What the dispatch looks at.

    Attributes:
        intermediate: size of the tensors handed to the wrapper (TensorRT-LLM pads them).
        sharing: whether one input scale serves all experts.
        graph_capacity: ``max_num_tokens`` of a CUDA-graph wrapper, whose dynamic workspace fixes
            the tile of every call; ``None`` without CUDA graphs.
    """

    tokens: int
    top_k: int
    hidden: int
    intermediate: int
    experts: int
    activation: Activation
    graph_capacity: int | None = None
    sharing: InputQuantization = InputQuantization.PER_ROUTE

    @property
    def routed_rows(self) -> int:
        return self.tokens * self.top_k

    @property
    def padded_intermediate(self) -> int:
        return -(-self.intermediate // TILE) * TILE


@dataclass(frozen=True)
class KernelContract:
    """Everything version-dependent about b12x's kernels.

    Attributes:
        version: FlashInfer version this describes.
        micro_max_tokens: token limit of micro, ``None`` where there is none.
        static_output: output summation of static.
        exceptions: per-shape exceptions the dispatch has and this record leaves out; printed
            wherever a family is chosen from data.
        allowed: families a fix leaves in the dispatch.
    """

    version: str
    origin: ContractOrigin
    input_scale: InputScaleArgument
    direct_micro: DirectMicro
    micro_max_tokens: int | None
    quantizer: Quantizer
    static_band: StaticBand
    static_output: OutputSum
    gated_dynamic: GatedDynamic
    static_groups: StaticGroups = StaticGroups.PAIRS
    exceptions: tuple[str, ...] = ()
    allowed: frozenset[KernelFamily] = frozenset(KernelFamily)

    def without(self, *families: KernelFamily) -> KernelContract:
        """The same contract with these families kept out of the dispatch."""
        return replace(self, allowed=self.allowed - set(families))

    def select(self, shape: Shape) -> KernelFamily:
        """The family the dispatch launches for this shape on SM121 (GB10)."""
        if shape.routed_rows > self.static_limit(shape):
            return KernelFamily.DYNAMIC
        if self._takes_direct_micro(shape):
            return KernelFamily.DIRECT_MICRO
        micro_rows = 40 if shape.top_k > 1 else 20
        few_tokens = self.micro_max_tokens is None or shape.tokens <= self.micro_max_tokens
        micro = KernelFamily.MICRO in self.allowed
        if micro and few_tokens and shape.routed_rows <= micro_rows:
            return KernelFamily.MICRO
        return KernelFamily.STATIC

    def static_limit(self, shape: Shape) -> int:
        """Routed rows up to which static (or a micro family) is chosen over dynamic."""
        if self.static_band is StaticBand.FLAT_640:
            return 640
        if self.static_band is StaticBand.FLAT_1024 or shape.intermediate <= TILE:
            return 1024
        rows_per_expert = 8 if shape.intermediate % TILE == 0 else 16
        three = shape.activation.is_gated and self._merges_three(
            shape, rows_per_expert * shape.experts
        )
        return max(1024, (17 if three else rows_per_expert) * shape.experts)

    def _merges_three(self, shape: Shape, rows: int) -> bool:
        return (
            self.static_groups is StaticGroups.PAIRS_OR_THREE
            and shape.padded_intermediate == 3 * TILE
            and shape.top_k > 1
            and rows >= 1920
        )

    def supports_direct_micro(self, shape: Shape) -> bool:
        """Whether direct micro could run this shape at all (bands aside)."""
        return (
            self.direct_micro is not DirectMicro.NEVER_SELECTED
            and shape.tokens <= 8
            and shape.hidden <= 6144
            and shape.hidden % TILE == 0
            and shape.top_k <= 32
        )

    def _takes_direct_micro(self, shape: Shape) -> bool:
        return (
            KernelFamily.DIRECT_MICRO in self.allowed
            and self.supports_direct_micro(shape)
            and shape.routed_rows < 32
            and shape.padded_intermediate <= 512
        )

    def arithmetic(self, family: KernelFamily, shape: Shape) -> Arithmetic:
        """The arithmetic of one family for this shape.

        Raises:
            InputError: the version never launches that family.
        """
        if family is KernelFamily.DIRECT_MICRO:
            return self._direct_micro_arithmetic()
        fast = self.quantizer is Quantizer.FAST_MISREADING or shape.activation.is_gated
        misreads = self.quantizer is Quantizer.FAST_MISREADING
        output_sum, retained = self._output_sum(family, shape)
        return Arithmetic(
            name=f"{family.value} of FlashInfer {self.version}",
            quant_math=QuantMath.FAST if fast else QuantMath.PRECISE,
            convention=ScaleConvention.DIVISOR,
            subnormals=SubnormalDecode.HIDDEN_ONE if misreads else SubnormalDecode.IEEE,
            sigmoid=SigmoidMath.RECIPROCAL,
            output_sum=output_sum,
            retained_slices=retained,
        )

    def _direct_micro_arithmetic(self) -> Arithmetic:
        if self.direct_micro is DirectMicro.NEVER_SELECTED:
            raise InputError(f"FlashInfer {self.version} never launches direct micro")
        multiplies = self.direct_micro is DirectMicro.MULTIPLIES
        return Arithmetic(
            name=f"direct-micro of FlashInfer {self.version}",
            quant_math=QuantMath.DIRECT_MICRO,
            convention=ScaleConvention.MULTIPLIER if multiplies else ScaleConvention.DIVISOR,
            subnormals=SubnormalDecode.IEEE,
            sigmoid=SigmoidMath.RECIPROCAL,
            output_sum=OutputSum.SINGLE_STORE,
        )

    def _output_sum(self, family: KernelFamily, shape: Shape) -> tuple[OutputSum, int]:
        if family is KernelFamily.STATIC and self.static_output is OutputSum.FP32_SLOTS:
            three = self._merges_three(shape, shape.routed_rows)
            return OutputSum.FP32_SLOTS, 3 if three else 2
        if family is KernelFamily.DYNAMIC and self.retains_slices(shape):
            # Above 256 tokens (no decode step) a mix of 2 and all slices, by grid size.
            slices = shape.padded_intermediate // TILE
            retained = min(2, slices) if shape.tokens <= 256 else slices
            return OutputSum.BF16_ATOMICS_RETAINED, retained
        return OutputSum.BF16_ATOMICS, 1

    def retains_slices(self, shape: Shape) -> bool:
        """Whether dynamic is the gated kernel: it needs a 128-row M tile, so dense routing.

        The tile follows the rows per expert of the call, or of a CUDA-graph wrapper's capacity.
        """
        tile_rows = (shape.graph_capacity or shape.tokens) * shape.top_k
        return (
            self.gated_dynamic is GatedDynamic.RETAINED
            and shape.activation.is_gated
            and shape.padded_intermediate <= 512
            and tile_rows >= 96 * shape.experts
            and shape.top_k <= (32 if shape.sharing is InputQuantization.SHARED else 16)
            and shape.hidden <= 16384
        )


_V0_6_16 = KernelContract(
    version="0.6.16",
    origin=ContractOrigin.DATA,
    input_scale=InputScaleArgument.IS_W1_ALPHA,
    direct_micro=DirectMicro.NEVER_SELECTED,
    micro_max_tokens=None,
    quantizer=Quantizer.FAST_MISREADING,
    static_band=StaticBand.FLAT_640,
    static_output=OutputSum.BF16_ATOMICS,
    gated_dynamic=GatedDynamic.GENERIC,
)
_V0_6_17 = replace(
    _V0_6_16,
    version="0.6.17",
    input_scale=InputScaleArgument.SEPARATE,
    direct_micro=DirectMicro.MULTIPLIES,
    micro_max_tokens=8,
    quantizer=Quantizer.PRECISE_FOR_RELU2,
)
_V0_6_18 = replace(_V0_6_17, version="0.6.18", gated_dynamic=GatedDynamic.RETAINED)
_V0_7_0 = replace(
    _V0_6_18,
    version="0.7.0",
    static_band=StaticBand.FLAT_1024,
    static_output=OutputSum.FP32_SLOTS,
)
_V0_7_2 = replace(_V0_7_0, version="0.7.2", direct_micro=DirectMicro.DIVIDES)
_QWEN_EXCEPTION = (
    "static takes 1792 rows of 256 experts, top-8, hidden 2048, intermediate 512, SwiGLU, 110 SMs, "
    "wrapper capacity of 8192 tokens"
)
_V0_7_4 = replace(
    _V0_7_2,
    version="0.7.4",
    static_band=StaticBand.PER_EXPERT,
    static_groups=StaticGroups.PAIRS_OR_THREE,
    exceptions=(
        "SM120 takes direct micro below 65 routed rows, not 32",
        "direct micro takes 4 tokens of 512 experts, top-10, hidden 2560, intermediate 320, SwiGLU",
        _QWEN_EXCEPTION,
    ),
)

#: First version of each row and the first version it no longer describes.
_TABLE: tuple[tuple[str, str, KernelContract], ...] = (
    ("0.6.16", "0.6.17", _V0_6_16),
    ("0.6.17", "0.6.18", _V0_6_17),
    ("0.6.18", "0.6.19", _V0_6_18),
    ("0.7.0", "0.7.2", _V0_7_0),
    ("0.7.2", "0.7.3", _V0_7_2),
    ("0.7.4", "0.7.5", _V0_7_4),
)

KNOWN_VERSIONS: tuple[str, ...] = tuple(first for first, _, _ in _TABLE)


def contract_for(version: str) -> KernelContract:
    """The contract of a FlashInfer version, from this module's table.

    Raises:
        InputError: not a version number.
        UnsupportedVersionError: a version nobody has read the kernels of.
    """
    try:
        wanted = Version(version)
    except InvalidVersion as error:
        raise InputError(
            f"not a FlashInfer version: {version!r}; known are {', '.join(KNOWN_VERSIONS)}"
        ) from error
    for first, end, contract in _TABLE:
        if wanted.is_prerelease:  # a candidate may lack what its release has
            break
        if Version(first) <= wanted < Version(end):
            return replace(contract, version=str(wanted))
    raise UnsupportedVersionError(
        f"FlashInfer {version}: its b12x kernel contract is not known here (known: 0.6.16 to "
        "0.6.18.*, 0.7.0 to 0.7.2.*, 0.7.4.*). Choose a known one with --flashinfer, or report "
        "the version so that its kernels get read."
    )
