"""Import one vLLM version, with the FlashInfer that it pins, on a CPU.

Only questions to the hardware are answered by stubs: the platform says that it is CUDA of a
capability that the caller names, and FlashInfer's are those of tests/flashinfer/harness.py. All
else is the wheels' own Python; their compiled extensions are not there, so the platform is none
while vLLM is imported: on CUDA some of its modules ask an extension as they are.

One version per process.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import site
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.flashinfer import harness as flashinfer_harness

#: vLLM version to the FlashInfer version that its metadata pins.
PAIRS = {"0.27.0": "0.6.16.post3", "0.33.0": "0.7.2.post1"}

_MOE = "vllm.model_executor.layers.fused_moe"
#: All that selecting and preparing an NVFP4 layer imports, but for the experts' own modules.
_BASES = (
    f"{_MOE}.oracle.nvfp4",
    f"{_MOE}.modular_kernel",
    "vllm.model_executor.layers.quantization.modelopt",
)


def oracles(version: str) -> tuple[str, ...]:
    """Names of the oracles that a version needs, for ``pytest.mark.oracle``."""
    return (f"vllm-{version}", f"flashinfer-{PAIRS[version]}", "flashinfer-deps", "vllm-deps")


def enter(version: str) -> None:
    """Put the folders on the path; nothing is imported."""
    root = flashinfer_harness.oracle_root()
    # Behind everything: what the test environment has, it keeps.
    site.addsitedir(str(root / "vllm-deps"))
    sys.path.insert(0, str(root / f"vllm-{version}"))
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_CONFIG_ROOT", os.environ.get("TMPDIR", "/tmp"))


def load(version: str, *, capability: tuple[int, int] = (12, 1)) -> SimpleNamespace:
    """Import FlashInfer and vLLM's platform; MoE modules are left to the caller.

    Returns:
        ``flashinfer``: what tests.flashinfer.harness.load returns; ``platform``: the object that
        vLLM calls current_platform.
    """
    if "vllm" in sys.modules:
        raise RuntimeError("one vLLM version per process: it is already imported")
    enter(version)
    flashinfer = flashinfer_harness.load(PAIRS[version], capability=capability)
    platform = _stub_platform(capability)
    for name in _BASES:
        importlib.import_module(name)
    parameter: Any = importlib.import_module("vllm.model_executor.parameter")
    parameter.get_tensor_model_parallel_rank = lambda: 0
    parameter.get_tensor_model_parallel_world_size = lambda: 1
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor  # type: ignore[assignment, unused-ignore]
    platform.pretend_cuda()
    return SimpleNamespace(version=version, flashinfer=flashinfer, platform=platform)


def _stub_platform(capability: tuple[int, int]) -> Any:
    platforms: Any = importlib.import_module("vllm.platforms")
    interface: Any = importlib.import_module("vllm.platforms.interface")

    class Platform(interface.Platform):  # type: ignore[misc, name-defined, unused-ignore]
        """Nothing at first, then CUDA, as far as anything on the way to a kernel asks."""

        _enum = interface.PlatformEnum.UNSPECIFIED
        capability = (0, 0)
        device_name = "a stub"
        device_type = "cpu"  # where tensors are made
        dispatch_key = "CPU"

        def pretend_cuda(self) -> None:
            self._enum = interface.PlatformEnum.CUDA

        def pretend_capability(self, major: int, minor: int) -> None:
            """Another GPU; FlashInfer keeps the one it was loaded for."""
            type(self).capability = (major, minor)

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return interface.DeviceCapability(*cls.capability)

        @classmethod
        def import_kernels(cls) -> None:
            return None

    platforms._current_platform = Platform()
    platforms._current_platform.pretend_capability(*capability)
    return platforms.current_platform


def import_module(name: str) -> types.ModuleType:
    """A module of vLLM."""
    return importlib.import_module(name)


def module(name: str) -> types.ModuleType:
    """A module below vllm.model_executor.layers.fused_moe."""
    return importlib.import_module(f"{_MOE}.{name}")


def package_folder(version: str) -> Path:
    """Where the version's wheel was unpacked."""
    return flashinfer_harness.oracle_root() / f"vllm-{version}"
