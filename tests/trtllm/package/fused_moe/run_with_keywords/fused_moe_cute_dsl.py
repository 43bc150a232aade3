"""The CuTe DSL backend of data-centre Blackwell; here only the b12x backend's parent."""

from .fused_moe_cutlass import CutlassFusedMoE


class CuteDslFusedMoE(CutlassFusedMoE):
    """SM100 and SM103."""
