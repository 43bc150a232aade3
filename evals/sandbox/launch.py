"""Starts a confined Python, collects what it prints up to a limit, and ends it for certain."""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from evals.sandbox.blocks import SandboxError
from evals.sandbox.bubblewrap import Sandbox, module_source

_INSIDE = "evals.sandbox.inside"
_READ = 1 << 16
_KEPT = 1 << 14  # of what a program prints: enough for an error message
_END_SECONDS = 60.0
# Modules come as source on standard input: the sandbox has no file of ours in it.
_BOOTSTRAP = """\
import json, sys, types
sys.path[:] = [entry for entry in sys.path if entry]
parcel = json.load(open(0, "rb", closefd=False))
for name, source in parcel["modules"]:
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
module.main(parcel["job"])
"""


@dataclass(frozen=True)
class Ending:
    """How a confined process ended: bubblewrap's exit status, 128 and more for a signal."""

    status: int

    def by(self, number: signal.Signals) -> bool:
        """Whether a signal ended it, other than ours."""
        return self.status == 128 + number

    @property
    def killed_here(self) -> bool:
        """Whether it still ran when it was ended from outside."""
        return self.status == -signal.SIGKILL


def readable(fds: Iterable[int], seconds: float) -> list[int]:
    """Those of ``fds`` that can be read, or have come to their end, after at most ``seconds``."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(max(0.0, seconds) * 1000)]


class Confined:
    """A running sandbox. Not for two threads at once."""

    def __init__(
        self,
        sandbox: Sandbox,
        modules: Sequence[str],
        job: dict[str, Any],
        pass_fds: Sequence[int],
    ) -> None:
        names = [(f"{_INSIDE}.{name}", module_source(name)) for name in modules]
        parcel = _sealed("job", json.dumps({"modules": names, "job": job}).encode())
        calls = _sealed("filter", sandbox.filter)
        self.output, printing = os.pipe()
        self.printed = 0
        self.kept = b""
        user = sandbox.user
        try:
            self._process = subprocess.Popen(
                sandbox.command(calls, _BOOTSTRAP),
                stdin=parcel,
                stdout=printing,
                stderr=printing,
                pass_fds=[*pass_fds, calls],
                env=sandbox.environment,
                cwd="/",
                user=user,
                group=user,
                extra_groups=None if user is None else [],
            )
        except OSError as error:
            os.close(self.output)
            raise SandboxError(f"cannot start bubblewrap: {error}") from error
        finally:
            for fd in (parcel, calls, printing):
                os.close(fd)

    def read_output(self) -> bool:
        """Take what was printed, waiting for it; False once nobody can print any more."""
        part = os.read(self.output, _READ)
        self.printed += len(part)
        self.kept += part[: max(0, _KEPT - len(self.kept))]
        return bool(part)

    def poll(self) -> Ending | None:
        """How it ended, or None while it runs."""
        status = self._process.poll()
        return None if status is None else Ending(status)

    def end(self) -> Ending:
        """Kill whatever still runs, take the rest of the output, and wait until all is gone.

        Raises:
            SandboxError: a process outlived its sandbox.
        """
        try:
            # All others in the sandbox die with this one.
            self._process.kill()
            status = self._process.wait()
            if self.output >= 0:
                self._drain()
        finally:
            if self.output >= 0:
                os.close(self.output)
                self.output = -1
        return Ending(status)

    def _drain(self) -> None:
        give_up = time.monotonic() + _END_SECONDS
        while readable([self.output], give_up - time.monotonic()):
            if not self.read_output():
                return
        raise SandboxError("a process outlived its sandbox")


def _sealed(name: str, data: bytes) -> int:
    """A file in memory that nobody can write to again."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
