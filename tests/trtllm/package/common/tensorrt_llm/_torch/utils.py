"""Enums and small records shared by the PyTorch backend."""

from dataclasses import dataclass
from enum import IntEnum

import torch


class ActivationType(IntEnum):
    """Order and values are those of the C++ enum."""

    InvalidType = 0
    Identity = 1
    Gelu = 2
    Relu = 3
    Silu = 4
    Swiglu = 5
    Geglu = 6
    SwigluBias = 7
    Relu2 = 8


def is_gated_activation(kind) -> bool:
    """Whether FC1 has a gate half."""
    return kind in (ActivationType.Swiglu, ActivationType.SwigluBias, ActivationType.Geglu)


@dataclass
class Fp4QuantizedTensor:
    """Activations that somebody quantized already; b12x refuses them."""

    fp4_tensor: torch.Tensor
    scaling_factor: torch.Tensor
    is_sf_swizzled: bool = True

    @property
    def shape(self):
        return self.fp4_tensor.shape
