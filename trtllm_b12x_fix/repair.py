"""The repair as pure functions: a layer's scales in, b12x kernel arguments out, and why.

Upstream bakes ``weight_scale_2`` into the E4M3 block scales because, below FlashInfer 0.6.17, one
tensor (``w1_alpha``) has two jobs: it multiplies FC1's accumulator and it is the scale against
which activations are quantized, so ``weight_scale_2`` cannot ride in it. Two forms keep block
scales intact:

``alphas``
    needs ``input_global_scale``: w1_alpha = ws2, input_global_scale = s1, w2_alpha = ws2 * s2.
``fp32-rescale``
    relu2 only: w1_alpha = s1 leaves FC1 at h/ws2; relu2 is homogeneous, so the activation comes
    out at r/ws2^2, and an fc2_input_scale of s2/ws2^2 quantizes it to the same codes.

Names: ws2 is ``weight_scale_2``; s1 and s2 are the FC1 and FC2 input scales (amax / 2688). All
are dequantizing multipliers.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_b12x_fix.emulator.arithmetic import KernelFamily
from trtllm_b12x_fix.emulator.contract import DirectMicro, InputScaleArgument, KernelContract
from trtllm_b12x_fix.emulator.moe import LaunchTensors
from trtllm_b12x_fix.errors import NoExactFormError
from trtllm_b12x_fix.formats import e4m3
from trtllm_b12x_fix.layer import Activation, ExpertMatrices, MoELayer


class Strategy(enum.Enum):
    """How ``weight_scale_2`` reaches the kernel."""

    BAKED = "baked"  # multiplied into the block scales: upstream's way
    ALPHAS = "alphas"  # in w1_alpha and w2_alpha, calibrated input scales
    FP32_RESCALE = "fp32-rescale"  # in fc2_input_scale and w2_alpha
    UNIT = "unit"  # in the alphas, input scales of 1.0
    CUTLASS = "cutlass"  # no exact form: decode leaves b12x


class InputScales(enum.Enum):
    """Which calibrated input scales a backend uses."""

    LAYER = "layer"  # the layer's largest, one scalar (TensorRT-LLM)
    FILE = "file"  # each expert's own, as the checkpoint has them


@dataclass(frozen=True)
class KernelArguments:
    """Arguments of ``B12xMoEWrapper.run`` for one strategy (weights' codes are the layer's own).

    Attributes:
        w1_block_scale, w2_block_scale: uint8 E4M3 bytes, linear layout; the layer's own tensors
            unless the strategy is ``baked``.
        w1_alpha, w2_alpha: fp32 [E].
        input_global_scale: fp32 [] or [E]; ``None`` where the kernel takes w1_alpha for it.
        fc2_input_scale: fp32 [] or [E].
        fc1_unit: fp32 [E]; the kernel's FC1 output times this is FC1's true output. 1 unless the
            strategy carries FC1 in other units. Not an argument: for comparing traces.
    """

    strategy: Strategy
    w1_block_scale: Tensor
    w2_block_scale: Tensor
    w1_alpha: Tensor
    w2_alpha: Tensor
    input_global_scale: Tensor | None
    fc2_input_scale: Tensor
    fc1_unit: Tensor

    def launch(self, layer: MoELayer) -> LaunchTensors:
        """What the kernel gets: the wrapper's fold of w1_alpha and input_global_scale done."""
        if self.input_global_scale is None:
            w1_alpha, input_scale = self.w1_alpha, self.w1_alpha
        else:
            w1_alpha = self.w1_alpha * self.input_global_scale
            input_scale = self.input_global_scale
        return LaunchTensors(
            w1_packed=layer.fc1.packed,
            w1_block_scale=self.w1_block_scale,
            w2_packed=layer.fc2.packed,
            w2_block_scale=self.w2_block_scale,
            w1_alpha=w1_alpha,
            w2_alpha=self.w2_alpha,
            input_global_scale=input_scale,
            fc2_input_scale=self.fc2_input_scale,
            activation=layer.activation,
        )


@dataclass(frozen=True)
class FixPlan:
    """What the fix does on one kernel contract: a strategy, families kept out, and the reason."""

    strategy: Strategy
    keep_out: frozenset[KernelFamily]
    reason: str


def plan(contract: KernelContract, activation: Activation) -> FixPlan:
    """Choose the strategy for a layer's activation on a contract."""
    if contract.input_scale is InputScaleArgument.SEPARATE:
        if contract.direct_micro is DirectMicro.MULTIPLIES:
            return FixPlan(
                Strategy.ALPHAS,
                frozenset({KernelFamily.DIRECT_MICRO}),
                f"weight_scale_2 rides in the alphas; direct micro, which misreads input scales in "
                f"FlashInfer {contract.version}, is never launched",
            )
        return FixPlan(Strategy.ALPHAS, frozenset(), "weight_scale_2 rides in the alphas")
    if activation is Activation.RELU2:
        return FixPlan(
            Strategy.FP32_RESCALE,
            frozenset(),
            f"FlashInfer {contract.version} has no input_global_scale; relu2 lets weight_scale_2 "
            "ride in fc2_input_scale",
        )
    return FixPlan(
        Strategy.CUTLASS,
        frozenset(),
        f"FlashInfer {contract.version} has no input_global_scale, without which "
        f"{activation.value} has no exact form: decode has to go to CUTLASS, or FlashInfer to "
        "0.6.17 or later",
    )


def input_scales(layer: MoELayer, source: InputScales) -> tuple[Tensor, Tensor]:
    """FC1's and FC2's input scales as a backend uses them: two fp32 scalars, or two [E]."""
    if source is InputScales.LAYER:
        return layer.fc1.largest_input_scale, layer.fc2.largest_input_scale
    return layer.fc1.input_scale, layer.fc2.input_scale


def arguments(
    strategy: Strategy,
    layer: MoELayer,
    fc1_input_scale: Tensor,
    fc2_input_scale: Tensor,
    contract: KernelContract,
) -> KernelArguments:
    """Kernel arguments of a strategy.

    Args:
        fc1_input_scale, fc2_input_scale: fp32 [] or [E], from :func:`input_scales`.

    Raises:
        NoExactFormError: the strategy cannot be expressed on this contract or activation.
    """
    _refuse(strategy, layer.activation, contract)
    builder = {
        Strategy.BAKED: _baked,
        Strategy.ALPHAS: _alphas,
        Strategy.FP32_RESCALE: _fp32_rescale,
        Strategy.UNIT: _unit,
    }[strategy]
    return builder(layer, fc1_input_scale, fc2_input_scale)


def _refuse(strategy: Strategy, activation: Activation, contract: KernelContract) -> None:
    separate = contract.input_scale is InputScaleArgument.SEPARATE
    if strategy in (Strategy.ALPHAS, Strategy.UNIT) and not separate:
        raise NoExactFormError(
            f"{strategy.value} needs input_global_scale, which FlashInfer {contract.version} does "
            "not have (0.6.17 or later does)"
        )
    if strategy is Strategy.FP32_RESCALE and activation is not Activation.RELU2:
        raise NoExactFormError(
            f"fp32-rescale needs relu2 (scaling its input by c scales its output by c^2), not "
            f"{activation.value}"
        )
    if strategy is Strategy.CUTLASS:
        raise NoExactFormError("CUTLASS takes no b12x arguments")


def bake(matrices: ExpertMatrices) -> Tensor:
    """Block scales with weight_scale_2 multiplied in and cast back to E4M3, as upstream does.

    Returns:
        uint8 [E, R, C/16]. Subnormal products lose bits and those at or below 2^-10 become zero:
        the bug. Products above 448 (weights above 2688) are left to the installed torch's cast, as
        upstream leaves them: NaN in older versions, 448 in 2.13.
    """
    exact = e4m3.decode(matrices.block_scale) * matrices.weight_scale_2[:, None, None]
    return exact.to(torch.float8_e4m3fn).view(torch.uint8)


def _per_expert(scale: Tensor, layer: MoELayer) -> Tensor:
    return scale.expand(layer.experts).contiguous()


def _ones(layer: MoELayer) -> Tensor:
    return torch.ones_like(layer.fc1.weight_scale_2)


def _baked(layer: MoELayer, s1: Tensor, s2: Tensor) -> KernelArguments:
    return KernelArguments(
        Strategy.BAKED,
        bake(layer.fc1),
        bake(layer.fc2),
        w1_alpha=_per_expert(s1, layer),
        w2_alpha=_per_expert(s2, layer),
        input_global_scale=None,
        fc2_input_scale=s2,
        fc1_unit=_ones(layer),
    )


def _alphas(layer: MoELayer, s1: Tensor, s2: Tensor) -> KernelArguments:
    return KernelArguments(
        Strategy.ALPHAS,
        layer.fc1.block_scale,
        layer.fc2.block_scale,
        w1_alpha=layer.fc1.weight_scale_2,
        w2_alpha=layer.fc2.weight_scale_2 * s2,
        input_global_scale=s1,
        fc2_input_scale=s2,
        fc1_unit=_ones(layer),
    )


def _fp32_rescale(layer: MoELayer, s1: Tensor, s2: Tensor) -> KernelArguments:
    unit = layer.fc1.weight_scale_2
    return KernelArguments(
        Strategy.FP32_RESCALE,
        layer.fc1.block_scale,
        layer.fc2.block_scale,
        w1_alpha=_per_expert(s1, layer),
        w2_alpha=layer.fc2.weight_scale_2 * s2,
        input_global_scale=None,
        # Divided twice: ws2 squared may underflow fp32 where the quotient does not.
        fc2_input_scale=s2 / unit / unit,
        fc1_unit=unit,
    )


def _unit(layer: MoELayer, s1: Tensor, s2: Tensor) -> KernelArguments:
    return KernelArguments(
        Strategy.UNIT,
        layer.fc1.block_scale,
        layer.fc2.block_scale,
        w1_alpha=layer.fc1.weight_scale_2,
        w2_alpha=layer.fc2.weight_scale_2,
        input_global_scale=torch.ones_like(s1),
        fc2_input_scale=torch.ones_like(s2),
        fc1_unit=_ones(layer),
    )
