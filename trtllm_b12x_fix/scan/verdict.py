"""The answer in one sentence, and what to do."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from trtllm_b12x_fix.checkpoint.files import Checkpoint
from trtllm_b12x_fix.checkpoint.findings import Severity
from trtllm_b12x_fix.checkpoint.layers import Stack
from trtllm_b12x_fix.scan.result import ProjectionResult, ScanFinding, Totals, Verdict

#: As ``doctor.model``: b12x runs such layers as W4A16 and bakes nothing.
W4A16 = "W4A16_NVFP4"
COMMAND = "trtllm-b12x-fix check-layer"
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
    bake = _bake(checkpoint, worst_first, totals, algorithm)
    if not damage:
        return bake
    kinds = sorted({finding.code for finding in damage})
    shown = ", ".join(kinds[:4]) + (f" and {len(kinds) - 4} more" if len(kinds) > 4 else "")
    reason = f"the file itself is damaged or incomplete: {shown} (see the findings)"
    if bake.verdict is Verdict.AFFECTED:
        reason += f"; beside that, {bake.reason}"
    return Opinion(Verdict.BROKEN, reason, ("mend or download the checkpoint first", *bake.advice))


def _bake(
    checkpoint: Checkpoint,
    worst_first: list[ProjectionResult],
    totals: Totals,
    algorithm: str | None,
) -> Opinion:
    if not worst_first:
        reason = "no NVFP4 mixture-of-experts layer that can be used"
        if dense := totals.dense_matrices:
            reason += f"; dense NVFP4 linears ({dense:,}) do not go through b12x's MoE kernels"
        else:
            reason += ", and no other NVFP4 matrix"
        return Opinion(Verdict.NOT_APPLICABLE, reason, ())
    if algorithm == W4A16:
        return Opinion(
            Verdict.NOT_APPLICABLE,
            f"{W4A16}: TensorRT-LLM runs these layers on b12x as W4A16 and bakes nothing",
            (),
        )
    if totals.affected_matrices:
        return _affected(checkpoint, worst_first[0], totals)
    mean = _percent(totals.damage.mean_error)
    part = " (of this one shard of several)" if checkpoint.partial else ""
    return Opinion(
        Verdict.CLEAN,
        f"not affected{part}: the b12x bake (TensorRT-LLM, vLLM and SGLang do it) moves block "
        f"scales by {mean} on average, as any second rounding to E4M3 does",
        (_check_layer(checkpoint, worst_first[0]),),
    )


def _affected(checkpoint: Checkpoint, worst: ProjectionResult, totals: Totals) -> Opinion:
    expert = worst.worst[0]
    place = f"{worst.layer}.{worst.projection}"
    if expert.expert is not None:
        place += f", expert {expert.expert}"
    damage = expert.damage
    return Opinion(
        Verdict.AFFECTED,
        f"the b12x bake (TensorRT-LLM, vLLM and SGLang do it) damages "
        f"{totals.affected_matrices:,} of {totals.matrices:,} matrices of experts; over all, "
        f"{_percent(totals.damage.zero_fraction)} of block scales become 0 and "
        f"{_percent(totals.damage.subnormal_fraction)} subnormal, mean error "
        f"{_percent(totals.damage.mean_error)}; worst is {place}: "
        f"{_percent(damage.zero_fraction)} become 0, mean error {_percent(damage.mean_error)}",
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
