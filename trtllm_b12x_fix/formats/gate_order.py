"""Which half of a gated FC1 comes first, as an enum and not as an accident."""

from __future__ import annotations

import enum

import torch
from torch import Tensor

from trtllm_b12x_fix.errors import ShapeError


class GateOrder(enum.Enum):
    """Row order of a gated FC1 [2*I, H]."""

    #: [w3; w1]: up first. Every b12x kernel family, every FlashInfer version from 0.6.16 to 0.7.4.
    UP_GATE = "up-gate"
    #: [w1; w3]: gate first, as Hugging Face ``gate_up_proj`` stores it.
    GATE_UP = "gate-up"


def reorder(rows: Tensor, source: GateOrder, target: GateOrder) -> Tensor:
    """Swap the halves of dimension -2 unless they already stand in ``target`` order.

    Works for packed codes and for linear block scales alike, since both keep rows in dimension -2.

    Raises:
        ShapeError: an odd number of rows.
    """
    if rows.shape[-2] % 2:
        raise ShapeError(f"a gated FC1 needs an even number of rows, got {tuple(rows.shape)}")
    if source is target:
        return rows
    first, second = rows.chunk(2, dim=-2)
    return torch.cat([second, first], dim=-2)
