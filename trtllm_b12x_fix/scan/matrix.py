"""Which backend takes a checkpoint's expert shapes, at which tensor-parallel size, at what cost.

Facts about FlashInfer's b12x kernels come from :mod:`trtllm_b12x_fix.doctor.advisories`; nothing
here was run on a GPU.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from packaging.version import Version

from trtllm_b12x_fix.checkpoint.layers import LayerEntry
from trtllm_b12x_fix.doctor.advisories import (
    TILE,
    Key,
    LayerShape,
    advisories_for,
    padded,
    second_copy_bytes,
)
from trtllm_b12x_fix.doctor.model import tensor_intermediate
from trtllm_b12x_fix.scan.bake import Bake

TP_SIZES = (1, 2, 4, 8)
#: As ``emulator.contract.KNOWN_VERSIONS``, which needs torch; the tests compare them.
VERSIONS = ("0.6.16", "0.6.17", "0.6.18", "0.7.0", "0.7.2", "0.7.4")
_BLOCK = 16
#: trtllm-gen's block-scale MoE pads the hidden size to this.
_TRTLLM_GEN_HIDDEN = 256


class Backend(enum.Enum):
    """Where an NVFP4 mixture of experts can run."""

    B12X = "b12x"
    CUTLASS = "CUTLASS"
    TRTLLM_GEN = "trtllm-gen"


class Fit(enum.Enum):
    """Whether a shape can be cut and padded for a backend."""

    ALIGNED = "aligned"
    PADDED = "padded"
    IMPOSSIBLE = "impossible"


@dataclass(frozen=True)
class VersionNote:
    """One FlashInfer version and what its b12x kernels have in store for a shape.

    Attributes:
        traps: names of ``doctor.advisories.Key``.
        second_copy_bytes: per rank, over all layers of the shape.
    """

    version: str
    traps: tuple[str, ...]
    second_copy_bytes: int


@dataclass(frozen=True)
class MatrixRow:
    """One shape on one backend at one tensor-parallel size.

    Attributes:
        shape: of a whole layer, before it is cut.
        intermediate: of one rank; ``padded_intermediate`` of the tensors it gets.
        bakes: whether the backend's conversion rounds block scales a second time.
        notes: what else to know.
        versions: b12x only.
    """

    backend: Backend
    tp: int
    shape: LayerShape
    fit: Fit
    intermediate: int
    padded_intermediate: int
    padded_hidden: int
    bakes: bool
    notes: tuple[str, ...]
    versions: tuple[VersionNote, ...] = ()


def shapes_of(entries: Iterable[LayerEntry], top_k: int | None) -> list[LayerShape]:
    """Layers by shape, the most frequent first; those whose shard is missing have none."""
    counted = Counter(
        LayerShape(e.experts, e.hidden, e.intermediate, e.is_gated, 1, top_k)
        for e in entries
        if e.intermediate and e.hidden
    )
    return [replace(shape, layers=count) for shape, count in counted.most_common()]


def backend_matrix(shapes: list[LayerShape], bake: Bake = Bake.YES) -> tuple[MatrixRow, ...]:
    """Every shape on every backend at every tensor-parallel size.

    Args:
        bake: of these layers; b12x rounds nothing twice of weight-only ones.
    """
    return tuple(
        _row(backend, tp, shape, bake) for shape in shapes for backend in Backend for tp in TP_SIZES
    )


def _row(backend: Backend, tp: int, shape: LayerShape, bake: Bake) -> MatrixRow:
    mine, rest = divmod(shape.intermediate, tp)
    bakes = backend is Backend.B12X and bake is Bake.YES
    if rest or mine % _BLOCK:
        why = f"{shape.intermediate} cannot be cut into {tp} parts of whole blocks of {_BLOCK}"
        return MatrixRow(backend, tp, shape, Fit.IMPOSSIBLE, mine, 0, 0, bakes, (why,))
    rows = tensor_intermediate(mine, gated=shape.gated)
    tile = _TRTLLM_GEN_HIDDEN if backend is Backend.TRTLLM_GEN else TILE
    hidden = padded(shape.hidden, tile)
    fit = Fit.ALIGNED if (rows, hidden) == (mine, shape.hidden) else Fit.PADDED
    cut = replace(shape, intermediate=rows)
    return MatrixRow(
        backend,
        tp,
        shape,
        fit,
        mine,
        rows,
        hidden,
        bakes,
        tuple(_notes(backend, shape, mine, rows, hidden)),
        tuple(_version(version, cut) for version in VERSIONS) if bakes else (),
    )


def _notes(backend: Backend, shape: LayerShape, mine: int, rows: int, hidden: int) -> list[str]:
    notes = []
    if rows != mine and shape.gated and backend is Backend.B12X:
        notes.append("TensorRT-LLM pads gate and up as one: kernels split them in the wrong place")
    if backend is Backend.TRTLLM_GEN and hidden != shape.hidden:
        notes.append(
            f"hidden {shape.hidden} is padded to {hidden}: a hidden size like this gave fluent, "
            "wrong output (vllm#52308, flashinfer#3168; cause not known): compare with CUTLASS"
        )
    if backend is Backend.B12X and hidden != shape.hidden:
        notes.append(f"hidden must be padded to {hidden}")
    return notes


def _version(version: str, shape: LayerShape) -> VersionNote:
    met = advisories_for(version, (shape,))
    traps = tuple(one.key.value for one in met if one.key is not Key.SECOND_COPY)
    size = second_copy_bytes(Version(version), shape) * shape.layers
    return VersionNote(version, traps, size)
