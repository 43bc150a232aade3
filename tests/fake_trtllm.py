"""A tensorrt_llm that has nothing but the class to patch, and an integration that patches it.

For tests of how a patch reaches processes and what is told about it; what the real patch computes
is tested elsewhere.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
from pathlib import Path
from typing import Any

from trtllm_b12x_fix import fix, patching, startup
from trtllm_b12x_fix.integrations import targets
from trtllm_b12x_fix.ledger import Ledger
from trtllm_b12x_fix.settings import LEDGER, MODE, PREFIX

NEW, OLD = targets.TARGET_MODULES
CLASS = "NVFP4CuteDslB12xFusedMoEMethod"
CALLBACK = "b12x_placeholder:on_import"

QUANTIZATION = f"""
class {CLASS}:
    def transform_weights(self, module):
        return "baked"
"""

PLACEHOLDER = f"""
from trtllm_b12x_fix.patching import Patch, TargetPlan

LOG = []

def repaired(original):
    def transform_weights(self, module):
        from trtllm_b12x_fix.ledger import Ledger
        Ledger.for_process().record_layer("alphas", bytes_freed=16)
        return "repaired " + original(self, module)
    return transform_weights

def on_import(module, settings):
    LOG.append((module, settings))
    owner = getattr(module, "{CLASS}", None)
    versions = {{"tensorrt_llm": "1.4.0rc1"}}
    if owner is None:
        return TargetPlan((), "class absent: nothing to fix", versions)
    return TargetPlan((Patch(owner, "transform_weights", repaired),), "", versions)
"""

#: Runs after the start-up file: from here on the hook calls the placeholder.
CUSTOMIZE = f"""
try:
    import trtllm_b12x_fix.integrations.targets as targets
    targets.CALLBACK = "{CALLBACK}"
except ImportError:
    pass
"""


def write_package(folder: Path, name: str = NEW, source: str = QUANTIZATION) -> Path:
    """Write the package so that ``name`` is ``source``; returns the folder to put on the path."""
    path = folder.joinpath(*name.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True, exist_ok=True)
    for parent in path.relative_to(folder).parents:
        if parent.name:
            (folder / parent / "__init__.py").touch()
    path.write_text(textwrap.dedent(source), encoding="utf-8")
    return folder


def write_placeholder(folder: Path, customize: str = "sitecustomize") -> None:
    """Write the integration, and the start-up module that puts it in the real one's place."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "b12x_placeholder.py").write_text(PLACEHOLDER, encoding="utf-8")
    (folder / f"{customize}.py").write_text(CUSTOMIZE, encoding="utf-8")


def convert(name: str = NEW) -> str:
    """What a layer gets from the class as it is now: "baked" or "repaired baked"."""
    result: str = getattr(sys.modules[name], CLASS)().transform_weights(None)
    return result


def forget_package() -> None:
    """As if tensorrt_llm had never been imported."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]


def isolate(monkeypatch: Any, tmp_path: Path) -> Path:
    """A process in which nothing of ours has happened yet; returns its ledger's folder."""
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)
    # What apply() sets is taken away again, or it would reach processes of later tests.
    monkeypatch.setenv(MODE, "")
    monkeypatch.delenv(MODE)
    ledger = tmp_path / "ledger"
    monkeypatch.setenv(LEDGER, str(ledger))
    write_package(tmp_path / "site")
    write_placeholder(tmp_path / "site")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(targets, "CALLBACK", CALLBACK)
    monkeypatch.setattr(fix, "_treated", {})
    monkeypatch.setattr(fix, "_variable_set", None)
    monkeypatch.setattr(patching, "_INSTALLED", {})
    monkeypatch.setattr(patching, "_REMOVED", set())
    monkeypatch.setattr(Ledger, "_current", None)
    sys.modules.pop("b12x_placeholder", None)
    forget_package()
    startup.uninstall()
    return ledger


def records(ledger: Path) -> list[dict[str, Any]]:
    """What processes wrote."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(ledger.glob("*.json"))]
