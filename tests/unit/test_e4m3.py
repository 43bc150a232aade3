"""E4M3 against ml-dtypes: all 256 bytes both ways, every tie, saturation, NaN, subnormals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests import oracle
from trtllm_b12x_fix.errors import InputError
from trtllm_b12x_fix.formats import e4m3

BYTES = torch.arange(256, dtype=torch.uint8)


def _bits_but_nan(values: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(values), np.float32(0), values).view(np.uint32)


def test_the_table_is_ml_dtypes_table():
    table = np.array(e4m3.E4M3_VALUES, dtype=np.float32)
    theirs = oracle.e4m3_values(BYTES.numpy())
    assert np.array_equal(np.isnan(table), np.isnan(theirs))
    assert np.array_equal(_bits_but_nan(table), _bits_but_nan(theirs))
    assert [i for i, v in enumerate(e4m3.E4M3_VALUES) if math.isnan(v)] == list(e4m3.NAN_BYTES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_decode_is_the_table(dtype):
    decoded = e4m3.decode(BYTES, dtype).double().numpy()
    assert np.array_equal(decoded, np.array(e4m3.E4M3_VALUES), equal_nan=True)


def test_every_finite_byte_survives_a_round_trip():
    finite = torch.tensor([b for b in range(256) if b not in e4m3.NAN_BYTES], dtype=torch.uint8)
    assert torch.equal(e4m3.encode(e4m3.decode(finite)), finite)


def test_encode_agrees_at_every_tie_and_its_neighbours():
    finite = np.array(sorted({v for v in e4m3.E4M3_VALUES if not math.isnan(v)}), dtype=np.float64)
    middles = (finite[1:] + finite[:-1]) / 2
    points = np.concatenate([finite, middles, [2.0**-10, 449, 464, 465, 480, 1e9]])
    points = points.astype(np.float32)
    near = np.concatenate([points, np.nextafter(points, np.inf), np.nextafter(points, -np.inf)])
    near = np.concatenate([near, np.array([np.inf, -np.inf], dtype=np.float32)])
    ours = e4m3.encode(torch.from_numpy(near)).numpy()
    assert np.array_equal(ours, oracle.e4m3_bytes(near))


def test_encode_saturates_whatever_the_installed_torch_does():
    """torch's own cast made NaN of 465 in older versions and saturates in 2.13."""
    assert e4m3.encode(torch.tensor([465.0, -1e9])).tolist() == [0x7E, 0xFE]


def test_nan_stays_nan():
    assert int(e4m3.encode(torch.tensor([float("nan")]))[0]) in e4m3.NAN_BYTES


def test_at_or_below_2_to_minus_10_is_zero():
    assert e4m3.encode(torch.tensor([2.0**-10, 1.0001 * 2.0**-10])).tolist() == [0, 1]


def test_wrong_dtypes_are_named():
    with pytest.raises(InputError, match="int64"):
        e4m3.decode(torch.tensor([1]))
    with pytest.raises(InputError, match="int64"):
        e4m3.encode(torch.tensor([1]))
