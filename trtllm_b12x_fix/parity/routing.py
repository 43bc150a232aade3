"""Sigmoid routing with a bias, as the model means it and as trtllm-gen's kernel does it.

``RoutingMethodType.DeepSeekV3`` with at most one group runs through FlashInfer's ``routingCustom``
kernels: the key is sigmoid(logit) + bias in fp32, the weights are normalized sigmoids rounded to
bf16 (include/flashinfer/trtllm/fused_moe/RoutingCustomPolicy.cuh of the wheels 0.6.16.post3 and
0.7.2.post1; csrc/trtllm_fused_moe_runner.cu for what is called).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor

#: What the kernels add to the sum of weights.
_SUM_EPSILON = 1e-20


class WeightRecovery(enum.Enum):
    """Where the kernel takes a chosen expert's sigmoid from."""

    #: from its logit again, as FlashInfer does since flashinfer#3875
    RECOMPUTED = "recomputed"
    #: (sigmoid + bias) - bias in fp32: a small sigmoid drowns in a large bias
    SUBTRACTED = "subtracted"


@dataclass(frozen=True)
class Router:
    """What routes a batch: logits fp32 [T, E], bias fp32 [E], top-k, scale of the weights."""

    logits: Tensor
    bias: Tensor
    top_k: int
    scale: float = 1.0


@dataclass(frozen=True)
class Routes:
    """expert_ids int64 [T, K]; weights bf16 or fp32 [T, K]."""

    expert_ids: Tensor
    weights: Tensor


def expected(router: Router) -> Routes:
    """The model's own routing: fp32 keys, weights from fp64 sigmoids, fp32 [T, K]."""
    keys = _keys(router)
    chosen = keys.topk(router.top_k, dim=1).indices
    return Routes(chosen, _exact_weights(router, chosen))


def inside_kernel(router: Router, recovery: WeightRecovery) -> Routes:
    """The kernel's routing: bf16 weights; ties go to the lower expert."""
    keys = _keys(router)
    chosen = keys.sort(dim=1, descending=True, stable=True).indices[:, : router.top_k]
    if recovery is WeightRecovery.SUBTRACTED:
        score = keys.gather(1, chosen) - router.bias.float()[chosen]
    else:
        score = torch.sigmoid(router.logits.float()).gather(1, chosen)
    total = score.sum(dim=1, keepdim=True) + _SUM_EPSILON
    return Routes(chosen, (score * router.scale / total).to(torch.bfloat16))


def wrong_choices(router: Router, routes: Routes) -> int:
    """Tokens with an expert whose key is below the K-th largest, or with one expert twice.

    Which of several equal keys is taken is nobody's fault.
    """
    keys = _keys(router)
    limit = keys.topk(router.top_k, dim=1).values[:, -1:]
    below = (keys.gather(1, routes.expert_ids) < limit).any(dim=1)
    ordered = routes.expert_ids.sort(dim=1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]).any(dim=1)
    return int((below | twice).sum())


def weight_error(router: Router, routes: Routes) -> float:
    """Largest deviation of a weight from the exact one, relative to its token's largest weight."""
    exact = _exact_weights(router, routes.expert_ids).double()
    off = (routes.weights.double() - exact).abs().amax(dim=1) / exact.amax(dim=1)
    return float(off.max())


def exact_for(router: Router, routes: Routes) -> Routes:
    """The exact weights of a choice; of the model's own where the choice is wrong."""
    if wrong_choices(router, routes):
        return expected(router)
    return Routes(routes.expert_ids, _exact_weights(router, routes.expert_ids))


def unpack(packed: Tensor) -> Routes:
    """``(expert << 16) | bf16 bits`` int32 [T, K] to routes."""
    # The low half, shifted up, are the bits of the same number in fp32.
    weights = (packed << 16).contiguous().view(torch.float32)
    return Routes((packed >> 16).long(), weights.to(torch.bfloat16))


def pack(routes: Routes) -> Tensor:
    """Undo :func:`unpack`; weights are rounded to bf16."""
    bits = routes.weights.to(torch.bfloat16).contiguous().view(torch.int16).to(torch.int32)
    return (routes.expert_ids.to(torch.int32) << 16) | (bits & 0xFFFF)


def _keys(router: Router) -> Tensor:
    return torch.sigmoid(router.logits.float()) + router.bias.float()


def _exact_weights(router: Router, chosen: Tensor) -> Tensor:
    score = torch.sigmoid(router.logits.double()).gather(1, chosen)
    return (score * router.scale / score.sum(dim=1, keepdim=True)).float()
