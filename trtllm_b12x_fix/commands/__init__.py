"""Subcommands, each its own module with NAME, HELP, ``add_arguments`` and ``run``."""

from __future__ import annotations

from types import ModuleType

from trtllm_b12x_fix.commands import (
    canary,
    check_layer,
    doctor,
    emit_patch,
    parity,
    run,
    scan,
    status,
)

#: Every subcommand, in the order the help shows them.
COMMANDS: tuple[ModuleType, ...] = (
    doctor,
    run,
    status,
    scan,
    check_layer,
    parity,
    canary,
    emit_patch,
)
