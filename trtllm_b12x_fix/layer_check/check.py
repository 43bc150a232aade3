"""The whole layer check: scales, arms, gates, and the layer at its own magnitude."""

from __future__ import annotations

import platform
from dataclasses import replace

import torch

from trtllm_b12x_fix import __version__
from trtllm_b12x_fix.checkpoint.findings import Finding
from trtllm_b12x_fix.emulator.arithmetic import KernelFamily
from trtllm_b12x_fix.emulator.grouped import describe
from trtllm_b12x_fix.layer import Projection
from trtllm_b12x_fix.layer_check import from_preset, gates
from trtllm_b12x_fix.layer_check.arms import Arm
from trtllm_b12x_fix.layer_check.result import Gate, LayerCheckResult, OwnMagnitude
from trtllm_b12x_fix.layer_check.run import LayerInput, Progress, RowCheck, Settings, run_arms
from trtllm_b12x_fix.layer_check.scales import damage
from trtllm_b12x_fix.repair import plan

#: Row count of the view at the layer's own magnitude; enough rows to be typical.
_OWN_MAGNITUDE_ROWS = 8


def check(
    subject: LayerInput,
    settings: Settings,
    limits: tuple[Gate, ...],
    progress: Progress,
    own_magnitude: LayerInput | None = None,
    findings: tuple[Finding, ...] = (),
    preset: from_preset.Loaded | None = None,
) -> LayerCheckResult:
    """Run every arm and judge.

    Args:
        own_magnitude: the same layer before its magnitude was moved, for the view that shows why
            small models look clean.
        findings: what loading the layer brought to light; damage among them is a finding of the
            check.
        preset: where the layer is a made-up one, what its figures are to be set beside.
    """
    progress("block scales")
    layer = subject.layer
    fc1, fc2 = (damage(layer.projection(which)) for which in Projection)
    results, families = run_arms(subject, settings, progress)
    outcomes = tuple(gates.apply(limit, results) for limit in limits)
    own = None
    if own_magnitude is not None:
        progress("own magnitude")
        own = _own_magnitude(own_magnitude, settings)
    chosen = plan(settings.contract, layer.activation)
    return LayerCheckResult(
        verdict=gates.verdict(outcomes, findings),
        source=layer.source,
        inputs=subject.inputs,
        shape=_shape(subject),
        flashinfer=settings.contract.version,
        contract_origin=settings.contract.origin.value,
        contract_exceptions=settings.contract.exceptions,
        plan=f"{chosen.strategy.value}: {chosen.reason}",
        input_scales=settings.input_scales,
        device=str(subject.x.device),
        seed=settings.seed,
        fc1=fc1,
        fc2=fc2,
        results=results,
        families=families,
        gates=outcomes,
        own_magnitude=own,
        findings=findings,
        versions=_versions(subject.x.device),
        preset=from_preset.compare(preset, fc1, results, families) if preset else None,
    )


def _own_magnitude(subject: LayerInput, settings: Settings) -> OwnMagnitude:
    rows = min(_OWN_MAGNITUDE_ROWS, max(settings.rows))
    # This view is about block scales: a direct micro that misreads input scales would drown it.
    contract = settings.contract.without(KernelFamily.DIRECT_MICRO)
    settings = replace(settings, contract=contract, forced=None)
    return OwnMagnitude(
        fc1=damage(subject.layer.fc1),
        fc2=damage(subject.layer.fc2),
        baked=RowCheck(subject, settings, rows).arm(Arm.BAKED),
    )


def _shape(subject: LayerInput) -> dict[str, int | str]:
    layer = subject.layer
    return {
        "hidden": layer.hidden,
        "intermediate": layer.intermediate,
        "logical_hidden": layer.logical_hidden,
        "logical_intermediate": layer.logical_intermediate,
        "experts": subject.experts,
        "experts_read": layer.experts,
        "top_k": subject.routing.expert_ids.shape[1],
        "activation": layer.activation.value,
    }


def _versions(device: torch.device) -> dict[str, str]:
    versions = {
        "trtllm_b12x_fix": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "matmul": describe(device),
    }
    if device.type == "cuda":
        versions["gpu"] = torch.cuda.get_device_name(device)
    return versions
