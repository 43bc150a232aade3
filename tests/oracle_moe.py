"""One b12x launch written a second time: plain numpy loops, nothing of the package imported.

Written from the kernels' sources (see the facts beside each table below), one token, one route, one
slice at a time. Slow on purpose. Outputs may differ from the emulator's by fp32 summation order in
the two matrix products, so a last bf16 bit here and there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests import oracle

F32 = np.float32

#: Output summation per version and family: (slices of 128 summed before rounding, weighting, adds).
#: "alpha" rounds bf16(alpha * acc) and then bf16(that * weight); "combined" rounds bf16(acc) and
#: multiplies by bf16(weight * alpha); "fp32" rounds nothing before the end.
SUMS = {
    ("0.6.16", "micro"): (1, "alpha", "bf16"),
    ("0.6.16", "static"): (1, "alpha", "bf16"),
    ("0.6.16", "dynamic"): (1, "alpha", "bf16"),
    ("0.6.18", "direct-micro"): (None, "fp32", "fp32"),
    ("0.6.18", "micro"): (1, "alpha", "bf16"),
    ("0.6.18", "static"): (1, "alpha", "bf16"),
    ("0.6.18", "dynamic"): (1, "alpha", "bf16"),
    ("0.6.18", "gated-dynamic"): (2, "combined", "bf16"),
    ("0.7.2", "direct-micro"): (None, "fp32", "fp32"),
    ("0.7.2", "micro"): (1, "alpha", "bf16"),
    ("0.7.2", "static"): (2, "combined", "fp32"),
    ("0.7.2", "dynamic"): (1, "alpha", "bf16"),
    ("0.7.2", "gated-dynamic"): (2, "combined", "bf16"),
    ("0.7.4", "direct-micro"): (None, "fp32", "fp32"),
    ("0.7.4", "micro"): (1, "alpha", "bf16"),
    ("0.7.4", "static"): (2, "combined", "fp32"),
    ("0.7.4", "dynamic"): (1, "alpha", "bf16"),
    ("0.7.4", "gated-dynamic"): (2, "combined", "bf16"),
}


@dataclass(frozen=True)
class Launch:
    """Decoded weights (code * block scale, fp32) and per-expert scales of one launch."""

    w1: np.ndarray  # [E, R, H]
    w2: np.ndarray  # [E, H, I]
    w1_alpha: np.ndarray
    w2_alpha: np.ndarray
    input_scale: np.ndarray  # [E]
    fc2_scale: np.ndarray  # [E]
    gated: bool


def quantizer(version: str, family: str, gated: bool):
    """The quantizer a kernel family uses; direct micro of 0.6.18 multiplies by what it is given."""
    if family == "direct-micro":
        if version == "0.6.18":
            return oracle.quantize_direct_micro
        return lambda rows, g: oracle.quantize_direct_micro(rows, F32(1) / F32(g))
    if version == "0.6.16":
        return lambda rows, g: oracle.quantize_fast(rows, g, hidden_one=True)
    return oracle.quantize_fast if gated else oracle.quantize_precise


def run(
    launch: Launch, version: str, family: str, x: np.ndarray, ids: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """fp32 [T, H] of bf16 values, atomic adds in slot order."""
    quantize = quantizer(version, family, launch.gated)
    slices, weighting, adds = SUMS[version, family]
    out = np.zeros((x.shape[0], launch.w2.shape[1]), F32)
    for token in range(x.shape[0]):
        total = np.zeros(launch.w2.shape[1], F32)
        for expert, weight in zip(ids[token], weights[token], strict=True):
            inner = _intermediate(launch, quantize, x[token : token + 1], expert)
            codes, scales = quantize(inner, launch.fc2_scale[expert])
            value = _operand(codes, scales)[0]
            width = value.size if slices is None else 128 * slices
            for start in range(0, value.size, width):
                part = slice(start, start + width)
                acc = launch.w2[expert][:, part] @ value[part]
                term = _term(acc, launch.w2_alpha[expert], F32(weight), weighting)
                total = total + term
                if adds == "bf16":
                    total = oracle.bf16(total)
        out[token] = oracle.bf16(total)
    return out


def _operand(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return oracle.e2m1_values(codes) * oracle.e4m3_values(scales).repeat(16, axis=1)


def _intermediate(launch: Launch, quantize, row: np.ndarray, expert: int) -> np.ndarray:
    codes, scales = quantize(row, launch.input_scale[expert])
    fc1 = launch.w1_alpha[expert] * (launch.w1[expert] @ _operand(codes, scales)[0])
    if launch.gated:
        up, gate = np.split(fc1, 2)
        inner = gate * (F32(1) / (F32(1) + np.exp(-gate))) * up
    else:
        inner = np.maximum(fc1, F32(0)) ** 2
    return oracle.bf16(inner.astype(F32))[None]


def _term(acc: np.ndarray, alpha: F32, weight: F32, weighting: str) -> np.ndarray:
    if weighting == "fp32":
        return acc * (alpha * weight)
    if weighting == "alpha":
        return oracle.bf16(oracle.bf16(alpha * acc) * weight)
    return oracle.bf16(oracle.bf16(acc) * oracle.bf16(np.array([weight * alpha], F32)))
