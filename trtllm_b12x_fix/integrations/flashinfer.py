"""The b12x kernel contract of an installed FlashInfer, read from its files with ``ast``.

FlashInfer is never imported: that would need CUDA, and would take seconds. What is looked at are
features, not the version number: a version whose features contradict the table of
:mod:`trtllm_b12x_fix.emulator.contract` is refused, since its kernels would be emulated wrongly.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from importlib import metadata
from pathlib import Path

from trtllm_b12x_fix.emulator.arithmetic import OutputSum
from trtllm_b12x_fix.emulator.contract import (
    ContractOrigin,
    DirectMicro,
    GatedDynamic,
    InputScaleArgument,
    KernelContract,
    Quantizer,
    StaticBand,
    StaticGroups,
    contract_for,
)
from trtllm_b12x_fix.errors import UnsupportedVersionError
from trtllm_b12x_fix.integrations.regular_files import regular_bytes

DISTRIBUTION = "flashinfer-python"
_MOE = Path("fused_moe/cute_dsl")
_SM12X = _MOE / "blackwell_sm12x"


@dataclass
class NeededContract:
    """The contract of a process that is about to run b12x: read once, when first asked for."""

    read: Callable[[], KernelContract | None]
    _found: KernelContract | None = None

    def get(self) -> KernelContract:
        """The contract.

        Raises:
            UnsupportedVersionError: FlashInfer is missing or not known.
        """
        if self._found is None:
            found = self.read()
            if found is None:
                raise UnsupportedVersionError("FlashInfer is not installed: b12x cannot run")
            self._found = found
        return self._found

    @property
    def version(self) -> str:
        """FlashInfer's version for reports, ``unknown`` before the contract was read."""
        return self._found.version if self._found else "unknown"


def installed_contract() -> KernelContract | None:
    """The contract of the FlashInfer this Python would import, or ``None`` without one.

    Raises:
        UnsupportedVersionError: FlashInfer is installed, but its kernels are not the ones known
            under its version; the message names version, symbol and way out.
    """
    spec = importlib.util.find_spec("flashinfer")
    # A namespace package (origin None) is a mere folder of that name, such as a checkout.
    if spec is None or spec.origin is None or not spec.submodule_search_locations:
        return None
    try:
        version = metadata.version(DISTRIBUTION)
        if not version:  # METADATA without the line
            raise metadata.PackageNotFoundError(DISTRIBUTION)
    except (metadata.PackageNotFoundError, KeyError, ValueError) as error:  # ValueError: not UTF-8
        raise UnsupportedVersionError(
            f"flashinfer is importable but {DISTRIBUTION} has no metadata, so its version is "
            "unknown; name a version with --flashinfer"
        ) from error
    return read_contract(Path(next(iter(spec.submodule_search_locations))), version)


def read_contract(package: Path, version: str) -> KernelContract:
    """The contract of a FlashInfer package folder, checked against the table.

    Args:
        package: the ``flashinfer`` folder (the one holding ``fused_moe``).
        version: its version, as its metadata has it.

    Raises:
        UnsupportedVersionError: unknown version, missing symbol, or features that contradict the
            table.
    """
    known = contract_for(version)
    sources = _Sources(package, version)
    found = _features(sources)
    _check_figures(sources)
    for field in fields(found):
        expected, actual = getattr(known, field.name), getattr(found, field.name)
        if expected != actual:
            raise UnsupportedVersionError(
                f"FlashInfer {version}: {field.name} is {_show(actual)} in the installed files, "
                f"but {_show(expected)} in the version we know under that number (a patched "
                "build?). Use an unpatched build, or name the version to emulate with --flashinfer."
            )
    return replace(known, origin=ContractOrigin.INSTALLED)


#: Figures of moe_dispatch.py that KernelContract's selection has built in, where they exist.
_FIGURES = {
    "_MICRO_COMPACT_CUTOVER_PAIRS": 20,
    "_MICRO_COMPACT_CUTOVER_PAIRS_MULTI_TOPK": 40,
    "_DIRECT_MICRO_CUTOVER_PAIRS": 32,
    "_DIRECT_MICRO_MAX_N": 512,
    "_STATIC_COMPACT_CUTOVER_PAIRS_NVFP4_DEFAULT": 1024,
    "_STATIC_COMPACT_CUTOVER_ROWS_PER_EXPERT": 8,
    "_STATIC_COMPACT_CUTOVER_ROWS_PER_EXPERT_PADDED": 16,
    "_STATIC_MERGED_GROUPS_MIN_PAIRS": 1920,
    "_STATIC_MERGED_CUTOVER_ROWS_PER_EXPERT": 17,
}


def _check_figures(sources: _Sources) -> None:
    for name, expected in _FIGURES.items():
        actual = sources.constant(name)
        if actual is not None and actual != expected:
            raise sources.missing(f"{name} = {expected} (moe_dispatch.py has {actual})")


def _show(value: object) -> str:
    return str(getattr(value, "value", value))


@dataclass(frozen=True)
class _Features:
    """What the files show; field names are those of :class:`KernelContract`."""

    input_scale: InputScaleArgument
    direct_micro: DirectMicro
    micro_max_tokens: int | None
    quantizer: Quantizer
    static_band: StaticBand
    static_output: OutputSum
    gated_dynamic: GatedDynamic
    static_groups: StaticGroups


class _Sources:
    """Parsed source files of one FlashInfer package."""

    def __init__(self, package: Path, version: str) -> None:
        self._package = package
        self._version = version

    def missing(self, symbol: str) -> UnsupportedVersionError:
        return UnsupportedVersionError(
            f"FlashInfer {self._version}: {symbol} not found below {self._package.name}/; its b12x "
            "kernels are not the ones known here. Name a known version with --flashinfer."
        )

    def exists(self, path: Path) -> bool:
        return (self._package / path).is_file()

    def text(self, path: Path) -> str:
        try:
            return regular_bytes(self._package / path).decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise self.missing(str(path)) from error

    def tree(self, path: Path) -> ast.Module:
        try:
            return ast.parse(self.text(path))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise self.missing(f"Python source in {path}") from error

    @cached_property
    def dispatch(self) -> ast.Module:
        return self.tree(_SM12X / "moe_dispatch.py")

    def function(self, tree: ast.Module, name: str, owner: str | None = None) -> ast.FunctionDef:
        for node in ast.walk(tree):
            if owner is None and isinstance(node, ast.FunctionDef) and node.name == name:
                return node
            if isinstance(node, ast.ClassDef) and node.name == owner:
                for item in node.body:
                    if isinstance(item, ast.FunctionDef) and item.name == name:
                        return item
        raise self.missing(f"{owner}.{name}" if owner else name)

    def constant(self, name: str) -> int | None:
        """A module-level integer of moe_dispatch.py, or ``None``."""
        for node in self.dispatch.body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                targets = [t.id for t in node.targets if isinstance(t, ast.Name)]
                if name in targets and isinstance(node.value.value, int):
                    return node.value.value
        return None


def _parameters(function: ast.FunctionDef) -> set[str]:
    arguments = function.args
    return {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}


def _calls(tree: ast.AST, name: str) -> bool:
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
        for node in ast.walk(tree)
    )


def _features(sources: _Sources) -> _Features:
    return _Features(
        input_scale=_input_scale(sources),
        direct_micro=_direct_micro(sources),
        micro_max_tokens=sources.constant("_MICRO_MAX_TOKENS"),
        quantizer=_quantizer(sources),
        static_band=_static_band(sources),
        static_output=_static_output(sources),
        gated_dynamic=_gated_dynamic(sources),
        static_groups=_static_groups(sources),
    )


def _input_scale(sources: _Sources) -> InputScaleArgument:
    run = sources.function(sources.tree(_MOE / "b12x_moe.py"), "run", "B12xMoEWrapper")
    if "input_global_scale" in _parameters(run):
        return InputScaleArgument.SEPARATE
    return InputScaleArgument.IS_W1_ALPHA


def _direct_micro(sources: _Sources) -> DirectMicro:
    launcher = sources.function(sources.dispatch, "launch_sm120_static_moe")
    if not _calls(launcher, "_get_direct_micro_kernel"):
        return DirectMicro.NEVER_SELECTED
    kernel = sources.tree(_SM12X / "moe_direct_micro_kernel.py")
    constructor = sources.function(kernel, "__init__", "MoEDirectMicroKernel")
    if "input_scales_are_reciprocal" in _parameters(constructor):
        return DirectMicro.DIVIDES
    return DirectMicro.MULTIPLIES


def _quantizer(sources: _Sources) -> Quantizer:
    kernel = sources.tree(_SM12X / "moe_static_kernel.py")
    if _relu2_is_precise(kernel):
        return Quantizer.PRECISE_FOR_RELU2
    # The misreading builds 2^(e-7) * (1 + m/8) for every byte with an approximate ex2.
    decode = sources.function(sources.tree(Path("cute_dsl/fp4_common.py")), "fp8_e4m3_to_f32")
    if "ex2.approx" in ast.dump(decode):
        return Quantizer.FAST_MISREADING
    raise sources.missing("an activation quantizer we know (moe_static_kernel.py, fp4_common.py)")


def _relu2_is_precise(kernel: ast.Module) -> bool:
    """Whether a constructor assigns ``self.fast_math = <...> and self.is_gated``."""
    for node in ast.walk(kernel):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Attribute)
            and node.targets[0].attr == "fast_math"
            and isinstance(node.value, ast.BoolOp)
            and isinstance(node.value.op, ast.And)
        ):
            parts = [v.attr for v in node.value.values if isinstance(v, ast.Attribute)]
            return "is_gated" in parts
    return False


def _static_band(sources: _Sources) -> StaticBand:
    if sources.constant("_STATIC_COMPACT_CUTOVER_ROWS_PER_EXPERT") is not None:
        return StaticBand.PER_EXPERT
    if sources.constant("_STATIC_COMPACT_CUTOVER_PAIRS_NVFP4_DEFAULT") is not None:
        return StaticBand.FLAT_1024
    if sources.constant("_STATIC_COMPACT_CUTOVER_PAIRS_DEFAULT") == 640:
        return StaticBand.FLAT_640
    raise sources.missing("_STATIC_COMPACT_CUTOVER_PAIRS_DEFAULT = 640 (moe_dispatch.py)")


def _static_output(sources: _Sources) -> OutputSum:
    kernel = sources.tree(_SM12X / "moe_static_kernel.py")
    finalizes = any(
        isinstance(node, ast.FunctionDef) and node.name == "finalize_kernel"
        for node in ast.walk(kernel)
    )
    return OutputSum.FP32_SLOTS if finalizes else OutputSum.BF16_ATOMICS


def _static_groups(sources: _Sources) -> StaticGroups:
    if sources.constant("_STATIC_MERGED_GROUPS_MIN_PAIRS") is not None:
        return StaticGroups.PAIRS_OR_THREE
    return StaticGroups.PAIRS


def _gated_dynamic(sources: _Sources) -> GatedDynamic:
    if sources.exists(_SM12X / "_moe_dynamic" / "gated.py"):
        return GatedDynamic.RETAINED
    return GatedDynamic.GENERIC
