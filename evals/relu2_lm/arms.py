"""What stands in the place of the experts: bf16, dequantized weights, or an emulated kernel."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from evals.relu2_lm.experts import Experts
from evals.relu2_lm.model import LanguageModel
from evals.relu2_lm.quantize import dequantize
from trtllm_b12x_fix.checkpoint.embedded import REPORTED_WEIGHT_SCALE_2
from trtllm_b12x_fix.emulator import moe
from trtllm_b12x_fix.emulator.arithmetic import Arithmetic, KernelFamily
from trtllm_b12x_fix.emulator.contract import KernelContract, Shape
from trtllm_b12x_fix.emulator.moe import LaunchTensors, Routing
from trtllm_b12x_fix.emulator.reference import exact_launch
from trtllm_b12x_fix.errors import NoExactFormError
from trtllm_b12x_fix.law import Powers, move_input, move_layer, move_routing, nearest_shift
from trtllm_b12x_fix.layer import MoELayer
from trtllm_b12x_fix.layer_check.arms import Arm, resolve
from trtllm_b12x_fix.repair import InputScales, arguments, bake, input_scales

#: Tokens of one emulated launch at most: memory for every stage of more than that.
_TOKENS_AT_A_TIME = 2**14


@dataclass(frozen=True)
class Kernel:
    """Which kernel serves.

    Attributes:
        tokens: tokens of a decode step, which decides the kernel family. All tokens of an
            evaluation, the prompt's too, run in that family's arithmetic.
    """

    contract: KernelContract
    tokens: int


class Magnitude(enum.Enum):
    """Where the law moves the experts' weights, each projection of each layer by itself."""

    OWN = "own"
    REPORTED = "reported"  # weight_scale_2 nearest to the reported checkpoint's 2e-5
    #: One and two powers of two further: controls that show what an evaluation can see.
    HALF = "reported / 2"
    QUARTER = "reported / 4"

    def powers(self, layer: MoELayer) -> Powers:
        """How far this layer is moved."""
        if self is Magnitude.OWN:
            return Powers()
        further = {Magnitude.REPORTED: 0, Magnitude.HALF: 1, Magnitude.QUARTER: 2}[self]
        return Powers(
            k=nearest_shift(layer.fc1.weight_scale_2, REPORTED_WEIGHT_SCALE_2) + further,
            j=nearest_shift(layer.fc2.weight_scale_2, REPORTED_WEIGHT_SCALE_2) + further,
        )


class EmulatedExperts(nn.Module):
    """One layer's experts through an emulated launch, at a magnitude of the law's.

    Args:
        arm: ``None`` for the reference: exact scales in the kernel's own arithmetic.
        order_seed: order of atomic adds, ``None`` for slot order.

    Raises:
        NoExactFormError: the arm cannot be expressed on this contract.
    """

    def __init__(
        self,
        layer: MoELayer,
        arm: Arm | None,
        kernel: Kernel,
        top_k: int,
        powers: Powers,
        order_seed: int | None = None,
    ) -> None:
        super().__init__()
        moved = move_layer(layer, powers)
        self.powers, self.order_seed = powers, order_seed
        self.arithmetic, self.launch = _prepare(moved, arm, kernel, top_k)

    def forward(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        parts = zip(*(t.split(_TOKENS_AT_A_TIME) for t in (x, expert_ids, weights)), strict=True)
        return torch.cat([self._run(*part) for part in parts]).to(x.dtype)

    def _run(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        routing = move_routing(Routing(expert_ids, weights), self.powers)
        moved = move_input(x.to(torch.bfloat16), self.powers)
        return moe.run(self.launch, moved, routing, self.arithmetic, self.order_seed).output


def _prepare(
    layer: MoELayer, arm: Arm | None, kernel: Kernel, top_k: int
) -> tuple[Arithmetic, LaunchTensors]:
    shape = Shape(
        kernel.tokens, top_k, layer.hidden, layer.intermediate, layer.experts, layer.activation
    )
    scales = input_scales(layer, InputScales.LAYER)
    if arm is None:
        family = kernel.contract.select(shape)
        return _arithmetic(kernel, family, shape), exact_launch(layer, *scales)
    resolved = resolve(arm, kernel.contract, shape, None)
    if resolved.family is None:
        raise NoExactFormError(resolved.note)
    args = arguments(resolved.strategy, layer, *scales, kernel.contract)
    return _arithmetic(kernel, resolved.family, shape), args.launch(layer)


def _arithmetic(kernel: Kernel, family: KernelFamily, shape: Shape) -> Arithmetic:
    return kernel.contract.arithmetic(family, shape)


def weights_only(layer: MoELayer, like: Experts) -> Experts:
    """W4A16: the quantized weights, dequantized into the dtype of ``like``; activations stay."""
    made = _empty_like(like)
    made.up_proj.data = dequantize(layer.fc1, like.up_proj.dtype)
    made.down_proj.data = dequantize(layer.fc2, like.down_proj.dtype)
    return made


def baked_weights_only(layer: MoELayer, powers: Powers, like: Experts) -> Experts:
    """The weights that the bake leaves at a magnitude, in bf16 and back at their own magnitude.

    Activations stay: a server of bf16 checkpoints can run it as the broken twin.
    """
    moved = move_layer(layer, powers)
    fc1, fc2 = (
        dequantize(
            replace(
                matrices,
                block_scale=bake(matrices),
                weight_scale_2=torch.full_like(matrices.weight_scale_2, 2.0**back),
            ),
            like.up_proj.dtype,
        )
        for matrices, back in ((moved.fc1, powers.k + powers.i), (moved.fc2, powers.j))
    )
    made = _empty_like(like)
    made.up_proj.data, made.down_proj.data = fc1, fc2
    return made


def _empty_like(like: Experts) -> Experts:
    made = Experts.__new__(Experts)
    nn.Module.__init__(made)
    made.up_proj = nn.Parameter(like.up_proj, requires_grad=False)
    made.down_proj = nn.Parameter(like.down_proj, requires_grad=False)
    made.observe = None
    return made


@contextmanager
def standing_in(model: LanguageModel, experts: dict[int, nn.Module]) -> Iterator[LanguageModel]:
    """The model with these experts by layer number; its own are put back at the end."""
    own = {number: layer.experts for number, layer in model.moe_layers()}
    try:
        for number, layer in model.moe_layers():
            layer.experts = experts.get(number, own[number])
        yield model
    finally:
        for number, layer in model.moe_layers():
            layer.experts = own[number]
