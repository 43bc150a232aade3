"""Our NVFP4 quantizer against NVIDIA ModelOpt's, code for code.

ModelOpt writes the checkpoints that the affected backends read, so it is the authority on what
``weight``, ``weight_scale``, ``weight_scale_2`` and ``input_scale`` mean. Small random models are
quantized and exported for real (a gated and two relu2 ones), and adversarial tensors go straight
through its ``NVFP4QTensor``.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.exports import FAMILIES, Export
from trtllm_b12x_fix.errors import ScaleError
from trtllm_b12x_fix.formats import e2m1, e4m3, nvfp4
from trtllm_b12x_fix.formats.nvfp4 import NVFP4Tensor

pytestmark = [
    # ModelOpt warns about every transformers release newer than itself.
    pytest.mark.filterwarnings("ignore::Warning"),
    pytest.mark.xdist_group("modelopt"),
]


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def export(request: pytest.FixtureRequest, modelopt_export: Callable[[str], Export]) -> Export:
    """One family, quantized and exported."""
    return modelopt_export(request.param)


def different_codes(packed: Tensor, expected: Tensor) -> int:
    """How many E2M1 codes differ between two packed tensors of one shape."""
    return int((e2m1.unpack(packed) != e2m1.unpack(expected)).sum())


def different_bytes(scales: Tensor, expected: Tensor) -> int:
    """How many E4M3 bytes differ; compares bytes because NaN never equals itself as a value."""
    return int((scales.view(torch.uint8) != expected.view(torch.uint8)).sum())


def test_every_expert_projection_is_exported_in_the_layout_we_read(export: Export) -> None:
    for projection in export.projections:
        rows, columns = projection.weight.shape
        weight = export.tensors[f"{projection.name}.weight"]
        scale = export.tensors[f"{projection.name}.weight_scale"]
        assert (weight.dtype, weight.shape) == (torch.uint8, (rows, columns // 2))
        assert (scale.dtype, scale.shape) == (torch.float8_e4m3fn, (rows, columns // 16))
        for name in ("weight_scale_2", "input_scale"):
            scalar = export.tensors[f"{projection.name}.{name}"]
            assert (scalar.dtype, scalar.shape) == (torch.float32, ())
    exported = {name.rsplit(".", 1)[0] for name in export.tensors if ".experts." in name}
    assert exported == {projection.name for projection in export.projections}


def test_weights_and_block_scales_match_code_for_code(export: Export) -> None:
    differing = {}
    for projection in export.projections:
        scale_2 = export.tensors[f"{projection.name}.weight_scale_2"]
        ours = nvfp4.quantize(projection.weight, scale_2)
        codes = different_codes(ours.packed, export.tensors[f"{projection.name}.weight"])
        scales = different_bytes(
            ours.block_scale, export.tensors[f"{projection.name}.weight_scale"]
        )
        if codes or scales:
            differing[projection.name] = (codes, scales)
    assert not differing, f"(codes, block scales) that differ from ModelOpt: {differing}"


def test_weight_scale_2_is_amax_over_2688_and_shared_by_gate_and_up(export: Export) -> None:
    for projection in export.projections:
        scale_2 = export.tensors[f"{projection.name}.weight_scale_2"]
        amax = projection.scale_group.abs().amax()
        assert torch.equal(scale_2, nvfp4.global_scale_from_amax(amax)), projection.name


def test_weight_scale_2_has_the_magnitude_that_baking_destroys(export: Export) -> None:
    """Weights of standard deviation 0.02 give weight_scale_2 near 2e-5: the bug's own regime."""
    for projection in export.projections:
        scale_2 = export.tensors[f"{projection.name}.weight_scale_2"]
        true = e4m3.decode(export.tensors[f"{projection.name}.weight_scale"]) * scale_2
        baked = e4m3.decode(e4m3.encode(true))
        assert 1e-5 < float(scale_2) < 5e-5
        assert float((baked < e4m3.E4M3_MIN_NORMAL).float().mean()) > 0.99, "subnormal share"
        assert float(((baked - true).abs() / true).mean()) > 0.05, projection.name


def test_input_scale_is_the_recorded_amax_over_2688_for_all_experts(export: Export) -> None:
    """With fused experts ModelOpt keeps one input quantizer per kind of projection and layer."""
    for projection in export.projections:
        assert float(projection.inputs_amax) > 0
        expected = nvfp4.global_scale_from_amax(projection.inputs_amax)
        input_scale = export.tensors[f"{projection.name}.input_scale"]
        assert torch.equal(input_scale, expected), projection.name


# --- adversarial tensors, without a model ---------------------------------------------------------


def modelopt_quantize(values: Tensor, scale_2: Tensor | None) -> NVFP4Tensor:
    """ModelOpt's own quantizer on a copy (it works in place on intermediates)."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    quantized, scale, scale_2 = NVFP4QTensor.quantize(
        values.clone(), nvfp4.BLOCK, weights_scaling_factor_2=scale_2
    )
    return NVFP4Tensor(quantized._quantized_data, scale.view(torch.uint8), scale_2)


def zero_blocks() -> Tensor:
    """fp32 [8, 64]: every other block is zero, two of them made of negative zeros."""
    values = torch.randn(8, 4, 16, generator=torch.Generator().manual_seed(2))
    values[:, ::2] = 0.0
    values[0, 0] = -0.0
    values[1, 2, ::3] = -0.0
    return values.flatten(-2)


def huge_spread() -> Tensor:
    """fp32 [16, 64]: magnitudes from 1e-12 to 1e4, so most block scales clamp at 2^-9."""
    values = torch.randn(16, 64, generator=torch.Generator().manual_seed(3))
    return values * torch.logspace(-12, 4, 16).unsqueeze(-1)


def signed_zeros() -> Tensor:
    """fp32 [1, 32]: negative zero beside numbers, and a negative number that underflows to it."""
    values = torch.linspace(-1e4, 1e4, 32).unsqueeze(0)
    values[0, 3:7] = torch.tensor([-0.0, 0.0, -1e-45, 1e-45])
    return values


def code_ties(scale_2: float) -> Tensor:
    """fp32 [1, 16]: every E2M1 midpoint with both signs, exactly, under a block scale of 1."""
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    return (torch.cat([midpoints, -midpoints, torch.tensor([6.0, 0.0])]) * scale_2).unsqueeze(0)


def scale_ties(scale_2: float) -> Tensor:
    """fp32 [R, 16]: block amax exactly halfway between neighbouring E4M3 scales.

    Midpoints of two E4M3 values have 5 significant bits, so 6 * midpoint is exact in fp32.
    """
    grid = torch.tensor(e4m3.E4M3_VALUES[1:0x7F])
    midpoints = (grid[1:] + grid[:-1]) / 2
    shape = torch.linspace(-1, 1, 16)
    return (6.0 * midpoints * scale_2).unsqueeze(-1) * shape


POWER_OF_TWO = 2.0**-16
ADVERSARIAL: dict[str, tuple[Tensor, float | None]] = {
    "zero blocks": (zero_blocks(), None),
    "huge spread": (huge_spread(), None),
    "signed zeros": (signed_zeros(), None),
    "code ties": (code_ties(POWER_OF_TWO), POWER_OF_TWO),
    "scale ties": (scale_ties(POWER_OF_TWO), POWER_OF_TWO),
    # A global scale below the calibrated one: block scales saturate at 448 and codes at 6.
    "saturation": (huge_spread(), 1e-4),
    # A global scale far above it: every block scale is clamped up to 2^-9.
    "floor": (huge_spread(), 1e7),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", ADVERSARIAL)
def test_adversarial_tensors_match_code_for_code(case: str, dtype: torch.dtype) -> None:
    values, scale = ADVERSARIAL[case]
    values = values.to(dtype)
    scale_2 = None if scale is None else torch.tensor(scale)
    ours, expected = nvfp4.quantize(values, scale_2), modelopt_quantize(values, scale_2)
    assert torch.equal(ours.global_scale, expected.global_scale)
    assert different_bytes(ours.block_scale, expected.block_scale) == 0
    assert different_codes(ours.packed, expected.packed) == 0


def test_the_adversarial_tensors_reach_what_they_are_for() -> None:
    """Guards the cases above against quietly becoming ordinary tensors."""
    floor_byte, one_byte, largest_byte = 0x01, 0x38, 0x7E

    def quantized(case: str) -> NVFP4Tensor:
        values, scale = ADVERSARIAL[case]
        return nvfp4.quantize(values, None if scale is None else torch.tensor(scale))

    zero = quantized("zero blocks")
    assert bool((zero.block_scale[nvfp4.block_is_zero(zero.packed)] == one_byte).all())
    assert not bool((e2m1.unpack(quantized("signed zeros").packed)[0, 3:6] == 8).any())
    assert float((quantized("huge spread").block_scale == floor_byte).float().mean()) > 0.3
    assert bool((quantized("floor").block_scale == floor_byte).all())
    assert bool((quantized("saturation").block_scale == largest_byte).any())
    ties = quantized("code ties")
    assert ties.block_scale.tolist() == [[one_byte]]
    assert e2m1.unpack(ties.packed)[0, :7].tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert bool((quantized("scale ties").block_scale % 2 == 0).all()), "ties go to the even byte"


def test_an_all_zero_tensor_is_refused_where_modelopt_writes_nan() -> None:
    """ModelOpt divides 0 by 0: NaN block scales and a zero weight_scale_2, for readers to meet."""
    theirs = modelopt_quantize(torch.zeros(2, 32), None)
    assert float(theirs.global_scale) == 0.0
    assert set(theirs.block_scale.flatten().tolist()) <= set(e4m3.NAN_BYTES)
    with pytest.raises(ScaleError):
        nvfp4.quantize(torch.zeros(2, 32))


@pytest.mark.parametrize("exponent", [-30, -10, 0, 10])
def test_random_tensors_match_code_for_code(exponent: int) -> None:
    generator = torch.Generator().manual_seed(exponent + 100)
    spread = torch.exp(2.0 * torch.randn(64, 1, generator=generator))
    values = torch.randn(64, 256, generator=generator) * spread * 2.0**exponent
    ours, expected = nvfp4.quantize(values), modelopt_quantize(values, None)
    assert different_bytes(ours.block_scale, expected.block_scale) == 0
    assert different_codes(ours.packed, expected.packed) == 0


def test_dequantize_matches_modelopt_to_the_last_fp32_bit_or_one() -> None:
    """ModelOpt multiplies the two scales first, we multiply the code first: one rounding apart."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    values = huge_spread()
    quantized, scale, scale_2 = NVFP4QTensor.quantize(values.clone(), nvfp4.BLOCK)
    theirs = quantized.dequantize(
        dtype=torch.float32, scale=scale, double_scale=scale_2, block_sizes={-1: nvfp4.BLOCK}
    )
    ours = nvfp4.dequantize(nvfp4.quantize(values))
    torch.testing.assert_close(ours, theirs, rtol=2.0**-22, atol=0.0)
