"""Tries, from inside, what the sandbox promises to prevent; run once before any program."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import resource
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

from evals.sandbox.inside.confine import confine


def main(job: dict[str, Any]) -> None:
    """Report the names of what was possible and must not be."""
    confine(job["limits"])
    attempts: tuple[tuple[str, Callable[[], object]], ...] = (
        ("read the environment", _environment),
        ("see files at home", _home),
        ("write a file", lambda: _write_anywhere(("/home/guest/x", "/usr/x", "/tmp/x", "/x"))),
        ("see other processes", lambda: os.listdir("/proc/1")),
        ("start a process", _fork),
        ("open a socket", lambda: socket.socket(socket.AF_INET)),
        ("make a namespace", _unshare),
        ("use shared memory", lambda: _call("shmget", 0, 4096, 0o1600)),
        ("take memory without limit", lambda: _memory(job["limits"]["memory_bytes"])),
        ("start threads without limit", lambda: _threads(job["limits"]["tasks"])),
        ("lift its limits", _lift),
    )
    possible = []
    for name, attempt in attempts:
        try:
            attempt()
        except (OSError, MemoryError, RuntimeError, ValueError):
            continue
        possible.append(name)
    report = {"possible": possible, "python": list(sys.version_info[:3])}
    os.write(job["report"], json.dumps(report).encode())


def _environment() -> None:
    libc = ctypes.CDLL(None)
    variables = ctypes.c_void_p.in_dll(libc, "environ").value
    if not os.environ and not (variables and ctypes.c_void_p.from_address(variables).value):
        raise OSError


def _home() -> None:
    if not os.listdir("."):
        raise OSError


def _write_anywhere(paths: tuple[str, ...]) -> None:
    for path in paths:
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT))
        except OSError:
            continue
        return
    raise OSError


def _fork() -> None:
    if os.fork() == 0:
        os._exit(0)


def _unshare() -> None:
    _call("unshare", 0x10000000)  # CLONE_NEWUSER


def _call(name: str, *arguments: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) == -1:
        raise OSError(ctypes.get_errno(), name)


def _memory(limit: int) -> None:
    mmap.mmap(-1, limit).close()


def _threads(limit: int) -> None:
    threading.stack_size(1 << 16)  # or the memory limit would come first
    stop = threading.Event()
    try:
        for _ in range(limit):
            threading.Thread(target=stop.wait, daemon=True).start()
    finally:
        stop.set()


def _lift() -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    resource.setrlimit(resource.RLIMIT_NPROC, (soft + 1, soft + 1))
