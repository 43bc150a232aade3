"""Whether the fix is on: the variables, and whether the start-up file reached this interpreter."""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trtllm_b12x_fix import startup
from trtllm_b12x_fix.errors import InputError
from trtllm_b12x_fix.settings import MODE, VARIABLES, Mode, Settings

STARTUP_FILE = "trtllm_b12x_fix.pth"
FORCE_W4A16 = "FLASHINFER_B12X_FORCE_MOE_W4A16"
CUTOVER = "FLASHINFER_B12X_STATIC_COMPACT_CUTOVER_PAIRS"
SINGLE_PROCESS = "TLLM_WORKER_USE_SINGLE_PROCESS"
#: Nothing else of the environment is ever shown.
SHOWN = (*VARIABLES, FORCE_W4A16, CUTOVER, SINGLE_PROCESS)
_LONGEST_VALUE = 200


@dataclass(frozen=True)
class Switch:
    """What the environment asks for, and whether anything would read it.

    Attributes:
        variables: those of :data:`SHOWN` that are set.
        settings: ``None`` where a variable has a value that is not known; ``problem`` says which.
        startup_files: every copy of the start-up file on the path.
        hooked: whether the hook is in place in this interpreter.
    """

    variables: Mapping[str, str]
    settings: Settings | None
    problem: str
    startup_files: tuple[str, ...]
    hooked: bool

    @property
    def mode(self) -> Mode:
        """What was asked for; with an unknown value, as if nothing was."""
        return self.settings.mode if self.settings else Mode.NOT_ASKED

    @property
    def is_on(self) -> bool:
        """Whether a process started like this one would repair what it imports."""
        return self.hooked and self.mode.wants_repair

    @property
    def forces_w4a16(self) -> bool:
        """FlashInfer then reads the alphas otherwise, and the fix refuses."""
        return self.variables.get(FORCE_W4A16) == "1"

    def why_off(self) -> str:
        """One sentence, empty where it is on."""
        if self.problem:
            return self.problem
        if self.mode is Mode.NOT_ASKED:
            return f"{MODE} is not set"
        if self.mode is Mode.OFF:
            return f"{MODE}=off"
        if not self.hooked and self.startup_files:
            return (
                f"{MODE}={self.mode.value}, but {STARTUP_FILE} did not run in this interpreter "
                "(python -S, or it failed)"
            )
        if not self.hooked:
            return f"{MODE}={self.mode.value}, but {STARTUP_FILE} is missing, so nothing reads it"
        return ""


def read_switch(environ: Mapping[str, str] | None = None) -> Switch:
    """Look at the environment and at this interpreter."""
    environ = os.environ if environ is None else environ
    shown = {name: environ[name][:_LONGEST_VALUE] for name in SHOWN if environ.get(name)}
    settings, problem = None, ""
    try:
        settings = Settings.from_environment(environ)
    except InputError as error:
        problem = str(error)
    return Switch(shown, settings, problem, startup_files(), startup.is_in_place())


def startup_files() -> tuple[str, ...]:
    """Copies of the start-up file where ``site`` looks for such files."""
    folders = [*site.getsitepackages(), *(p for p in sys.path if p.endswith("-packages"))]
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    found = (Path(folder) / STARTUP_FILE for folder in dict.fromkeys(folders))
    return tuple(str(file) for file in found if file.is_file())
