"""Set-ups for tests/trtllm/worker.py: switch the fix on in that process."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from packaging.version import Version

import trtllm_b12x_fix
from trtllm_b12x_fix.integrations import tensorrt_llm, trtllm_report
from trtllm_b12x_fix.integrations.targets import TARGET_MODULES
from trtllm_b12x_fix.integrations.trtllm_summary import QuietPeriod, Summary
from trtllm_b12x_fix.settings import Settings


class NoTimer(QuietPeriod):
    """Between two layers of this process lie minutes of emulation."""

    def _start(self) -> None:
        pass


def install() -> Callable[[], None]:
    """Patch the stand-in that is on the path now, as the import hook would.

    Each stand-in is a process of its own as far as the one INFO line goes: what is returned ends
    it.
    """
    summary = Summary(trtllm_report._logger, NoTimer)
    trtllm_report.SUMMARY = summary
    for name in TARGET_MODULES:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        for patch in tensorrt_llm.on_import(module, Settings.from_environment()).patches:
            patch.install()
    return summary.quiet.finish


def install_without_prime() -> Callable[[], None]:
    """Planted: nothing is called before the first call of serving."""
    tensorrt_llm.prime = lambda module, view: ""
    return install()


def hook() -> Callable[[], None]:
    """Switch the fix on as a launch script does; the patch comes with the import."""
    trtllm_b12x_fix.apply()
    return lambda: trtllm_report.SUMMARY.quiet.finish()  # as the end of the interpreter does


def hook_on_cuda_12() -> Callable[[], None]:
    """The same where torch was built for a CUDA that b12x's kernels cannot be compiled with."""
    cpp_ext = importlib.import_module("flashinfer.jit.cpp_ext")
    cpp_ext.get_cuda_version = lambda: Version("12.9")
    return hook()
