"""Versions, driver, GPU and CUDA payloads of this environment, read from files and metadata.

torch is not imported: a CUDA build of it takes seconds and memory, and a broken one raises.
"""

from __future__ import annotations

import ast
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from trtllm_b12x_fix.integrations.installed import distribution_records, find_package

DRIVER_FILE = Path("/proc/driver/nvidia/version")
GPU_FOLDER = Path("/proc/driver/nvidia/gpus")
SMI_SECONDS = 10.0
CUTLASS_DSL = "nvidia-cutlass-dsl"
#: What nvidia-cutlass-dsl 4.8.1 requires: base and cu12 always, cu13 with its extra of that name.
#: There both payloads lie side by side and the loader takes the newest the driver supports.
PAYLOADS = ("cu12", "cu13")


@dataclass(frozen=True)
class Gpu:
    """One GPU; ``capability`` is ``None`` where only its name is known."""

    name: str
    capability: tuple[int, int] | None = None

    @property
    def sm(self) -> str:
        """``SM121``, or ``SM unknown``."""
        return f"SM{self.capability[0]}{self.capability[1]}" if self.capability else "SM unknown"


@dataclass(frozen=True)
class Cutlass:
    """nvidia-cutlass-dsl: its version, payloads (name to version), and what is wrong with them."""

    version: str | None
    payloads: tuple[tuple[str, str], ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Environment:
    """What the processes of this Python run on."""

    python: str
    torch: str | None
    torch_cuda: str | None
    cutlass: Cutlass
    driver: str | None
    gpus: tuple[Gpu, ...]
    gpu_source: str


def read_environment() -> Environment:
    """Look at everything; whatever cannot be known is ``None`` or empty."""
    version, cuda = _torch()
    gpus, source = read_gpus()
    return Environment(
        python=platform.python_version(),
        torch=version,
        torch_cuda=cuda,
        cutlass=read_cutlass(),
        driver=read_driver(DRIVER_FILE),
        gpus=gpus,
        gpu_source=source,
    )


def read_driver(file: Path) -> str | None:
    """Version of the kernel's NVIDIA driver."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", text)
    return match[1] if match else None


def read_gpus() -> tuple[tuple[Gpu, ...], str]:
    """The GPUs, and who said so: nvidia-smi with compute capabilities, else the driver's names."""
    command = shutil.which("nvidia-smi")
    if command is not None:
        gpus = _ask_smi(command)
        if gpus:
            return gpus, "nvidia-smi"
    names = []
    for file in sorted(GPU_FOLDER.glob("*/information")):
        try:
            match = re.search(r"^Model:\s*(.+?)\s*$", file.read_text(errors="replace"), re.M)
        except OSError:
            continue
        if match:
            names.append(Gpu(match[1]))
    return tuple(names), "the driver" if names else "nobody"


def _ask_smi(command: str) -> tuple[Gpu, ...]:
    query = [command, "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            query, capture_output=True, text=True, timeout=SMI_SECONDS, check=True, errors="replace"
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    return parse_smi(done.stdout)


def parse_smi(text: str) -> tuple[Gpu, ...]:
    """Lines of ``name, major.minor``; a capability may be ``[N/A]``."""
    gpus = []
    for line in text.splitlines():
        name, comma, capability = line.rpartition(",")
        match = re.fullmatch(r"\s*(\d+)\.(\d+)\s*", capability)
        if comma and name.strip():
            gpus.append(Gpu(name.strip(), (int(match[1]), int(match[2])) if match else None))
    return tuple(gpus)


def read_cutlass() -> Cutlass:
    """nvidia-cutlass-dsl and its payloads, by their metadata."""
    records = distribution_records(CUTLASS_DSL)
    version = records[0].version if records else None
    payloads = {}
    for name in ("base", "core", *PAYLOADS):
        found = distribution_records(f"{CUTLASS_DSL}-libs-{name}")
        if found:
            payloads[name] = found[0].version
    problems = [
        f"{CUTLASS_DSL}-libs-{name} is {other}, {CUTLASS_DSL} is {version}: install one version of "
        "all"
        for name, other in payloads.items()
        if version is not None and other != version
    ]
    if all(name in payloads for name in PAYLOADS):
        problems += _clash()
    return Cutlass(version, tuple(payloads.items()), tuple(problems))


def _clash() -> list[str]:
    """Files that both payloads brought: whichever was installed last has overwritten the other."""
    first, second = (_files(f"{CUTLASS_DSL}-libs-{name}") for name in PAYLOADS)
    shared = sorted(first & second)
    if not shared:
        return []
    words = (
        f"the cu12 and cu13 payloads of {CUTLASS_DSL} overwrite each other ({len(shared)} files, "
        f"such as {shared[0]}): uninstall both, then install the one that fits torch's CUDA"
    )
    return [words]


def _files(name: str) -> set[str]:
    try:
        files = metadata.files(name) or []
        return {str(file) for file in files if ".dist-info/" not in str(file)}
    except Exception:  # not there, or a RECORD that is neither text nor a table
        return set()


def _torch() -> tuple[str | None, str | None]:
    """torch's version, and the CUDA it was built for, from its version.py."""
    package = find_package("torch", "torch")
    if package.folder is None:
        return package.version, None
    constants = _constants(package.folder / "version.py")
    return package.version or constants.get("__version__"), constants.get("cuda")


def _constants(file: Path) -> dict[str, str]:
    try:
        tree = ast.parse(file.read_bytes()) if file.is_file() else ast.Module([], [])
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    found = {}
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        target = node.target if isinstance(node, ast.AnnAssign) else target
        value = getattr(node, "value", None)
        text = value.value if isinstance(value, ast.Constant) else None
        if isinstance(target, ast.Name) and isinstance(text, str):
            found[target.id] = text
    return found
