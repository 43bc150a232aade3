"""What a TensorRT-LLM does to b12x's block scales, read from its quantization.py with ``ast``.

Nothing of TensorRT-LLM is imported: that takes CUDA and half a minute. What counts as baking, in
the hook or a helper of the same file that it calls: an expression that multiplies a block scale
(``w3_w1_weight_scale``, ``w2_weight_scale``) by something, cast with ``.to(torch.float8_e4m3fn)``.
Local names are followed through all their assignments; ``view`` is no cast. Intact is a file whose
entries are certainly views of the parameters; whatever is neither is unknown.

The fix itself does not rely on this: it looks at the bytes of every layer.
"""

from __future__ import annotations

import ast
import enum
import io
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trtllm_b12x_fix.errors import InputError
from trtllm_b12x_fix.integrations.installed import Package, find_package
from trtllm_b12x_fix.integrations.regular_files import regular_bytes
from trtllm_b12x_fix.integrations.targets import TARGET_MODULES
from trtllm_b12x_fix.integrations.trtllm_dataflow import (
    INPUT_GLOBAL_SCALE,
    HookCode,
    names_attribute,
)
from trtllm_b12x_fix.integrations.trtllm_patch_block import (
    ENTRIES,
    FoundBlock,
    find_block,
    marked_line,
)

PACKAGE = "tensorrt_llm"
CLASS = "NVFP4CuteDslB12xFusedMoEMethod"
#: The method with the work, newest first, as the fix looks for it.
HOOKS = ("transform_weights", "post_load_weights")
WRAPPER = "B12xMoEWrapper"
_SCALE_ENTRIES = ("w1_weight_sf", "w2_weight_sf")
_USES_WRAPPER = re.compile(rb"\b" + WRAPPER.encode() + rb"\(")
_NAMES_CLASS = re.compile(rb"\b" + CLASS.encode() + rb"\b")
#: Modules that Python imports and ``ast`` cannot read.
_COMPILED = frozenset({".pyc", ".so", ".pyd"})


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
        unknown_hook: why the fix refuses the class's layers, empty where it knows what to patch.
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
    unknown_hook: str = ""

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

    @property
    def lines(self) -> list[str]:
        """As the parser counts them: form feeds and Unicode's separators end no line."""
        return list(io.StringIO(self.text, newline=""))


def find_tensorrt_llm() -> Package:
    """The TensorRT-LLM that this Python would import."""
    return find_package(PACKAGE, PACKAGE)


def source_files(package: Path) -> tuple[tuple[str, Path], ...]:
    """Module name and path of each quantization.py that is there, the newest place first."""
    places = ((name, package.joinpath(*name.split(".")[1:])) for name in TARGET_MODULES)
    found = ((name, path.with_suffix(".py")) for name, path in places)
    # A pipe or a device in that place is found, too: reading it is refused by name.
    return tuple((name, path) for name, path in found if _is_there(path))


def _is_there(path: Path) -> bool:
    """Neither a folder of that name nor a link to nowhere is a module; what may not be seen is."""
    try:
        return not stat.S_ISDIR(os.stat(path).st_mode)
    except PermissionError:
        return True
    except OSError:
        return False


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
    return _elsewhere(package)


def _elsewhere(package: Path) -> SourceReading | None:
    """The class at a place not known; else whatever shows that b12x is there all the same."""
    makes, names = None, None
    for path in _modules(package):
        content = _bytes(path)
        # A compiled module's name goes on: quantization.cpython-312-x86_64-linux-gnu.so.
        place = path.relative_to(package).with_name(path.name.partition(".")[0])
        module = ".".join((PACKAGE, *place.parts))
        has_class, has_wrapper = _NAMES_CLASS.search(content), _USES_WRAPPER.search(content)
        if path.suffix in _COMPILED:
            if has_class:
                reason = f"{module} has or uses {CLASS} and is compiled: it cannot be read"
                names = names or _unknown(module, path, reason)
            continue
        if not has_class and not has_wrapper:
            continue
        reading = read_source(path, module)
        if reading.handling is not ScaleHandling.NO_CLASS:
            return reading
        if has_wrapper:
            reason = f"{module} makes a {WRAPPER}, but {CLASS} is not there"
            makes = makes or _unknown(module, path, reason)
        else:
            reason = f"{module} uses {CLASS}, which no source file here defines"
            names = names or _unknown(module, path, reason)
    return makes or names


def wrapper_maker(folder: Path) -> str | None:
    """The file below a folder that makes a b12x wrapper, by its text; cheap: a few megabytes.

    Files that cannot be read are passed over: this is asked while TensorRT-LLM is imported.
    """
    for path in sorted(folder.rglob("*.py")):
        try:
            if _USES_WRAPPER.search(regular_bytes(path)):
                return str(path.relative_to(folder))
        except OSError:
            continue
    return None


def _unknown(module: str, path: Path, reason: str) -> SourceReading:
    return SourceReading(module, path, ScaleHandling.UNKNOWN, reason=reason)


def _modules(package: Path) -> Iterator[Path]:
    """Every module's file, also the compiled ones that stand in the place of sources."""
    for path in sorted(package.glob("_torch/**/*")):
        compiled = path.suffix in _COMPILED and path.parent.name != "__pycache__"
        if (path.suffix == ".py" or compiled) and _is_there(path):
            yield path


def _bytes(path: Path) -> bytes:
    try:
        return regular_bytes(path)
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
        return SourceReading(
            module, path, ScaleHandling.UNKNOWN, reason=reason, unknown_hook=reason
        )
    code = HookCode(source.tree, source.method_class, hook)
    bakes = code.baking_casts()
    found = find_block(hook, source.lines)
    handling, reason = _handling(source, code, bool(bakes))
    if found is not None or marked_line(hook, source.lines) is not None:
        handling, reason = _patched(source, hook, found)
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
        patch_strategy=None if found is None else found.strategy.value,
        reason=reason,
        unknown_hook=_signature(hook),
    )


def _signature(hook: ast.FunctionDef) -> str:
    """As the fix sees it when the class is imported: anything but (self, module) is refused."""
    given = hook.args
    names = [one.arg for one in (*given.posonlyargs, *given.args)]
    more = (given.vararg, given.kwarg, *given.kwonlyargs, *given.defaults)
    if names[1:] == ["module"] and not given.posonlyargs and not any(more):
        return ""
    return f"{hook.name} takes ({ast.unparse(given)}), known is (self, module)"


def _handling(source: ParsedSource, code: HookCode, bakes: bool) -> tuple[ScaleHandling, str]:
    hands_over = code.mentions_text(INPUT_GLOBAL_SCALE)
    if bakes and hands_over:
        return ScaleHandling.UNKNOWN, (
            f"{code.name} bakes block scales and also knows {INPUT_GLOBAL_SCALE}: which of the two "
            "happens is decided at run time"
        )
    if bakes:
        return ScaleHandling.BAKES, ""
    if hands_over:
        doubt = _doubt(source, code)
        return (ScaleHandling.UNKNOWN, doubt) if doubt else (ScaleHandling.INTACT, "")
    return ScaleHandling.UNKNOWN, (
        f"{code.name} neither bakes block scales in a way known here nor hands over "
        f"{INPUT_GLOBAL_SCALE}"
    )


def _doubt(source: ParsedSource, code: HookCode) -> str:
    """Why block scales are not certain to reach the kernel as they are, empty where they are."""
    neither = f"{code.name} neither bakes block scales in a way known here nor is it certain"
    entries = code.entries_of(ENTRIES)
    if entries is None:
        return f"{neither} what is in {ENTRIES}"
    scale = entries.get(INPUT_GLOBAL_SCALE)
    made = scale is not None and code.reaches_attribute(scale, "fc31_input_scale")
    if scale is None or not made or code.may_be_none(scale):
        return f"{neither} that {INPUT_GLOBAL_SCALE} is made of fc31_input_scale"
    for name in _SCALE_ENTRIES:
        if name not in entries or not code.is_view(entries[name]):
            return f"{neither} that {name} is the parameter as it was loaded"
    if (node := code.changes()) is not None:
        line = getattr(node, "lineno", 0)
        return f"{neither} that line {line} leaves the layer's block scales as they are"
    if line := used_elsewhere(source):
        return f"{neither} that line {line} leaves {ENTRIES} as it is"
    return ""


def _patched(
    source: ParsedSource, hook: ast.FunctionDef, found: FoundBlock | None
) -> tuple[ScaleHandling, str]:
    """A file with the block in it, or with what is left of one."""
    again = "put TensorRT-LLM's own file back and run emit-patch again"
    if found is None:
        line = marked_line(hook, source.lines)
        reason = f"the block of emit-patch in line {line} is not whole, or of another version"
        return ScaleHandling.UNKNOWN, f"{reason}: {again}"
    if line := used_after(source, found.statement, found.last):
        reason = f"line {line} uses {ENTRIES} after the block of emit-patch, and may undo it"
        return ScaleHandling.UNKNOWN, f"{reason}: {again}"
    return ScaleHandling.PATCHED, ""


def used_after(source: ParsedSource, statement: ast.Assign, last: int) -> int | None:
    """The line that uses the entries behind a line, or in another function; 0 or None is no line.

    Also by another name that the assignment gives them, or takes them from.
    """
    hook = source.hook
    assert hook is not None
    names = {target.id for target in statement.targets if isinstance(target, ast.Name)}
    names |= {statement.value.id} if isinstance(statement.value, ast.Name) else set()
    for node in ast.walk(hook):
        line = getattr(node, "lineno", 0)
        by_name = isinstance(node, ast.Name) and node.id in names
        if line > last and (by_name or names_attribute(node, ENTRIES)):
            return int(line)
    return used_elsewhere(source)


def used_elsewhere(source: ParsedSource) -> int | None:
    """The line outside the hook that uses the entries, other than to forget or to look for them."""
    hook = source.hook
    assert hook is not None
    inside = set(ast.walk(hook))
    for parent in ast.walk(source.tree):
        for node in ast.iter_child_nodes(parent):
            if node not in inside and names_attribute(node, ENTRIES) and not _is_harmless(parent):
                return getattr(node, "lineno", None)
    return None


def _is_harmless(parent: ast.AST) -> bool:
    """``... = None`` and ``... is None``: nothing else is put there."""
    values: list[ast.expr] = []
    if isinstance(parent, ast.Assign):
        values = [parent.value]
    if isinstance(parent, ast.Compare):
        values = parent.comparators
    return bool(values) and all(isinstance(v, ast.Constant) and v.value is None for v in values)


def _told_size(code: HookCode, wrapper: ast.Call | None) -> ToldSize:
    value = None
    if wrapper is not None:
        value = next((k.value for k in wrapper.keywords if k.arg == "intermediate_size"), None)
    if value is None:
        return ToldSize.UNKNOWN
    if code.reaches_attribute(value, "intermediate_size_per_partition"):
        return ToldSize.LOGICAL
    return ToldSize.TENSORS if code.reaches_attribute(value, "shape") else ToldSize.UNKNOWN
