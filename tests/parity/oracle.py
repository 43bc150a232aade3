"""A second reading of trtllm-gen's contract: index loops and numpy, nothing of the package.

Formats come from ml_dtypes. Where a stored row, code or scale belongs is computed byte by byte from
FlashInfer's documented index functions, the other way round than the package does it.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

#: flashinfer/utils.py, srcToDstBlk32RowMap: where row r of a block of 32 goes.
ROW_MAP_32 = [
    0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27,
    4, 12, 20, 28, 5, 13, 21, 29, 6, 14, 22, 30, 7, 15, 23, 31,
]  # fmt: skip


def stored_row(row: int, rows: int, *, gated: bool) -> int:
    """Where row ``row`` of the linear matrix ([up; gate] where gated) is stored."""
    if gated:
        half = rows // 2
        row = 2 * row if row < half else 2 * (row - half) + 1
    return row - row % 32 + ROW_MAP_32[row % 32]


def stored_scale(row: int, group: int, groups: int) -> int:
    """Offset of a scale in the 128x4 layout, by quantization_utils.cuh, from a STORED row."""
    tiles = -(-groups // 4)
    offset = (row // 128) * tiles * 512 + (group // 4) * 512
    return offset + (row % 32) * 16 + (row % 128) // 32 * 4 + group % 4


def decode(codes: np.ndarray, scales: np.ndarray, *, gated: bool) -> np.ndarray:
    """Stored bytes of one expert, [R, C/2] and [R, C/16], to fp64 [R, C] in linear order."""
    rows, half = codes.shape
    groups = half // 8
    flat = scales.reshape(-1).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    values = np.zeros((rows, half * 2))
    for row in range(rows):
        at = stored_row(row, rows, gated=gated)
        values[row, 0::2] = (codes[at] & 15).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
        values[row, 1::2] = (codes[at] >> 4).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
        for group in range(groups):
            scale = flat[stored_scale(at, group, groups)]
            values[row, group * 16 : group * 16 + 16] *= scale
    return values


def launch(call, routes) -> np.ndarray:
    """The output in fp64, the intermediate quantized as the contract says: float64 [T, H]."""
    gated = call.activation.is_gated
    tokens = call.hidden_states.numpy()
    groups = tokens.shape[1] // 8
    scale = call.hidden_states_scale.view(torch_uint8()).numpy()
    scale = scale.reshape(-1)[: tokens.shape[0] * groups].view(ml_dtypes.float8_e4m3fn)
    x = np.zeros((tokens.shape[0], groups * 16))
    x[:, 0::2] = (tokens & 15).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    x[:, 1::2] = (tokens >> 4).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    x *= np.repeat(scale.astype(np.float64).reshape(tokens.shape[0], groups), 16, axis=1)
    ids, weights = routes.expert_ids.numpy(), routes.weights.double().numpy()
    output = np.zeros((x.shape[0], x.shape[1]))
    used = {int(expert): _matrices(call, int(expert), gated) for expert in np.unique(ids)}
    for token in range(x.shape[0]):
        for expert, weight in zip(ids[token], weights[token], strict=True):
            fc1, fc2 = used[int(expert)]
            h = _quantize(_activate(fc1 @ x[token], call, int(expert), gated))
            output[token] += weight * float(call.output2_scale_scalar[expert]) * (fc2 @ h)
    return output


def _quantize(values: np.ndarray) -> np.ndarray:
    """NVFP4 with a global scale of 1: block scale amax / 6, both rounded to nearest even."""
    blocks = values.astype(np.float32).reshape(-1, 16)
    scale = np.minimum(np.abs(blocks).max(axis=1, keepdims=True) / 6, 448)
    scale = scale.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    ratio = np.divide(blocks, scale, out=np.zeros_like(blocks), where=scale != 0)
    codes = np.clip(ratio, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float64)
    return (codes * scale).reshape(-1)


def torch_uint8():
    import torch

    return torch.uint8


def _matrices(call, expert: int, gated: bool) -> tuple[np.ndarray, np.ndarray]:
    uint8 = torch_uint8()
    return (
        decode(
            call.gemm1_weights[expert].numpy(),
            call.gemm1_weights_scale[expert].view(uint8).numpy(),
            gated=gated,
        ),
        decode(
            call.gemm2_weights[expert].numpy(),
            call.gemm2_weights_scale[expert].view(uint8).numpy(),
            gated=False,
        ),
    )


def _activate(h: np.ndarray, call, expert: int, gated: bool) -> np.ndarray:
    before = float(call.output1_scale_gate_scalar[expert])
    after = float(call.output1_scale_scalar[expert])
    if not gated:
        return np.maximum(h * before, 0) ** 2 * after
    up, gate = np.split(h, 2)
    gate = gate * before
    return up * after * gate / (1 + np.exp(-gate))
