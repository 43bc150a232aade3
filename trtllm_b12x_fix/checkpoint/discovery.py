"""Which mixture-of-experts layers a checkpoint holds, from tensor names and header shapes alone."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from trtllm_b12x_fix.checkpoint import conventions
from trtllm_b12x_fix.checkpoint.conventions import Dialect, ProjectionNames, Spelling, detect
from trtllm_b12x_fix.checkpoint.files import Checkpoint
from trtllm_b12x_fix.checkpoint.header import TensorInfo
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
class LayerEntry:
    """One mixture-of-experts layer as stored.

    Attributes:
        prefix: up to and including ``experts``.
        number: block number, ``None`` where the prefix has none.
        names: projection names below the prefix (fused: ``up`` is ``gate_up_proj`` if gated).
        experts, hidden, intermediate: from the tensors, never from the config.
        present: whether all of it is in shards that are here.
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

    @property
    def is_gated(self) -> bool:
        return self.names.gate is not None or self.names.up == conventions.FUSED_GATE_UP

    def matrix(self, expert: int, projection: str) -> str:
        """Full name of an expert's matrix (split storage)."""
        return f"{self.prefix}.{expert}.{projection}"

    def fused(self, projection: str) -> str:
        """Full name of a projection (fused storage)."""
        return f"{self.prefix}.{projection}"


def discover(checkpoint: Checkpoint) -> list[LayerEntry]:
    """All NVFP4 mixture-of-experts layers, in the order of their block numbers.

    Unquantized layers of experts are left out: there is no block scale to lose.

    Raises:
        InputError: a layer whose experts are incomplete or whose shapes make no sense.
    """
    split: dict[str, dict[int, set[str]]] = {}
    fused: dict[str, set[str]] = {}
    for tensor in checkpoint.names():
        if match := conventions.SPLIT_EXPERT.match(tensor):
            experts = split.setdefault(match["layer"], {})
            experts.setdefault(int(match["expert"]), set()).add(match["matrix"])
        elif match := conventions.FUSED_EXPERT.match(tensor):
            fused.setdefault(match["layer"], set()).add(match["matrix"])
    entries = [_split_entry(checkpoint, prefix, found) for prefix, found in split.items()]
    entries += [
        _fused_entry(checkpoint, prefix, found)
        for prefix, found in fused.items()
        if prefix not in split
    ]
    found_entries = [entry for entry in entries if entry is not None]
    return sorted(
        found_entries, key=lambda e: (e.stack.value, e.number if e.number is not None else -1)
    )


def choose(entries: list[LayerEntry], wanted: str, name: str) -> LayerEntry:
    """The layer a user means by a block number or by (the start of) a prefix.

    Raises:
        InputError: no such layer, or several; the message lists what there is.
    """
    if not entries:
        raise InputError(f"{name}: no NVFP4 mixture-of-experts layer found in it")
    if wanted.isdecimal():
        # As text: int() refuses what is longer than 4300 digits.
        number = wanted.lstrip("0") or "0"
        same = [entry for entry in entries if str(entry.number) == number]
        matches = [entry for entry in same if entry.stack is Stack.MODEL] or same
    else:
        bare = wanted.removesuffix(".").removesuffix(".experts")
        matches = [e for e in entries if e.prefix in (wanted, f"{bare}.experts")] or [
            e for e in entries if e.prefix.startswith(f"{bare}.")
        ]
    if len(matches) == 1:
        return matches[0]
    if not matches:
        raise InputError(f"{name}: no MoE layer {wanted}; there are {_names(entries)}")
    raise InputError(f"{name}: {wanted} could be {_names(matches)}: name one")


def _names(entries: list[LayerEntry]) -> str:
    shown = [entry.prefix for entry in entries[:6]]
    more = f" and {len(entries) - 6} more" if len(entries) > 6 else ""
    return ", ".join(shown) + more + " (--list shows all)"


def _split_entry(
    checkpoint: Checkpoint, prefix: str, experts: dict[int, set[str]]
) -> LayerEntry | None:
    names = _split_names(checkpoint, prefix, experts)
    if sorted(experts) != list(range(len(experts))):
        absent = next(i for i in range(len(experts) + 1) if i not in experts)
        raise InputError(
            f"{checkpoint.name}: {prefix}: expert {absent} is missing though expert "
            f"{max(experts)} is there"
        )
    spelling = _nvfp4(checkpoint, f"{prefix}.0.{names.up}")
    if spelling is None:
        _refuse_mixture(checkpoint, prefix, experts, names)
        return None
    rows, columns = _split_shape(checkpoint, prefix, len(experts), names.up)
    return LayerEntry(
        prefix,
        _number(prefix),
        _stack(prefix),
        Storage.SPLIT,
        spelling.dialect,
        names,
        len(experts),
        columns * 2,
        rows,
        not checkpoint.lacks_part_of(f"{prefix}."),
    )


def _nvfp4(checkpoint: Checkpoint, matrix: str) -> Spelling | None:
    """How a matrix is spelled, ``None`` where it is not NVFP4.

    FP8 linears have a ``weight`` and a ``weight_scale`` too: only codes of one byte's two are ours.
    MXFP4 has such codes, but a scale for 32 of them.
    """
    try:
        spelling = detect(checkpoint, matrix)
    except InputError:
        return None
    info, scales = (_info(checkpoint, name) for name in (spelling.packed, spelling.block_scale))
    if info is not None and info.dtype in conventions.UNPACKED_DTYPES:
        return None
    if info and scales and scales.dtype in conventions.MX_SCALE_DTYPES:
        codes = 2 * math.prod(info.shape)
        if codes == conventions.MX_BLOCK * math.prod(scales.shape):
            return None
    return spelling


def _split_names(
    checkpoint: Checkpoint, prefix: str, experts: dict[int, set[str]]
) -> ProjectionNames:
    seen = set().union(*experts.values())
    for names in conventions.SPLIT_NAMES:
        if {names.up, names.down} & seen:
            gate = names.gate if names.gate in seen else None
            chosen = ProjectionNames(gate, names.up, names.down)
            needed = {name for name in (gate, names.up, names.down) if name}
            for expert, found in sorted(experts.items()):
                if lacking := needed - found:
                    raise InputError(
                        f"{checkpoint.name}: {prefix}.{expert}: {sorted(lacking)[0]} is missing"
                    )
            return chosen
    raise InputError(f"{checkpoint.name}: {prefix}: only {sorted(seen)} found, no up and down")


def _refuse_mixture(
    checkpoint: Checkpoint, prefix: str, experts: dict[int, set[str]], names: ProjectionNames
) -> None:
    """Expert 0 is not NVFP4: fine if none is, an error if others are."""
    for expert in experts:
        if _nvfp4(checkpoint, f"{prefix}.{expert}.{names.up}"):
            raise InputError(
                f"{checkpoint.name}: {prefix}.0.{names.up} has no NVFP4 weight and weight_scale, "
                f"but expert {expert} has"
            )


def _fused_entry(checkpoint: Checkpoint, prefix: str, found: set[str]) -> LayerEntry | None:
    gated = conventions.FUSED_GATE_UP in found
    up = conventions.FUSED_GATE_UP if gated else conventions.FUSED_UP
    lacking = {up, conventions.FUSED_DOWN} - found
    spelling = _nvfp4(checkpoint, f"{prefix}.{up}")
    if spelling is None:
        return None
    if lacking:
        raise InputError(f"{checkpoint.name}: {prefix}: {sorted(lacking)[0]} is missing")
    if conventions.FUSED_GATE in found:
        raise InputError(
            f"{checkpoint.name}: {prefix}: gate_proj and up_proj as two fused tensors are not read "
            "here; gate_up_proj as one, or experts one by one, are"
        )
    detect(checkpoint, f"{prefix}.{conventions.FUSED_DOWN}")
    experts, rows, columns = _fused_shape(checkpoint, spelling.packed, spelling.block_scale)
    return LayerEntry(
        prefix,
        _number(prefix),
        _stack(prefix),
        Storage.FUSED,
        spelling.dialect,
        ProjectionNames(None, up, conventions.FUSED_DOWN),
        experts,
        columns,
        rows // 2 if gated else rows,
        not checkpoint.lacks_part_of(f"{prefix}."),
    )


def _info(checkpoint: Checkpoint, tensor: str) -> TensorInfo | None:
    return checkpoint.tensors.get(tensor)


def _split_shape(
    checkpoint: Checkpoint, prefix: str, experts: int, projection: str
) -> tuple[int, int]:
    """(rows, columns / 2) of the first expert whose shard is there; zeros where none is."""
    for expert in range(experts):
        spelling = _nvfp4(checkpoint, f"{prefix}.{expert}.{projection}")
        info = _info(checkpoint, spelling.packed) if spelling else None
        if spelling and info:
            if len(info.shape) != 2 or not all(info.shape):
                raise InputError(
                    f"{checkpoint.file_of(spelling.packed)}: {spelling.packed} must be "
                    f"[rows, columns / 2], got {list(info.shape)}"
                )
            return info.shape[0], info.shape[1]
    return 0, 0


def _fused_shape(checkpoint: Checkpoint, packed: str, block_scale: str) -> tuple[int, int, int]:
    """(experts, rows, columns) of a fused matrix stored straight or transposed."""
    info, scales = _info(checkpoint, packed), _info(checkpoint, block_scale)
    if info is None or scales is None:
        return 0, 0, 0
    if len(info.shape) != 3 or len(scales.shape) != 3 or not all(info.shape):
        raise InputError(
            f"{checkpoint.file_of(packed)}: {packed} must be [experts, rows, columns / 2], got "
            f"{list(info.shape)} with scales {list(scales.shape)}"
        )
    experts, first, second = info.shape
    if scales.shape[0] != experts:
        raise InputError(
            f"{checkpoint.file_of(packed)}: {packed} has {experts} experts, {block_scale} has "
            f"{scales.shape[0]}"
        )
    if first != scales.shape[1] and second == scales.shape[2]:
        return experts, second, first * 2
    return experts, first, second * 2


def _number(prefix: str) -> int | None:
    match = conventions.LAYER_NUMBER.search(prefix)
    return int(match[1]) if match else None


def _stack(prefix: str) -> Stack:
    return Stack.SIDE if conventions.SIDE_STACK.search(prefix) else Stack.MODEL
