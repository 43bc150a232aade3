"""NVFP4 quantization: arithmetic against an independent numpy version, bounds, errors.

The comparison with an nvidia-modelopt export, code for code, is in test_modelopt_export.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests import oracle
from trtllm_b12x_fix.errors import InputError, ScaleError, ShapeError
from trtllm_b12x_fix.formats import e2m1, e4m3, nvfp4


def _by_hand(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.float32]:
    f32 = np.float32
    scale = np.abs(values).max() / f32(2688)
    blocks = values.reshape(values.shape[0], -1, 16)
    raw = np.abs(blocks).max(-1) / (f32(6) * scale)
    raw = np.where(raw == 0, f32(1), raw)
    bytes_ = oracle.e4m3_bytes(np.clip(raw, f32(2.0**-9), f32(448)))
    divisor = oracle.e4m3_values(bytes_) * scale
    return oracle.e2m1_codes(blocks / divisor[..., None]).reshape(values.shape), bytes_, scale


@pytest.mark.parametrize("seed", range(4))
def test_quantize_is_the_formula(seed):
    rng = np.random.default_rng(seed)
    spread = np.exp(rng.normal(size=(64, 1)) * 2)
    values = (rng.normal(size=(64, 128)) * spread).astype(np.float32)
    codes, scales, global_scale = _by_hand(values)
    ours = nvfp4.quantize(torch.from_numpy(values))
    assert float(ours.global_scale) == float(global_scale)
    assert np.array_equal(ours.block_scale.numpy(), scales)
    assert np.array_equal(e2m1.unpack(ours.packed).numpy(), codes)


def test_operand_times_global_scale_is_the_value():
    packed = torch.arange(256, dtype=torch.uint8).view(1, -1)
    scales = torch.tensor([[0x00, 0x01, 0x07, 0x08, 0x38, 0x7E] + [0x30] * 26], dtype=torch.uint8)
    codes = e2m1.unpack(packed).view(1, 32, 16)
    expected = oracle.e2m1_values(codes.numpy()) * oracle.e4m3_values(scales.numpy())[..., None]
    tensor = nvfp4.NVFP4Tensor(packed, scales, torch.tensor(0.25))
    assert np.array_equal(nvfp4.operand(packed, scales).numpy(), expected.reshape(1, -1))
    assert np.array_equal(nvfp4.dequantize(tensor).numpy(), expected.reshape(1, -1) * 0.25)


def test_every_product_of_code_and_scale_is_exact_in_bf16():
    codes, scales = torch.arange(16, dtype=torch.uint8), torch.arange(127, dtype=torch.uint8)
    exact = e2m1.decode(codes, torch.float64)[:, None] * e4m3.decode(scales, torch.float64)
    assert torch.equal(exact.to(torch.bfloat16).double(), exact)


def test_zero_blocks_are_found_whatever_their_signs():
    codes = torch.zeros(3, 16, dtype=torch.uint8)
    codes[1] = 8  # negative zero
    codes[2, 7] = 1
    assert nvfp4.block_is_zero(e2m1.pack(codes)).flatten().tolist() == [True, True, False]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: nvfp4.quantize(torch.ones(2, 17)), ShapeError),
        (lambda: nvfp4.quantize(torch.full((1, 16), float("nan"))), InputError),
        (lambda: nvfp4.quantize(torch.full((1, 16), float("inf"))), InputError),
        (lambda: nvfp4.quantize(torch.zeros(1, 16)), ScaleError),
        (lambda: nvfp4.quantize(torch.ones(1, 16), torch.tensor(-1.0)), ScaleError),
        (
            lambda: nvfp4.operand(
                torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(2, 3, dtype=torch.uint8)
            ),
            ShapeError,
        ),
    ],
)
def test_wrong_input_is_named(call, error):
    with pytest.raises(error):
        call()
