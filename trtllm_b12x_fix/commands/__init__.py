"""Subcommands, each its own module with NAME, HELP, ``add_arguments`` and ``run``."""

from __future__ import annotations

from types import ModuleType

from trtllm_b12x_fix.commands import check_layer, doctor, emit_patch, run, scan, status

#: Every subcommand, in the order the help shows them.
COMMANDS: tuple[ModuleType, ...] = (doctor, run, status, scan, check_layer, emit_patch)
