"""Limits that a process without privileges puts on itself, for good, before foreign code runs."""

from __future__ import annotations

import os
import resource
from typing import Any


def confine(limits: dict[str, Any]) -> None:
    """Set resource limits, forget the environment, and put /dev/null where the job came from.

    Args:
        limits: ``cpu_seconds``, ``memory_bytes``, ``tasks`` and ``open_files``.
    """
    os.environ.clear()
    nothing = os.open("/dev/null", os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    cpu = limits["cpu_seconds"]
    # The soft limit's signal says what happened; a program that ignores it meets the hard one.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
    for kind, limit in (
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        # Threads, and bubblewrap's own process beside this one: seccomp forbids other processes.
        (resource.RLIMIT_NPROC, limits["tasks"]),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))
