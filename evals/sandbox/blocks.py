"""What keeps bubblewrap from starting, and what to do about each."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from trtllm_b12x_fix.errors import B12xFixError


class Block(enum.Enum):
    """Why there is no sandbox here."""

    NO_BWRAP = "no-bubblewrap"
    MACHINE = "machine-without-call-table"
    INTERPRETER = "interpreter-out-of-reach"
    NO_USER_NAMESPACES = "user-namespaces-off"
    APPARMOR_USERNS = "apparmor-restricts-user-namespaces"
    CONTAINER_SECCOMP = "container-seccomp"
    CONTAINER_APPARMOR = "container-apparmor"
    BARRIER = "barrier-missing"
    UNKNOWN = "unknown"


class SandboxUnavailableError(B12xFixError):
    """No sandbox can be started here; the message says why and what to do."""

    def __init__(self, block: Block, message: str) -> None:
        super().__init__(message)
        self.block = block


class SandboxError(B12xFixError):
    """A sandbox that should work did not; the program in it was not judged."""


@dataclass(frozen=True)
class Facts:
    """What is known after bubblewrap failed.

    Attributes:
        words: what bubblewrap said.
        max_user_namespaces: of /proc/sys/user, None where there is no such file.
        unprivileged_userns_clone: of /proc/sys/kernel (Debian's switch), None without the file.
        apparmor_restricts: /proc/sys/kernel/apparmor_restrict_unprivileged_userns, None without.
        seccomp_filtered: whether this very process runs under a filter.
    """

    words: str
    max_user_namespaces: int | None
    unprivileged_userns_clone: int | None
    apparmor_restricts: int | None
    seccomp_filtered: bool


#: What bubblewrap says when it may not make a namespace, and when it may not use the one it made.
_REFUSED = ("No permissions to creat", "Creating new namespace failed")
_USELESS = ("setting up uid map", "setting up gid map", "RTM_NEWADDR", "RTM_NEWLINK")
_MOUNT_REFUSED = ("Failed to make / slave", "Failed to mount", "pivot_root", "Can't mount")

_ELSEWHERE = (
    "Nothing is lost meanwhile: generations are saved before they are graded. Copy the record "
    "files to a machine where the sandbox starts, and run `python -m evals grade FILE...` there."
)
_PROFILE = """\
    printf '%s\\n' 'abi <abi/4.0>,' 'include <tunables/global>' \\
      'profile bwrap /usr/bin/bwrap flags=(unconfined) {' \\
      '  userns,' '  include if exists <local/bwrap>' '}' | sudo tee /etc/apparmor.d/bwrap
    sudo apparmor_parser -r /etc/apparmor.d/bwrap"""
_REMEDIES = {
    Block.NO_BWRAP: "bubblewrap is not installed: apt-get install bubblewrap",
    Block.MACHINE: "the sandbox knows the system calls of x86_64 and aarch64 only; grade there",
    Block.INTERPRETER: (
        "the runner is root, and programs run as a user without rights, who cannot reach this "
        "Python (a folder above it is closed, such as /root), nor is there a /usr/bin/python3 of "
        "3.10 or newer: apt-get install python3, or run this as an ordinary user"
    ),
    Block.NO_USER_NAMESPACES: (
        "user namespaces are switched off on this kernel. Switch them on:\n"
        "    sudo sysctl -w user.max_user_namespaces=15000\n"
        "    sudo sysctl -w kernel.unprivileged_userns_clone=1    # where this switch exists"
    ),
    Block.APPARMOR_USERNS: (
        "AppArmor restricts user namespaces (kernel.apparmor_restrict_unprivileged_userns = 1, "
        "the default since Ubuntu 23.10). Allow bubblewrap alone:\n"
        f"{_PROFILE}\n"
        "or lift the restriction until the next boot:\n"
        "    sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
    ),
    Block.CONTAINER_SECCOMP: (
        "the container's seccomp profile (Docker's default) forbids new namespaces. Start the "
        "container with\n"
        "    docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined ...\n"
        "or grade outside of it."
    ),
    Block.CONTAINER_APPARMOR: (
        "the container's AppArmor profile (docker-default) forbids mounts. Start the container "
        "with\n"
        "    docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined ...\n"
        "or grade outside of it."
    ),
    Block.BARRIER: "the sandbox starts but does not hold what it promises",
    Block.UNKNOWN: "bubblewrap does not start here",
}


def remedy(block: Block, words: str = "") -> str:
    """Why and what to do, in the words that are printed."""
    said = f" ({words.strip()})" if words.strip() else ""
    return f"no sandbox: {_REMEDIES[block]}{said}\n{_ELSEWHERE}"


def diagnose(facts: Facts) -> Block:
    """Which block explains what bubblewrap said."""
    refused = any(word in facts.words for word in _REFUSED)
    if refused and 0 in (facts.max_user_namespaces, facts.unprivileged_userns_clone):
        return Block.NO_USER_NAMESPACES
    if refused and facts.seccomp_filtered:
        return Block.CONTAINER_SECCOMP
    if facts.apparmor_restricts == 1 and (refused or any(word in facts.words for word in _USELESS)):
        return Block.APPARMOR_USERNS
    if any(word in facts.words for word in _MOUNT_REFUSED):
        return Block.CONTAINER_APPARMOR
    return Block.UNKNOWN
