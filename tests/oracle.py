"""Independent arithmetic for the tests: numpy in fp32, with ml-dtypes for every cast.

Nothing here imports the package under test. Each quantizer is written from the kernels' formulas
in numpy, so that agreement with the emulator is agreement between two implementations.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

F32 = np.float32
BLOCK = 16


def e2m1_codes(values: np.ndarray) -> np.ndarray:
    """E2M1 codes of fp32 values by ml-dtypes (nearest even, saturating)."""
    return values.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)


def e2m1_values(codes: np.ndarray) -> np.ndarray:
    """fp32 values of E2M1 codes by ml-dtypes."""
    return codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(F32)


def e4m3_bytes(values: np.ndarray) -> np.ndarray:
    """E4M3 bytes of fp32 values by ml-dtypes, saturating as cvt.rn.satfinite does."""
    return np.clip(values, F32(-448), F32(448)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def e4m3_values(bytes_: np.ndarray) -> np.ndarray:
    """fp32 values of E4M3 bytes by ml-dtypes."""
    return bytes_.view(ml_dtypes.float8_e4m3fn).astype(F32)


def bf16(values: np.ndarray) -> np.ndarray:
    """Round fp32 to bf16 and back, by ml-dtypes."""
    return values.astype(ml_dtypes.bfloat16).astype(F32)


def _blocks(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    blocks = rows.astype(F32).reshape(rows.shape[0], -1, BLOCK)
    return blocks, np.abs(blocks).max(axis=-1)


def quantize_precise(rows: np.ndarray, g: float) -> tuple[np.ndarray, np.ndarray]:
    """sf = E4M3(amax / (6 g)); code = E2M1(v * (1 / (sf * g)))."""
    blocks, amax = _blocks(rows)
    scale = e4m3_bytes(amax / (F32(6) * F32(g)))
    effective = e4m3_values(scale) * F32(g)
    inverse = np.divide(F32(1), effective, out=np.zeros_like(effective), where=effective != 0)
    return e2m1_codes(blocks * inverse[..., None]).reshape(rows.shape), scale


def quantize_fast(
    rows: np.ndarray, g: float, *, hidden_one: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """sf = E4M3(rcp(g) * (amax * rcp(6))); code = E2M1(v * (rcp(sf) * rcp(g)))."""
    blocks, amax = _blocks(rows)
    reciprocal = F32(1) / F32(g)
    scale = e4m3_bytes(reciprocal * (amax * (F32(1) / F32(6))))
    value = e4m3_values(scale)
    if hidden_one:
        misread = (F32(1) + scale.astype(F32) / F32(8)) * F32(2.0**-7)
        value = np.where((scale > 0) & (scale < 8), misread, value)
    inverse = np.divide(F32(1), value, out=np.zeros_like(value), where=value != 0) * reciprocal
    return e2m1_codes(blocks * inverse[..., None]).reshape(rows.shape), scale


def quantize_direct_micro(rows: np.ndarray, multiplier: float) -> tuple[np.ndarray, np.ndarray]:
    """sf = E4M3(fp32(fp64(amax) * m / 6)); code = E2M1(v * (1 / max(sf / m, 1e-30)))."""
    blocks, amax = _blocks(rows)
    raw = (amax.astype(np.float64) * np.float64(F32(multiplier)) / 6.0).astype(F32)
    scale = e4m3_bytes(raw)
    effective = np.maximum(e4m3_values(scale) / F32(multiplier), F32(1e-30))
    inverse = F32(1) / effective
    return e2m1_codes(blocks * inverse[..., None]).reshape(rows.shape), scale
