"""The sandbox of this machine, tried once."""

from __future__ import annotations

import os

import pytest

from evals.sandbox.blocks import SandboxUnavailableError
from evals.sandbox.bubblewrap import Sandbox
from evals.sandbox.probe import prove


@pytest.fixture(scope="session")
def sandbox(require_system) -> Sandbox:
    """Skips where none can start, with the remedy; fails where system packages are required."""
    require_system("bwrap")
    try:
        return prove().sandbox
    except SandboxUnavailableError as error:
        if os.environ.get("REQUIRE_SYSTEM_PACKAGES") == "1":
            pytest.fail(str(error), pytrace=False)
        pytest.skip(str(error))
