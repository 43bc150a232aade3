"""Subcommands, each its own module with NAME, HELP, ``add_arguments`` and ``run``."""

from __future__ import annotations

from types import ModuleType

from trtllm_b12x_fix.commands import check_layer

#: Every subcommand, in the order the help shows them.
COMMANDS: tuple[ModuleType, ...] = (check_layer,)
