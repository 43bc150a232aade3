"""vLLM in this environment: whether its plugin would be loaded, and what it would do."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata

from trtllm_b12x_fix.doctor.environment import Gpu
from trtllm_b12x_fix.errors import B12xFixError
from trtllm_b12x_fix.integrations.installed import find_package
from trtllm_b12x_fix.settings import MODE, Mode, Settings

GROUP = "vllm.general_plugins"
PLUGIN = "trtllm_b12x_fix"
#: vLLM's own list of the plugins it may load.
ALLOWED = "VLLM_PLUGINS"
_NAME = "vllm"
#: Compute capability majors that the plugin does something on: b12x, and trtllm-gen.
_B12X_MAJOR, _TRTLLM_GEN_MAJOR = 12, 10


@dataclass(frozen=True)
class Vllm:
    """What was found.

    Attributes:
        why_off: why the plugin would not work, empty where it would.
        contract: of the installed FlashInfer, in words: what becomes of b12x layers.
    """

    version: str
    why_off: str
    contract: str

    @property
    def affected(self) -> str:
        """What is wrong without the plugin."""
        return (
            f"vLLM {self.version} bakes block scales with --moe-backend flashinfer_b12x "
            "(SM120, SM121) and runs non-gated NVFP4 layers on trtllm-gen (SM100)"
        )

    @property
    def note(self) -> str:
        """One sentence."""
        state = f"is off: {self.why_off}" if self.why_off else f"is on; {self.contract}"
        return f"{self.affected}; the plugin {state}"

    def not_concerned(self, gpus: Iterable[Gpu]) -> str:
        """Why nothing needs the plugin here, empty where something may."""
        known = [gpu for gpu in gpus if gpu.capability]
        majors = {gpu.capability[0] for gpu in known if gpu.capability}
        if not known or majors & {_B12X_MAJOR, _TRTLLM_GEN_MAJOR}:
            return ""
        names = ", ".join(sorted({f"{gpu.name} ({gpu.sm})" for gpu in known}))
        return f"vLLM {self.version} uses neither b12x nor trtllm-gen on {names}"


def read_vllm(environ: Mapping[str, str] | None = None) -> Vllm | None:
    """Look for vLLM, without importing it."""
    package = find_package(_NAME, _NAME)
    if not package.importable:
        return None
    environ = os.environ if environ is None else environ
    return Vllm(package.version or "of unknown version", _why_off(environ), _contract())


def _why_off(environ: Mapping[str, str]) -> str:
    try:
        if Settings.from_environment(environ, unset=Mode.AUTO).mode is Mode.OFF:
            return f"{MODE}=off"
    except B12xFixError as error:
        return str(error)
    if not any(one.name == PLUGIN for one in metadata.entry_points(group=GROUP)):
        return f"no installed package names it in {GROUP}: install this package again"
    allowed = environ.get(ALLOWED)
    if allowed is not None and PLUGIN not in [name.strip() for name in allowed.split(",")]:
        return f"{ALLOWED}={allowed[:200]} leaves {PLUGIN} out"
    return ""


def _contract() -> str:
    try:
        from trtllm_b12x_fix.integrations.flashinfer import installed_contract
        from trtllm_b12x_fix.layer import Activation
        from trtllm_b12x_fix.repair import plan

        contract = installed_contract()
    except Exception as error:  # no torch, a FlashInfer nobody knows: it would refuse, and say this
        return f"b12x layers would be refused: {' '.join(str(error).split())[:300]}"
    if contract is None:
        return "FlashInfer is not installed, so vLLM cannot use b12x"
    ways = [f"{one.value} {plan(contract, one).strategy.value}" for one in Activation]
    return f"b12x layers on FlashInfer {contract.version}: {', '.join(ways)}"
