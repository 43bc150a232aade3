"""A parity run as text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from trtllm_b12x_fix.metrics import Distance
from trtllm_b12x_fix.parity.arms import ArmResult, KernelReport, Status
from trtllm_b12x_fix.parity.result import CaseResult, PreparationReport, Verdict
from trtllm_b12x_fix.parity.routing import WeightRecovery
from trtllm_b12x_fix.parity.run import Grid, faults_by_suspect
from trtllm_b12x_fix.parity.suspects import REPORTED, Fault, Suspect
from trtllm_b12x_fix.report.text import bullet, grid, labelled, paragraph, percent, span

WAY_OUT = (
    "layers without a gate on B200, as long as the kernel has not been run and found right:\n"
    "  vllm serve MODEL --moe-backend flashinfer_cutlass"
)
_CASES = [
    "activation",
    "hidden",
    "as run",
    "inter.",
    "as run",
    "path",
    "router",
    "tokens",
    "fidelity",
    "true error",
    "of emulation",
    "faults",
]
_ARMS = [
    "activation",
    "hidden",
    "inter.",
    "arm",
    "tokens",
    "status",
    "fidelity",
    "true error",
    "emulation",
    "noise",
]
_LEGEND = (
    "fidelity: the output against the kernel's arithmetic on the layer as it is, nothing padded or "
    "moved, exact routing weights (bf16 ones cost 0.2 to 0.3%). true error, of the output and of "
    "that emulation: against fp64 on dequantized weights and unquantized activations."
)


@dataclass(frozen=True)
class Parity:
    """Both halves, each run or not."""

    grid: Grid
    preparation: PreparationReport | None
    why_no_preparation: str
    kernels: KernelReport | None
    why_no_kernels: str
    origin: str
    seed: int

    @property
    def verdict(self) -> Verdict:
        verdicts = [half.verdict for half in (self.preparation, self.kernels) if half is not None]
        for worst in (Verdict.FINDING, Verdict.INCONCLUSIVE):
            if worst in verdicts or not verdicts:
                return worst
        return Verdict.GOOD

    def outcomes(self) -> Iterator[tuple[Suspect, str, tuple[str, ...]]]:
        """(suspect, outcome in one word or two, what was found), the reported ones first."""
        found = self._found()
        order = [*REPORTED, *(one for one in Suspect if one not in REPORTED)]
        for suspect in order:
            if suspect in found:
                yield suspect, "FOUND", tuple(found[suspect])
            elif suspect is Suspect.KERNEL and self.kernels is None:
                yield suspect, "not run", ()
            else:
                yield suspect, "not found", ()

    def _found(self) -> dict[Suspect, list[str]]:
        found: dict[Suspect, list[str]] = {}
        if self.kernels is not None:
            for fault in self.kernels.named:
                found.setdefault(fault.suspect, []).append(f"real kernels: {fault.detail}")
        if self.preparation is not None:
            for suspect, pairs in faults_by_suspect(self.preparation.cases).items():
                found.setdefault(suspect, []).extend(_grouped(pairs))
        return found


def _grouped(pairs: list[tuple[CaseResult, Fault]]) -> list[str]:
    """Each detail once, with the cases it was seen in."""
    places: dict[str, list[CaseResult]] = {}
    for case, fault in pairs:
        places.setdefault(fault.detail, []).append(case)
    return [f"{detail} ({_where(cases)})" for detail, cases in places.items()]


def _where(cases: list[CaseResult]) -> str:
    def listed(values: list[str]) -> str:
        return ", ".join(dict.fromkeys(values))

    parts = [
        listed([case.activation.value for case in cases]),
        "hidden " + listed([str(case.hidden) for case in cases]),
        "intermediate " + listed([str(case.intermediate) for case in cases]),
        listed([case.path.value for case in cases]),
    ]
    regimes = list(dict.fromkeys(case.regime for case in cases))
    if len(regimes) == 1 and regimes[0].name != "near":
        parts.append(f"only with {regimes[0].origin}")
    return "; ".join(parts)


def render(result: Parity) -> str:
    """The report, ending in a newline."""
    parts = [_head(result), _suspects(result)]
    if result.preparation is not None:
        parts += _preparation(result.preparation)
    if result.kernels is not None:
        parts.append(_arms(result.kernels))
    parts.append(paragraph(_LEGEND))
    if result.kernels is None or result.kernels.verdict is not Verdict.GOOD:
        parts.append(WAY_OUT)
    return "\n\n".join(parts) + "\n"


def _head(result: Parity) -> str:
    lines = []
    prepared = result.preparation
    if prepared is not None:
        lines.append(
            labelled(
                "prepared",
                f"by vLLM {prepared.vllm}'s own code with FlashInfer {prepared.flashinfer}, on the "
                "CPU; the kernel EMULATED by its contract",
            )
        )
    else:
        lines.append(labelled("prepared", f"not judged: {result.why_no_preparation}"))
    if result.kernels is not None:
        vllm = f", vLLM {result.kernels.vllm}" if result.kernels.vllm else ", no vLLM"
        lines.append(
            labelled(
                "kernels",
                f"FlashInfer {result.kernels.flashinfer}'s own, on {result.kernels.device}{vllm}",
            )
        )
    else:
        lines.append(labelled("kernels", f"real kernels: not run: {result.why_no_kernels}"))
    shape = f"{result.grid.experts} experts, top-{result.grid.top_k}, seed {result.seed}"
    lines.append(labelled("layers", f"{shape}; {result.origin}"))
    verdict = "FINDING" if result.verdict is Verdict.FINDING else result.verdict.value
    return "\n".join(lines) + "\n\n" + labelled("VERDICT", verdict)


def _suspects(result: Parity) -> str:
    rows, notes = [], []
    for suspect, outcome, found in result.outcomes():
        reported = "vllm#52308" if suspect in REPORTED else ""
        rows.append([suspect.value, reported, outcome])
        notes += [bullet(f"{suspect.value}: {text}") for text in found]
    table = grid(["suspect", "reported in", "outcome"], rows, left=2)
    return "\n".join([table, *notes])


def _preparation(report: PreparationReport) -> Iterator[str]:
    lines: dict[tuple[object, ...], list[CaseResult]] = {}
    for case in report.cases:
        if not case.refused:
            key = (case.activation, case.hidden, case.intermediate, case.path, case.regime)
            lines.setdefault(key, []).append(case)
    yield grid(_CASES, [_line(cases) for cases in lines.values()], left=1)
    refused: dict[str, list[CaseResult]] = {}
    for case in report.cases:
        if case.refused:
            refused.setdefault(case.refused, []).append(case)
    if refused:
        why_not = [bullet(f"{why} ({_where(cases)})") for why, cases in refused.items()]
        yield "\n".join(["not judged", *why_not])
    yield "\n".join(["notes", *(bullet(text) for text in _notes(report))])


def _notes(report: PreparationReport) -> Iterator[str]:
    subtracted = report.recovery is WeightRecovery.SUBTRACTED
    how = "(sigmoid + bias) - bias" if subtracted else "the sigmoid of the logit"
    yield (
        f"routing in the kernel, by FlashInfer {report.flashinfer}'s source: weights are {how}, in "
        "fp32, rounded to bf16; with 160 experts and more some batches take another path"
    )
    yield from (f"stand-in: {text}" for text in report.stand_ins)


def _line(cases: list[CaseResult]) -> list[str]:
    """One line for what differs in tokens and routing_replay_out only."""
    case = cases[0]
    faults = [fault.suspect.value for one in cases for fault in one.faults]
    return [
        case.activation.value,
        str(case.hidden),
        str(case.padded_hidden),
        str(case.intermediate),
        str(case.padded_intermediate),
        case.path.value,
        case.regime.name,
        ",".join(dict.fromkeys(str(one.tokens) for one in cases)),
        _span([one.fidelity for one in cases]),
        _span([one.true_error for one in cases]),
        _span([one.emulation_error for one in cases]),
        ", ".join(dict.fromkeys(faults)) or "none",
    ]


def _arms(report: KernelReport) -> str:
    rows = [_arm(result) for result in report.arms if result.status is not Status.NOT_APPLICABLE]
    details = dict.fromkeys(
        f"{result.arm.value}: {result.status.value}: {result.detail}"
        for result in report.arms
        if result.detail
    )
    lines = [grid(_ARMS, rows, left=1), *(bullet(text) for text in details)]
    lines += [
        bullet(
            f"the control (CUTLASS) is wrong at {cell.activation.value}, hidden {cell.hidden}, "
            f"intermediate {cell.intermediate}, {cell.tokens} tokens: nothing follows there"
        )
        for cell in report.controls_failed
    ]
    noise = [result.noise for result in report.arms if result.noise is not None]
    if noise:
        lines.append(paragraph(f"noise between two runs: {span(noise)}."))
    return "\n".join(lines)


def _arm(result: ArmResult) -> list[str]:
    return [
        result.cell.activation.value,
        str(result.cell.hidden),
        str(result.cell.intermediate),
        result.arm.value,
        str(result.cell.tokens),
        result.status.value,
        _percent(result.fidelity),
        _percent(result.true_error),
        _percent(result.emulation_error),
        "-" if result.noise is None else percent(result.noise),
    ]


def _span(values: list[Distance | None]) -> str:
    known = [math.nan if value is None else value.relative_rms for value in values]
    return span(known) if any(known) else "exact"


def _percent(value: Distance | None) -> str:
    if value is None:
        return "-"
    return "exact" if value.relative_rms == 0 else percent(value.relative_rms)
