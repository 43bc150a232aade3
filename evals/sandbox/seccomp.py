"""A system call filter for the sandbox: no new processes, no sockets, no memory outside the limit.

Namespaces already keep a program from anything outside. The filter closes what resource limits do
not count (System V shared memory stays when it is detached), forbids processes whatever the
kernel's age, and keeps programs from the parts of the kernel that sandboxes were broken through.
"""

from __future__ import annotations

import errno
import platform
import struct
from dataclasses import dataclass

# From linux/filter.h and linux/seccomp.h.
_LOAD_WORD, _JUMP_IF_EQUAL, _JUMP_IF_ALL_OF, _JUMP_IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 6
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_OFFSET_NUMBER, _OFFSET_ARCH, _OFFSET_FIRST_ARGUMENT = 0, 4, 16  # both machines are little endian
_CLONE_THREAD = 0x10000
#: Numbers at or above are x86-64's x32 calls: the same calls by other numbers.
_X32 = 0x40000000


@dataclass(frozen=True)
class Machine:
    """One architecture: its audit number, and the numbers of its calls."""

    audit: int
    numbers: dict[str, int]


# From the kernel's headers: asm/unistd_64.h and asm-generic/unistd.h.
_X86_64 = Machine(
    0xC000003E,
    {
        "clone": 56, "fork": 57, "vfork": 58, "clone3": 435, "unshare": 272, "setns": 308,
        "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "open_tree": 428,
        "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433,
        "mount_setattr": 442, "shmget": 29, "msgget": 68, "semget": 64, "mq_open": 240,
        "memfd_create": 319, "memfd_secret": 447, "ptrace": 101, "process_vm_readv": 310,
        "process_vm_writev": 311, "kcmp": 312, "pidfd_open": 434, "pidfd_getfd": 438,
        "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "io_uring_setup": 425,
        "io_uring_enter": 426, "io_uring_register": 427, "keyctl": 250, "add_key": 248,
        "request_key": 249, "kexec_load": 246, "kexec_file_load": 320, "init_module": 175,
        "finit_module": 313, "delete_module": 176, "quotactl": 179, "swapon": 167,
        "swapoff": 168, "reboot": 169, "syslog": 103, "acct": 163, "iopl": 172, "ioperm": 173,
        "socket": 41, "name_to_handle_at": 303, "open_by_handle_at": 304, "fanotify_init": 300,
        "personality": 135,
    },
)  # fmt: skip
_AARCH64 = Machine(
    0xC00000B7,
    {
        "clone": 220, "clone3": 435, "unshare": 97, "setns": 268, "mount": 40, "umount2": 39,
        "pivot_root": 41, "chroot": 51, "open_tree": 428, "move_mount": 429, "fsopen": 430,
        "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442, "shmget": 194,
        "msgget": 186, "semget": 190, "mq_open": 180, "memfd_create": 279, "memfd_secret": 447,
        "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272,
        "pidfd_open": 434, "pidfd_getfd": 438, "bpf": 280, "perf_event_open": 241,
        "userfaultfd": 282, "io_uring_setup": 425, "io_uring_enter": 426,
        "io_uring_register": 427, "keyctl": 219, "add_key": 217, "request_key": 218,
        "kexec_load": 104, "kexec_file_load": 294, "init_module": 105, "finit_module": 273,
        "delete_module": 106, "quotactl": 60, "swapon": 224, "swapoff": 225, "reboot": 142,
        "syslog": 116, "acct": 89, "socket": 198, "name_to_handle_at": 264,
        "open_by_handle_at": 265, "fanotify_init": 262, "personality": 92,
    },
)  # fmt: skip
MACHINES = {"x86_64": _X86_64, "aarch64": _AARCH64}
#: Handled by their own rules; all other calls of a table answer "not permitted".
_OWN_RULE = ("clone", "clone3")


def program(machine: str | None = None) -> bytes | None:
    """The filter as the kernel takes it, or None for an architecture without a table.

    Args:
        machine: as ``platform.machine`` names it; by default this one.
    """
    target = MACHINES.get(machine or platform.machine())
    return None if target is None else b"".join(_instructions(target))


def _instructions(target: Machine) -> list[bytes]:
    denied = [number for name, number in target.numbers.items() if name not in _OWN_RULE]
    code = [
        _op(_LOAD_WORD, _OFFSET_ARCH),
        _op(_JUMP_IF_EQUAL, target.audit, yes=1),
        _op(_RETURN, _KILL_PROCESS),
        _op(_LOAD_WORD, _OFFSET_NUMBER),
        _op(_JUMP_IF_AT_LEAST, _X32, no=1),
        _op(_RETURN, _KILL_PROCESS),
        # The C library asks for clone3 first; its flags lie in memory, where no filter sees them.
        _op(_JUMP_IF_EQUAL, target.numbers["clone3"], no=1),
        _op(_RETURN, _ERRNO | errno.ENOSYS),
        _op(_JUMP_IF_EQUAL, target.numbers["clone"], no=4),
        _op(_LOAD_WORD, _OFFSET_FIRST_ARGUMENT),
        _op(_JUMP_IF_ALL_OF, _CLONE_THREAD, no=1),
        _op(_RETURN, _ALLOW),
        _op(_RETURN, _ERRNO | errno.EPERM),
    ]
    for number in denied:
        code += [_op(_JUMP_IF_EQUAL, number, no=1), _op(_RETURN, _ERRNO | errno.EPERM)]
    return [*code, _op(_RETURN, _ALLOW)]


def _op(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("=HBBI", code, yes, no, value)
