"""Every NVFP4 matrix of a checkpoint by layer and projection, from names and headers alone."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from trtllm_b12x_fix.checkpoint import conventions
from trtllm_b12x_fix.checkpoint.conventions import Dialect, Spelling
from trtllm_b12x_fix.checkpoint.discovery import discover
from trtllm_b12x_fix.checkpoint.files import Checkpoint
from trtllm_b12x_fix.checkpoint.header import TensorInfo
from trtllm_b12x_fix.checkpoint.layers import LayerEntry, Layers, Stack, Storage
from trtllm_b12x_fix.checkpoint.shapes import fit, is_wide, nvfp4
from trtllm_b12x_fix.errors import InputError
from trtllm_b12x_fix.scan.findings import Code, Notebook
from trtllm_b12x_fix.scan.groups import Group, Stored, Width
from trtllm_b12x_fix.scan.reading import Shards
from trtllm_b12x_fix.scan.result import Kind

#: Suffixes that tell an NVFP4 matrix from other quantized ones, longest first.
_SCALE_SUFFIXES = ("weight_scale_2", "weight_global_scale", "weight_scale")
#: Experts under names that discovery does not know; a shared expert is a dense linear.
_OTHER_EXPERT = re.compile(
    r"(?P<layer>(?:.*\.)?(?!shared)(?:[A-Za-z0-9]+_)*(?:experts\b|experts?(?=\.[0-9])))\."
    r"(?:(?P<expert>[0-9]{1,6})\.)?(?P<name>.+)",
    re.DOTALL,
)
#: A part of a mixture of experts, by the name of a component: its stacks are experts.
_MIXTURE = re.compile(r"(?:^|[._])moe(?=[._]|$)")
#: Suffixes of a linear's packed codes.
_CODE_SUFFIXES = (".weight", ".weight_packed")
#: What other formats have beside codes of this dtype.
_FOREIGN = ("absmax", "quant_map", "SCB", "scales", "qzeros", "zeros", "scale_inv")
#: More experts in one tensor than any model has.
MOST_FUSED = 1 << 16
_MATRIX_DIMENSIONS = 2


@dataclass
class Inventory:
    """What there is to scan.

    Attributes:
        lost: matrices of experts of which a part is in files that are not looked at.
    """

    layers: Layers
    groups: list[Group]
    dialects: set[Dialect]
    lost: int


def take(checkpoint: Checkpoint, shards: Shards, notebook: Notebook) -> Inventory:
    """List all NVFP4 matrices; what cannot be listed is put down in the notebook.

    Raises:
        InputError: a file cannot be read.
    """
    layers = discover(checkpoint)
    taker = _Taker(checkpoint, shards, notebook)
    for entry in layers.usable:
        taker.take_layer(entry)
    taker.take_rest()
    taker.note_bare_codes()
    groups = [group for group in taker.groups.values() if len(group)]
    return Inventory(layers, groups, taker.dialects, taker.lost)


class _Taker:
    def __init__(self, checkpoint: Checkpoint, shards: Shards, notebook: Notebook) -> None:
        self._checkpoint, self._shards, self._notebook = checkpoint, shards, notebook
        self.groups: dict[tuple[str, str], Group] = {}
        self.dialects: set[Dialect] = set()
        self.lost = 0
        self._taken: set[str] = set()
        self._usable: set[str] = set()

    def take_layer(self, entry: LayerEntry) -> None:
        """All matrices of a usable layer."""
        self._usable.add(entry.prefix)
        names = [name for name in (entry.names.gate, entry.names.up, entry.names.down) if name]
        for name in names:
            group = Group(entry.prefix, entry.number, entry.stack, name, Kind.EXPERTS)
            self.groups[entry.prefix, name] = group
            if entry.storage is Storage.FUSED:
                self._take(group, entry.fused(name), None)
                continue
            for expert in range(entry.experts):
                self._take(group, entry.matrix(expert, name), expert)

    def take_rest(self) -> None:
        """Dense linears, and experts of layers that cannot be used."""
        for matrix in self._leftovers():
            match = conventions.SPLIT_EXPERT.fullmatch(matrix)
            if match and len(match["expert"]) <= conventions.EXPERT_DIGITS and not match["suffix"]:
                group = self._group(match["layer"], match["matrix"], Kind.UNUSABLE)
                self._take(group, matrix, int(match["expert"]))
            elif (match := conventions.FUSED_EXPERT.fullmatch(matrix)) and not match["suffix"]:
                group = self._group(match["layer"], match["matrix"], Kind.UNUSABLE)
                self._take(group, matrix, None)
            elif match := _OTHER_EXPERT.fullmatch(matrix):
                group = self._group(match["layer"], match["name"], Kind.EXPERTS)
                expert = None if match["expert"] is None else int(match["expert"])
                self._note(Code.UNKNOWN_EXPERTS, group, matrix, expert)
                self._take(group, matrix, expert)
            else:
                layer, _, name = matrix.rpartition(".")
                stacked = self._is_stack(matrix)
                group = self._group(layer, name, Kind.EXPERTS if stacked else Kind.DENSE)
                if stacked:
                    self._note(Code.UNKNOWN_EXPERTS, group, matrix, None)
                self._take(group, matrix, None)

    def _is_stack(self, matrix: str) -> bool:
        """Matrices of experts in one tensor under any name: each with its own scale of the whole
        matrix, or in a mixture of experts by name."""
        spelling = conventions.spelling_of(self._checkpoint, matrix)
        if spelling is None:
            return False
        tensors = self._checkpoint.tensors
        codes, scales = tensors.get(spelling.packed), tensors.get(spelling.block_scale)
        if codes is None or scales is None or len(codes.shape) != 3 or len(scales.shape) != 3:
            return False
        count = codes.shape[0]
        wholes = (tensors.get(name) for name in (spelling.weight_global, spelling.input_global))
        each = any(info is not None and math.prod(info.shape) == count > 1 for info in wholes)
        return count == scales.shape[0] and (each or _MIXTURE.search(matrix) is not None)

    def note_bare_codes(self) -> None:
        """Packed codes without any scale, in a checkpoint whose other matrices have theirs."""
        if not self.dialects:
            return
        parents = {tensor.rpartition(".")[0] for tensor in self._checkpoint.names()}
        for tensor, info in self._checkpoint.tensors.items():
            if info.dtype != conventions.CODE_DTYPE or len(info.shape) != _MATRIX_DIMENSIONS:
                continue
            suffix = next((s for s in _CODE_SUFFIXES if tensor.endswith(s)), None)
            if suffix is None or (matrix := tensor[: -len(suffix)]) in self._taken:
                continue
            siblings = (f"{matrix}.{name}" for name in _FOREIGN)
            if tensor in parents or any(map(self._checkpoint.has, siblings)):
                continue  # bitsandbytes and others
            layer, _, name = matrix.rpartition(".")
            detail = "packed codes without block scales"
            self._note(Code.MISSING, self._group(layer, name, Kind.DENSE), tensor, None, detail)

    def _leftovers(self) -> Iterator[str]:
        """Names of matrices that have a scale and belong to no usable layer."""
        seen = set()
        for tensor in self._checkpoint.names():
            suffix = next((s for s in _SCALE_SUFFIXES if tensor.endswith(s)), None)
            if suffix is None:
                continue
            matrix = tensor[: -len(suffix) - 1]  # and the "." or "_" before it
            if matrix not in seen and matrix not in self._taken:
                seen.add(matrix)
                yield matrix

    def _group(self, layer: str, projection: str, kind: Kind) -> Group:
        found = conventions.LAYER_NUMBER.search(f"{layer}.")
        number = int(found[1]) if found else None
        side = conventions.SIDE_STACK.search(layer)
        new = Group(layer, number, Stack.SIDE if side else Stack.MODEL, projection, kind)
        return self.groups.setdefault((layer, projection), new)

    def _take(self, group: Group, matrix: str, expert: int | None) -> None:
        self._taken.add(matrix)
        try:
            spelling = nvfp4(self._checkpoint, matrix)
        except InputError as error:
            self._note(Code.UNREADABLE, group, matrix, expert, str(error))
            return
        if spelling is None:
            self._note_if_broken(group, matrix, expert)
            return
        self.dialects.add(spelling.dialect)
        infos = [self._checkpoint.tensors.get(n) for n in (spelling.packed, spelling.block_scale)]
        codes, scales = infos
        if codes is None or scales is None:
            self._note_lost(group, spelling, expert)
            return
        self._add(group, spelling, codes, scales, expert)

    def _add(
        self, group: Group, spelling: Spelling, codes: TensorInfo, scales: TensorInfo,
        expert: int | None,
    ) -> None:  # fmt: skip
        name = spelling.block_scale
        where = self._shards.span(name, scales)
        if not where.size:
            self._note(Code.UNREADABLE, group, name, expert, "it is empty")
            return
        fused = len(scales.shape) == 3 and group.kind is not Kind.DENSE and expert is None
        count = scales.shape[0] if fused else 1
        if count > MOST_FUSED:
            detail = f"{count} experts in one tensor, no model has more than {MOST_FUSED}"
            self._note(Code.UNREADABLE, group, name, expert, detail)
            return
        width, shape, turned = Width.UNKNOWN, None, False
        if group.layer not in self._usable and is_wide(self._checkpoint, spelling):
            width = Width.WIDE
        else:
            skip = int(fused and codes.shape[:1] == scales.shape[:1])
            found = None if fused and not skip else fit(codes.shape[skip:], scales.shape[skip:])
            if found is None:
                self._note(Code.UNFIT, group, name, expert, _misfit(codes.shape, scales.shape))
            else:
                width, (shape, turned) = Width.NVFP4, found
        group.add(
            Stored(
                spelling,
                self._checkpoint.file_of(name),
                expert,
                fused,
                count,
                where,
                self._shards.span(spelling.packed, codes) if shape else None,
                shape,
                turned,
                width,
            )
        )

    def _note_lost(self, group: Group, spelling: Spelling, expert: int | None) -> None:
        """Of one shard of several, what is wholly in another was not asked for."""
        needed = (spelling.packed, spelling.block_scale, spelling.weight_global)
        if not self._checkpoint.partial:
            self._note(Code.MISSING_SHARD, group, spelling.block_scale, expert)
        elif any(name in self._checkpoint.tensors for name in needed):
            self._note(Code.SPLIT_MATRIX, group, spelling.block_scale, expert)
        else:
            return
        self.lost += group.kind is not Kind.DENSE

    def _note_if_broken(self, group: Group, matrix: str, expert: int | None) -> None:
        """A scale of the whole matrix without codes or block scales beside it."""
        has = self._checkpoint.has
        whole = [f"{matrix}{dot}{s}" for dot in "._" for s in _SCALE_SUFFIXES[:2]]
        orphan = next((name for name in whole if has(name)), None)
        if orphan is None:
            return  # another format
        spelling = conventions.spelling_of(self._checkpoint, matrix)
        if spelling is None:
            detail = f"{orphan} is there, its codes or block scales are not"
            self._note(Code.MISSING, group, matrix, expert, detail)
            return
        infos = [self._checkpoint.tensors.get(n) for n in (spelling.packed, spelling.block_scale)]
        codes, scales = (info.dtype if info else "missing" for info in infos)
        detail = f"codes are {codes}, block scales {scales}: NVFP4 has U8 and F8_E4M3"
        self._note(Code.UNREADABLE, group, spelling.block_scale, expert, detail)

    def _note(
        self, code: Code, group: Group, tensor: str, expert: int | None, detail: str = ""
    ) -> None:
        file = self._checkpoint.file_of(tensor)
        self._notebook.add(code, group.where(tensor, expert, file), detail)


def _misfit(codes: tuple[int, ...], scales: tuple[int, ...]) -> str:
    text = f"codes {list(codes)}, block scales {list(scales)}"
    if len(codes) < 2:
        return text
    rows, columns = codes[-2], codes[-1] * 2 // conventions.BLOCK
    padded = (-(-rows // 128) * 128) * (-(-columns // 4) * 4)
    if math.prod(scales[-2:]) == padded:
        text += ": the size of scales already swizzled into 128x4 tiles; a checkpoint stores them"
        text += " linear"
    return text
