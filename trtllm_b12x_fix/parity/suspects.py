"""What can be wrong between a layer and trtllm-gen's output, as names that a report can carry."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Suspect(enum.Enum):
    """One cause. The first five are those of vllm#52308; the next are the rest of the way."""

    #: columns, rows and scale groups that zero padding adds
    PADDING = "padding"
    #: output1_scale_scalar, output1_scale_gate_scalar, output2_scale_scalar
    SCALARS = "scalars"
    #: choice of experts and their weights
    ROUTING = "routing"
    #: layout of hidden_states_scale: linear by contract
    ACTIVATION_SCALES = "activation-scales"
    #: what passing routing_replay_out changes or leaves in it
    ROUTING_REPLAY = "routing-replay"
    #: row permutation of weights and block scales for the epilogue tile of 128
    ROW_SHUFFLE = "row-shuffle"
    #: 128x4 interleave of the weights' block scales
    SCALE_INTERLEAVE = "scale-interleave"
    #: order of gate and up in FC1
    GATE_ROWS = "gate-rows"
    #: a multiplier where a reciprocal belongs, or the other way round
    RECIPROCALS = "reciprocals"
    #: codes or block scales that no layout known here explains
    WEIGHTS = "weights"
    #: every argument reads as the contract says, and the output is still another
    KERNEL = "kernel"


#: The suspects of vllm#52308, in the order in which the report lists them.
REPORTED = (
    Suspect.PADDING,
    Suspect.SCALARS,
    Suspect.ROUTING,
    Suspect.ACTIVATION_SCALES,
    Suspect.ROUTING_REPLAY,
)


@dataclass(frozen=True)
class Fault:
    """A suspect that was caught, and what was seen."""

    suspect: Suspect
    detail: str
