"""Quantization algorithms and a layer's quantization config."""

from dataclasses import dataclass
from enum import Enum


class QuantAlgo(str, Enum):
    """Names as checkpoints spell them; members compare equal to their string."""

    FP8 = "FP8"
    NVFP4 = "NVFP4"
    W4A16_NVFP4 = "W4A16_NVFP4"


@dataclass(frozen=True)
class QuantMode:
    """What a layer's weights are quantized to; W4A16_NVFP4 answers yes to NVFP4 too."""

    algo: QuantAlgo | None

    def has_any_quant(self, exclude_kv_cache=False):
        return self.algo is not None

    def has_nvfp4(self):
        return self.algo in (QuantAlgo.NVFP4, QuantAlgo.W4A16_NVFP4)


@dataclass
class QuantConfig:
    """One layer's quantization."""

    quant_algo: QuantAlgo | None = None

    @property
    def layer_quant_mode(self) -> QuantMode:
        return QuantMode(self.quant_algo)
