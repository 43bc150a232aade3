"""How a kernel family computes, as named enums: every member says where it was read.

Sources are files of the flashinfer-python wheels 0.6.16, 0.6.18, 0.7.2 and 0.7.4 below
``flashinfer/fused_moe/cute_dsl/blackwell_sm12x/`` unless another is named.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class KernelFamily(enum.Enum):
    """The four b12x kernels, in the order in which the dispatch considers them."""

    DIRECT_MICRO = "direct-micro"  # moe_direct_micro_kernel.py, CUDA-core dot products
    MICRO = "micro"  # moe_micro_kernel.py
    STATIC = "static"  # moe_static_kernel.py
    DYNAMIC = "dynamic"  # moe_dynamic_kernel.py, from 0.6.17 _moe_dynamic/


class QuantMath(enum.Enum):
    """Evaluation order of the activation quantizer; visible at rounding ties."""

    #: sf = E4M3(rcp(g) * (amax * rcp(6))), code = E2M1(v * (rcp(sf) * rcp(g))).
    #: quantize_block_fp4_fast in flashinfer/cute_dsl/fp4_common.py. The hardware's
    #: rcp.approx.ftz (up to 1 ulp) is emulated by a correctly rounded reciprocal.
    FAST = "fast"
    #: sf = E4M3(amax / (6 g)), code = E2M1(v * (1 / (sf * g))). quantize_block_fp4, same file.
    PRECISE = "precise"
    #: m = 1/g, sf = E4M3(fp32(fp64(amax) * m / 6)), code = E2M1(v * (1 / max(sf / m, 1e-30))).
    #: moe_direct_micro_kernel.py with nvfp4_scale_from_amax of fp4_common.py.
    DIRECT_MICRO = "direct-micro"
    #: s = 1/g, sf = E4M3(amax * s / 6), code = E2M1(v / max(sf / s, 1e-30)). The reference
    #: published with b12x, moe_reference_nvfp4(quant_scale_math="direct_division").
    DIRECT_DIVISION = "direct-division"


class ScaleConvention(enum.Enum):
    """What a kernel does with the global scale it is handed (a dequantizing multiplier)."""

    #: values are divided by it, as the API documents
    DIVISOR = "divisor"
    #: values are multiplied by it: direct micro from 0.6.17 to 0.7.1, whose constructor lacks
    #: ``input_scales_are_reciprocal`` and takes every scale for a reciprocal
    MULTIPLIER = "multiplier"


class SubnormalDecode(enum.Enum):
    """How the quantizer reads back its own E4M3 block scale."""

    IEEE = "ieee"
    #: 0.6.16's fp8_e4m3_to_f32 adds the hidden one to subnormals too: k*2^-9 is read as
    #: 2^-7 * (1 + k/8), so codes shrink by 1.07x to 4.5x
    HIDDEN_ONE = "hidden-one"


class SigmoidMath(enum.Enum):
    """How SwiGLU's sigmoid is evaluated in fp32."""

    #: 1 / (1 + exp(-g)); the hardware's approximate exp and rcp are within 2 ulp of it
    RECIPROCAL = "reciprocal"
    #: torch.sigmoid, as the published reference has it
    TORCH = "torch"


class OutputSum(enum.Enum):
    """How routed outputs become one row."""

    #: per route and 128-wide slice: bf16(bf16(w2_alpha * acc) * weight), atomic bf16 adds
    BF16_ATOMICS = "bf16-atomics"
    #: 2 or 4 slices summed in fp32, bf16(acc) * bf16(w2_alpha * weight) in bf16, atomic bf16 adds.
    #: _moe_dynamic/gated.py
    BF16_ATOMICS_RETAINED = "bf16-atomics-retained"
    #: 2 slices in fp32, bf16(acc) * bf16(w2_alpha * weight) in bf16, fp32 sum in slot order,
    #: rounded once. moe_static_kernel.py from 0.7.0 (route scratch and finalize kernel)
    FP32_SLOTS = "fp32-slots"
    #: fp32 throughout, acc * (w2_alpha * weight), rounded once. moe_direct_micro_kernel.py
    SINGLE_STORE = "single-store"
    #: (w2_alpha * acc) * weight summed in fp32, rounded once: the published reference
    FP32 = "fp32"

    @property
    def has_random_order(self) -> bool:
        """Whether two runs may differ because atomic adds arrive in another order."""
        return self in (OutputSum.BF16_ATOMICS, OutputSum.BF16_ATOMICS_RETAINED)


#: Width of one slice of the intermediate dimension in every MMA family.
SLICE = 128


@dataclass(frozen=True)
class Arithmetic:
    """Everything that decides the bits of one launch, apart from its tensors.

    Attributes:
        retained_slices: how many 128-wide slices FC2 sums in fp32 before its first rounding.
    """

    name: str
    quant_math: QuantMath
    convention: ScaleConvention
    subnormals: SubnormalDecode
    sigmoid: SigmoidMath
    output_sum: OutputSum
    retained_slices: int = 1


#: The arithmetic of b12x's published reference (package b12x, moe_reference_nvfp4).
PUBLISHED = Arithmetic(
    name="published",
    quant_math=QuantMath.DIRECT_DIVISION,
    convention=ScaleConvention.DIVISOR,
    subnormals=SubnormalDecode.IEEE,
    sigmoid=SigmoidMath.TORCH,
    output_sum=OutputSum.FP32,
)
