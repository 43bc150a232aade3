"""An installed package is found by vLLM's own loader of plugins, and costs next to nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.environments import Build, build, clean_environ, pip
from tests.vllm import harness

GROUP = "vllm.general_plugins"

#: What importlib.metadata finds is called, any number of times; nothing heavy may be there after.
LIGHT = f"""
import json, sys
from importlib.metadata import entry_points
(found,) = [one for one in entry_points(group={GROUP!r}) if one.name == "trtllm_b12x_fix"]
register = found.load()
for _ in range(3):
    register()
import trtllm_b12x_fix
heavy = [name for name in ("torch", "vllm", "numpy", "flashinfer") if name in sys.modules]
hooks = [one for one in sys.meta_path if type(one).__name__ == "PostImportFinder"]
print(json.dumps({{"value": found.value, "heavy": heavy, "file": trtllm_b12x_fix.__file__,
                  "hooks": len(hooks)}}))
"""

#: vLLM's own function, called again as in a process that forgot that it had been.
OWN_LOADER = """
import json, sys
from tests.vllm import harness
harness.enter(sys.argv[1])
import vllm.plugins as plugins
for _ in range(2):
    plugins.plugins_loaded = False
    plugins.load_general_plugins()
plugin = sys.modules.get("trtllm_b12x_fix.vllm_plugin")
modules = [name for name in sys.modules if name.startswith("vllm.model_executor")]
print(json.dumps({"in place": bool(plugin and plugin.is_in_place()), "modules": modules}))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The wheel of this tree in a folder of its own."""
    folder = tmp_path_factory.mktemp("installed")
    wheel = build(Build.WHEEL, tmp_path_factory.mktemp("wheel"))
    pip(sys.executable, "install", "--no-deps", "--no-index", "--target", str(folder), str(wheel))
    return folder


def run(code: str, installed: Path, *arguments: str, **environ: str) -> dict:
    paths = os.pathsep.join([str(installed), str(Path(harness.__file__).parents[2])])
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=clean_environ(PYTHONPATH=paths, **environ),
        cwd=installed,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_importlib_finds_the_plugin_and_it_imports_nothing_heavy(installed):
    told = run(LIGHT, installed)
    assert told["value"] == "trtllm_b12x_fix.vllm_plugin:register"
    assert told["heavy"] == []
    assert told["hooks"] == 1
    assert Path(told["file"]).is_relative_to(installed)


@pytest.mark.oracle("vllm-0.27.0", "vllm-0.33.0", "vllm-deps", "flashinfer-deps")
@pytest.mark.parametrize("version", tuple(harness.PAIRS))
def test_vllm_loads_it(installed, version):
    told = run(OWN_LOADER, installed, version)
    assert told == {"in place": True, "modules": []}


@pytest.mark.oracle("vllm-0.33.0", "vllm-deps", "flashinfer-deps")
def test_vllms_own_list_of_plugins_is_obeyed(installed):
    told = run(OWN_LOADER, installed, "0.33.0", VLLM_PLUGINS="lora_filesystem_resolver")
    assert told["in place"] is False
