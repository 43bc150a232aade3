"""What is wrong with a checkpoint though it can be used: data, not exceptions."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Severity(enum.Enum):
    """Whether a finding changes what the model computes."""

    DAMAGE = "damage"  # weights or scales are not what the quantizer meant
    NOTE = "note"  # worth knowing, harmless for this check


@dataclass(frozen=True)
class Finding:
    """One finding, with the place it was found.

    Attributes:
        code: short stable name, such as ``gate-up-scales-differ``.
        file, tensor: where; empty where it does not apply.
        layer: prefix of the layer, empty for the whole checkpoint.
        expert: number, ``None`` where it concerns all.
        message: what is wrong, and what to do.
    """

    severity: Severity
    code: str
    message: str
    file: str = ""
    layer: str = ""
    expert: int | None = None
    tensor: str = ""
