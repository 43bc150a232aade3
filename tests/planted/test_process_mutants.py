"""Mutants of the process machinery: each must make the named test fail, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.planted.process_mutants import MUTANTS, VARIABLE, naive_start_up_file

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [*MUTANTS, naive_start_up_file()], ids=lambda one: one.name)
def test_a_wrong_process_is_caught(mutant):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.planted.process_mutants"]
    # None of this process's xdist workers: the plugin plants in the process that runs the test.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", mutant.guard],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
        env={**clean, VARIABLE: mutant.name},
    )
    # An error in a set-up or in collecting would be no proof that the test noticed.
    assert done.returncode == 1, done.stdout + done.stderr
    assert " failed" in done.stdout.splitlines()[-1]
    assert " error" not in done.stdout.splitlines()[-1]


def test_every_mutant_names_a_test_that_exists():
    for mutant in MUTANTS:
        path, _, name = mutant.guard.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / path).read_text(encoding="utf-8")
