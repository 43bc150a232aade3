"""The emulator on CUDA against itself on a CPU: codes equal, outputs equal up to fp32 order.

Runs on any CUDA GPU: FP4 units are not used, operands are decoded to bf16, which holds them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.layers import make_inputs, make_layer
from trtllm_b12x_fix.emulator import moe, reference
from trtllm_b12x_fix.emulator.arithmetic import PUBLISHED, KernelFamily
from trtllm_b12x_fix.emulator.contract import Shape, contract_for
from trtllm_b12x_fix.emulator.matmul import full_precision, matmul, operand_dtype
from trtllm_b12x_fix.formats import nvfp4
from trtllm_b12x_fix.layer import Activation
from trtllm_b12x_fix.layer_check.arms import Arm
from trtllm_b12x_fix.layer_check.check import check
from trtllm_b12x_fix.layer_check.embedded import load_inputs
from trtllm_b12x_fix.layer_check.result import Gate, Verdict
from trtllm_b12x_fix.layer_check.run import Settings
from trtllm_b12x_fix.metrics import compare_codes, distance
from trtllm_b12x_fix.repair import InputScales

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
CPU = torch.device("cpu")
VERSIONS = ("0.6.16", "0.6.18", "0.7.2", "0.7.4")


def to(launch: moe.LaunchTensors, device: torch.device) -> moe.LaunchTensors:
    tensors = {
        name: value.to(device) for name, value in vars(launch).items() if torch.is_tensor(value)
    }
    return replace(launch, **tensors)


def arithmetics(activation: Activation):
    shape = Shape(16, 4, 256, 512, 8, activation)
    yield PUBLISHED
    for version in VERSIONS:
        for family in KernelFamily:
            if version == "0.6.16" and family is KernelFamily.DIRECT_MICRO:
                continue
            yield contract_for(version).arithmetic(family, shape)


@pytest.mark.parametrize("activation", Activation)
def test_every_family_agrees_with_the_cpu(activation):
    layer = make_layer(activation, experts=8, hidden=256, intermediate=512)
    x, routing = make_inputs(layer, tokens=16, top_k=4)
    launch = reference.exact_launch(layer, layer.fc1.input_scale.max(), layer.fc2.input_scale)
    on_gpu = moe.Routing(routing.expert_ids.to(CUDA), routing.weights.to(CUDA))
    for arithmetic in arithmetics(activation):
        cpu = moe.run(launch, x, routing, arithmetic, 5)
        gpu = moe.run(to(launch, CUDA), x.to(CUDA), on_gpu, arithmetic, 5)
        assert torch.equal(gpu.input.codes.cpu(), cpu.input.codes)
        assert torch.equal(gpu.input.block_scale.cpu(), cpu.input.block_scale)
        assert distance(gpu.fc1.cpu(), cpu.fc1).relative_rms < 1e-6
        # fp32 order may move a bf16 rounding of the intermediate, rarely.
        inner = compare_codes(
            gpu.intermediate_quantized.codes.cpu(), cpu.intermediate_quantized.codes
        )
        assert inner.differing <= inner.total * 1e-3
        assert distance(gpu.unrounded.cpu(), cpu.unrounded).relative_rms < 0.01


def test_bf16_operands_with_fp32_output_are_the_exact_product():
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (96, 256), dtype=torch.uint8, generator=generator)
    scales = torch.randint(1, 120, (96, 32), dtype=torch.uint8, generator=generator)
    assert operand_dtype(CUDA) is torch.bfloat16
    exact = nvfp4.operand(packed, scales, torch.float64)
    operand = nvfp4.operand(packed.to(CUDA), scales.to(CUDA), torch.bfloat16)
    assert torch.equal(operand.double().cpu(), exact)
    with full_precision():
        product = matmul(operand, operand).cpu()
    assert product.dtype == torch.float32
    assert distance(product, exact @ exact.t()).relative_rms < 1e-6


def test_the_truth_agrees_with_the_cpu():
    for activation in Activation:
        layer = make_layer(activation)
        x, routing = make_inputs(layer)
        cpu = reference.truth(layer, x, routing)
        on_gpu = moe.Routing(routing.expert_ids.to(CUDA), routing.weights.to(CUDA))
        gpu = reference.truth(layer.to(CUDA), x.to(CUDA), on_gpu)
        assert distance(gpu.cpu(), cpu).relative_rms < 1e-12


@pytest.mark.parametrize("version", VERSIONS[1:])
def test_the_layer_check_says_the_same(version):
    subject, own = load_inputs()
    chosen = Settings(
        contract_for(version), (Arm.FIX, Arm.BAKED), (1, 8), None, InputScales.LAYER, 0
    )
    cpu, gpu = (
        check(subject.to(device), chosen, (Gate(Arm.FIX),), lambda _: None, own.to(device))
        for device in (CPU, CUDA)
    )
    assert gpu.verdict is cpu.verdict is Verdict.GOOD
    assert gpu.fc1 == cpu.fc1
    for left, right in zip(gpu.results, cpu.results, strict=True):
        assert left.first_divergence is right.first_divergence
        assert left.true_error.relative_rms == pytest.approx(
            right.true_error.relative_rms, rel=0.02
        )
