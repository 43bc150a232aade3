"""Whether trtllm-gen's kernels can run here, and if not, why: one line, no exception."""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version

import torch

CAPABILITIES = ((10, 0), (10, 3))
ENTRIES = (
    "trtllm_fp4_block_scale_moe",
    "trtllm_fp4_block_scale_routed_moe",
    "cutlass_fused_moe",
)


def why_not() -> str:
    """Why the real kernels cannot run here; empty if they can."""
    return _why_not_gpu() or _why_not_flashinfer()


def _why_not_gpu() -> str:
    if not torch.cuda.is_available():
        return "no CUDA GPU here; trtllm-gen needs capability 10.0 or 10.3 (B200, GB200, B300)"
    capability = torch.cuda.get_device_capability()
    if capability not in CAPABILITIES:
        name = torch.cuda.get_device_name()
        return f"{name} has capability {capability[0]}.{capability[1]}, trtllm-gen 10.0 or 10.3"
    return ""


def _why_not_flashinfer() -> str:
    try:
        installed = version("flashinfer-python")
    except PackageNotFoundError:
        return "FlashInfer is not installed"
    try:
        module = importlib.import_module("flashinfer.fused_moe")
    except Exception as error:  # importing it compiles and probes: anything can be raised
        words = " ".join(str(error).split())[:200]
        return f"FlashInfer {installed} cannot be imported: {type(error).__name__}: {words}"
    missing = [name for name in ENTRIES if not hasattr(module, name)]
    if missing:
        return f"FlashInfer {installed} has no flashinfer.fused_moe.{missing[0]}"
    return ""
