"""What a TensorRT-LLM does to b12x's block scales, read from its quantization.py with ``ast``.

Nothing of TensorRT-LLM is imported: that takes CUDA and half a minute. What counts as baking, in
the hook or a helper of the same file that it calls: an expression that multiplies a block scale
(``w3_w1_weight_scale``, ``w2_weight_scale``) by something, cast with ``.to(torch.float8_e4m3fn)``.
Local names are followed through all their assignments; ``view`` is no cast.

The fix itself does not rely on this: it looks at the bytes of every layer.
"""

from __future__ import annotations

import ast
import enum
import re
from dataclasses import dataclass, replace
from pathlib import Path

from trtllm_b12x_fix.errors import InputError
from trtllm_b12x_fix.integrations.installed import Package, find_package
from trtllm_b12x_fix.integrations.targets import TARGET_MODULES
from trtllm_b12x_fix.integrations.trtllm_dataflow import INPUT_GLOBAL_SCALE, HookCode

PACKAGE = "tensorrt_llm"
CLASS = "NVFP4CuteDslB12xFusedMoEMethod"
#: The method with the work, newest first, as the fix looks for it.
HOOKS = ("transform_weights", "post_load_weights")
WRAPPER = "B12xMoEWrapper"
ENTRIES = "_b12x_weights"
#: First words of the block that emit-patch puts in, and where it names its strategy.
PATCH_MARK = "trtllm-b12x-fix"
_PATCH_LINE = re.compile(rf"^\s*# {PATCH_MARK} \S+, begin: strategy (?P<strategy>[a-z0-9-]+)", re.M)
_USES_WRAPPER = re.compile(rb"\b" + WRAPPER.encode() + rb"\(")


class SourceError(InputError):
    """A quantization.py that cannot be read as Python, or has the class twice."""


class ScaleHandling(enum.Enum):
    """What the file does to block scales."""

    BAKES = "bakes"
    INTACT = "intact"
    PATCHED = "patched"
    """Bakes, but the block that emit-patch makes follows."""
    NO_CLASS = "no b12x class"
    UNKNOWN = "unknown"


class ToldSize(enum.Enum):
    """Which intermediate size the wrapper is told."""

    TENSORS = "the tensors' (padded)"
    LOGICAL = "the logical one"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class SourceReading:
    """One quantization.py.

    Attributes:
        module: dotted name, by its place.
        hook: the method that prepares b12x, ``None`` where none is known.
        line: of the first cast that bakes.
        w4a16_exempt: whether W4A16_NVFP4 layers are left out of it; ``None`` where nothing bakes.
        quant_mode: whether the wrapper is told ``quant_mode``.
        patch_strategy: of the block that emit-patch made.
        reason: why the handling is unknown.
    """

    module: str
    path: Path
    handling: ScaleHandling
    hook: str | None = None
    line: int | None = None
    w4a16_exempt: bool | None = None
    quant_mode: bool = False
    told_size: ToldSize = ToldSize.UNKNOWN
    patch_strategy: str | None = None
    reason: str = ""

    @property
    def is_watched(self) -> bool:
        """Whether the fix waits for this module."""
        return self.module in TARGET_MODULES


@dataclass(frozen=True)
class ParsedSource:
    """A file's text and its class, for whoever needs positions."""

    path: Path
    text: str
    tree: ast.Module
    method_class: ast.ClassDef | None

    @property
    def hook(self) -> ast.FunctionDef | None:
        """The method with the work; the newer name where the class defines both."""
        if self.method_class is None:
            return None
        methods = {n.name: n for n in self.method_class.body if isinstance(n, ast.FunctionDef)}
        return next((methods[name] for name in HOOKS if name in methods), None)


def find_tensorrt_llm() -> Package:
    """The TensorRT-LLM that this Python would import."""
    return find_package(PACKAGE, PACKAGE)


def source_files(package: Path) -> tuple[tuple[str, Path], ...]:
    """Module name and path of each quantization.py that is there, the newest place first."""
    places = ((name, package.joinpath(*name.split(".")[1:])) for name in TARGET_MODULES)
    found = ((name, path.with_suffix(".py")) for name, path in places)
    return tuple((name, path) for name, path in found if path.is_file())


def read_package(package: Path) -> SourceReading | None:
    """What the package does: at the places known, else wherever it makes a b12x wrapper.

    ``None`` where nothing of b12x is in it.

    Raises:
        SourceError: a file that matters cannot be parsed.
    """
    readings = [read_source(path, name) for name, path in source_files(package)]
    having = [one for one in readings if one.handling is not ScaleHandling.NO_CLASS]
    if having:
        return having[0]
    for path in sorted(package.glob("_torch/**/*.py")):
        if not _USES_WRAPPER.search(_bytes(path)):
            continue
        module = ".".join((PACKAGE, *path.relative_to(package).with_suffix("").parts))
        reading = read_source(path, module)
        if reading.handling is ScaleHandling.NO_CLASS:
            reason = f"{module} makes a {WRAPPER}, but {CLASS} is not there"
            return replace(reading, handling=ScaleHandling.UNKNOWN, reason=reason)
        return reading
    return None


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror}") from error


def parse_source(path: Path) -> ParsedSource:
    """Read and parse a file.

    Raises:
        SourceError: it cannot be read, is not Python, or defines the class twice.
    """
    try:
        content = _bytes(path)
        text = content.decode("utf-8")
        # As bytes: a byte-order mark is skipped and a declared encoding checked.
        tree = ast.parse(content)
    except UnicodeDecodeError as error:
        raise SourceError(f"{path}: is not UTF-8: the installation is damaged") from error
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise SourceError(f"{path}: is not Python: the installation is damaged: {error}") from error
    classes = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == CLASS]
    if len(classes) > 1:
        raise SourceError(f"{path}: defines {CLASS} {len(classes)} times")
    return ParsedSource(path, text, tree, classes[0] if classes else None)


def read_source(path: Path, module: str) -> SourceReading:
    """What the file does.

    Raises:
        SourceError: it cannot be parsed.
    """
    source = parse_source(path)
    if source.method_class is None:
        return SourceReading(module, path, ScaleHandling.NO_CLASS)
    hook = source.hook
    if hook is None:
        reason = f"{CLASS} defines neither {' nor '.join(HOOKS)}"
        return SourceReading(module, path, ScaleHandling.UNKNOWN, reason=reason)
    code = HookCode(source.tree, source.method_class, hook)
    bakes = code.baking_casts()
    handling, reason = _handling(code, bool(bakes))
    strategy = _patch_strategy(source)
    if strategy is not None:
        handling, reason = ScaleHandling.PATCHED, ""
    wrapper = code.call_of(WRAPPER)
    return SourceReading(
        module=module,
        path=path,
        handling=handling,
        hook=hook.name,
        line=min((cast.lineno for cast in bakes), default=None),
        w4a16_exempt=all(code.is_w4a16_exempt(cast) for cast in bakes) if bakes else None,
        quant_mode=wrapper is not None and any(k.arg == "quant_mode" for k in wrapper.keywords),
        told_size=_told_size(code, wrapper),
        patch_strategy=strategy,
        reason=reason,
    )


def _handling(code: HookCode, bakes: bool) -> tuple[ScaleHandling, str]:
    hands_over = code.mentions_text(INPUT_GLOBAL_SCALE)
    if bakes and hands_over:
        return ScaleHandling.UNKNOWN, (
            f"{code.name} bakes block scales and also knows {INPUT_GLOBAL_SCALE}: which of the two "
            "happens is decided at run time"
        )
    if bakes:
        return ScaleHandling.BAKES, ""
    if hands_over:
        return ScaleHandling.INTACT, ""
    return ScaleHandling.UNKNOWN, (
        f"{code.name} neither bakes block scales in a way known here nor hands over "
        f"{INPUT_GLOBAL_SCALE}"
    )


def _patch_strategy(source: ParsedSource) -> str | None:
    match = _PATCH_LINE.search(source.text)
    return match["strategy"] if match else None


def _told_size(code: HookCode, wrapper: ast.Call | None) -> ToldSize:
    value = None
    if wrapper is not None:
        value = next((k.value for k in wrapper.keywords if k.arg == "intermediate_size"), None)
    if value is None:
        return ToldSize.UNKNOWN
    if code.reaches_attribute(value, "intermediate_size_per_partition"):
        return ToldSize.LOGICAL
    return ToldSize.TENSORS if code.reaches_attribute(value, "shape") else ToldSize.UNKNOWN
