"""Environments of Python that have this package installed as a user would install it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from trtllm_b12x_fix.settings import LEDGER, PREFIX

ROOT = Path(__file__).resolve().parents[1]
PTH = "trtllm_b12x_fix.pth"


@dataclass(frozen=True)
class Environment:
    """A folder made by venv, without pip."""

    root: Path

    @classmethod
    def make(cls, root: Path) -> Environment:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(root)], check=True)
        return cls(root)

    @property
    def python(self) -> str:
        return str(self.root / "bin" / "python")

    @property
    def site(self) -> Path:
        return _only(self.root.glob("lib/python3*/site-packages"))

    def install(self, wheel: Path, *options: str) -> None:
        """By the pip of this interpreter, without dependencies."""
        pip(self.python, "install", "--no-deps", "--no-index", *options, str(wheel))

    def uninstall(self) -> None:
        pip(self.python, "uninstall", "--yes", "trtllm-b12x-fix")

    def listing(self) -> set[str]:
        """Every file, byte code included."""
        found = (path for path in self.root.rglob("*") if not path.is_dir())
        return {str(path.relative_to(self.root)) for path in found}


def pip(python: str, *arguments: str, **environ: str) -> None:
    command = [sys.executable, "-m", "pip", "--python", python, *arguments]
    quiet = ["--quiet", "--disable-pip-version-check", "--no-input"]
    done = subprocess.run(
        [*command, *quiet],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environ},
    )
    assert done.returncode == 0, done.stderr


class Build(Enum):
    """What to ask the build backend for; its value is the backend's function."""

    WHEEL = "build_wheel"
    EDITABLE = "build_editable"
    """What `pip install --editable` makes and installs."""


def build(kind: Build, folder: Path) -> Path:
    """The wheel of this tree, made by the build backend that is installed here."""
    code = f"from hatchling.build import {kind.value} as build; build({str(folder)!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return _only(folder.glob("*.whl"))


def clean_environ(**variables: str) -> dict[str, str]:
    """The environment without anything that would change how Python starts, or our own answers."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith((PREFIX, "PYTHON")) and name != "VIRTUAL_ENV"
    }
    # Not the user's own: the records of these processes would stand among those of servers.
    return {**kept, LEDGER: os.environ[LEDGER], **variables}


def link_package(name: str, site: Path) -> bool:
    """Make a package of this interpreter importable in another of the same version."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return False
    source = Path(spec.origin).parent
    for path in (source, *source.parent.glob(f"{name}.libs")):
        shutil.copytree(path, site / path.name, symlinks=True)
    return True


def _only(paths: Iterable[Path]) -> Path:
    (path,) = paths
    return path
