"""Routed rows times packed expert matrices: the one place where the two meet.

FC1, FC2 and the fp64 truth all come through :func:`grouped_matmul`. What multiplies is a
:class:`MatmulBackend`; they agree up to the order of their additions.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from trtllm_b12x_fix.emulator.matmul import matmul, operand_dtype
from trtllm_b12x_fix.errors import InputError, MissingDependencyError, ShapeError
from trtllm_b12x_fix.formats import e4m3, nvfp4
from trtllm_b12x_fix.formats.nvfp4 import BLOCK

#: Weights of one product from which numba pays: importing it costs half a second, as decoding this
#: many weights a few dozen times in torch does. A fixed limit, so that no result depends on what
#: the process did before.
NUMBA_FROM_WEIGHTS = 2**24

_forced: ContextVar[MatmulBackend | None] = ContextVar("_forced", default=None)


class MatmulBackend(enum.Enum):
    """What multiplies. Values are the names in reports."""

    #: decode an expert, multiply by a GEMM; any device
    TORCH = "torch"
    #: :mod:`.packed_numba`, CPU
    NUMBA = "numba"
    #: :mod:`.grouped_cuda`, any GPU
    CUDA = "cuda"


@contextmanager
def forced(backend: MatmulBackend | None) -> Iterator[None]:
    """Use this backend for every product within; ``None`` restores the choice by size."""
    token = _forced.set(backend)
    try:
        yield
    finally:
        _forced.reset(token)


def backend_for(device: torch.device, dtype: torch.dtype, weights: float) -> MatmulBackend:
    """Which backend multiplies.

    Args:
        device: of all tensors.
        dtype: of the operand; numba takes fp32 and fp64.
        weights: how many weights take part; see :data:`NUMBA_FROM_WEIGHTS`.
    """
    chosen = _forced.get()
    if chosen is not None:
        return chosen
    if device.type == "cuda":
        return MatmulBackend.CUDA
    fits = device.type == "cpu" and dtype in (torch.float32, torch.float64)
    large = fits and weights >= NUMBA_FROM_WEIGHTS
    # The order matters: looking for numba imports it.
    return MatmulBackend.NUMBA if large and _numba_module() is not None else MatmulBackend.TORCH


def describe(device: torch.device, weights: float = math.inf) -> str:
    """The backend of a product in words for reports, such as ``numba 0.68.1``.

    Without ``weights``, of a product as large as any. Imports numba where that is the answer.
    """
    backend = backend_for(device, operand_dtype(device), weights)
    if backend is MatmulBackend.NUMBA and (module := _numba_module()) is not None:
        return f"{backend.value} {module.VERSION}"
    return backend.value


def grouped_matmul(
    operand: Tensor,
    rows: Tensor,
    packed: Tensor,
    block_scale: Tensor,
    groups: list[tuple[int, Tensor]],
    columns: list[slice],
) -> Tensor:
    """Each route's row times its expert's matrix, without global scales.

    Args:
        operand: [N, C] decoded activations: in the device's
            :func:`trtllm_b12x_fix.emulator.matmul.operand_dtype`, or fp64.
        rows: int64 [n_routes], the operand's row of each route.
        packed: uint8 [E, R, C/2].
        block_scale: uint8 or float8_e4m3fn [E, R, C/16]; a NaN byte makes its outputs NaN.
        groups: (expert, int64 routes) of every expert with work; each route in exactly one.
        columns: S ranges of C, whole blocks; each is summed on its own.

    Returns:
        [n_routes, S, R]: fp64 for fp64 operands, else fp32 with fp32 accumulation.

    Raises:
        ShapeError: sizes that contradict each other, or a range that cuts a block.
        InputError: an expert, a route or a row out of range.
        MissingDependencyError: the forced backend is not installed.
    """
    _check(operand, packed, block_scale, columns)
    _check_indices(operand.shape[0], packed.shape[0], rows, groups)
    bytes_ = e4m3.as_e4m3(block_scale).view(torch.uint8)
    weights = len(groups) * packed[0].numel() * 2
    backend = backend_for(operand.device, operand.dtype, weights)
    multiply = _implementation(backend, operand.device)
    return multiply(operand, rows, packed, bytes_, groups, columns)


def _implementation(backend: MatmulBackend, device: torch.device) -> Callable[..., Tensor]:
    if backend is MatmulBackend.TORCH:
        return _torch_loop
    needed = "cuda" if backend is MatmulBackend.CUDA else "cpu"
    if device.type != needed:
        raise InputError(f"the {backend.value} backend needs tensors on {needed}, not {device}")
    if backend is MatmulBackend.CUDA:
        from trtllm_b12x_fix.emulator import grouped_cuda

        return grouped_cuda.grouped
    module = _numba_module()
    if module is None:
        raise MissingDependencyError("the numba backend needs numba: pip install numba")
    return module.grouped


def _torch_loop(
    operand: Tensor,
    rows: Tensor,
    packed: Tensor,
    block_scale: Tensor,
    groups: list[tuple[int, Tensor]],
    columns: list[slice],
) -> Tensor:
    sums = torch.float64 if operand.dtype is torch.float64 else torch.float32
    shape = (rows.numel(), len(columns), packed.shape[1])
    out = torch.empty(shape, dtype=sums, device=operand.device)
    for expert, routes in groups:
        weight = nvfp4.operand(packed[expert], block_scale[expert], operand.dtype)
        left = operand[rows[routes]]
        for number, part in enumerate(columns):
            out[routes, number] = matmul(left[:, part], weight[:, part])
    return out


def _check(operand: Tensor, packed: Tensor, block_scale: Tensor, columns: list[slice]) -> None:
    width = operand.shape[-1]
    fits = (
        operand.dim() == 2
        and packed.dim() == 3
        and width % BLOCK == 0
        and packed.shape[2] * 2 == width
        and block_scale.shape == (*packed.shape[:2], width // BLOCK)
    )
    if not fits:
        raise ShapeError(
            f"operand {tuple(operand.shape)}, packed codes {tuple(packed.shape)} and block scales "
            f"{tuple(block_scale.shape)} do not belong together: need [N, C], [E, R, C/2] and "
            f"[E, R, C/{BLOCK}]"
        )
    for part in columns:
        inside = part.step in (None, 1) and 0 <= part.start <= part.stop <= width
        if not inside or part.start % BLOCK or part.stop % BLOCK:
            raise ShapeError(f"{part} is not a range of whole blocks of {BLOCK} in {width} columns")


def _check_indices(
    operand_rows: int, experts: int, rows: Tensor, groups: list[tuple[int, Tensor]]
) -> None:
    """Compiled loops follow indices blindly and write each route's output: none may be wrong."""
    if any(not 0 <= expert < experts for expert, _ in groups):
        raise InputError(f"a group's expert is not one of 0..{experts - 1}")
    routes = torch.cat([routes for _, routes in groups]) if groups else rows[:0]
    every = torch.arange(rows.numel(), device=rows.device)
    if not torch.equal(routes.sort().values, every):
        raise InputError(f"groups must hold each of {rows.numel()} routes once")
    if rows.numel() and not bool(((rows >= 0) & (rows < operand_rows)).all()):
        raise InputError(f"a route's row is not one of 0..{operand_rows - 1}")


@cache
def _numba_module() -> ModuleType | None:
    """:mod:`.packed_numba`, or ``None`` where numba is missing or does not load."""
    try:
        from trtllm_b12x_fix.emulator import packed_numba
    except (ImportError, OSError):  # OSError: llvmlite's library does not load
        return None
    return packed_numba
