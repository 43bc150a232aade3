"""vLLM's MoE classes in a process without a Blackwell GPU: what takes the place of what, and why.

Everything replaced is named in :data:`STAND_INS`, which every report repeats. Replacements last for
a ``with`` block, except the one that importing needs.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from trtllm_b12x_fix.errors import InputError, UnsupportedVersionError
from trtllm_b12x_fix.formats import e2m1, scale_layout
from trtllm_b12x_fix.parity.contract import quantize_by

#: What a report says of a run on the CPU.
STAND_INS = (
    "flashinfer.nvfp4_block_scale_interleave (no CPU form): ours, by the layout's documented index",
    "vllm._custom_ops.scaled_fp4_quant (CUDA): ours, the emulator's quantizer",
    "vLLM's packing of ids and weights (Triton, 0.27.0): ours, by FlashInfer's documented format",
    "vLLM's platform: like CUDA, which layers without a gate ask; not CUDA, whose ops are compiled",
    "the compiled kernel: the contract emulator",
)

_PLATFORM = "vllm.platforms"
_OPS = "vllm._custom_ops"
_TRTLLM = "vllm.model_executor.layers.fused_moe.experts.trtllm_nvfp4_moe"
_PACK = "trtllm_moe_pack_topk_ids_weights"


def symbol(module: str, name: str) -> Any:
    """One foreign symbol.

    Raises:
        InputError: vLLM or FlashInfer is not installed, or cannot be imported.
        UnsupportedVersionError: the symbol is not there.
    """
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise InputError(
            f"{module} cannot be imported: {error}. Run this where vLLM and its FlashInfer are "
            "installed, or name folders that hold them with --site"
        ) from error
    except Exception as error:  # importing it probes hardware and compiles: anything can be raised
        raise InputError(f"{module} cannot be imported: {_words(error)}") from error
    if not hasattr(found, name):
        raise UnsupportedVersionError(
            f"{_version()}: {module}.{name} is not there; parity was tried with vLLM 0.27.0 and "
            "0.33.0"
        )
    return getattr(found, name)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"vLLM {version('vllm')}"
    except PackageNotFoundError:
        return "vLLM of an unknown version"


def _words(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


@contextmanager
def refusals(doing: str) -> Iterator[None]:
    """Foreign exceptions within as ours.

    Raises:
        UnsupportedVersionError: vLLM read or called what this code does not give it.
        InputError: vLLM refused the shape or the value.
    """
    try:
        yield
    except (AttributeError, TypeError, ImportError) as error:
        raise UnsupportedVersionError(
            f"{_version()} changed while {doing}: {_words(error)}; parity was tried with 0.27.0 "
            "and 0.33.0"
        ) from error
    except (AssertionError, ValueError, RuntimeError, NotImplementedError) as error:
        raise InputError(f"{_version()} refused while {doing}: {_words(error)}") from error


@contextmanager
def replaced(*items: tuple[Any, str, Any]) -> Iterator[None]:
    """Attributes set for the duration: (owner, name, value)."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in items:
            missing = object()
            old = owner.__dict__.get(name, missing)
            setattr(owner, name, value)
            if old is missing:
                stack.callback(delattr, owner, name)
            else:
                stack.callback(setattr, owner, name, old)
        yield


def make_importable() -> None:
    """FlashInfer asks for a GPU's properties while it is imported: without one, made-up ones."""
    # Its log would share standard output with a report, and warns of what a GPU would have.
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
    logging.getLogger("vllm").setLevel(logging.ERROR)
    if torch.cuda.is_available():
        return
    properties = SimpleNamespace(
        name="none", major=10, minor=0, multi_processor_count=148, total_memory=0
    )
    torch.cuda.get_device_properties = lambda *_, **__: properties  # type: ignore[assignment]


def stand_ins(device: torch.device) -> Sequence[tuple[Any, str, Any]]:
    """What :func:`replaced` has to put in place for tensors on this device."""
    parameter = importlib.import_module("vllm.model_executor.parameter")
    items: list[tuple[Any, str, Any]] = [
        (parameter, "get_tensor_model_parallel_rank", lambda: 0),
        (parameter, "get_tensor_model_parallel_world_size", lambda: 1),
    ]
    if device.type != "cpu":
        return items
    platform = type(symbol(_PLATFORM, "current_platform"))
    flashinfer = importlib.import_module("flashinfer")
    items += [
        (platform, "is_cuda_alike", lambda _: True),
        (platform, "is_cuda", lambda _: False),
        (flashinfer, "nvfp4_block_scale_interleave", interleave),
        (importlib.import_module(_OPS), "scaled_fp4_quant", quantize),
        (torch.accelerator, "current_device_index", lambda: "cpu"),
        (torch.accelerator, "empty_cache", lambda: None),
    ]
    trtllm = importlib.import_module(_TRTLLM)
    if hasattr(trtllm, _PACK):
        items.append((trtllm, _PACK, pack))
    return items


def interleave(linear: Tensor) -> Tensor:
    """Stands in for ``nvfp4_block_scale_interleave``: uint8 [R, G] to its flat 128x4 storage."""
    return scale_layout.swizzle(linear).reshape(-1)


def quantize(
    values: Tensor,
    reciprocal_global_scale: Tensor,
    is_sf_swizzled_layout: bool = True,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """Stands in for ``scaled_fp4_quant``, which reads the first element of its global scale."""
    rows = quantize_by(values, reciprocal_global_scale.detach().flatten()[0])
    scales = rows.block_scale
    if is_sf_swizzled_layout:
        scales = scale_layout.swizzle(scales)
    return e2m1.pack(rows.codes), scales.view(torch.float8_e4m3fn)


def pack(ids: Tensor, weights: Tensor, *_: object) -> Tensor:
    """Stands in for the Triton packing of ids and weights."""
    from trtllm_b12x_fix.parity import routing

    return routing.pack(routing.Routes(ids, weights))
