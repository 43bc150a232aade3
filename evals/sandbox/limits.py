"""What a program may use before it counts as failed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of one program. Processes are none, writable files are none: those are not here.

    Time is counted in seconds of the CPU, so that a loaded machine gives the same verdicts. The
    wall clock only ends programs that sleep; it leaves a busy one twelve times its CPU limit.

    Attributes:
        cpu_seconds: of the program, interpreter's start included; whole seconds.
        wall_seconds: from the guest's first sign of life to the verdict.
        memory_bytes: address space.
        tasks: threads of the program, and two for the sandbox itself.
        open_files: file descriptors.
        output_bytes: printed by the program, both streams together.
        message_bytes: one answer of the function, as JSON.
        start_seconds: for the sandbox to come up, which is not the program's time.
    """

    cpu_seconds: int = 10
    wall_seconds: float = 120.0
    memory_bytes: int = 1 << 30
    tasks: int = 18
    open_files: int = 64
    output_bytes: int = 1 << 20
    message_bytes: int = 4 << 20
    start_seconds: float = 60.0
