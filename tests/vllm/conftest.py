"""Layers of real exports, shared by the tests of one worker."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.exports import Export
from tests.vllm.scenarios import PADDED, RELU2, SILU, Subject, subject_of


@pytest.fixture(scope="session")
def subjects(modelopt_export: Callable[[str], Export]) -> dict[str, Subject]:
    """By what they are here for."""
    names = {"relu2": RELU2, "silu": SILU, "padded": PADDED}
    return {what: subject_of(name, modelopt_export(name)) for what, name in names.items()}
