"""Arms: ways of passing scales, resolved against a kernel contract and a shape."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from trtllm_b12x_fix.emulator.arithmetic import KernelFamily
from trtllm_b12x_fix.emulator.contract import KernelContract, Shape
from trtllm_b12x_fix.errors import InputError
from trtllm_b12x_fix.repair import Strategy, plan


class Arm(enum.Enum):
    """What is compared. Values are the names on the command line."""

    FIX = "fix"  # what the repair really does on this version
    BAKED = "baked"  # upstream
    ALPHAS = "alphas"  # intact scales, naive: in the dispatch as it stands
    FP32_RESCALE = "fp32-rescale"
    UNIT = "unit"

    @property
    def report_name(self) -> str | None:
        """The arm's name in TensorRT-LLM#21461, where it has one."""
        return {Arm.BAKED: "wrapper-trt", Arm.ALPHAS: "wrapper-exact"}.get(self)


_STRATEGIES = {
    Arm.BAKED: Strategy.BAKED,
    Arm.ALPHAS: Strategy.ALPHAS,
    Arm.FP32_RESCALE: Strategy.FP32_RESCALE,
    Arm.UNIT: Strategy.UNIT,
}


@dataclass(frozen=True)
class ResolvedArm:
    """An arm on one shape: strategy and family, or ``family is None`` where decode leaves b12x."""

    arm: Arm
    strategy: Strategy
    family: KernelFamily | None
    note: str


def resolve(
    arm: Arm, contract: KernelContract, shape: Shape, forced: KernelFamily | None
) -> ResolvedArm:
    """Which strategy and kernel family an arm runs for this shape.

    Args:
        forced: the family asked for, ``None`` for the dispatch's own choice. The fix still keeps
            its families out.

    Raises:
        InputError: the forced family cannot run this shape on this version.
    """
    if forced is not None:
        _check_forced(contract, shape, forced)
    if arm is not Arm.FIX:
        return ResolvedArm(arm, _STRATEGIES[arm], forced or contract.select(shape), "")
    chosen = plan(contract, shape.activation)
    if chosen.strategy is Strategy.CUTLASS:
        return ResolvedArm(arm, chosen.strategy, None, chosen.reason)
    family = forced or contract.select(shape)
    if family in chosen.keep_out:
        family = contract.without(*chosen.keep_out).select(shape)
    return ResolvedArm(arm, chosen.strategy, family, "")


def _check_forced(contract: KernelContract, shape: Shape, forced: KernelFamily) -> None:
    # arithmetic() raises for a family the version never launches.
    contract.arithmetic(forced, shape)
    limit = None
    if forced is KernelFamily.DIRECT_MICRO and not contract.supports_direct_micro(shape):
        limit = "at most 8 tokens, hidden size a multiple of 128 up to 6144, top-k up to 32"
    too_many = contract.micro_max_tokens is not None and shape.tokens > contract.micro_max_tokens
    if forced is KernelFamily.MICRO and too_many:
        limit = f"at most {contract.micro_max_tokens} tokens"
    if limit:
        raise InputError(
            f"{forced.value} of FlashInfer {contract.version} takes {limit}; asked for "
            f"{shape.tokens} tokens, hidden {shape.hidden}, top-k {shape.top_k}. "
            "Choose smaller --rows, or --kernel auto."
        )
