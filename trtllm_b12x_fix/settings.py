"""The variables a user can set, all read here and nowhere else.

They are read when TensorRT-LLM's or vLLM's module is imported, not when Python starts: variables
that a launch script sets reach an MPI worker only after its start-up. An empty variable counts as
unset, as in a shell.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TypeVar

from trtllm_b12x_fix.errors import InputError

PREFIX = "TRTLLM_B12X_FIX"
MODE = PREFIX
ON_UNKNOWN = f"{PREFIX}_ON_UNKNOWN"
ACCUMULATE = f"{PREFIX}_ACCUMULATE"
VERIFY = f"{PREFIX}_VERIFY"
ACT_SCALE = f"{PREFIX}_ACT_SCALE"
LEDGER = f"{PREFIX}_LEDGER"

#: Every variable of ours; nothing else of the environment may be recorded anywhere.
VARIABLES = (MODE, ON_UNKNOWN, ACCUMULATE, VERIFY, ACT_SCALE, LEDGER)


class Mode(Enum):
    """How the repair passes weight_scale_2, or why it does not."""

    AUTO = "auto"
    ALPHAS = "alphas"
    FP32_RESCALE = "fp32-rescale"
    OFF = "off"
    NOT_ASKED = "not asked for"
    """The variable is unset. No variable can say this."""

    @property
    def wants_repair(self) -> bool:
        """Whether something is to be patched."""
        return self not in (Mode.OFF, Mode.NOT_ASKED)


class OnUnknown(Enum):
    """What to do about a TensorRT-LLM, vLLM or FlashInfer whose contract is not known."""

    FAIL = "fail"
    CUTLASS = "cutlass"


class Accumulate(Enum):
    """How the routes of one token are summed."""

    AUTO = "auto"
    FP32 = "fp32"


class Verify(Enum):
    """Which layers are checked after loading."""

    FIRST = "first"
    ALL = "all"
    OFF = "off"


class ActScale(Enum):
    """What vLLM's b12x layers quantize activations against."""

    CALIBRATED = "calibrated"
    """The checkpoint's input scales, the layer's largest; evals/act_scale.py says why."""
    UNIT = "unit"
    """1.0, as vLLM itself does."""


#: What TRTLLM_B12X_FIX may say.
MODES = tuple(mode for mode in Mode if mode is not Mode.NOT_ASKED)

_Choice = TypeVar("_Choice", bound=Enum)


@dataclass(frozen=True)
class Settings:
    """What the environment asks for."""

    mode: Mode = Mode.NOT_ASKED
    on_unknown: OnUnknown = OnUnknown.FAIL
    accumulate: Accumulate = Accumulate.AUTO
    verify: Verify = Verify.FIRST
    act_scale: ActScale = ActScale.CALIBRATED
    ledger: Path | None = None
    """None: the folder of this user below the system's folder for temporary files. A relative one
    is kept only where nothing is to be repaired, and used nowhere."""

    @classmethod
    def from_environment(
        cls, environ: Mapping[str, str] | None = None, unset: Mode = Mode.NOT_ASKED
    ) -> Settings:
        """Read all variables; with the repair off, the ones that steer it are not looked at.

        Args:
            unset: the mode where no variable names one.

        Raises:
            InputError: a value that is not allowed; names the variable, the value and what is.
        """
        environ = os.environ if environ is None else environ
        mode = mode_of(environ, unset)
        if not mode.wants_repair:
            return cls(mode=mode, ledger=Path(environ[LEDGER]) if environ.get(LEDGER) else None)
        return cls(
            mode=mode,
            on_unknown=_choice(environ, ON_UNKNOWN, tuple(OnUnknown), OnUnknown.FAIL),
            accumulate=_choice(environ, ACCUMULATE, tuple(Accumulate), Accumulate.AUTO),
            verify=_choice(environ, VERIFY, tuple(Verify), Verify.FIRST),
            act_scale=_choice(environ, ACT_SCALE, tuple(ActScale), ActScale.CALIBRATED),
            ledger=_absolute_ledger(environ),
        )


def mode_of(environ: Mapping[str, str], unset: Mode = Mode.NOT_ASKED) -> Mode:
    """The mode alone.

    Raises:
        InputError: the value is not allowed.
    """
    return _choice(environ, MODE, MODES, unset)


def ledger_directory(environ: Mapping[str, str] | None = None) -> Path:
    """Where processes leave word of what they did.

    Raises:
        InputError: the variable names a relative path.
    """
    environ = os.environ if environ is None else environ
    named = _absolute_ledger(environ)
    if named is not None:
        return named
    return Path(tempfile.gettempdir()) / f"trtllm-b12x-fix-{os.getuid()}"


def _absolute_ledger(environ: Mapping[str, str]) -> Path | None:
    value = environ.get(LEDGER)
    if not value:
        return None
    path = Path(value)
    if not path.is_absolute():
        # Workers change their folder: each would leave its record, and look for others, elsewhere.
        raise InputError(
            f"{LEDGER}={_shortened(value)} is a relative path: name the folder from the root, as "
            "in /tmp/ledger, or unset it"
        )
    return path


def own_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Our variables that are set, and nothing else."""
    environ = os.environ if environ is None else environ
    return {name: environ[name] for name in VARIABLES if environ.get(name)}


def _choice(
    environ: Mapping[str, str], variable: str, allowed: tuple[_Choice, ...], default: _Choice
) -> _Choice:
    value = environ.get(variable)
    if not value:
        return default
    for choice in allowed:
        if choice.value == value:
            return choice
    names = ", ".join(str(choice.value) for choice in allowed)
    raise InputError(f"{variable}={_shortened(value)} is not known: it may be {names}, or unset")


def _shortened(value: str) -> str:
    return repr(value if len(value) <= 40 else value[:40] + "...")
