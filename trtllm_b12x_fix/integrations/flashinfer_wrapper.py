"""Whether an installed FlashInfer's wrapper takes ``input_global_scale``; needs no torch.

The whole contract (:mod:`.flashinfer`) is known for named versions only. This one feature decides
which block of code emit-patch makes.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from trtllm_b12x_fix.errors import UnsupportedVersionError
from trtllm_b12x_fix.integrations.installed import Package, find_package
from trtllm_b12x_fix.integrations.regular_files import regular_bytes
from trtllm_b12x_fix.integrations.trtllm_dataflow import INPUT_GLOBAL_SCALE

PACKAGE = "flashinfer"
DISTRIBUTION = "flashinfer-python"
_WRAPPER = Path("fused_moe/cute_dsl/b12x_moe.py")
_CLASS, _METHOD = "B12xMoEWrapper", "run"


@dataclass(frozen=True)
class WrapperReading:
    """What the wrapper's own file says."""

    version: str
    takes_input_global_scale: bool


def find_flashinfer() -> Package:
    """The FlashInfer that this Python would import."""
    return find_package(PACKAGE, DISTRIBUTION)


def read_wrapper(package: Package) -> WrapperReading | None:
    """Read the wrapper of a package that was found; ``None`` without FlashInfer.

    Raises:
        UnsupportedVersionError: it has no such wrapper, or its file cannot be read.
    """
    if package.folder is None:
        return None
    version = package.version or "of unknown version"
    try:
        tree = ast.parse(regular_bytes(package.folder / _WRAPPER))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UnsupportedVersionError(
            f"FlashInfer {version}: {_WRAPPER} cannot be read: {error}"
        ) from error
    for owner in ast.walk(tree):
        if isinstance(owner, ast.ClassDef) and owner.name == _CLASS:
            for item in owner.body:
                if isinstance(item, ast.FunctionDef) and item.name == _METHOD:
                    names = {a.arg for a in (*item.args.args, *item.args.kwonlyargs)}
                    return WrapperReading(version, INPUT_GLOBAL_SCALE in names)
    raise UnsupportedVersionError(f"FlashInfer {version}: {_CLASS}.{_METHOD} is not in {_WRAPPER}")
