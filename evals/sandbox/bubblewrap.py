"""The bubblewrap command line: which parts of the system a program sees, and as whom it runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from evals.sandbox.blocks import Block, SandboxUnavailableError, remedy

#: Any user will do that owns nothing; as in Debian's and Ubuntu's /etc/passwd.
NOBODY = 65534
_MODULES_FOLDER = Path(__file__).parent / "inside"
_LINKS = ("bin", "sbin", "lib", "lib64")
_HOME = "/home/guest"


@dataclass(frozen=True)
class Sandbox:
    """How to start a confined Python on this machine.

    Attributes:
        bwrap: the bubblewrap binary.
        python: the interpreter, found again at this path in the sandbox.
        prefix: the interpreter's own folder, where that is outside /usr.
        user: whom to become first, where the runner is root, whom no process limit binds.
        filter: the system call filter.
    """

    bwrap: str
    python: str
    prefix: str | None
    user: int | None
    filter: bytes = field(repr=False)

    def command(self, filter_fd: int, script: str) -> list[str]:
        """The command line that runs ``script`` in a sandbox of its own."""
        # fmt: off
        command = [
            self.bwrap, "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session",
            "--cap-drop", "ALL", "--uid", str(NOBODY), "--gid", str(NOBODY),
            "--hostname", "sandbox", "--seccomp", str(filter_fd), "--ro-bind", "/usr", "/usr",
        ]
        for name in _LINKS:
            path = Path("/", name)
            if path.is_symlink():
                command += ["--symlink", os.readlink(path), str(path)]
            elif path.is_dir():
                command += ["--ro-bind", str(path), str(path)]
        if self.prefix is not None:
            command += ["--ro-bind", self.prefix, self.prefix]
        # No /proc: a program finds no other process there, nor its own memory and environment, and
        # containers that may not mount one need no exception.
        command += [
            "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache", "--dir", _HOME,
            "--dev-bind", "/dev/null", "/dev/null", "--dev-bind", "/dev/urandom", "/dev/urandom",
            "--remount-ro", "/", "--chdir", _HOME,
        ]
        # fmt: on
        return [*command, self.python, "-s", "-S", "-B", "-X", "utf8", "-c", script]

    @property
    def environment(self) -> dict[str, str]:
        """One variable, gone before the program starts: sets have the same order in every run."""
        return {"PYTHONHASHSEED": "0"}


def module_source(name: str) -> str:
    """Source of a module of ``inside``."""
    return (_MODULES_FOLDER / f"{name}.py").read_text(encoding="utf-8")


def locate(machine_filter: bytes | None) -> Sandbox:
    """Find what a sandbox needs, without trying it.

    Raises:
        SandboxUnavailableError: something is missing.
    """
    if machine_filter is None:
        raise SandboxUnavailableError(Block.MACHINE, remedy(Block.MACHINE))
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxUnavailableError(Block.NO_BWRAP, remedy(Block.NO_BWRAP))
    user = _user()
    python = _interpreter(user)
    if python is None:
        raise SandboxUnavailableError(Block.INTERPRETER, remedy(Block.INTERPRETER))
    path, prefix = python
    return Sandbox(bwrap, path, prefix, user, machine_filter)


def _user() -> int | None:
    """Whom to become: nobody, where this is root outside of any user namespace."""
    if os.geteuid() != 0:
        return None
    lines = Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines()
    ranges = [[int(number) for number in line.split()] for line in lines]
    is_root = any(inside == outside == 0 for inside, outside, _ in ranges)
    mapped = any(inside <= NOBODY < inside + count for inside, _, count in ranges)
    return NOBODY if is_root and mapped else None


def _interpreter(user: int | None) -> tuple[str, str | None] | None:
    """This interpreter, or the system's where ``user`` may not reach it (root's home is closed)."""
    own = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    if user is None or _reachable(Path(own)):
        inside_usr = Path(sys.base_prefix).is_relative_to("/usr")
        return own, None if inside_usr else os.path.realpath(sys.base_prefix)
    for path in ("/usr/bin/python3", "/usr/local/bin/python3"):
        if os.access(path, os.X_OK) and _version(path) >= (3, 10):
            return os.path.realpath(path), None
    return None


def _reachable(path: Path) -> bool:
    return all(parent.stat().st_mode & 0o001 for parent in path.parents)


def _version(python: str) -> tuple[int, int]:
    words = "import sys; print(*sys.version_info[:2])"
    done = subprocess.run(
        [python, "-I", "-S", "-c", words], capture_output=True, text=True, check=False
    )
    try:
        major, minor = done.stdout.split()
        return int(major), int(minor)
    except ValueError:
        return (0, 0)
