"""Whether FlashInfer's real b12x kernels can run here, and if not, why: one line, no exception."""

from __future__ import annotations

import importlib
import os

import torch

from trtllm_b12x_fix.emulator.contract import KernelContract
from trtllm_b12x_fix.errors import UnsupportedVersionError
from trtllm_b12x_fix.integrations.b12x_wrapper import (
    FORCE_W4A16,
    describe,
    load_symbols,
    one_line,
)
from trtllm_b12x_fix.integrations.flashinfer import installed_contract

CAPABILITIES = ((12, 0), (12, 1))

_CUDA_VERSION = "flashinfer.jit.cpp_ext"
_OLDEST_CUDA = 13


def why_not(contract: KernelContract, device: torch.device) -> str:
    """Why the real kernels cannot run here, in one line; empty if they can.

    Args:
        contract: what the emulated arms stand for; the installed FlashInfer must be that version.
        device: where the check runs.
    """
    return _why_not_gpu(device) or _why_not_version(contract) or _why_not_import(contract)


def _why_not_gpu(device: torch.device) -> str:
    if not torch.cuda.is_available():
        return "no CUDA GPU here, b12x kernels need SM120 or SM121"
    if device.type != "cuda":
        return "this check runs on the CPU; --device cuda runs it on the GPU"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) not in CAPABILITIES:
        name = torch.cuda.get_device_name(device)
        return f"{name} is SM{major}{minor}, b12x kernels need SM120 or SM121"
    if os.environ.get(FORCE_W4A16) == "1":
        return f"{FORCE_W4A16}=1 turns every b12x wrapper into W4A16; unset it"
    return ""


def _why_not_version(contract: KernelContract) -> str:
    try:
        installed = installed_contract()
    except UnsupportedVersionError as error:
        return one_line(str(error))
    if installed is None:
        return "FlashInfer is not installed"
    if installed.version != contract.version:
        return f"FlashInfer {installed.version} is installed, {contract.version} is emulated"
    return ""


def _why_not_import(contract: KernelContract) -> str:
    try:
        load_symbols()
        cuda = importlib.import_module(_CUDA_VERSION).get_cuda_version()
    except Exception as error:  # importing it compiles and probes: anything can be raised
        return f"FlashInfer {contract.version} cannot be used: {describe(error)}"
    if cuda.major < _OLDEST_CUDA:
        return f"FlashInfer's b12x kernels need CUDA {_OLDEST_CUDA} or later, here is CUDA {cuda}"
    return ""
