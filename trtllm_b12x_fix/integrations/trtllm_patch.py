"""A unified diff against an installed quantization.py, made from the file as it is.

Nothing of TensorRT-LLM's is kept here: the file is parsed, the one statement that assigns
``module._b12x_weights`` is found, and a block of ours (:mod:`.trtllm_patch_block`) goes behind it.
Their expressions stay as they are; what they baked is dropped before the method ends.
"""

from __future__ import annotations

import ast
import difflib
from dataclasses import dataclass
from pathlib import Path

from trtllm_b12x_fix.errors import B12xFixError, InputError
from trtllm_b12x_fix.integrations.flashinfer_wrapper import read_wrapper
from trtllm_b12x_fix.integrations.installed import Package
from trtllm_b12x_fix.integrations.trtllm_patch_block import ENTRIES, PatchStrategy, block
from trtllm_b12x_fix.integrations.trtllm_source import (
    CLASS,
    PACKAGE,
    ParsedSource,
    ScaleHandling,
    SourceReading,
    find_tensorrt_llm,
    parse_source,
    read_source,
    source_files,
    used_after,
)

_NO_NEWLINE = "\\ No newline at end of file\n"


class PatchPlaceError(B12xFixError):
    """The file bakes, but the place for the block is not the one known."""


@dataclass(frozen=True)
class Target:
    """A file to patch, and its name below the folder that holds ``tensorrt_llm``."""

    path: Path
    name: str


@dataclass(frozen=True)
class SourcePatch:
    """A diff, empty where there is nothing to patch; ``reason`` then says why."""

    target: Target
    reading: SourceReading
    diff: str = ""
    reason: str = ""


def find_target(file: Path | None) -> Target:
    """The file named, or the installed one that has the class.

    Raises:
        InputError: there is none, or two.
    """
    if file is not None:
        return Target(file, _name_below_package(file))
    package = find_tensorrt_llm()
    if package.folder is None:
        raise InputError(f"{PACKAGE} is not installed here ({package.kind.value}): use --file PATH")
    found = [path for _, path in source_files(package.folder)]
    having = [path for path in found if parse_source(path).method_class is not None]
    if len(having) > 1:
        raise InputError(f"{CLASS} is in {having[0]} and in {having[1]}: choose with --file PATH")
    if not found:
        raise InputError(f"{package.folder} has no quantization.py of fused MoE: use --file PATH")
    path = (having or found)[0]
    return Target(path, _name_below_package(path))


def choose_strategy(asked: str, flashinfer: Package) -> tuple[PatchStrategy, str]:
    """The strategy and, in words, why; ``auto`` looks at the installed FlashInfer.

    Raises:
        UnsupportedVersionError: its wrapper cannot be read.
    """
    if asked != "auto":
        return PatchStrategy(asked), "asked for"
    reading = read_wrapper(flashinfer)
    if reading is None:
        return PatchStrategy.ALPHAS, (
            "FlashInfer is not installed here; the patch needs 0.6.17 or later (for an older one "
            "name --strategy fp32-rescale)"
        )
    if reading.takes_input_global_scale:
        return PatchStrategy.ALPHAS, f"FlashInfer {reading.version} has input_global_scale"
    return PatchStrategy.FP32_RESCALE, (
        f"FlashInfer {reading.version} has no input_global_scale: relu2 layers get exact scales, "
        "loading any other raises"
    )


def make_patch(target: Target, strategy: PatchStrategy) -> SourcePatch:
    """The diff.

    Raises:
        SourceError: the file cannot be parsed.
        PatchPlaceError: it bakes, or may, and cannot be patched by this version.
    """
    reading = read_source(target.path, target.name.removesuffix(".py").replace("/", "."))
    if reason := _nothing_to_do(reading):
        return SourcePatch(target, reading, reason=reason)
    if reading.handling is ScaleHandling.UNKNOWN:
        raise PatchPlaceError(f"{target.path}: {reading.reason} (else report the version)")
    source = parse_source(target.path)
    before = source.lines
    after = patched_lines(source, before, strategy)
    return SourcePatch(target, reading, _diff(before, after, target.name))


def patched_lines(source: ParsedSource, before: list[str], strategy: PatchStrategy) -> list[str]:
    """The file's lines with the block in place.

    Raises:
        PatchPlaceError: the assignment is not there exactly once or shares its lines, or what it
            assigns is used again behind it.
    """
    statement, module = _assignment(source)
    last = statement.end_lineno
    assert last is not None
    first_line, last_line = before[statement.lineno - 1], before[last - 1]
    indent = first_line[: len(first_line) - len(first_line.lstrip(" \t"))]
    rest = last_line.encode()[statement.end_col_offset :].decode().strip()
    if len(indent) != statement.col_offset or (rest and not rest.startswith("#")):
        raise PatchPlaceError(
            f"{source.path}:{statement.lineno}: the assignment of {ENTRIES} shares its lines with "
            "other code"
        )
    if line := used_after(source, statement, last):
        raise PatchPlaceError(
            f"{source.path}:{line}: {ENTRIES} is used again behind the place for the block, which "
            "may undo it: report the version, or use the fix without a patch (TRTLLM_B12X_FIX=auto)"
        )
    # The last line of a file may have no end; the first one tells, too.
    end = "\r\n" if before[0].endswith("\r\n") else "\n"
    added = [line + end for line in block(strategy, module, indent)]
    if not last_line.endswith(("\n", "\r")):
        return [*before[: last - 1], last_line + end, *added, *before[last:]]
    return [*before[:last], *added, *before[last:]]


def _nothing_to_do(reading: SourceReading) -> str:
    if reading.handling is ScaleHandling.NO_CLASS:
        return f"it has no {CLASS}, so nothing is baked there"
    if reading.handling is ScaleHandling.INTACT:
        return "it keeps block scales intact: it is fixed upstream"
    if reading.handling is ScaleHandling.PATCHED:
        return f"it is patched already (strategy {reading.patch_strategy})"
    return ""


def _assignment(source: ParsedSource) -> tuple[ast.Assign, str]:
    hook = source.hook
    assert hook is not None
    found = [
        (node, target.value.id)
        for node in ast.walk(hook)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Attribute)
        and target.attr == ENTRIES
        and isinstance(target.value, ast.Name)
    ]
    if len(found) != 1:
        raise PatchPlaceError(
            f"{source.path}: {CLASS}.{hook.name} assigns {ENTRIES} {len(found)} times, known is "
            "once: report the version, or use the fix without a patch (TRTLLM_B12X_FIX=auto)"
        )
    return found[0]


def _name_below_package(path: Path) -> str:
    parts = path.resolve().parts
    if PACKAGE not in parts[:-1]:
        raise InputError(
            f"{path}: no folder {PACKAGE} above it, so the patch could not say where it belongs"
        )
    last = len(parts) - 1 - parts[::-1].index(PACKAGE)
    return "/".join(parts[last:])


def _diff(before: list[str], after: list[str], name: str) -> str:
    lines = difflib.unified_diff(before, after, f"a/{name}", f"b/{name}")
    return "".join(line if line.endswith("\n") else f"{line}\n{_NO_NEWLINE}" for line in lines)
