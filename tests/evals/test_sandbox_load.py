"""The same verdicts on a loaded machine. 20 seconds and more."""

from __future__ import annotations

import subprocess
import sys

import pytest

from evals.sandbox.inside.outcome import CodeOutcome as Is
from evals.sandbox.judge import judge
from tests.evals.hostile import ADD, BUSY, HOSTILE, Hostile
from tests.evals.test_sandbox import SUM, filled, listener  # noqa: F401


@pytest.mark.slow
def test_the_same_verdicts_under_load(sandbox, listener):  # noqa: F811
    """Four busy processes beside this one; every program that can end by time is among these."""
    chosen = [one for one in HOSTILE if Is.TIME_LIMIT in one.outcomes or hash_of(one) % 9 == 0]
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        assert judge(sandbox, ADD, SUM, BUSY).passed
        for one in chosen:
            verdict = judge(sandbox, ADD, filled(one, listener.getsockname()[1]), one.limits)
            assert verdict.outcome in one.outcomes, (one.name, verdict)
    finally:
        for process in busy:
            process.kill()
            process.wait()


def hash_of(hostile: Hostile) -> int:
    return sum(hostile.name.encode())
