"""E2M1 against ml-dtypes: all codes, all midpoints and their neighbours, signs, NaN, inf."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests import oracle
from trtllm_b12x_fix.errors import InputError, ShapeError
from trtllm_b12x_fix.formats import e2m1

CODES = torch.arange(16, dtype=torch.uint8)


def test_every_code_decodes_as_ml_dtypes_does():
    ours = e2m1.decode(CODES).numpy()
    theirs = oracle.e2m1_values(CODES.numpy())
    assert np.array_equal(ours.view(np.uint32), theirs.view(np.uint32))  # bits: -0 counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_code_survives_a_round_trip(dtype):
    assert torch.equal(e2m1.encode(e2m1.decode(CODES, dtype)), CODES)


def test_encode_agrees_at_every_tie_and_its_neighbours():
    magnitudes = np.array(sorted({abs(v) for v in e2m1.E2M1_VALUES}), dtype=np.float32)
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    points = np.concatenate([magnitudes, middles, [5.5, 7.0, 1e30, np.inf]]).astype(np.float32)
    near = np.concatenate([points, np.nextafter(points, np.inf), np.nextafter(points, -np.inf)])
    values = np.concatenate([near, -near]).astype(np.float32)
    assert np.array_equal(e2m1.encode(torch.from_numpy(values)).numpy(), oracle.e2m1_codes(values))


def test_encode_agrees_on_every_bf16_value():
    bits = np.arange(65536, dtype=np.uint16)
    values = torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16).float()
    finite = ~values.isnan()
    ours = e2m1.encode(values[finite]).numpy()
    assert np.array_equal(ours, oracle.e2m1_codes(values[finite].numpy()))


def test_nan_becomes_plus_six_as_ptx_satfinite_says():
    assert e2m1.encode(torch.tensor([float("nan"), -float("nan")])).tolist() == [7, 7]


def test_low_nibble_comes_first():
    assert e2m1.pack(torch.tensor([1, 2, 15, 0], dtype=torch.uint8)).tolist() == [0x21, 0x0F]


def test_every_byte_unpacks_and_packs_back():
    packed = torch.arange(256, dtype=torch.uint8).view(16, 16)
    codes = e2m1.unpack(packed)
    assert codes.shape == (16, 32)
    assert torch.equal(codes[:, 0::2], packed & 15)
    assert torch.equal(codes[:, 1::2], packed >> 4)
    assert torch.equal(e2m1.pack(codes), packed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_byte_decodes_at_once_as_one_by_one(dtype):
    packed = torch.arange(256, dtype=torch.uint8).view(4, 64)
    slow = e2m1.decode(e2m1.unpack(packed), dtype)
    fast = e2m1.decode_packed(packed, dtype)
    assert fast.dtype == dtype
    assert torch.equal(fast, slow)
    assert torch.equal(fast.signbit(), slow.signbit())


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: e2m1.encode(torch.tensor([1])), InputError),
        (lambda: e2m1.decode(torch.tensor([1])), InputError),
        (lambda: e2m1.unpack(torch.tensor([1])), InputError),
        (lambda: e2m1.decode_packed(torch.tensor([1])), InputError),
        (lambda: e2m1.pack(torch.zeros(3, dtype=torch.uint8)), ShapeError),
    ],
)
def test_wrong_input_is_named(call, error):
    with pytest.raises(error):
        call()
