"""Records of the mixture-of-experts layers that a checkpoint holds, and choosing one of them."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from trtllm_b12x_fix.checkpoint import conventions
from trtllm_b12x_fix.checkpoint.conventions import Dialect, ProjectionNames
from trtllm_b12x_fix.checkpoint.findings import Finding
from trtllm_b12x_fix.errors import InputError


class Storage(enum.Enum):
    """How experts are stored."""

    SPLIT = "split"  # one linear per expert and projection
    FUSED = "fused"  # one tensor per projection, experts first


class Stack(enum.Enum):
    """Which stack of blocks a layer belongs to."""

    MODEL = "model"
    SIDE = "side"  # multi-token prediction, vision tower, draft model


@dataclass(frozen=True)
class Place:
    """Where a layer is: its prefix, its block number (``None`` where the prefix has none)."""

    prefix: str
    number: int | None
    stack: Stack


@dataclass(frozen=True)
class LayerEntry:
    """One mixture-of-experts layer as stored.

    Attributes:
        prefix: up to and including ``experts``.
        number: block number, ``None`` where the prefix has none.
        names: projection names below the prefix (fused: ``up`` is ``gate_up_proj`` if gated).
        experts, hidden, intermediate: from the tensors, never from the config; sizes are 0 where
            the shard that would tell is missing.
        present: whether all of it is in shards that are here.
        findings: what its names and shapes brought to light.
    """

    prefix: str
    number: int | None
    stack: Stack
    storage: Storage
    dialect: Dialect
    names: ProjectionNames
    experts: int
    hidden: int
    intermediate: int
    present: bool
    findings: tuple[Finding, ...] = ()

    @property
    def is_predictor(self) -> bool:
        """Whether it predicts further tokens as one more block of the model's own stack."""
        return self.stack is Stack.SIDE and not conventions.SIDE_STACK.search(self.prefix)

    @property
    def is_gated(self) -> bool:
        return self.names.gate is not None or self.names.up == conventions.FUSED_GATE_UP

    def matrix(self, expert: int, projection: str) -> str:
        """Full name of an expert's matrix (split storage)."""
        return f"{self.prefix}.{expert}.{projection}"

    def fused(self, projection: str) -> str:
        """Full name of a projection (fused storage)."""
        return f"{self.prefix}.{projection}"


@dataclass(frozen=True)
class UnusableLayer:
    """A layer with NVFP4 experts that cannot be checked, and why."""

    prefix: str
    number: int | None
    stack: Stack
    reason: str


@dataclass(frozen=True)
class Layers:
    """What a checkpoint holds, each list by stack and block number.

    One layer that cannot be used says nothing of the others, so it is data until it is chosen.
    """

    usable: list[LayerEntry]
    unusable: list[UnusableLayer]

    def __len__(self) -> int:
        return len(self.usable) + len(self.unusable)


def choose(layers: Layers, wanted: str, name: str) -> LayerEntry:
    """The layer a user means by a block number or by (the start of) a prefix.

    Raises:
        InputError: no such layer, several, or one that cannot be checked; the message lists what
            there is, or says why.
    """
    everything: list[LayerEntry | UnusableLayer] = [*layers.usable, *layers.unusable]
    if not everything:
        raise InputError(f"{name}: no NVFP4 mixture-of-experts layer found in it")
    matches = _matches(everything, wanted)
    if not matches:
        aside = [entry for entry in everything if _has_number(entry, wanted)]
        if aside:
            raise InputError(
                f"{name}: the model itself has no MoE layer {wanted}; of a side stack there are "
                f"{_names(aside)}: name the prefix"
            )
        raise InputError(f"{name}: no MoE layer {wanted}; there are {_names(everything)}")
    if len(matches) > 1:
        raise InputError(f"{name}: {wanted} could be {_names(matches)}: name one")
    (match,) = matches
    if isinstance(match, UnusableLayer):
        raise InputError(match.reason)
    return match


def _matches(
    everything: list[LayerEntry | UnusableLayer], wanted: str
) -> list[LayerEntry | UnusableLayer]:
    if re.fullmatch("[0-9]+", wanted):
        same = [entry for entry in everything if _has_number(entry, wanted)]
        # A predictor in the model's own stack is one of its blocks; what is beside it never is.
        return [entry for entry in same if entry.stack is Stack.MODEL] or [
            entry for entry in same if not conventions.SIDE_STACK.search(entry.prefix)
        ]
    bare = wanted.removesuffix(".").removesuffix(".experts")
    return [e for e in everything if e.prefix in (wanted, f"{bare}.experts")] or [
        e for e in everything if e.prefix.startswith(f"{bare}.")
    ]


def _has_number(entry: LayerEntry | UnusableLayer, wanted: str) -> bool:
    # As text: int() refuses what is longer than 4300 digits.
    bare = wanted.lstrip("0") or "0"
    return re.fullmatch("[0-9]+", wanted) is not None and str(entry.number) == bare


def _names(entries: list[LayerEntry | UnusableLayer]) -> str:
    shown = [entry.prefix for entry in entries[:6]]
    more = f" and {len(entries) - 6} more" if len(entries) > 6 else ""
    return ", ".join(shown) + more + " (--list shows all)"
