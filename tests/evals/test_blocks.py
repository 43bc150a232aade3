"""What keeps the sandbox from starting, from bubblewrap's own words. 2 seconds."""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import struct
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from evals import __main__ as cli
from evals.sandbox import bubblewrap, probe, seccomp
from evals.sandbox.blocks import Block, Facts, SandboxUnavailableError, diagnose, remedy

QUIET = Facts("", 15000, None, None, seccomp_filtered=False)
AGO = "creating"  # as releases before 0.5 spell it
NO_PERMISSION = (
    "bwrap: No permissions to create new namespace, likely because the kernel does not allow "
    "non-privileged user namespaces."
)


@pytest.mark.parametrize(
    ("facts", "block"),
    [
        # Words as bubblewrap 0.4 to 0.11 print them, from public reports.
        (replace(QUIET, words=NO_PERMISSION, seccomp_filtered=True), Block.CONTAINER_SECCOMP),
        (
            replace(QUIET, words=NO_PERMISSION.replace("create", AGO), seccomp_filtered=True),
            Block.CONTAINER_SECCOMP,
        ),
        (replace(QUIET, words=NO_PERMISSION, max_user_namespaces=0), Block.NO_USER_NAMESPACES),
        (
            replace(QUIET, words=NO_PERMISSION, unprivileged_userns_clone=0),
            Block.NO_USER_NAMESPACES,
        ),
        (
            replace(QUIET, words="bwrap: Creating new namespace failed: No space left on device",
                    max_user_namespaces=0, seccomp_filtered=True),
            Block.NO_USER_NAMESPACES,
        ),
        (
            replace(QUIET, words="bwrap: setting up uid map: Permission denied",
                    apparmor_restricts=1),
            Block.APPARMOR_USERNS,
        ),
        (
            replace(QUIET, words="bwrap: loopback: Failed RTM_NEWADDR: Operation not permitted",
                    apparmor_restricts=1),
            Block.APPARMOR_USERNS,
        ),
        (
            replace(QUIET, words="bwrap: Failed to make / slave: Permission denied",
                    seccomp_filtered=True),
            Block.CONTAINER_APPARMOR,
        ),
        (replace(QUIET, words="bwrap: something new"), Block.UNKNOWN),
        (replace(QUIET, words=NO_PERMISSION), Block.UNKNOWN),
    ],
)  # fmt: skip
def test_words_and_switches_name_the_block(facts, block):
    assert diagnose(facts) is block


def test_every_block_has_a_remedy_that_can_be_typed():
    commands = {
        Block.NO_BWRAP: "apt-get install bubblewrap",
        Block.NO_USER_NAMESPACES: "sysctl -w user.max_user_namespaces=",
        Block.APPARMOR_USERNS: "apparmor_parser -r /etc/apparmor.d/bwrap",
        Block.CONTAINER_SECCOMP: "docker run --security-opt seccomp=unconfined",
        Block.CONTAINER_APPARMOR: "--security-opt apparmor=unconfined",
    }
    for block in Block:
        words = remedy(block, "what it said")
        assert commands.get(block, "no sandbox") in words
        assert "python -m evals grade" in words
        assert "what it said" in words


def refused(sandbox, wrapper: list[str]) -> str:
    """What bubblewrap says when it is started in a worse place."""
    read, write = os.pipe()
    os.write(write, sandbox.filter)
    os.close(write)
    done = subprocess.run(
        [*wrapper, *sandbox.command(read, "pass")],
        capture_output=True, text=True, check=False, pass_fds=[read], env={"PATH": os.defpath},
        user=sandbox.user, group=sandbox.user, extra_groups=None if sandbox.user is None else [],
        cwd="/",
    )  # fmt: skip
    os.close(read)
    assert done.returncode != 0
    return done.stderr


def test_a_kernel_without_user_namespaces(sandbox):
    script = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    words = refused(sandbox, ["unshare", "--user", "--map-root-user", "sh", "-c", script, "sh"])
    assert diagnose(replace(QUIET, words=words, max_user_namespaces=0)) is Block.NO_USER_NAMESPACES


# Docker's default profile answers "not permitted" to new user namespaces.
DOCKERS_RULE = """
import ctypes, os, sys
code = bytes.fromhex(sys.argv[1])
buffer = ctypes.create_string_buffer(code)
class Program(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
program = Program(len(code) // 8, ctypes.addressof(buffer))
assert libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0, ctypes.get_errno()
print("Seccomp:\\t2" in open("/proc/self/status").read(), file=sys.stderr)
os.execvp(sys.argv[2], sys.argv[2:])
"""


def test_a_container_that_forbids_namespaces(sandbox):
    numbers = seccomp.MACHINES[platform.machine()].numbers
    rules = [seccomp._op(0x20, 0)]  # the call's number
    for name in ("unshare", "clone3"):
        rules += [
            seccomp._op(0x15, numbers[name], no=1),
            seccomp._op(6, 0x50000 | (errno.ENOSYS if name == "clone3" else errno.EPERM)),
        ]
    rules += [
        seccomp._op(0x15, numbers["clone"], no=3),
        seccomp._op(0x20, 16),
        seccomp._op(0x45, 0x10000000, no=1),  # CLONE_NEWUSER
        seccomp._op(6, 0x50000 | errno.EPERM),
        seccomp._op(6, 0x7FFF0000),
    ]
    words = refused(sandbox, [sandbox.python, "-c", DOCKERS_RULE, b"".join(rules).hex()])
    assert words.startswith("True")
    facts = replace(QUIET, words=words, seccomp_filtered=True)
    assert diagnose(facts) is Block.CONTAINER_SECCOMP


def test_barriers_that_do_not_hold_are_named(sandbox, monkeypatch):
    allow_all = replace(sandbox, filter=struct.pack("=HBBI", 6, 0, 0, 0x7FFF0000))
    monkeypatch.setattr(probe, "locate", lambda _: allow_all)
    with pytest.raises(SandboxUnavailableError, match="start a process, open a socket") as caught:
        probe.prove()
    assert caught.value.block is Block.BARRIER


def test_the_command_says_good_or_what_to_do(sandbox, monkeypatch, capsys):
    assert cli.main(["sandbox", "--json", "-"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["verdict"] == "good"
    assert answer["sandbox"]["bubblewrap"].startswith("bubblewrap ")
    monkeypatch.setenv("PATH", "")
    assert cli.main(["sandbox"]) == 1
    assert "apt-get install bubblewrap" in capsys.readouterr().out
    assert cli.main(["sandbox", "--json", "-"]) == 1
    assert json.loads(capsys.readouterr().out)["block"] == "no-bubblewrap"


def test_a_machine_without_a_table_is_refused(monkeypatch):
    assert seccomp.program("riscv64") is None
    with pytest.raises(SandboxUnavailableError, match="x86_64 and aarch64"):
        bubblewrap.locate(None)


@pytest.mark.parametrize(
    ("machine", "header", "pattern"),
    [
        ("x86_64", "x86_64-linux-gnu/asm/unistd_64.h", r"__NR_(\w+)\s+(\d+)"),
        ("aarch64", "asm-generic/unistd.h", r"__NR(?:3264)?_(\w+)\s+(\d+)"),
    ],
)
def test_call_numbers_are_the_kernels(machine, header, pattern, require_system):
    if header.startswith("x86_64") and platform.machine() != "x86_64":
        pytest.skip("Debian ships this header for x86-64 alone")
    path = Path(require_system(f"/usr/include/{header}"))
    known = {name: int(number) for name, number in re.findall(pattern, path.read_text())}
    for name, number in seccomp.MACHINES[machine].numbers.items():
        assert known[name] == number, name


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_decides_as_meant(machine):
    """Runs the filter by hand: one instruction after the other, as the kernel would."""
    table = seccomp.MACHINES[machine]
    code = seccomp.program(machine)
    allow, kill, refuse = 0x7FFF0000, 0x80000000, 0x50000 | errno.EPERM

    def decide(number: int, argument: int = 0, audit: int = table.audit) -> int:
        return interpret(code, struct.pack("<IIQ6Q", number, audit, 0, argument, 0, 0, 0, 0, 0))

    for name, number in table.numbers.items():
        if name not in ("clone", "clone3"):
            assert decide(number) == refuse, name
    assert decide(table.numbers["clone3"]) == 0x50000 | errno.ENOSYS
    assert decide(table.numbers["clone"], 0x11) == refuse  # fork
    assert decide(table.numbers["clone"], 0x3D0F00) == allow  # a thread of the C library
    assert decide(table.numbers["clone"], 0x10000 | 0x10000000) in (allow, refuse)
    assert decide(0) == decide(1) == decide(63) == allow
    assert decide(0x40000000 | 41) == kill
    assert decide(41, audit=0x40000003) == kill  # 32 bits


def interpret(code: bytes, data: bytes) -> int:
    at, word = 0, 0
    while True:
        op, yes, no, value = struct.unpack_from("=HBBI", code, 8 * at)
        at += 1
        if op == 0x06:
            return value
        if op == 0x20:
            (word,) = struct.unpack_from("<I", data, value)
            continue
        hit = {0x15: word == value, 0x35: word >= value, 0x45: bool(word & value)}[op]
        at += yes if hit else no


def test_root_in_a_user_namespace_becomes_nobody_only_where_it_can(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    for text, user in (
        ("0 0 4294967295\n", bubblewrap.NOBODY),
        ("0 1000 1\n", None),
        ("0 0 1\n", None),
        ("0 100000 65536\n", None),
    ):
        monkeypatch.setattr(Path, "read_text", lambda *_, text=text, **__: text)
        assert bubblewrap._user() == user
