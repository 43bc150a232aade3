"""The package as a whole: what an import costs, what it needs, what its sources may contain."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import trtllm_b12x_fix

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "trtllm_b12x_fix"
SOURCES = sorted(PACKAGE.rglob("*.py"))
SERVING_STACKS = {"flashinfer", "tensorrt_llm", "vllm"}

_IMPORT_AND_REPORT = """
import json, sys, time
before = set(sys.modules)
start = time.perf_counter()
import trtllm_b12x_fix
seconds = time.perf_counter() - start
print(json.dumps({"seconds": seconds, "modules": sorted(set(sys.modules) - before)}))
"""


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture(scope="module")
def imports() -> list[dict]:
    """Ten imports, each in a process of its own; -S, or the start-up file has done it already."""
    return [json.loads(python("-S", "-c", _IMPORT_AND_REPORT).stdout) for _ in range(10)]


def test_importing_the_package_imports_the_standard_library_alone(imports):
    for record in imports:
        roots = {name.partition(".")[0] for name in record["modules"]}
        assert "trtllm_b12x_fix" in roots
        assert roots - {"trtllm_b12x_fix"} <= sys.stdlib_module_names


def test_importing_the_package_takes_less_than_50_ms(imports):
    assert statistics.median(record["seconds"] for record in imports) < 0.05


def test_the_command_line_is_importable_without_any_third_party_module():
    code = "import sys; before = set(sys.modules); import trtllm_b12x_fix.cli; "
    code += "print(*{n.partition('.')[0] for n in set(sys.modules) - before})"
    roots = set(python("-c", code).stdout.split())
    assert "trtllm_b12x_fix" in roots
    assert roots - {"trtllm_b12x_fix"} <= sys.stdlib_module_names


def test_packaging_is_the_only_dependency():
    assert _project()["dependencies"] == ["packaging"]


def test_no_extra_asks_for_torch():
    extras = _project()["optional-dependencies"]
    names = {re.split(r"[<>=!\[ ;]", line)[0] for lines in extras.values() for line in lines}
    assert names  # the pattern found something
    assert not names & {"torch", "torchvision", "torchaudio", "triton", *SERVING_STACKS}


def test_the_version_is_the_one_of_pyproject():
    done = python("-m", "trtllm_b12x_fix", "--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"trtllm-b12x-fix {_project()['version']}\n"
    assert trtllm_b12x_fix.__version__ == _project()["version"]


def test_the_console_script_exists():
    module, _, function = _project()["scripts"]["trtllm-b12x-fix"].partition(":")
    assert module == "trtllm_b12x_fix.cli"
    names = {
        node.name
        for node in ast.parse((PACKAGE / "cli.py").read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }
    assert function in names


def test_the_sources_were_found():
    names = {str(path.relative_to(PACKAGE)) for path in SOURCES}
    assert {"cli.py", "layer.py", "integrations/flashinfer.py"} <= names
    assert len(names) > 30


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_everything_public_has_a_docstring(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    lacking = [] if ast.get_docstring(tree) else ["the module"]
    for node in tree.body:
        public = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        if public and not node.name.startswith("_") and not ast.get_docstring(node):
            lacking.append(node.name)
    assert lacking == []


@pytest.mark.parametrize(
    "path",
    [path for path in SOURCES if "integrations" not in path.relative_to(PACKAGE).parts],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_only_integrations_import_the_serving_stacks(path):
    assert _imported(path) & SERVING_STACKS == set()


def test_the_import_finder_sees_every_form(tmp_path):
    path = tmp_path / "module.py"
    path.write_text("def f():\n    import vllm.x as y\n    from flashinfer.z import w\n")
    assert _imported(path) == {"vllm", "flashinfer"}


def _imported(path: Path) -> set[str]:
    """Roots of all absolute imports, those inside functions included."""
    roots = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            roots |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            roots.add(node.module.partition(".")[0])
    return roots


def _project() -> dict:
    name = "tomllib" if importlib.util.find_spec("tomllib") else "tomli"  # pytest brings tomli
    toml = importlib.import_module(name)
    return toml.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
