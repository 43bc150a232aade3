"""Whether a sandbox starts and holds here; if not, which of the usual blocks it is."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

from evals.sandbox import seccomp
from evals.sandbox.blocks import Block, Facts, SandboxUnavailableError, diagnose, remedy
from evals.sandbox.bubblewrap import Sandbox, locate
from evals.sandbox.launch import Confined, readable
from evals.sandbox.limits import Limits

_MODULES = ("confine", "barriers")


@dataclass(frozen=True)
class Proven:
    """A sandbox that was tried from inside.

    Attributes:
        bubblewrap: its version, as it names itself.
        python: version of the interpreter that programs run in.
    """

    sandbox: Sandbox
    bubblewrap: str
    python: str


def prove() -> Proven:
    """Start a sandbox, try from inside what it must prevent, and give it out if it held.

    Raises:
        SandboxUnavailableError: with the block and what to do about it.
    """
    sandbox = locate(seccomp.program())
    limits = Limits(memory_bytes=1 << 28)
    reading, writing = os.pipe()
    try:
        job = {"limits": asdict(limits), "report": writing}
        confined = Confined(sandbox, _MODULES, job, [writing])
    finally:
        os.close(writing)
    try:
        report = _read_report(reading, limits.start_seconds)
    finally:
        os.close(reading)
        confined.end()
    if report is None:
        words = confined.kept.decode("utf-8", "replace")
        block = diagnose(_gather(words))
        raise SandboxUnavailableError(block, remedy(block, words[-400:]))
    if report["possible"]:
        possible = f"a program could {', '.join(report['possible'])}"
        raise SandboxUnavailableError(Block.BARRIER, remedy(Block.BARRIER, possible))
    python = ".".join(str(part) for part in report["python"])
    return Proven(sandbox, _version(sandbox.bwrap), python)


def _read_report(reading: int, seconds: float) -> dict[str, list[str]] | None:
    data = b""
    while readable([reading], seconds):
        part = os.read(reading, 1 << 16)
        if not part:
            break
        data += part
    with contextlib.suppress(ValueError):
        report: dict[str, list[str]] = json.loads(data)
        return report
    return None


def _gather(words: str) -> Facts:
    status = _read(Path("/proc/self/status")) or ""
    return Facts(
        words=words,
        max_user_namespaces=_number("user/max_user_namespaces"),
        unprivileged_userns_clone=_number("kernel/unprivileged_userns_clone"),
        apparmor_restricts=_number("kernel/apparmor_restrict_unprivileged_userns"),
        seccomp_filtered="Seccomp:\t2" in status,
    )


def _number(name: str) -> int | None:
    text = _read(Path("/proc/sys", name))
    return int(text) if text is not None and text.strip().isdigit() else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _version(bwrap: str) -> str:
    done = subprocess.run([bwrap, "--version"], capture_output=True, text=True, check=False)
    return done.stdout.strip()
