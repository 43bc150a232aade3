"""Defects planted in the plugin: the check of the job named with each must fail."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm import checks, harness
from tests.vllm.mutants import MUTANTS
from tests.vllm.scenarios import (
    PADDED,
    RELU2,
    SILU,
    Subject,
    jobs,
    run_worker,
    selections,
    subject_of,
)

pytestmark = [
    pytest.mark.oracle(*{name for version in harness.PAIRS for name in harness.oracles(version)}),
    pytest.mark.filterwarnings("ignore::Warning"),
]

Planted = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def subjects(modelopt_export) -> dict[str, Subject]:
    names = {"relu2": RELU2, "silu": SILU, "padded": PADDED}
    return {what: subject_of(name, modelopt_export(name)) for what, name in names.items()}


@pytest.fixture(scope="module")
def planted(subjects, tmp_path_factory) -> Planted:
    """Records by mutant; and, by the name of its job, one without any for each wheel."""
    known = jobs(subjects["relu2"], subjects["silu"], subjects["padded"]) | selections()
    found: Planted = {}
    for version in harness.PAIRS:
        wanted: Planted = {}
        for name, one in MUTANTS.items():
            if one.version == version:
                job = shortened(known[one.job])
                wanted[name] = {**job, "mutant": name}
                wanted.setdefault(f"{version}: {one.job}", job)
        found |= run_worker(version, wanted, tmp_path_factory.mktemp("planted"))
    return found


def shortened(job: dict[str, Any]) -> dict[str, Any]:
    """Decode alone: what takes time are the others."""
    if "layer" not in job:
        return job
    return {**job, "layer": {**job["layer"], "cases": job["layer"]["cases"][:2]}}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_check_notices(name, planted, subjects):
    mutant = MUTANTS[name]
    sound = planted[f"{mutant.version}: {mutant.job}"]
    checks.check_job(mutant.job, mutant.version, sound, subjects)
    with pytest.raises((AssertionError, KeyError)):
        checks.check_job(mutant.job, mutant.version, planted[name], subjects)
