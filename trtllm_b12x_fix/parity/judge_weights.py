"""What is stored for the kernel against what the contract wants, and the fault that explains it.

A stored matrix is compared byte by byte with our own storing of the same layer. If it differs,
known mistakes are made on purpose, one at a time: the one that gives the stored bytes is the fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trtllm_b12x_fix.formats import e2m1, e4m3
from trtllm_b12x_fix.formats.nvfp4 import BLOCK
from trtllm_b12x_fix.layer import ExpertMatrices, MoELayer
from trtllm_b12x_fix.parity.call import KernelCall, as_bytes
from trtllm_b12x_fix.parity.contract import linear_weights
from trtllm_b12x_fix.parity.kernel import LinearWeights, read_weights
from trtllm_b12x_fix.parity.layout import (
    GateMap,
    Layout,
    RowMap,
    ScaleMap,
    contract,
    read_rows,
    read_scales,
    store_rows,
    store_scales,
)
from trtllm_b12x_fix.parity.suspects import Fault, Suspect

_NAN = e4m3.NAN_BYTES[0]
#: Comparing takes several copies: of these experts, not of a whole layer of gigabytes.
_EXPERTS_AT_A_TIME = 16


@dataclass(frozen=True)
class _Matrix:
    """One matrix: as the layer has it, as it should be stored, and as it is."""

    name: str
    source: ExpertMatrices
    halves: int
    linear: tuple[Tensor, Tensor]
    stored: tuple[Tensor, Tensor]
    layout: Layout


def judge_weights(call: KernelCall, layer: MoELayer) -> tuple[Fault, ...]:
    """Faults of both matrices' codes and block scales; none where all bytes that matter are right.

    Args:
        layer: what was prepared, unpadded.
    """
    if call.hidden < layer.hidden or call.intermediate_size < layer.intermediate:
        text = (
            f"hidden {call.hidden} and intermediate {call.intermediate_size} for a layer of "
            f"{layer.hidden} and {layer.intermediate}"
        )
        return (Fault(Suspect.PADDING, text),)
    found: dict[tuple[Suspect, str], Fault] = {}
    for first in range(0, layer.experts, _EXPERTS_AT_A_TIME):
        experts = slice(first, first + _EXPERTS_AT_A_TIME)
        for fault in _judge_experts(_some(call, experts), _some_of(layer, experts), first):
            # One matrix is wrong in one way; every further batch of experts would repeat it.
            found.setdefault((fault.suspect, fault.detail.split(":")[0]), fault)
    return tuple(found.values())


def _judge_experts(call: KernelCall, layer: MoELayer, first: int) -> list[Fault]:
    wanted = linear_weights(layer, call.hidden, call.intermediate_size)
    read = read_weights(call)
    return [
        fault for matrix in _matrices(call, layer, wanted) for fault in _judge(matrix, read, first)
    ]


def _some(call: KernelCall, experts: slice) -> KernelCall:
    names = ("gemm1_weights", "gemm1_weights_scale", "gemm2_weights", "gemm2_weights_scale")
    return replace(call, **{name: getattr(call, name)[experts] for name in names})


def _some_of(layer: MoELayer, experts: slice) -> MoELayer:
    def some(matrices: ExpertMatrices) -> ExpertMatrices:
        return replace(
            matrices,
            packed=matrices.packed[experts],
            block_scale=matrices.block_scale[experts],
            weight_scale_2=matrices.weight_scale_2[experts],
            input_scale=matrices.input_scale[experts],
        )

    return replace(layer, fc1=some(layer.fc1), fc2=some(layer.fc2))


def _matrices(call: KernelCall, layer: MoELayer, wanted: LinearWeights) -> Iterator[_Matrix]:
    gated = layer.activation.is_gated
    yield _Matrix(
        "FC1",
        layer.fc1,
        2 if gated else 1,
        (wanted.fc1_packed, wanted.fc1_scale),
        (call.gemm1_weights, as_bytes(call.gemm1_weights_scale)),
        contract(gated=gated),
    )
    yield _Matrix(
        "FC2",
        layer.fc2,
        1,
        (wanted.fc2_packed, wanted.fc2_scale),
        (call.gemm2_weights, as_bytes(call.gemm2_weights_scale)),
        contract(gated=False),
    )


def _judge(matrix: _Matrix, read: LinearWeights, first: int) -> list[Fault]:
    codes, scales = read.fc1_packed, read.fc1_scale
    if matrix.name == "FC2":
        codes, scales = read.fc2_packed, read.fc2_scale
    if not _differing_blocks(matrix.linear, (codes, scales)):
        return []
    return [
        *_in_padding(matrix, codes, scales, first),
        *_explain(matrix, 0, "codes", _code_mistakes),
        *_explain(matrix, 1, "block scales", _scale_mistakes),
    ]


def _differing_blocks(wanted: tuple[Tensor, Tensor], got: tuple[Tensor, Tensor]) -> int:
    """Blocks of 16 whose values differ; a block of zeros is zero whatever its scale, NaN apart."""
    same_codes = (wanted[0] == got[0]).unflatten(-1, (-1, BLOCK // 2)).all(-1)
    same = same_codes & (wanted[1] == got[1])
    if bool(same.all()):
        return 0
    zero = _is_zero(*wanted) & _is_zero(*got)
    return int((~(same | zero)).sum())


def _is_zero(codes: Tensor, scales: Tensor) -> Tensor:
    blocks = codes.unflatten(-1, (-1, BLOCK // 2))
    empty = ((blocks & 0x77) == 0).all(-1)
    return (empty | (scales & 0x7F == 0)) & (scales & 0x7F != _NAN)


def _in_padding(matrix: _Matrix, codes: Tensor, scales: Tensor, first: int) -> list[Fault]:
    """A fault where padding is not zero, unless real bytes are elsewhere than they should be."""
    if any(_real_bytes_differ(matrix, part) for part in (0, 1)):
        return []
    rows = matrix.source.rows // matrix.halves
    real = torch.zeros(scales.shape[1], dtype=torch.bool)
    real.unflatten(0, (matrix.halves, -1))[:, :rows] = True
    groups = matrix.source.columns // BLOCK
    filled = ~_is_zero(codes, scales)
    filled[:, real, :groups] = False
    if not bool(filled.any()):
        return []
    expert, row, group = filled.nonzero()[0].tolist()
    value = e2m1.decode_packed(codes[expert, row, group * 8 : group * 8 + 8])
    scale = e4m3.decode(scales[expert, row, group])
    text = (
        f"{matrix.name}: blocks of the padding are not zero, first in expert {first + expert}, "
        f"row {row}, group {group}: largest value {float((value * scale).abs().max()):g}"
    )
    return [Fault(Suspect.PADDING, text)]


_Mistake = tuple[Suspect, str, Callable[[], Tensor]]


def _explain(
    matrix: _Matrix, part: int, what: str, mistakes: Callable[[_Matrix], Iterator[_Mistake]]
) -> list[Fault]:
    """The fault of codes (part 0) or scales (part 1), if their real bytes differ."""
    stored = matrix.stored[part]
    store = store_rows if part == 0 else store_scales
    right = store(matrix.linear[part], matrix.layout)
    differing = int((stored != right).sum())
    if not differing or not _real_bytes_differ(matrix, part):
        return []
    for suspect, text, make in mistakes(matrix):
        if torch.equal(make(), stored):
            return [Fault(suspect, f"{matrix.name} {what}: {text}")]
    share = differing / stored.numel()
    return [
        Fault(
            Suspect.WEIGHTS,
            f"{matrix.name} {what}: {share:.1%} of the bytes are not those of the layer, and no "
            "mistake known here gives them",
        )
    ]


def _real_bytes_differ(matrix: _Matrix, part: int) -> bool:
    """Whether bytes outside the padding differ once the layout is undone by the contract."""
    read = (read_rows if part == 0 else read_scales)(matrix.stored[part], matrix.layout)
    rows = matrix.source.rows // matrix.halves
    columns = (matrix.source.packed if part == 0 else matrix.source.block_scale).shape[2]
    pairs = (one.unflatten(1, (matrix.halves, -1)) for one in (read, matrix.linear[part]))
    got, wanted = (one[:, :, :rows, :columns] for one in pairs)
    return not torch.equal(got, wanted)


def _code_mistakes(matrix: _Matrix) -> Iterator[_Mistake]:
    codes = matrix.linear[0]
    for suspect, text, layout in _wrong_rows(matrix.layout):
        yield suspect, text, lambda layout=layout: store_rows(codes, layout)  # type: ignore[misc]
    yield from _wrong_padding(matrix, 0, store_rows)


def _scale_mistakes(matrix: _Matrix) -> Iterator[_Mistake]:
    scales = matrix.linear[1]
    linear = matrix.layout.but(scales=ScaleMap.LINEAR)
    yield (
        Suspect.SCALE_INTERLEAVE,
        "stored in linear order, not in tiles of 128 by 4",
        lambda: store_scales(scales, linear),
    )
    for suspect, text, layout in _wrong_rows(matrix.layout):
        yield suspect, text, lambda layout=layout: store_scales(scales, layout)  # type: ignore[misc]
    yield from _wrong_padding(matrix, 1, store_scales)


def _wrong_rows(right: Layout) -> Iterator[tuple[Suspect, str, Layout]]:
    yield Suspect.ROW_SHUFFLE, "rows are not moved", right.but(rows=RowMap.UNMOVED)
    yield (
        Suspect.ROW_SHUFFLE,
        "rows are moved in blocks of 16, as for an epilogue tile of 64",
        right.but(rows=RowMap.BLOCK_16),
    )
    if right.gate is GateMap.NONE:
        return
    for gate in GateMap:
        if gate not in (GateMap.NONE, right.gate):
            yield Suspect.GATE_ROWS, f"rows stand as {gate.value}", right.but(gate=gate)


def _wrong_padding(
    matrix: _Matrix, part: int, store: Callable[[Tensor, Layout], Tensor]
) -> Iterator[_Mistake]:
    source = matrix.source.packed if part == 0 else matrix.source.block_scale
    room = matrix.linear[part]
    experts, rows, columns = room.shape

    def at_the_end() -> Tensor:
        wrong = torch.zeros_like(room)
        wrong.unflatten(1, (matrix.halves, -1))[
            :, :, : source.shape[1] // matrix.halves, columns - source.shape[2] :
        ] = source.unflatten(1, (matrix.halves, -1))
        return store(wrong, matrix.layout)

    def packed_rows() -> Tensor:
        wrong = torch.zeros_like(room).flatten(1)
        wrong[:, : source[0].numel()] = source.flatten(1)
        return store(wrong.view(experts, rows, columns), matrix.layout)

    def displaced() -> Tensor:
        wrong = torch.zeros_like(room)
        wrong[:, : source.shape[1], : source.shape[2]] = source
        return store(wrong, matrix.layout)

    if source.shape[2] != columns:
        unit = "columns" if part == 0 else "scale groups"
        yield Suspect.PADDING, f"{unit} are padded in front, not behind", at_the_end
        yield (
            Suspect.PADDING,
            f"rows of {source.shape[2]} bytes follow each other without a gap in rows of {columns}",
            packed_rows,
        )
    if matrix.halves == 2 and source.shape[1] != rows:
        text = f"the second half begins at row {source.shape[1] // 2}, the kernel's at {rows // 2}"
        yield Suspect.PADDING, f"gate and up were padded together: {text}", displaced
