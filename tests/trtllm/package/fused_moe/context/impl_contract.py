"""What a scheduler hands to a layer's ``run_moe``."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MoECommPlan:
    """How the call fits into communication between ranks."""

    moe_output: torch.Tensor | None = None
    input_sf_swizzled: bool = False
    enable_alltoall: bool = False


@dataclass(frozen=True)
class MoERunContext:
    """One call: activations as ``quantize_input`` left them, and the routing."""

    x: torch.Tensor
    token_selected_experts: torch.Tensor
    token_final_scales: torch.Tensor
    x_sf: torch.Tensor | None = None
    output_dtype: torch.dtype | None = None
    comm_plan: MoECommPlan | None = None


def require_comm_plan(owner, ctx) -> MoECommPlan:
    """The call's plan; a call without one is a mistake of whoever drives the layer."""
    if ctx.comm_plan is None:
        raise RuntimeError(f"{type(owner).__name__}.run_moe needs a communication plan")
    return ctx.comm_plan
