"""The answer in one sentence, and what to do."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from trtllm_b12x_fix.checkpoint.declared import W4A16
from trtllm_b12x_fix.checkpoint.files import Checkpoint
from trtllm_b12x_fix.checkpoint.findings import Severity
from trtllm_b12x_fix.checkpoint.layers import Stack
from trtllm_b12x_fix.scan import completeness
from trtllm_b12x_fix.scan.bake import Bake
from trtllm_b12x_fix.scan.findings import Code
from trtllm_b12x_fix.scan.result import (
    ExpertDamage,
    ProjectionResult,
    ScanFinding,
    Totals,
    Verdict,
)

COMMAND = "trtllm-b12x-fix check-layer"
_WEIGHTS = "scan with --weights: it reads the codes and tells zeros from weights"
_FIX = (
    "TensorRT-LLM: serve with the fix (trtllm-b12x-fix run -- trtllm-serve ...), or set "
    "moe_config.backend: CUTLASS"
)


@dataclass(frozen=True)
class Opinion:
    """Verdict, why, and what to do."""

    verdict: Verdict
    reason: str
    advice: tuple[str, ...]


def judge(
    checkpoint: Checkpoint,
    worst_first: list[ProjectionResult],
    totals: Totals,
    findings: tuple[ScanFinding, ...],
    algorithm: str | None,
) -> Opinion:
    """Damage in the file goes first: what the bake would do to a broken file is a second question.

    Args:
        worst_first: projections of usable layers of experts.
    """
    damage = [finding for finding in findings if finding.severity is Severity.DAMAGE]
    codes = {finding.code for finding in findings}
    baked = [one for one in worst_first if one.bake is Bake.YES]
    bake = _bake(checkpoint, worst_first, baked, totals, codes, algorithm)
    holes = _holes(baked, totals)
    if not damage and not holes:
        return bake
    reasons = []
    if damage:
        kinds = sorted({finding.code for finding in damage})
        shown = ", ".join(kinds[:4]) + (f" and {len(kinds) - 4} more" if len(kinds) > 4 else "")
        reasons.append(
            f"the file itself is damaged or incomplete: {shown} (see the findings)"
            f"{_restriction(checkpoint)}"
        )
    reasons += holes
    if bake.verdict is Verdict.AFFECTED:
        reasons.append(f"beside that, {bake.reason}")
    first = "mend or download the checkpoint first"
    if completeness.is_one_shard(checkpoint):
        first = "scan the folder or its index instead of one shard"
    elif not damage and totals.undecided_matrices:
        first = _WEIGHTS
    return Opinion(Verdict.BROKEN, "; ".join(reasons), (first, *bake.advice))


def _holes(baked: list[ProjectionResult], totals: Totals) -> list[str]:
    """What was not judged: no verdict on the bake can be given for it."""
    holes = []
    if totals.unjudged_matrices:
        every = totals.judged_matrices + totals.unjudged_matrices
        holes.append(
            f"incomplete: {totals.judged_matrices:,} of {every:,} matrices of experts were judged"
        )
    if baked and totals.judged_matrices and not totals.damage.blocks:
        why = "their blocks are all zero, or unusable"
        if totals.undecided_matrices:
            why = (
                f"{totals.undecided_matrices:,} have nothing but scales of 1.0 and are undecided "
                "(run --weights)"
            )
        holes.append(f"no block scale of the matrices of experts could be counted: {why}")
    return holes


def _restriction(checkpoint: Checkpoint) -> str:
    part = completeness.is_one_shard(checkpoint)
    return " (of this one shard of several; the others were not looked at)" if part else ""


def _bake(
    checkpoint: Checkpoint,
    worst_first: list[ProjectionResult],
    baked: list[ProjectionResult],
    totals: Totals,
    codes: set[str],
    algorithm: str | None,
) -> Opinion:
    part = _restriction(checkpoint)
    if worst_first and not baked:
        return Opinion(Verdict.NOT_APPLICABLE, _unbaked(worst_first, algorithm) + part, ())
    if not worst_first:
        return Opinion(Verdict.NOT_APPLICABLE, _nothing(totals, codes) + part, ())
    caveats = _caveats(worst_first, totals, codes)
    if totals.affected_matrices:
        return _affected(checkpoint, baked[0], totals, part + caveats)
    mean = _percent(totals.damage.mean_error)
    reason = (
        f"not affected{part}: the b12x bake (TensorRT-LLM, vLLM and SGLang do it) moves block "
        f"scales by {mean} on average over all {totals.judged_matrices:,} matrices of experts"
    )
    worst = max(
        (one for one in baked if one.most_zeros),
        key=lambda one: one.most_zeros.damage.zero_fraction if one.most_zeros else 0.0,
        default=None,
    )
    if worst is None or worst.most_zeros is None:
        reason += ", as any second rounding to E4M3 does"
    else:
        damage = worst.most_zeros.damage
        reason += (
            f"; most become 0 in {_place(worst, worst.most_zeros)}: "
            f"{_percent(damage.zero_fraction)} of its block scales, and "
            f"{_percent(damage.subnormal_fraction)} subnormal, below the limit of 5% RMS"
        )
    steps = [_check_layer(checkpoint, baked[0])]
    if caveats and (totals.undecided_matrices or Code.ASSUMPTION.value in codes):
        steps.insert(0, _WEIGHTS)
    return Opinion(Verdict.CLEAN, reason + caveats, tuple(steps))


def _unbaked(worst_first: list[ProjectionResult], algorithm: str | None) -> str:
    """Why the bake touches none of the layers that are there."""
    if any(one.bake is Bake.NOT_RUN for one in worst_first):
        return (
            f"{algorithm or 'activations of another format'}: b12x takes NVFP4 activations, or "
            "none, so these layers do not run on it and nothing is baked"
        )
    why = W4A16 if algorithm == W4A16 else "W4A16 (weight-only)"
    return f"{why}: TensorRT-LLM runs these layers on b12x as W4A16 and bakes nothing"


def _nothing(totals: Totals, codes: set[str]) -> str:
    """Why there is nothing to bake."""
    if Code.NOT_RUN.value in codes:
        return "the layers of NVFP4 experts are not run by b12x (see the findings)"
    reason = "no NVFP4 mixture-of-experts layer that can be used"
    if dense := totals.dense_matrices:
        return (
            f"{reason}; what is there has the names of dense NVFP4 linears ({dense:,}), and those "
            "do not go through b12x's MoE kernels"
        )
    return f"{reason}, and no other NVFP4 matrix"


def _caveats(worst_first: list[ProjectionResult], totals: Totals, codes: set[str]) -> str:
    text = ""
    if totals.undecided_matrices:
        text += (
            f"; {totals.undecided_matrices:,} matrices of nothing but scales of 1.0 are undecided "
            "(run --weights)"
        )
    if Code.ASSUMPTION.value in codes:
        text += "; it depends on what stands under scales of 1.0 (run --weights)"
    if unbaked := len({one.layer for one in worst_first if one.bake is not Bake.YES}):
        text += (
            f"; {unbaked:,} layers are not baked (W4A16, or activations that b12x does not take)"
        )
    return text


def _place(projection: ProjectionResult, expert: ExpertDamage) -> str:
    place = f"{projection.layer}.{projection.projection}"
    return place if expert.expert is None else f"{place}, expert {expert.expert}"


def _affected(
    checkpoint: Checkpoint, worst: ProjectionResult, totals: Totals, caveats: str
) -> Opinion:
    expert = worst.worst[0]
    place, damage = _place(worst, expert), expert.damage
    return Opinion(
        Verdict.AFFECTED,
        f"the b12x bake (TensorRT-LLM, vLLM and SGLang do it) damages "
        f"{totals.affected_matrices:,} of {totals.matrices:,} matrices of experts; over all, "
        f"{_percent(totals.damage.zero_fraction)} of block scales become 0 and "
        f"{_percent(totals.damage.subnormal_fraction)} subnormal, mean error "
        f"{_percent(totals.damage.mean_error)}; worst is {place}: "
        f"{_percent(damage.zero_fraction)} become 0, mean error {_percent(damage.mean_error)}"
        f"{caveats}",
        (
            _FIX,
            "vLLM, SGLang: leave their opt-in b12x backend off; CUTLASS keeps block scales intact",
            _check_layer(checkpoint, worst),
        ),
    )


def _check_layer(checkpoint: Checkpoint, worst: ProjectionResult) -> str:
    own = worst.stack is Stack.MODEL and worst.number is not None
    layer = str(worst.number) if own else worst.layer
    return (
        f"what it costs in the layer's output: {COMMAND} --checkpoint "
        f"{shlex.quote(str(checkpoint.path))} --layer {shlex.quote(layer)}"
    )


def _percent(fraction: float) -> str:
    if fraction == 0:
        return "0%"
    digits = 1 if fraction >= 0.1 else 2
    return f"{100 * fraction:.{digits}f}%" if fraction >= 0.0001 else f"{100 * fraction:.1e}%"
