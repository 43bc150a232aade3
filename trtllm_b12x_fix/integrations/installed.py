"""Where a package is and what its metadata says, without importing it.

``importlib.util.find_spec`` of a top-level name asks the finders (those of editable installs, too)
and runs none of the package's code; of a dotted name it would import the parents, so submodules
are found as files.
"""

from __future__ import annotations

import enum
import importlib.util
import json
import re
import sysconfig
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

UNKNOWN_VERSION = "of unknown version"


class Kind(enum.Enum):
    """What stands behind a package's name."""

    INSTALLED = "installed"
    EDITABLE = "editable install"
    SOURCE = "source checkout"
    """Importable from elsewhere than site-packages, with no editable install on record."""
    LEFTOVER = "folder without __init__.py"
    """What an uninstall leaves behind, or an unrelated folder on the path: a namespace package."""
    SINGLE_MODULE = "single module"
    ABSENT = "absent"
    UNFINDABLE = "cannot be looked for"


@dataclass(frozen=True)
class DistributionRecord:
    """One distribution's metadata."""

    name: str
    version: str
    folder: str
    editable: bool = False
    damage: str = ""
    """Why not all of it can be read."""


@dataclass(frozen=True)
class Package:
    """A package as this Python would import it.

    Attributes:
        folder: holds its modules; ``None`` unless it is a package that can be imported.
        distributions: every distribution of its names, the one that counts first.
        problem: what the finders said, where they failed.
    """

    name: str
    kind: Kind
    folder: Path | None = None
    distributions: tuple[DistributionRecord, ...] = ()
    problem: str = ""

    @property
    def version(self) -> str | None:
        """By the first distribution's metadata."""
        return self.distributions[0].version if self.distributions else None

    @property
    def importable(self) -> bool:
        """Whether there is a package with code."""
        return self.folder is not None

    def notes(self) -> tuple[str, ...]:
        """What is odd about it, in words."""
        found = []
        if self.kind is Kind.UNFINDABLE:
            found.append(f"{self.name} cannot be looked for: {self.problem}")
        if self.kind is Kind.LEFTOVER:
            found.append(
                f"{self.name} is a folder without __init__.py (left by an uninstall, or an "
                "unrelated folder on the path): it is not the package"
            )
        if self.kind is Kind.SINGLE_MODULE:
            found.append(f"{self.name} is a single module, not the package")
        if self.kind in (Kind.EDITABLE, Kind.SOURCE):
            found.append(f"{self.name} comes from a {self.kind.value}: {self.folder}")
        found += [
            f"{self.name}: metadata in {one.folder} is damaged: {one.damage}"
            for one in self.distributions
            if one.damage
        ]
        if self.importable and not self.distributions:
            found.append(f"{self.name} has no metadata, so its version is unknown")
        if not self.importable and self.distributions:
            found.append(f"{self.name} has metadata ({self.version}) but cannot be imported")
        if len(self.distributions) > 1:
            listed = ", ".join(f"{one.version} in {one.folder}" for one in self.distributions)
            found.append(f"{self.name} has several distributions ({listed}): remove all but one")
        return tuple(found)


def find_package(name: str, *distributions: str) -> Package:
    """Look for a top-level package and the metadata of the distributions that may bring it."""
    records = tuple(record for one in distributions for record in distribution_records(one))
    try:
        spec = importlib.util.find_spec(name)
    except Exception as error:  # other people's finders; a module without __spec__
        problem = f"{type(error).__name__}: {error}"
        return Package(name, Kind.UNFINDABLE, None, records, problem)
    if spec is None:
        return Package(name, Kind.ABSENT, None, records)
    if not spec.submodule_search_locations:
        return Package(name, Kind.SINGLE_MODULE, None, records)
    if spec.origin is None:
        return Package(name, Kind.LEFTOVER, None, records)
    folder = Path(spec.origin).parent
    return Package(name, _kind(folder, records), folder, records)


def distribution_records(name: str) -> tuple[DistributionRecord, ...]:
    """Every installed distribution of that name, in the order of the path, each once."""
    found: dict[DistributionRecord, None] = {}
    for one in metadata.distributions(name=name):
        folder = str(one.locate_file(""))
        version, editable, damage = UNKNOWN_VERSION, False, []
        try:
            version = one.version or UNKNOWN_VERSION
        except KeyError:  # METADATA without the line
            pass
        except Exception as error:  # other bytes than text; other people's finders
            damage.append(f"METADATA: {error}")
        try:
            editable = _is_editable(one)
        except Exception as error:  # the same, or nested too deeply
            damage.append(f"direct_url.json: {error}")
        words = "; ".join(damage)
        found[DistributionRecord(_normal(name), version, folder, editable, words)] = None
    return tuple(found)


#: What the root of a checkout has and site-packages has not.
_CHECKOUT = (".git", "setup.py", "pyproject.toml")


def _kind(folder: Path, records: tuple[DistributionRecord, ...]) -> Kind:
    editable = any(one.editable for one in records)
    if any((folder.parent / name).exists() for name in _CHECKOUT):
        return Kind.EDITABLE if editable else Kind.SOURCE
    if any(str(folder.parent) == str(Path(one.folder)) and not one.editable for one in records):
        return Kind.INSTALLED
    if editable:
        return Kind.EDITABLE
    sites = {Path(sysconfig.get_path(which)) for which in ("purelib", "platlib")}
    inside = folder.parent in sites or folder.parent.name in ("site-packages", "dist-packages")
    return Kind.INSTALLED if inside else Kind.SOURCE


def _is_editable(distribution: metadata.Distribution) -> bool:
    """By PEP 610's direct_url.json."""
    text = distribution.read_text("direct_url.json")
    origin = json.loads(text) if text else {}
    info = origin.get("dir_info") if isinstance(origin, dict) else None
    return isinstance(info, dict) and bool(info.get("editable"))


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
