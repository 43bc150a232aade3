"""A run as text."""

from __future__ import annotations

from statistics import median

from evals.regress.document import Run, evidence
from evals.regress.generate import diverge
from evals.regress.judge import Verdict
from evals.regress.statistics import Estimate
from evals.regress.summary import FLOOR_CONFIDENCE

_HEADER = (
    f"{'arm':52} {'KL mean':>22} {'KL p99':>7} {'perplexity':>19} {'agree':>6} "
    f"{'lost':>6} {'gained':>6}"
)


def to_text(run: Run) -> str:
    """Everything a reader needs, checks first."""
    return "\n".join(
        [
            *_head(run),
            "",
            *_checks(run),
            "",
            *_arms(run),
            "",
            *_differences(run),
            *_generations(run),
            "",
            f"{_verdict(run.verdict)} ({run.seconds:.0f} s)",
        ]
    )


def _head(run: Run) -> list[str]:
    about = evidence(run.device)
    return [
        _suite(run),
        f"model    {run.inputs['model']}, {len(run.layers)} MLPs as 6 NVFP4 experts each",
        f"kernels  EMULATED on {about['device']}: no FP4 kernel ran",
        f"moved    to weight_scale_2 nearest 2e-5: {run.moved}",
    ]


def _suite(run: Run) -> str:
    inputs = run.inputs
    return (
        f"suite    {run.suite.name.value}: {inputs['documents']} documents, {inputs['tokens']:,} "
        f"tokens, {inputs['scored_tokens']:,} of solutions scored"
    )


def _checks(run: Run) -> list[str]:
    marks = {True: "ok  ", False: "FAIL", None: "----"}
    return [f"{marks[check.passed]} {check.name}: {check.detail}" for check in run.checks]


def _arms(run: Run) -> list[str]:
    lines = [
        "against bf16, 95% intervals over documents; lost, gained: gold token no longer, now first",
        _HEADER,
    ]
    for scored in run.scored:
        variant = scored.variant
        if scored.not_run:
            lines.append(f"{variant.name:52} not run: {scored.not_run}")
            continue
        m = run.summary.metrics(variant)
        lines.append(
            f"{variant.name:52} {_nats(m['kl_mean'])} {m['kl_p99'].value:7.3f} "
            f"{_change(m['perplexity_change'])} {m['top1_agreement'].value:6.1%} "
            f"{m['gold_lost'].value:6.1%} {m['gold_gained'].value:6.1%}"
        )
    return lines


def _differences(run: Run) -> list[str]:
    lines = ["paired differences of mean KL, beyond their interval and the A/A floor or not"]
    for each in run.comparisons:
        kl = each.metrics["kl_mean"]
        seen = "told apart" if each.told_apart("kl_mean") else "not told apart"
        lines.append(f"{each.left.name} minus {each.right.name}: {_nats(kl).strip()}, {seen}")
    for arm in dict.fromkeys(each.left.arm for each in run.comparisons if each.left.seed):
        floor = run.summary.floor(arm)
        lines.append(
            f"A/A floor of {arm.value} ({FLOOR_CONFIDENCE:.1%}): mean KL {floor['kl_mean']:.4f}, "
            f"perplexity {floor['perplexity_change']:.1%}, agreement {floor['top1_agreement']:.1%}"
        )
    return lines


def _generations(run: Run) -> list[str]:
    if not run.generations:
        return []
    lines = ["", "greedy generation beside bf16: same answers, median first divergence, length"]
    base = run.generations[0].tokens
    for each in run.generations[1:]:
        if each.not_run:
            lines.append(f"{each.variant.name:52} not run: {each.not_run}")
            continue
        found = diverge(each.tokens, base)
        first = median(len(a) if n is None else n for n, a in zip(found.first, base, strict=True))
        shift = sum(found.length_shift) / len(base)
        lines.append(f"{each.variant.name:52} {found.identical:6.1%} {first:6.1f} {shift:+6.1f}")
    return lines


def _verdict(verdict: Verdict) -> str:
    return {
        Verdict.GOOD: "GOOD: every check holds",
        Verdict.REGRESSION: "REGRESSION: a check failed",
        Verdict.INCOMPLETE: "INCOMPLETE: not everything was run",
    }[verdict]


def _nats(e: Estimate) -> str:
    return f"{e.value:8.4f} [{e.low:.3f}, {e.high:.3f}]"


def _change(e: Estimate) -> str:
    return f"{e.value:+7.1%} [{e.low:.0%}, {e.high:.0%}]"
