"""The matrices of one projection: where their bytes are, and their scales of the whole matrix.

Experts of a fused tensor are held as one record, however many there are; a :class:`Unit` is made
when one of them is asked for. A checkpoint of a million tiny experts takes no more memory than one
of a hundred.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from trtllm_b12x_fix.checkpoint.conventions import Spelling
from trtllm_b12x_fix.checkpoint.layers import Stack
from trtllm_b12x_fix.scan.bake import Bake
from trtllm_b12x_fix.scan.findings import Where
from trtllm_b12x_fix.scan.reading import Span
from trtllm_b12x_fix.scan.result import Kind

Floats = npt.NDArray[np.float32]


class Width(enum.Enum):
    """Codes to a block scale."""

    NVFP4 = "16"
    WIDE = "32"  # other formats of the same names
    UNKNOWN = "codes and scales do not fit"


@dataclass(frozen=True, slots=True)
class Unit:
    """One matrix: one expert of a projection, or a dense linear.

    Attributes:
        expert: ``None`` for a dense linear.
        tensor: name of its block scales, or of the fused tensor they are in.
        scales: where the bytes are; ``codes`` is ``None`` where shapes do not fit.
        shape: (rows, columns / 16) of the scales; ``None`` where shapes do not fit.
        turned: stored with rows last (ModelOpt's fused experts).
    """

    expert: int | None
    tensor: str
    file: str
    scales: Span
    codes: Span | None
    shape: tuple[int, int] | None
    turned: bool = False


@dataclass(frozen=True, slots=True)
class Stored:
    """What one set of tensors holds: one matrix, or all experts of a fused projection.

    Attributes:
        expert: its number; ``None`` for a dense linear, and for fused experts, which count from 0.
        count: matrices, one behind the other; ``scales`` and ``codes`` span all of them.
        shape, turned: as :class:`Unit`'s.
    """

    spelling: Spelling
    file: str
    expert: int | None
    fused: bool
    count: int
    scales: Span
    codes: Span | None
    shape: tuple[int, int] | None
    turned: bool
    width: Width

    def unit(self, place: int) -> Unit:
        """One of the matrices."""
        return Unit(
            place if self.fused else self.expert,
            self.spelling.block_scale,
            self.file,
            self._part(self.scales, place),
            None if self.codes is None else self._part(self.codes, place),
            self.shape,
            self.turned,
        )

    def _part(self, span: Span, place: int) -> Span:
        size = span.size // self.count
        return Span(span.file, span.begin + place * size, size)


@dataclass
class Group:
    """One projection of one layer.

    Attributes:
        weight_scale_2, input_scale: fp32 [N], dequantizing multipliers; NaN where unusable.
        bake: whether the bake touches the layer at all.
        lost_inputs: no matrix of the layer has an input scale, though all should.
        one_scale: one stored ``weight_scale_2`` counts for several experts.
    """

    layer: str
    number: int | None
    stack: Stack
    projection: str
    kind: Kind
    stored: list[Stored] = field(default_factory=list)
    weight_scale_2: Floats = field(default_factory=lambda: np.empty(0, np.float32))
    input_scale: Floats = field(default_factory=lambda: np.empty(0, np.float32))
    bake: Bake = Bake.YES
    lost_inputs: bool = False
    one_scale: bool = False
    _ends: list[int] = field(default_factory=list)

    def add(self, stored: Stored) -> None:
        """Some matrices more."""
        self.stored.append(stored)
        self._ends.append(len(self) + stored.count)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def is_wide(self) -> bool:
        """Whether every matrix has one block scale for 32 codes."""
        return all(one.width is Width.WIDE for one in self.stored)

    def stored_at(self, place: int) -> tuple[Stored, int]:
        """What holds the matrix at a place, and the matrix's place in it."""
        which = bisect_right(self._ends, place)
        one = self.stored[which]
        return one, place - (self._ends[which] - one.count)

    def unit(self, place: int) -> Unit:
        """The matrix at a place."""
        one, inner = self.stored_at(place)
        return one.unit(inner)

    def units(self, first: int = 0, end: int | None = None) -> Iterator[Unit]:
        """Matrices in order."""
        for place in range(first, len(self) if end is None else end):
            yield self.unit(place)

    def per_matrix(self, per_stored: list[bool]) -> npt.NDArray[np.bool_]:
        """bool [N] from one value for each of ``stored``."""
        counts = [one.count for one in self.stored]
        return np.repeat(np.array(per_stored, np.bool_), counts)

    def where(self, tensor: str, expert: int | None = None, file: str = "") -> Where:
        """A place in this projection."""
        return Where(self.layer, self.projection, tensor, expert, file)

    def where_unit(self, place: int) -> Where:
        """The matrix at a place, by its block scales."""
        unit = self.unit(place)
        return self.where(unit.tensor, unit.expert, unit.file)
