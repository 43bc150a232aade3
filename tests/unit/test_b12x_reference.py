"""The emulator in the published arithmetic against the published code itself.

b12x's ``moe_reference_nvfp4`` is another author's program; it gets the same packed tensors,
block scales swizzled by FlashInfer's rule, and reciprocal activation scales.
"""

from __future__ import annotations

import site
import sys

import pytest
import torch

from tests import published
from tests.layers import make_inputs, make_layer
from trtllm_b12x_fix.emulator import moe, reference
from trtllm_b12x_fix.emulator.arithmetic import PUBLISHED
from trtllm_b12x_fix.formats import e2m1, scale_layout
from trtllm_b12x_fix.layer import Activation
from trtllm_b12x_fix.metrics import distance


@pytest.fixture(scope="module")
def b12x(oracle_dir):
    """The reference module of the b12x wheel; imports on a CPU beside nvidia-cutlass-dsl."""
    before = list(sys.path)
    # addsitedir obeys the .pth file by which nvidia-cutlass-dsl finds its own packages.
    for name in published.ORACLES:
        site.addsitedir(str(oracle_dir(name)))
    try:
        from b12x.moe._shared.kernels import reference as module

        yield module
    finally:
        sys.path[:] = before


def _options(layer):
    return {"activation": layer.activation.value, "quant_scale_math": "direct_division"}


CASES = [
    (activation, hidden, intermediate, seed, per_expert)
    for activation in Activation
    for hidden, intermediate in ((256, 256), (128, 384), (384, 128))
    for seed, per_expert in ((0, False), (1, True))
]


@pytest.mark.parametrize(("activation", "hidden", "intermediate", "seed", "per_expert"), CASES)
def test_every_activation_code_is_equal(b12x, activation, hidden, intermediate, seed, per_expert):
    layer = make_layer(activation, experts=6, hidden=hidden, intermediate=intermediate, seed=seed)
    s1, s2 = layer.fc1.input_scale, layer.fc2.input_scale
    launch = reference.exact_launch(layer, *((s1, s2) if per_expert else (s1.max(), s2.max())))
    x, routing = make_inputs(layer, tokens=5, top_k=3, seed=seed + 10)
    trace = moe.run(launch, x, routing, PUBLISHED)

    inner = trace.intermediate_quantized.operand().view(5, 3, -1)
    outer = trace.input.operand()
    for token in range(5):
        for route in range(3):
            theirs = b12x.trace_moe_reference_nvfp4_route(
                *published.arguments(launch, x, routing),
                token_idx=token,
                route_idx=route,
                **_options(layer),
            )
            row = token * 3 + route if per_expert else token
            # code * block scale: equal values mean equal codes and equal scales
            assert torch.equal(outer[row], theirs.x_dequant)
            assert torch.equal(inner[token, route], theirs.int_dequant)
            assert torch.equal(trace.intermediate[token, route].float(), theirs.intermediate)
            down = theirs.down_out.float()
            assert distance(trace.fc2[token, route], down).relative_rms < 2.0**-8
    whole = b12x.moe_reference_nvfp4(*published.arguments(launch, x, routing), **_options(layer))
    # Both round one fp32 sum to bf16; another order of the sum may move the last bit of a few.
    steps = (trace.output.view(torch.int16).int() - whole.view(torch.int16).int()).abs()
    assert int(steps.max()) <= 1
    assert float((steps != 0).float().mean()) < 0.01


def test_our_swizzle_is_what_b12x_reads(b12x):
    generator = torch.Generator().manual_seed(0)
    for rows, columns in ((128, 4), (256, 12), (200, 10), (1, 1)):
        scales = torch.randint(0, 127, (rows, columns), dtype=torch.uint8, generator=generator)
        theirs = b12x.unswizzle_block_scale(
            scale_layout.swizzle(scales).view(torch.float8_e4m3fn), rows, columns
        )
        assert torch.equal(theirs, scales.view(torch.float8_e4m3fn).float())


def test_fp4_codes_round_as_b12x_does(b12x):
    values = torch.linspace(-7, 7, 100_001)
    ours = e2m1.decode(e2m1.encode(values))
    assert torch.equal(ours, b12x.fp4_quantize_values_torch(values))
