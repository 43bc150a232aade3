"""What the bake does with a layer."""

from __future__ import annotations

import enum


class Bake(enum.Enum):
    """Whether the b12x bake touches a layer of experts."""

    YES = "yes"
    WEIGHT_ONLY = "weight-only"  # W4A16: nothing is baked
    NOT_RUN = "not-run"  # activations of a format that b12x does not take
