"""Subcommands of ``python -m evals``, each its own module with NAME, HELP, ``add_arguments`` and
``run``.
"""

from __future__ import annotations

from types import ModuleType

from evals.commands import grade, power, sandbox

#: Every subcommand, in the order the help shows them.
COMMANDS: tuple[ModuleType, ...] = (sandbox, grade, power)
