"""What every test gets: quiet threads, no network, markers that mean something.

Fixtures: `oracle_dir(name)` gives the folder of an oracle, `require_system(command)`
asks for a system command, `modelopt_export(family)` gives a real checkpoint. A missing
oracle fails, since `make test` fetches them; a missing system command skips, unless
REQUIRE_SYSTEM_PACKAGES=1 (set in CI) forbids it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

# Before anything imports torch: two workers with two threads each would fight
# for two cores, and the slowest tests would only get slower.
if "PYTEST_XDIST_WORKER" in os.environ:
    for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ.setdefault(_variable, "1")
# A test that would load from a model hub has to fail here as it does in CI.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Processes that a test starts must leave no record where the user's servers do.
os.environ["TRTLLM_B12X_FIX_LEDGER"] = str(
    Path(tempfile.gettempdir()) / f"trtllm-b12x-fix-tests-{os.getuid()}"
)

import hypothesis
import pytest

from tests.oracles.fetch import ORACLES

if TYPE_CHECKING:
    from tests.exports import Export

TESTS = Path(__file__).parent
BLACKWELL = {(12, 0), (12, 1)}
# Debian's name for the package, where it differs from the command's.
DEBIAN_PACKAGES = {
    "bwrap": "bubblewrap",
    "/usr/include/x86_64-linux-gnu/asm/unistd_64.h": "linux-libc-dev",
    "/usr/include/asm-generic/unistd.h": "linux-libc-dev",
}

# A shared machine's pauses are no fault of the code, hence no deadline; a red CI
# run must be red again when repeated, hence the fixed seed there.
hypothesis.settings.register_profile(
    "project", deadline=None, print_blob=True, derandomize="CI" in os.environ
)
hypothesis.settings.load_profile("project")


@pytest.hookimpl(tryfirst=True)  # before -m selects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "oracle_dir" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.oracle)
    # Fast tests first: a mistake in the arithmetic shows in seconds.
    items.sort(key=lambda item: not item.path.is_relative_to(TESTS / "unit"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("blackwell") and _capability() not in BLACKWELL:
        pytest.skip("needs an SM120 or SM121 device")
    if item.get_closest_marker("gpu") and _capability() is None:
        pytest.skip("needs a CUDA device")
    for marker in item.iter_markers("oracle"):
        for name in marker.args:
            _find_oracle(name)


@cache
def _capability() -> tuple[int, int] | None:
    import torch

    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def _find_oracle(name: str) -> Path:
    oracle = ORACLES.get(name)
    if oracle is None:
        pytest.fail(f"no oracle is called {name!r}; there are {', '.join(ORACLES)}", pytrace=False)
    if not oracle.fits:
        pytest.skip(f"oracle {name!r} needs Python {'.'.join(map(str, oracle.since))}")
    if not oracle.is_current():
        pytest.fail(
            f"oracle {name!r} is missing or of another version: run `make oracles`",
            pytrace=False,
        )
    return oracle.path


@pytest.fixture(scope="session")
def oracle_dir() -> Callable[[str], Path]:
    """Call with an oracle's name; its folder is there and complete, or the test fails."""
    return _find_oracle


@pytest.fixture(scope="session")
def require_system() -> Callable[[str], str]:
    """Call with a command, or a file's path; gives its path, or skips naming the Debian package."""

    def require(command: str) -> str:
        path = shutil.which(command, mode=os.F_OK if "/" in command else os.F_OK | os.X_OK)
        if path is None:
            package = DEBIAN_PACKAGES.get(command, command)
            message = f"needs {command!r}: apt-get install {package}"
            if os.environ.get("REQUIRE_SYSTEM_PACKAGES") == "1":
                pytest.fail(message, pytrace=False)
            pytest.skip(message)
        return path

    return require


@pytest.fixture(scope="session")
def modelopt_export(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Export]:
    """Call with a family of tests/exports.py; its checkpoint is made on the first call."""
    from tests.exports import make_export

    return cache(lambda name: make_export(name, tmp_path_factory.mktemp(name)))
