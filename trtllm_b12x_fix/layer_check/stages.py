"""Name the first stage of a launch that leaves its reference."""

from __future__ import annotations

import enum

import torch
from torch import Tensor

from trtllm_b12x_fix.emulator.moe import MoETrace, Routing
from trtllm_b12x_fix.emulator.quantize import Quantized
from trtllm_b12x_fix.layer import Activation
from trtllm_b12x_fix.metrics import compare_codes, distance

# fp32 sums in one order are equal bit for bit here; another GEMM tiling may move a last bit.
_FLOAT_TOLERANCE = 1e-6


class Stage(enum.Enum):
    """Stages of a launch, in order."""

    INPUT_QUANTIZATION = "input quantization"
    FC1 = "fc1"
    ACTIVATION = "activation (bf16)"
    INTERMEDIATE_QUANTIZATION = "intermediate quantization"
    FC2 = "fc2"
    OUTPUT = "output sum"


def first_divergence(
    trace: MoETrace,
    reference: MoETrace,
    routing: Routing,
    fc1_unit: Tensor,
    activation: Activation,
) -> Stage | None:
    """The first stage of ``trace`` that differs from ``reference``, or ``None``.

    Args:
        fc1_unit: fp32 [E], see :class:`trtllm_b12x_fix.repair.KernelArguments`: FC1 outputs are
            compared in true units, so carrying them in other units is no divergence.
    """
    unit = fc1_unit[routing.expert_ids].double().unsqueeze(-1)
    after = unit.square() if activation is Activation.RELU2 else unit
    checks = (
        (Stage.INPUT_QUANTIZATION, _same_quantized(trace.input, reference.input)),
        (Stage.FC1, _close(trace.fc1 * unit, reference.fc1)),
        (Stage.ACTIVATION, _close(trace.intermediate * after, reference.intermediate)),
        (
            Stage.INTERMEDIATE_QUANTIZATION,
            _same_quantized(trace.intermediate_quantized, reference.intermediate_quantized),
        ),
        (Stage.FC2, _close(trace.fc2, reference.fc2)),
        (Stage.OUTPUT, _close(trace.output, reference.output)),
    )
    return next((stage for stage, same in checks if not same), None)


def _close(value: Tensor, reference: Tensor) -> bool:
    return distance(value, reference).relative_rms <= _FLOAT_TOLERANCE


def _same_quantized(value: Quantized, reference: Quantized) -> bool:
    if value.codes.shape != reference.codes.shape:
        # One scale for all experts quantizes a token once; per-expert scales quantize each route.
        times = reference.codes.shape[0] / value.codes.shape[0]
        if times < 1:
            return _same_quantized(reference, value)
        value = Quantized(
            value.codes.repeat_interleave(int(times), 0),
            value.block_scale.repeat_interleave(int(times), 0),
        )
    same_scales = torch.equal(value.block_scale, reference.block_scale)
    return same_scales and compare_codes(value.codes, reference.codes).differing == 0
