"""The kernels' activation quantizers against numpy versions of the same formulas.

Codes and scale bytes must agree exactly: ties, subnormal scales, zeros and saturation included.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests import oracle
from trtllm_b12x_fix.emulator.arithmetic import (
    PUBLISHED,
    Arithmetic,
    QuantMath,
    ScaleConvention,
    SubnormalDecode,
)
from trtllm_b12x_fix.emulator.quantize import quantize_rows
from trtllm_b12x_fix.errors import ShapeError
from trtllm_b12x_fix.formats import e2m1, e4m3

SCALES = (4.5 / 2688, 1.0, 2.0**-9, 1e-6, 37.0)


def arithmetic(math: QuantMath, **changes: object) -> Arithmetic:
    return replace(PUBLISHED, quant_math=math, **changes)


def rows(seed: int) -> np.ndarray:
    """bf16 rows over many magnitudes, with zero blocks, single values and exact ties."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(24, 128)) * np.exp(rng.normal(size=(24, 8)) * 3).repeat(16, 1)
    values[0] = 0
    values[1, 1:] = 0
    values[2] = np.tile([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0], 16)
    values[3] *= 1e-8
    values[4] *= 1e6
    return oracle.bf16(values.astype(np.float32))


def check(values: np.ndarray, g: float, math: Arithmetic, expected: tuple) -> None:
    ours = quantize_rows(torch.from_numpy(values), torch.tensor(g, dtype=torch.float32), math)
    codes, scales = expected
    assert np.array_equal(ours.block_scale.numpy(), scales)
    # A block with a zero scale is zero whatever its codes say: the kernels leave them out.
    silent = (scales == 0).repeat(16, axis=1)
    assert np.array_equal(np.where(silent, 0, ours.codes.numpy()), np.where(silent, 0, codes))


@pytest.mark.parametrize("g", SCALES)
@pytest.mark.parametrize("seed", range(3))
class TestAgainstNumpy:
    def test_precise(self, seed, g):
        values = rows(seed)
        check(values, g, arithmetic(QuantMath.PRECISE), oracle.quantize_precise(values, g))

    def test_fast(self, seed, g):
        values = rows(seed)
        check(values, g, arithmetic(QuantMath.FAST), oracle.quantize_fast(values, g))

    def test_fast_reading_subnormals_with_a_hidden_one(self, seed, g):
        values = rows(seed)
        math = arithmetic(QuantMath.FAST, subnormals=SubnormalDecode.HIDDEN_ONE)
        check(values, g, math, oracle.quantize_fast(values, g, hidden_one=True))

    def test_direct_micro_that_divides(self, seed, g):
        values = rows(seed)
        reciprocal = np.float32(1) / np.float32(g)
        expected = oracle.quantize_direct_micro(values, reciprocal)
        check(values, g, arithmetic(QuantMath.DIRECT_MICRO), expected)

    def test_direct_micro_that_multiplies(self, seed, g):
        values = rows(seed)
        math = arithmetic(QuantMath.DIRECT_MICRO, convention=ScaleConvention.MULTIPLIER)
        check(values, g, math, oracle.quantize_direct_micro(values, g))


def test_the_orders_really_differ_on_bf16_gaussians():
    """Ties round apart: at some scales, in few codes. Never differing, the enum would be idle."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(512, 1024, generator=generator).to(torch.bfloat16)
    kinds = (QuantMath.FAST, QuantMath.PRECISE, QuantMath.DIRECT_DIVISION, QuantMath.DIRECT_MICRO)
    shares: dict[tuple[QuantMath, QuantMath], list[float]] = {}
    for amax in (3.5, 4.0, 4.25, 4.7, 5.25, 6.0, 7.0):
        g = torch.tensor(amax / 2688)
        codes = {kind: quantize_rows(values, g, arithmetic(kind)).codes for kind in kinds}
        for i, left in enumerate(kinds):
            for right in kinds[i + 1 :]:
                share = float((codes[left] != codes[right]).float().mean())
                shares.setdefault((left, right), []).append(share)
    for pair, found in shares.items():
        assert 0 < max(found) < 0.02, pair


def test_hidden_one_misreads_k_times_2_to_minus_9():
    """The decode of 0.6.16 read back through the codes it leads to: 4.5x to 1.07x too large."""
    for k in range(1, 8):
        block = torch.zeros(1, 16)
        block[0, 0] = 6.0 * k * 2.0**-9  # amax that gives exactly this subnormal scale at g = 1
        math = arithmetic(QuantMath.FAST, subnormals=SubnormalDecode.HIDDEN_ONE)
        ours = quantize_rows(block, torch.tensor(1.0), math)
        assert int(ours.block_scale[0, 0]) == k
        misread = (1 + k / 8) * 2.0**-7
        expected = int(oracle.e2m1_codes(np.array([block[0, 0] / misread], dtype=np.float32))[0])
        assert int(ours.codes[0, 0]) == expected
        assert 1.07 < misread / (k * 2.0**-9) <= 4.5


def test_multiplying_by_a_calibrated_scale_loses_every_block():
    """The direct-micro trap in one line: s1 near 1e-3 sends every block scale to zero."""
    values = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    math = arithmetic(QuantMath.DIRECT_MICRO, convention=ScaleConvention.MULTIPLIER)
    quantized = quantize_rows(values, torch.tensor(4.5 / 2688), math)
    assert not quantized.block_scale.any()
    right = quantize_rows(values, torch.tensor(4.5 / 2688), arithmetic(QuantMath.DIRECT_MICRO))
    assert (right.block_scale > 0).all()


def test_scales_of_one_are_safe_in_either_convention():
    values = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    one = torch.tensor(1.0)
    left = quantize_rows(values, one, arithmetic(QuantMath.DIRECT_MICRO))
    math = arithmetic(QuantMath.DIRECT_MICRO, convention=ScaleConvention.MULTIPLIER)
    right = quantize_rows(values, one, math)
    assert torch.equal(left.codes, right.codes)
    assert torch.equal(left.block_scale, right.block_scale)


def test_one_scale_per_row():
    values = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    scales = torch.tensor([1e-3, 1e-2, 1.0])
    together = quantize_rows(values, scales, arithmetic(QuantMath.PRECISE))
    for row in range(3):
        alone = quantize_rows(values[row : row + 1], scales[row], arithmetic(QuantMath.PRECISE))
        assert torch.equal(together.codes[row], alone.codes[0])
        assert torch.equal(together.block_scale[row], alone.block_scale[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operand_is_code_times_scale(dtype):
    values = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    q = quantize_rows(values, torch.tensor(1e-3), arithmetic(QuantMath.PRECISE))
    by_hand = e2m1.decode(q.codes).view(3, 4, 16) * e4m3.decode(q.block_scale)[..., None]
    assert torch.equal(q.operand(dtype).float(), by_hand.flatten(1))


def test_part_of_a_block_is_refused():
    with pytest.raises(ShapeError, match="16"):
        quantize_rows(torch.zeros(1, 20), torch.tensor(1.0), PUBLISHED)
