"""Small layers, routers and calls that the parity tests share."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from trtllm_b12x_fix.layer import Activation, MoELayer
from trtllm_b12x_fix.parity import contract
from trtllm_b12x_fix.parity.call import KernelCall
from trtllm_b12x_fix.parity.contract import Options
from trtllm_b12x_fix.parity.judge import Case
from trtllm_b12x_fix.parity.routing import Router
from trtllm_b12x_fix.presets import generate
from trtllm_b12x_fix.presets.shapes import NEMOTRON_3_NANO, LayerShape

EXPERTS, TOP_K, TOKENS = 4, 2, 9
#: Neither is a multiple of what the kernel pads to, so padding is always there.
HIDDEN = 192
INTERMEDIATE = {Activation.RELU2: 80, Activation.SILU: 48}


@cache
def make_layer(activation: Activation, hidden: int = HIDDEN, experts: int = EXPERTS) -> MoELayer:
    """A layer whose experts and projections have scales of their own."""
    shape = LayerShape(hidden, INTERMEDIATE[activation], experts, TOP_K, activation)
    return generate.make_layer(NEMOTRON_3_NANO, shape, range(experts), seed=3)


def make_tokens(count: int = TOKENS, hidden: int = HIDDEN) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(count, hidden, generator=generator).to(torch.bfloat16)


def make_router(count: int = TOKENS, experts: int = EXPERTS) -> Router:
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(count, experts, generator=generator)
    return Router(logits, torch.randn(experts, generator=generator) * 0.1, TOP_K)


def make_case(activation: Activation, count: int = TOKENS) -> Case:
    return Case(make_layer(activation), make_tokens(count), make_router(count))


def make_call(case: Case, options: Options | None = None) -> KernelCall:
    """What the contract wants for this case."""
    options = Options() if options is None else options
    return contract.make_call(contract.prepare(case.layer, options), case.x, case.router)
