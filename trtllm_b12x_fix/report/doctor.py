"""What doctor found, as text and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from trtllm_b12x_fix import __version__
from trtllm_b12x_fix.doctor.advisories import Advisory, human_bytes
from trtllm_b12x_fix.doctor.diagnosis import Diagnosis, Facts, Verdict
from trtllm_b12x_fix.doctor.hold import Hold
from trtllm_b12x_fix.doctor.switch import SHOWN, SINGLE_PROCESS
from trtllm_b12x_fix.integrations.installed import Package
from trtllm_b12x_fix.integrations.trtllm_source import SourceReading
from trtllm_b12x_fix.report.text import bullet, labelled, printable

SCHEMA = "trtllm-b12x-fix/doctor/1"
_WIDTH = 22
_WORDS = {
    Verdict.NOT_AFFECTED: "good",
    Verdict.FIXED: "good",
    Verdict.AFFECTED: "FINDING",
    Verdict.UNUSABLE: "UNUSABLE",
    Verdict.NOTHING: "UNUSABLE",
}


def render(diagnosis: Diagnosis) -> str:
    """The report, ending in a newline."""
    word = _WORDS[diagnosis.verdict]
    parts = [labelled("VERDICT", f"{word}: {diagnosis.reason}"), _installed(diagnosis.facts)]
    if diagnosis.facts.reading is not None:
        parts.append(_source(diagnosis.facts.reading))
    parts.append(_switch(diagnosis.facts))
    if diagnosis.hold is not None:
        parts.append(_hold(diagnosis.hold))
    parts.append(_advisories(diagnosis))
    for title, lines in (("notes", diagnosis.notes), ("what to do", diagnosis.to_do)):
        if lines:
            parts.append("\n".join([title, *map(bullet, lines)]))
    return "\n\n".join(part for part in parts if part) + "\n"


def _row(label: str, text: object) -> str:
    return f"  {label:<{_WIDTH}}{printable(str(text))}"


def _installed(facts: Facts) -> str:
    environment = facts.environment
    torch = environment.torch or "not installed"
    if environment.torch_cuda:
        torch += f", built for CUDA {environment.torch_cuda}"
    cutlass = environment.cutlass.version or "not installed"
    if environment.cutlass.payloads:
        cutlass += f" ({', '.join(name for name, _ in environment.cutlass.payloads)})"
    gpus = ", ".join(f"{gpu.name} ({gpu.sm})" for gpu in environment.gpus)
    rows = [
        "this Python",
        _row("tensorrt_llm", _package(facts.tensorrt_llm)),
        *([] if facts.vllm is None else [_row("vllm", facts.vllm.version)]),
        _row("flashinfer-python", _package(facts.flashinfer)),
        _row("nvidia-cutlass-dsl", cutlass),
        _row("torch", torch),
        _row("python", environment.python),
        _row("NVIDIA driver", environment.driver or "unknown"),
        _row("GPU", gpus or "unknown"),
    ]
    if facts.model is not None:
        shapes = "; ".join(map(str, facts.model.shapes)) or "no NVFP4 mixture-of-experts layer"
        rows.append(_row("model", f"{facts.model.name}: {shapes}"))
    return "\n".join(rows)


def _package(package: Package) -> str:
    if package.importable:
        return f"{package.version or 'unknown version'} ({package.kind.value})"
    return package.kind.value


def _source(reading: SourceReading) -> str:
    rows = [
        "TensorRT-LLM's b12x class",
        _row("module", reading.module),
        _row("file", reading.path),
        _row("block scales", reading.handling.value),
    ]
    if reading.hook:
        line = f", line {reading.line}" if reading.line else ""
        rows.append(_row("in", f"{reading.hook}{line}"))
        if reading.w4a16_exempt is not None:
            rows.append(_row("W4A16_NVFP4", "left alone" if reading.w4a16_exempt else "baked, too"))
        rows.append(_row("wrapper gets", _wrapper(reading)))
    return "\n".join(rows)


def _wrapper(reading: SourceReading) -> str:
    mode = "quant_mode" if reading.quant_mode else "no quant_mode"
    return f"{mode}; intermediate size: {reading.told_size.value}"


def _switch(facts: Facts) -> str:
    switch = facts.switch
    rows = ["the fix", _row("asked for", "yes" if switch.mode.wants_repair else switch.mode.value)]
    reached = "in place in this interpreter" if switch.hooked else "not in this interpreter"
    there = "start-up file present" if switch.startup_files else "no start-up file"
    rows.append(_row("import hook", f"{reached}; {there}"))
    set_here = [name for name in SHOWN if name in switch.variables]
    rows += [f"  {name}={printable(switch.variables[name])}" for name in set_here]
    if SINGLE_PROCESS not in switch.variables:
        words = "spawned: what is patched in the launching process alone does not reach them"
        rows.append(_row("workers", words))
    return "\n".join(rows)


def _hold(hold: Hold) -> str:
    rows = ["what the fix would do"]
    if hold.unknown:
        rows.append(bullet(hold.unknown))
    rows += [bullet(f"refuse: {words}") for words in hold.refusals]
    for layer in hold.layers:
        rows.append(bullet(f"{layer.activation}: {layer.strategy or 'refuse'}: {layer.reason}"))
    return "\n".join(rows)


def _advisories(diagnosis: Diagnosis) -> str:
    version = diagnosis.facts.flashinfer.version
    if not diagnosis.advisories_known:
        return (
            f"FlashInfer {printable(str(version))}: its kernels were not read, so nothing is said"
        )
    if not diagnosis.advisories:
        return ""
    lines = [f"known flaws of FlashInfer {printable(str(version))}'s b12x kernels"]
    for one in diagnosis.advisories:
        lines.append(bullet(_sentence(one)))
        lines += [f"  {bullet(shape)}" for shape in one.shapes]
    return "\n".join(lines)


def _sentence(advisory: Advisory) -> str:
    parts = [advisory.text]
    if advisory.bytes is not None:
        parts.append(f"here {human_bytes(advisory.bytes)} in all")
    if advisory.fix_helps:
        parts.append(advisory.fix_helps)
    parts.append(f"gone in {advisory.cured_by}" if advisory.cured_by else "no version is without")
    return f"{advisory.key.value}: {'; '.join(parts)}"


def to_json(diagnosis: Diagnosis) -> str:
    """Everything, ending in a newline."""
    facts = diagnosis.facts
    document = {
        "schema": SCHEMA,
        "tool": __version__,
        "verdict": diagnosis.verdict.value,
        "exit_code": diagnosis.verdict.exit_code,
        "reason": diagnosis.reason,
        "environment": asdict(facts.environment),
        "tensorrt_llm": _package_json(facts.tensorrt_llm),
        "flashinfer": _package_json(facts.flashinfer),
        "vllm": None if facts.vllm is None else asdict(facts.vllm),
        "source": None if facts.reading is None else _plain(asdict(facts.reading)),
        "damage": facts.damage,
        "switch": _switch_json(facts),
        "hold": None
        if diagnosis.hold is None
        else {"holds": diagnosis.hold.holds, **asdict(diagnosis.hold)},
        "model": None if facts.model is None else asdict(facts.model),
        "advisories_known": diagnosis.advisories_known,
        "advisories": [_plain(asdict(one)) for one in diagnosis.advisories],
        "to_do": diagnosis.to_do,
        "notes": diagnosis.notes,
    }
    return json.dumps(document, indent=2) + "\n"


def _switch_json(facts: Facts) -> dict[str, Any]:
    switch = facts.switch
    return {
        "on": switch.is_on,
        "why_off": switch.why_off(),
        "mode": switch.mode.value,
        "hooked": switch.hooked,
        "startup_files": switch.startup_files,
        "variables": dict(switch.variables),
    }


def _package_json(package: Package) -> dict[str, Any]:
    return {"version": package.version, "notes": package.notes(), **_plain(asdict(package))}


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Enums as their values, paths as text."""
    simple = (str, int, float, bool, list, tuple, dict, type(None))
    return {
        name: value if isinstance(value, simple) else str(getattr(value, "value", value))
        for name, value in values.items()
    }
