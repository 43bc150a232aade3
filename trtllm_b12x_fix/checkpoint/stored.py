"""One layer of experts as its names and header shapes describe it, or why it cannot be checked."""

from __future__ import annotations

from dataclasses import dataclass, field

from trtllm_b12x_fix.checkpoint import conventions
from trtllm_b12x_fix.checkpoint.conventions import ProjectionNames, Spelling, detect
from trtllm_b12x_fix.checkpoint.files import Checkpoint
from trtllm_b12x_fix.checkpoint.findings import Finding, Severity
from trtllm_b12x_fix.checkpoint.layers import LayerEntry, Place, Storage
from trtllm_b12x_fix.checkpoint.shapes import fused_shape, info_of, is_wide, nvfp4, split_shape
from trtllm_b12x_fix.errors import InputError

Matrices = dict[str, set[str]]  # a matrix's name -> suffixes of its tensors


@dataclass
class Seen:
    """Tensors below one ``experts`` prefix."""

    split: dict[str, Matrices] = field(default_factory=dict)  # by expert, as spelled
    fused: Matrices = field(default_factory=dict)
    present: bool = True

    def matrices(self, prefix: str) -> Matrices:
        """All of them by full name."""
        split = {
            f"{prefix}.{expert}.{name}": suffixes
            for expert, found in self.split.items()
            for name, suffixes in found.items()
        }
        return split | {f"{prefix}.{name}": suffixes for name, suffixes in self.fused.items()}


def describe(checkpoint: Checkpoint, place: Place, seen: Seen) -> LayerEntry | None:
    """A layer, ``None`` where its experts are not NVFP4.

    Raises:
        InputError: it is NVFP4 and cannot be used.
    """
    matrices = seen.matrices(place.prefix)
    quantized = {matrix: nvfp4(checkpoint, matrix) for matrix in matrices}
    broken = (matrix for matrix, has in matrices.items() if conventions.is_broken_nvfp4(has))
    if not any(quantized.values()) and next(broken, None) is None:
        return None
    _require_nothing_else(checkpoint, matrices)
    _require_one_copy(checkpoint, place.prefix, seen, matrices)
    _require_codes(checkpoint, matrices)
    _require_narrow(checkpoint, quantized)
    findings = _unread(checkpoint, place.prefix, matrices, quantized)
    if seen.split:
        return _split_entry(checkpoint, place, seen, quantized, findings)
    return _fused_entry(checkpoint, place, seen, findings)


def _require_nothing_else(checkpoint: Checkpoint, matrices: Matrices) -> None:
    if not any(map(conventions.refusal, set().union(*matrices.values()))):
        return
    for matrix, suffixes in matrices.items():
        for suffix in sorted(suffixes):
            if reason := conventions.refusal(suffix):
                name = matrix + suffix
                raise InputError(f"{checkpoint.file_of(name)}: {name}: {reason}")


def _require_one_copy(checkpoint: Checkpoint, prefix: str, seen: Seen, matrices: Matrices) -> None:
    """Of two copies of a layer in one checkpoint, either may be the one that a loader takes."""
    for matrix, suffixes in matrices.items():
        if len(codes := sorted(suffixes & conventions.CODES)) > 1:
            raise InputError(
                f"{checkpoint.file_of(matrix + codes[0])}: {matrix + codes[0]} and "
                f"{matrix + codes[1]} are two copies of one matrix"
            )
    if seen.split and (fused := [n for n, has in seen.fused.items() if has & conventions.CODES]):
        raise InputError(
            f"{checkpoint.name}: {prefix}.{fused[0]} for all experts and "
            f"{prefix}.{next(iter(seen.split))} by itself are two copies of one layer"
        )


def _require_codes(checkpoint: Checkpoint, matrices: Matrices) -> None:
    """Scales whose codes are missing: the matrix was there once."""
    orphans = {
        codes: matrix + min(suffixes)
        for matrix, suffixes in matrices.items()
        if (codes := conventions.missing_codes(matrix, suffixes))
    }
    if orphans:
        codes, scale = next(iter(orphans.items()))
        more = f" (and {len(orphans) - 1} more like it)" if len(orphans) > 1 else ""
        raise InputError(
            f"{checkpoint.name}: {codes} is missing{more}, though {scale} is in "
            f"{checkpoint.file_of(scale)}"
        )


def _require_narrow(checkpoint: Checkpoint, quantized: dict[str, Spelling | None]) -> None:
    """Another format has wide blocks throughout; one such matrix among others is a broken one."""
    spellings = [one for one in quantized.values() if one]
    if spellings and all(is_wide(checkpoint, one) for one in spellings):
        name = spellings[0].block_scale
        raise InputError(f"{checkpoint.file_of(name)}: {name}: {conventions.WIDE}")


def _unread(
    checkpoint: Checkpoint,
    prefix: str,
    matrices: Matrices,
    quantized: dict[str, Spelling | None],
) -> tuple[Finding, ...]:
    """Notes on tensors that nothing here reads, one for each suffix."""
    unread: dict[str, list[str]] = {}
    for matrix, spelling in quantized.items():
        if spelling is None or matrices[matrix] <= (read := spelling.suffixes.all):
            continue
        for suffix in sorted(matrices[matrix] - read):
            unread.setdefault(suffix, []).append(matrix + suffix)
    notes = [
        Finding(
            Severity.NOTE,
            "unknown-expert-tensor",
            f"{len(names)} tensors that end in {suffix} are not read: whether they change what "
            "the experts compute is not known",
            file=checkpoint.file_of(names[0]),
            layer=prefix,
            tensor=names[0],
        )
        for suffix, names in unread.items()
    ]
    first: dict[object, str] = {}
    for spelling in filter(None, quantized.values()):
        first.setdefault(spelling.dialect, spelling.packed)
    if len(first) > 1:
        notes.append(
            Finding(
                Severity.NOTE,
                "mixed-dialects",
                f"experts in two dialects: {' and '.join(first.values())}; both are read",
                file=checkpoint.file_of(next(iter(first.values()))),
                layer=prefix,
                tensor=next(iter(first.values())),
            )
        )
    return tuple(notes)


def _split_entry(
    checkpoint: Checkpoint,
    place: Place,
    seen: Seen,
    quantized: dict[str, Spelling | None],
    findings: tuple[Finding, ...],
) -> LayerEntry:
    prefix = place.prefix
    experts = _expert_numbers(checkpoint, prefix, seen.split)
    names = _split_names(checkpoint, prefix, experts)
    _require_all_nvfp4(checkpoint, prefix, experts, names, quantized)
    spelling = quantized[f"{prefix}.0.{names.up}"]
    assert spelling is not None
    rows, columns = split_shape(checkpoint, prefix, len(experts), names.up)
    return LayerEntry(
        prefix,
        place.number,
        place.stack,
        Storage.SPLIT,
        spelling.dialect,
        names,
        len(experts),
        columns * 2,
        rows,
        seen.present,
        findings,
    )


def _expert_numbers(
    checkpoint: Checkpoint, prefix: str, spelled: dict[str, Matrices]
) -> dict[int, set[str]]:
    for name in spelled:
        # As text: int() refuses what is longer than 4300 digits.
        if name != (name.lstrip("0") or "0"):
            raise InputError(
                f"{checkpoint.name}: {prefix}.{name[:80]}: an expert's number with a leading "
                "zero; loaders look for none"
            )
        if len(name) > conventions.EXPERT_DIGITS:
            raise InputError(
                f"{checkpoint.name}: {prefix}.{name[:80]}: no layer has so many experts"
            )
    experts = {int(name): set(found) for name, found in spelled.items()}
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
    families = [names for names in conventions.SPLIT_NAMES if names.all & seen]
    if len(families) > 1:
        both = " and ".join(sorted(names.all & seen)[0] for names in families)
        raise InputError(f"{checkpoint.name}: {prefix}: {both} are two copies of one layer")
    (names,) = families
    gate = names.gate if names.gate in seen else None
    needed = {name for name in (gate, names.up, names.down) if name}
    for expert, found in sorted(experts.items()):
        if lacking := needed - found:
            raise InputError(
                f"{checkpoint.name}: {prefix}.{expert}: {sorted(lacking)[0]} is missing"
            )
    return ProjectionNames(gate, names.up, names.down)


def _require_all_nvfp4(
    checkpoint: Checkpoint,
    prefix: str,
    experts: dict[int, set[str]],
    names: ProjectionNames,
    quantized: dict[str, Spelling | None],
) -> None:
    """A layer of which only a part is NVFP4 never runs as one fused kernel."""
    good = next((matrix for matrix, spelling in quantized.items() if spelling), "another")
    for expert in experts:
        for name in sorted(names.all):
            matrix = f"{prefix}.{expert}.{name}"
            if quantized[matrix] is None:
                raise _not_nvfp4(checkpoint, matrix, good)


def _not_nvfp4(checkpoint: Checkpoint, matrix: str, good: str) -> InputError:
    spelling = detect(checkpoint, matrix)  # names what is missing, if that is why
    infos = [info_of(checkpoint, name) for name in (spelling.packed, spelling.block_scale)]
    codes, scales = (info.dtype if info else "missing" for info in infos)
    culprit = spelling.block_scale if codes == conventions.CODE_DTYPE else spelling.packed
    return InputError(
        f"{checkpoint.file_of(culprit)}: {matrix} is not NVFP4, but {good} is: no fused kernel "
        f"runs such a layer ({spelling.packed} is {codes}, {spelling.block_scale} is {scales})"
    )


def _fused_entry(
    checkpoint: Checkpoint, place: Place, seen: Seen, findings: tuple[Finding, ...]
) -> LayerEntry:
    prefix, found = place.prefix, set(seen.fused)
    gated = conventions.FUSED_GATE_UP in found
    up = conventions.FUSED_GATE_UP if gated else conventions.FUSED_UP
    if lacking := {up, conventions.FUSED_DOWN} - found:
        raise InputError(f"{checkpoint.name}: {prefix}: {sorted(lacking)[0]} is missing")
    if conventions.FUSED_GATE in found:
        raise InputError(
            f"{checkpoint.name}: {prefix}: gate_proj and up_proj as two fused tensors are not read "
            "here; gate_up_proj as one, or experts one by one, are"
        )
    spelling, down = (_fused_spelling(checkpoint, prefix, n) for n in (up, conventions.FUSED_DOWN))
    experts, rows, columns = fused_shape(checkpoint, spelling)
    others, _, _ = fused_shape(checkpoint, down)
    if others and experts and others != experts:
        raise InputError(
            f"{checkpoint.file_of(down.packed)}: {down.packed} has {others} experts, "
            f"{spelling.packed} has {experts}"
        )
    if gated and rows % 2:
        raise InputError(
            f"{checkpoint.file_of(spelling.packed)}: {spelling.packed} has {rows} rows, which "
            "cannot be gate and up of one size"
        )
    return LayerEntry(
        prefix,
        place.number,
        place.stack,
        Storage.FUSED,
        spelling.dialect,
        ProjectionNames(None, up, conventions.FUSED_DOWN),
        experts,
        columns,
        rows // 2 if gated else rows,
        seen.present,
        findings,
    )


def _fused_spelling(checkpoint: Checkpoint, prefix: str, name: str) -> Spelling:
    matrix = f"{prefix}.{name}"
    spelling = detect(checkpoint, matrix)
    if nvfp4(checkpoint, matrix) is None:
        raise InputError(f"{checkpoint.file_of(spelling.packed)}: {matrix} is not NVFP4")
    return spelling
