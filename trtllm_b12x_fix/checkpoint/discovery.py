"""Which mixture-of-experts layers a checkpoint holds, from tensor names and header shapes alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from trtllm_b12x_fix.checkpoint import conventions
from trtllm_b12x_fix.checkpoint.conventions import ProjectionNames, Spelling, detect
from trtllm_b12x_fix.checkpoint.files import Checkpoint
from trtllm_b12x_fix.checkpoint.header import TensorInfo
from trtllm_b12x_fix.checkpoint.layers import LayerEntry, Layers, Stack, Storage, UnusableLayer
from trtllm_b12x_fix.errors import InputError


@dataclass
class _Seen:
    """Names below one ``experts`` prefix."""

    split: dict[str, set[str]] = field(default_factory=dict)  # expert as spelled -> matrices
    fused: set[str] = field(default_factory=set)
    biases: list[str] = field(default_factory=list)


def discover(checkpoint: Checkpoint) -> Layers:
    """All NVFP4 mixture-of-experts layers, in the order of their block numbers.

    Unquantized layers of experts are left out: there is no block scale to lose. A layer whose
    experts are incomplete or whose shapes make no sense is listed as unusable, with the reason.
    """
    seen: dict[str, _Seen] = {}
    predictors = set()
    for tensor in checkpoint.names():
        if match := conventions.SPLIT_EXPERT.match(tensor):
            experts = seen.setdefault(match["layer"], _Seen()).split
            experts.setdefault(match["expert"], set()).add(match["matrix"])
        elif match := conventions.FUSED_EXPERT.match(tensor):
            seen.setdefault(match["layer"], _Seen()).fused.add(match["matrix"])
        elif match := conventions.EXPERT_BIAS.match(tensor):
            seen.setdefault(match["layer"], _Seen()).biases.append(tensor)
        elif match := conventions.PREDICTOR_MARK.match(tensor):
            predictors.add(match["block"])
    usable: list[LayerEntry] = []
    unusable: list[UnusableLayer] = []
    for prefix, names in seen.items():
        stack = _stack(prefix, predictors)
        try:
            entry = _entry(checkpoint, prefix, names, stack)
        except InputError as error:
            unusable.append(UnusableLayer(prefix, _number(prefix), stack, str(error)))
        else:
            usable += [entry] if entry else []
    return Layers(sorted(usable, key=_place), sorted(unusable, key=_place))


def _place(entry: LayerEntry | UnusableLayer) -> tuple[str, int, str]:
    return entry.stack.value, -1 if entry.number is None else entry.number, entry.prefix


def _number(prefix: str) -> int | None:
    match = conventions.LAYER_NUMBER.search(prefix)
    return int(match[1]) if match else None


def _stack(prefix: str, predictors: set[str]) -> Stack:
    if conventions.SIDE_STACK.search(prefix):
        return Stack.SIDE
    # DeepSeek and GLM store the predictor as one more block of the model's own stack.
    return Stack.SIDE if any(prefix.startswith(block) for block in predictors) else Stack.MODEL


def _entry(checkpoint: Checkpoint, prefix: str, seen: _Seen, stack: Stack) -> LayerEntry | None:
    """A layer, ``None`` where its experts are not NVFP4.

    Raises:
        InputError: it is NVFP4 and cannot be used.
    """
    if seen.split:
        entry = _split_entry(checkpoint, prefix, seen.split, stack)
    else:
        entry = _fused_entry(checkpoint, prefix, seen.fused, stack)
    if entry and seen.biases:
        raise InputError(
            f"{checkpoint.file_of(seen.biases[0])}: {seen.biases[0]}: experts with biases; the "
            "b12x kernels take none, so this layer never runs on them as it is"
        )
    return entry


def _split_entry(
    checkpoint: Checkpoint, prefix: str, spelled: dict[str, set[str]], stack: Stack
) -> LayerEntry | None:
    matrices = [f"{prefix}.{e}.{name}" for e, found in spelled.items() for name in found]
    quantized = {matrix: _nvfp4(checkpoint, matrix) for matrix in matrices}
    if not any(quantized.values()):
        return None
    experts = _expert_numbers(checkpoint, prefix, spelled)
    names = _split_names(checkpoint, prefix, experts)
    _require_all_nvfp4(checkpoint, prefix, experts, names, quantized)
    spelling = quantized[f"{prefix}.0.{names.up}"]
    assert spelling is not None
    rows, columns = _split_shape(checkpoint, prefix, len(experts), names.up)
    return LayerEntry(
        prefix,
        _number(prefix),
        stack,
        Storage.SPLIT,
        spelling.dialect,
        names,
        len(experts),
        columns * 2,
        rows,
        not checkpoint.lacks_part_of(f"{prefix}."),
    )


def _expert_numbers(
    checkpoint: Checkpoint, prefix: str, spelled: dict[str, set[str]]
) -> dict[int, set[str]]:
    for name in spelled:
        if name != str(int(name)):
            raise InputError(
                f"{checkpoint.name}: {prefix}.{name}: an expert's number with a leading zero; "
                "loaders look for none"
            )
    experts = {int(name): found for name, found in spelled.items()}
    if sorted(experts) != list(range(len(experts))):
        absent = next(i for i in range(len(experts) + 1) if i not in experts)
        raise InputError(
            f"{checkpoint.name}: {prefix}: expert {absent} is missing though expert "
            f"{max(experts)} is there"
        )
    return experts


def _split_names(
    checkpoint: Checkpoint, prefix: str, experts: dict[int, set[str]]
) -> ProjectionNames:
    seen = set().union(*experts.values())
    if conventions.FUSED_GATE_UP in seen:
        raise InputError(
            f"{checkpoint.name}: {prefix}: {conventions.FUSED_GATE_UP} of single experts is not "
            "read here; gate_proj and up_proj are, or one tensor for all experts"
        )
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


def _require_all_nvfp4(
    checkpoint: Checkpoint,
    prefix: str,
    experts: dict[int, set[str]],
    names: ProjectionNames,
    quantized: dict[str, Spelling | None],
) -> None:
    """A layer of which only a part is NVFP4 never runs as one fused kernel."""
    good = next(matrix for matrix, spelling in quantized.items() if spelling)
    for expert in experts:
        for name in filter(None, (names.gate, names.up, names.down)):
            matrix = f"{prefix}.{expert}.{name}"
            if quantized[matrix] is None:
                detect(checkpoint, matrix)  # names what is missing, if that is why
                raise InputError(
                    f"{checkpoint.name}: {matrix} is not NVFP4, but {good} is: no fused kernel "
                    "runs such a layer"
                )


def _nvfp4(checkpoint: Checkpoint, matrix: str) -> Spelling | None:
    """How a matrix is spelled, ``None`` where it is not NVFP4.

    FP8 linears have a ``weight`` and a ``weight_scale`` too: only codes of one byte's two are ours.
    MXFP4 has such codes, but a scale for 32 of them.
    """
    spelling = conventions.spelling_of(checkpoint, matrix)
    if spelling is None:
        return None
    info, scales = (_info(checkpoint, name) for name in (spelling.packed, spelling.block_scale))
    if info is not None and info.dtype in conventions.UNPACKED_DTYPES:
        return None
    if info and scales and scales.dtype in conventions.MX_SCALE_DTYPES:
        codes = 2 * math.prod(info.shape)
        if codes == conventions.MX_BLOCK * math.prod(scales.shape):
            return None
    return spelling


def _fused_entry(
    checkpoint: Checkpoint, prefix: str, found: set[str], stack: Stack
) -> LayerEntry | None:
    gated = conventions.FUSED_GATE_UP in found
    up = conventions.FUSED_GATE_UP if gated else conventions.FUSED_UP
    spelling = _nvfp4(checkpoint, f"{prefix}.{up}")
    if spelling is None:
        return None
    if lacking := {up, conventions.FUSED_DOWN} - found:
        raise InputError(f"{checkpoint.name}: {prefix}: {sorted(lacking)[0]} is missing")
    if conventions.FUSED_GATE in found:
        raise InputError(
            f"{checkpoint.name}: {prefix}: gate_proj and up_proj as two fused tensors are not read "
            "here; gate_up_proj as one, or experts one by one, are"
        )
    detect(checkpoint, f"{prefix}.{conventions.FUSED_DOWN}")
    experts, rows, columns = _fused_shape(checkpoint, spelling.packed, spelling.block_scale)
    if gated and rows % 2:
        raise InputError(
            f"{checkpoint.file_of(spelling.packed)}: {spelling.packed} has {rows} rows, which "
            "cannot be gate and up of one size"
        )
    return LayerEntry(
        prefix,
        _number(prefix),
        stack,
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
