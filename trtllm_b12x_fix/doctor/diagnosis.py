"""One verdict on an environment, with everything that led to it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from pathlib import Path

from trtllm_b12x_fix.doctor.advisories import Advisory, advisories_for, is_known
from trtllm_b12x_fix.doctor.environment import Environment, read_environment
from trtllm_b12x_fix.doctor.hold import Hold, patch_problem, would_hold
from trtllm_b12x_fix.doctor.model import Model, read_model
from trtllm_b12x_fix.doctor.switch import STARTUP_FILE, Switch, read_switch
from trtllm_b12x_fix.doctor.vllm import Vllm, read_vllm
from trtllm_b12x_fix.integrations.flashinfer_wrapper import find_flashinfer
from trtllm_b12x_fix.integrations.installed import Package
from trtllm_b12x_fix.integrations.trtllm_source import (
    CLASS,
    ScaleHandling,
    SourceError,
    SourceReading,
    find_tensorrt_llm,
    read_package,
)
from trtllm_b12x_fix.settings import MODE

#: b12x is built on GPUs of this major compute capability (SM120, SM121) alone.
B12X_MAJOR = 12


class Verdict(enum.Enum):
    """From good to bad; the value says which exit code it has."""

    NOT_AFFECTED = "not affected"
    FIXED = "affected, and the fix is on"
    AFFECTED = "affected"
    UNUSABLE = "unusable"
    NOTHING = "nothing to judge"

    @property
    def exit_code(self) -> int:
        """0 good, 1 finding, 2 unusable; nothing looked at is not good."""
        return {Verdict.AFFECTED: 1, Verdict.UNUSABLE: 2, Verdict.NOTHING: 2}.get(self, 0)


@dataclass(frozen=True)
class Facts:
    """What was found, before any judgement.

    Attributes:
        reading: of the file with b12x's class, ``None`` where there is none.
        damage: why that file cannot be read.
    """

    environment: Environment
    tensorrt_llm: Package
    flashinfer: Package
    switch: Switch
    reading: SourceReading | None = None
    damage: str = ""
    model: Model | None = None
    vllm: Vllm | None = None


@dataclass(frozen=True)
class Diagnosis:
    """Facts, and what follows from them.

    Attributes:
        reason: of the verdict, one sentence.
        hold: ``None`` where nothing is to be repaired.
        to_do: what leads to a better verdict.
        notes: what is odd, and changes no verdict.
    """

    facts: Facts
    verdict: Verdict
    reason: str
    hold: Hold | None = None
    advisories: tuple[Advisory, ...] = ()
    advisories_known: bool = True
    to_do: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())


def gather(model: Path | None) -> Facts:
    """Look at this environment.

    Raises:
        B12xFixError: the model cannot be read.
    """
    found = None if model is None else read_model(model)
    package = find_tensorrt_llm()
    reading, damage = None, ""
    if package.folder is not None:
        try:
            reading = read_package(package.folder)
        except SourceError as error:
            damage = str(error)
    return Facts(
        environment=read_environment(),
        tensorrt_llm=package,
        flashinfer=find_flashinfer(),
        switch=read_switch(),
        reading=reading,
        damage=damage,
        model=found,
        vllm=read_vllm(),
    )


def diagnose(facts: Facts) -> Diagnosis:
    """Judge the facts."""
    verdict, reason, hold, to_do = _verdict(facts)
    version = facts.flashinfer.version if facts.flashinfer.importable else None
    shapes = facts.model.shapes if facts.model else ()
    return Diagnosis(
        facts=facts,
        verdict=verdict,
        reason=reason,
        hold=hold,
        advisories=advisories_for(version, shapes) if version else (),
        advisories_known=version is None or is_known(version),
        to_do=to_do,
        notes=_notes(facts),
    )


_Judgement = tuple[Verdict, str, Hold | None, tuple[str, ...]]


def _verdict(facts: Facts) -> _Judgement:
    if facts.damage:
        ways = ("install TensorRT-LLM again",)
        return Verdict.UNUSABLE, f"TensorRT-LLM cannot be judged: {facts.damage}", None, ways
    if not facts.tensorrt_llm.importable:
        if facts.vllm is not None:
            return _vllm_alone(facts, facts.vllm)
        reason = f"TensorRT-LLM is not installed for this Python ({facts.tensorrt_llm.kind.value})"
        return Verdict.NOTHING, reason, None, ("run this with the server's Python",)
    if reason := _not_affected(facts):
        return Verdict.NOT_AFFECTED, reason, None, ()
    reading = facts.reading
    assert reading is not None
    if reading.handling is ScaleHandling.PATCHED:
        return _patched(facts, reading)
    hold = would_hold(facts.switch, reading, facts.model)
    off = facts.switch.why_off()
    what = _what(facts, reading)
    if not off and hold.holds:
        return Verdict.FIXED, f"{what}; the fix is on and holds", hold, ()
    wrong = [off] if off else []
    wrong += [hold.unknown] if hold.unknown else []
    wrong += [*hold.refusals, *(one.reason for one in hold.layers if one.strategy is None)]
    state = "the fix is off" if off else "the fix would refuse"
    if hold.unknown and not off:
        state = "whether the fix would hold is unknown"
    reason = f"{what}, and {state}: {'; '.join(dict.fromkeys(wrong))}"
    return Verdict.AFFECTED, reason, hold, (*_switch_on(facts.switch), *hold.way_out)


def _vllm_alone(facts: Facts, vllm: Vllm) -> _Judgement:
    if reason := vllm.not_concerned(facts.environment.gpus):
        return Verdict.NOT_AFFECTED, reason, None, ()
    if vllm.why_off:
        ways = ("let vLLM load the plugin, or choose --moe-backend flashinfer_cutlass",)
        return Verdict.AFFECTED, vllm.note, None, ways
    return Verdict.FIXED, vllm.note, None, ()


def _what(facts: Facts, reading: SourceReading) -> str:
    where = f"TensorRT-LLM {facts.tensorrt_llm.version or 'of unknown version'}"
    if reading.handling is ScaleHandling.UNKNOWN:
        return f"{where} may bake block scales ({reading.reason})"
    return f"{where} bakes block scales in {CLASS}.{reading.hook}"


def _not_affected(facts: Facts) -> str:
    """Why nothing needs a repair, empty where something may."""
    reading, gpus = facts.reading, facts.environment.gpus
    if reading is None:
        return f"this TensorRT-LLM has no {CLASS} and makes no b12x wrapper"
    if reading.handling is ScaleHandling.INTACT:
        return "this TensorRT-LLM keeps block scales intact"
    if gpus and all(gpu.capability and gpu.capability[0] != B12X_MAJOR for gpu in gpus):
        names = ", ".join(sorted({f"{gpu.name} ({gpu.sm})" for gpu in gpus}))
        return f"the b12x class is never built on {names}, only on SM120 and SM121"
    model = facts.model
    if model is not None and not model.shapes and not model.unusable:
        return f"{model.name} has no NVFP4 mixture-of-experts layer"
    if model is not None and model.is_weight_only and reading.w4a16_exempt:
        return f"{model.name} is {model.quant_algo}, which this TensorRT-LLM does not bake"
    return ""


def _patched(facts: Facts, reading: SourceReading) -> _Judgement:
    if problem := patch_problem(reading, facts.flashinfer):
        ways = ("install FlashInfer 0.6.17 or later", "make the patch again for this FlashInfer")
        return Verdict.AFFECTED, f"quantization.py is patched, but {problem}", None, ways
    reason = f"quantization.py is patched (emit-patch, strategy {reading.patch_strategy})"
    return Verdict.NOT_AFFECTED, reason, None, ()


def _switch_on(switch: Switch) -> tuple[str, ...]:
    ways = []
    if switch.problem:
        ways.append("correct that variable, or unset it")
    elif not switch.mode.wants_repair:
        ways.append(
            "start the server with `trtllm-b12x-fix run -- COMMAND`, or set "
            f"{MODE}=auto in its environment (`trtllm-b12x-fix run -- trtllm-b12x-fix doctor` "
            "judges with it on)"
        )
    if not switch.hooked:
        ways.append(
            f"install this package again, so that {STARTUP_FILE} is in site-packages"
            if not switch.startup_files
            else "run the server with the Python whose site-packages hold the start-up file"
        )
        ways.append("or put `import trtllm_b12x_fix.auto` at the top of the launch script")
    return tuple(ways)


def _notes(facts: Facts) -> tuple[str, ...]:
    notes = [*facts.tensorrt_llm.notes(), *facts.flashinfer.notes()]
    notes += facts.environment.cutlass.problems
    reading = facts.reading
    if reading is not None and reading.w4a16_exempt is False:
        notes.append("W4A16_NVFP4 layers are not told apart by this TensorRT-LLM")
    if reading is not None and reading.handling is ScaleHandling.INTACT and reading.unknown_hook:
        notes.append(
            f"{reading.unknown_hook}: the fix would refuse this class, which needs none: leave "
            f"{MODE} unset"
        )
    if facts.model is not None:
        notes += facts.model.unusable
    if facts.vllm is not None and facts.tensorrt_llm.importable:
        notes.append(facts.vllm.note)
    return tuple(notes)
