"""Arms: ways of running one layer, each a pure function of the layer, its inputs and a seed."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import silu

from trtllm_b12x_fix.emulator import moe, reference
from trtllm_b12x_fix.emulator.arithmetic import PUBLISHED, Arithmetic, KernelFamily
from trtllm_b12x_fix.emulator.contract import Shape, contract_for
from trtllm_b12x_fix.emulator.grouped import MatmulBackend, forced, grouped_matmul
from trtllm_b12x_fix.emulator.matmul import full_precision, operand_dtype
from trtllm_b12x_fix.emulator.moe import Routing
from trtllm_b12x_fix.errors import InputError
from trtllm_b12x_fix.law import Powers, Subject
from trtllm_b12x_fix.layer import ExpertMatrices, MoELayer
from trtllm_b12x_fix.repair import InputScales, Strategy, arguments, input_scales

#: Rows of the decode step whose kernels are emulated; the arithmetic of a forced family does not
#: depend on it.
DECODE_TOKENS = 8


#: A backend of another order than the usual one for products of this size.
_OTHER_PRODUCTS = {"cpu": MatmulBackend.NUMBA, "cuda": MatmulBackend.TORCH}


class Arm(enum.Enum):
    """What is compared. Values are the names in reports."""

    BF16 = "bf16"  # the model's own MLPs: what every other arm is held against
    W4A16 = "w4a16"  # NVFP4 weights, bf16 activations
    REFERENCE = "reference"  # NVFP4 weights and activations, published arithmetic, fp32 sums
    ALPHAS = "alphas"  # the repair
    UNIT = "unit"  # intact scales, input scales of 1.0
    BAKED = "baked"  # as shipped

    @property
    def strategy(self) -> Strategy | None:
        """How a b12x kernel gets its scales; ``None`` for arms that run none."""
        return {
            Arm.ALPHAS: Strategy.ALPHAS,
            Arm.UNIT: Strategy.UNIT,
            Arm.BAKED: Strategy.BAKED,
        }.get(self)

    @property
    def obeys_the_law(self) -> bool:
        """Whether every power of two has to give the same bits."""
        return self in (Arm.W4A16, Arm.REFERENCE, Arm.ALPHAS)


@dataclass(frozen=True)
class Kernel:
    """One kernel family of one FlashInfer version.

    Attributes:
        graph_capacity: see :class:`trtllm_b12x_fix.emulator.contract.Shape`.
    """

    version: str
    family: KernelFamily
    graph_capacity: int | None = None

    def __str__(self) -> str:
        retained = " (retained)" if self.graph_capacity else ""
        return f"{self.version} {self.family.value}{retained}"

    def arithmetic(self, layer: MoELayer) -> Arithmetic:
        """What this family computes on such a layer, every expert selected."""
        shape = Shape(
            DECODE_TOKENS,
            layer.experts,
            layer.hidden,
            layer.intermediate,
            layer.experts,
            layer.activation,
            self.graph_capacity,
        )
        return contract_for(self.version).arithmetic(self.family, shape)


STATIC = Kernel("0.6.18", KernelFamily.STATIC)


@dataclass(frozen=True)
class Variant:
    """One run of the whole model.

    Attributes:
        kernel: for arms that run a b12x kernel.
        powers: where the law moved the weights.
        seed: order of adds: of the atomic ones where the kernel has them, else of the products',
            by another backend.
    """

    arm: Arm
    kernel: Kernel | None = None
    powers: Powers = field(default_factory=Powers)
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.arm.strategy is None) != (self.kernel is None):
            raise InputError(f"{self.arm.value} and kernel {self.kernel} do not go together")

    @property
    def label(self) -> str:
        """Arm and kernel."""
        return f"{self.arm.value}, {self.kernel}" if self.kernel else self.arm.value

    @property
    def name(self) -> str:
        """Everything that tells it from others."""
        order = f", other order {self.seed}" if self.seed else ""
        return f"{self.label}, {self.powers}{order}"


#: What runs one layer: its number and the moved subject, to bf16 [T, H].
Runner = Callable[[int, Subject], Tensor]


def runner(variant: Variant) -> Runner:
    """How a variant runs a layer. Its subjects have been moved by the law already.

    Raises:
        InputError: the bf16 arm, which has no experts.
    """
    if variant.arm is Arm.W4A16:
        return lambda _, subject: w4a16(subject)
    return lambda number, subject: trace(variant, number, subject).output


def trace(variant: Variant, number: int, subject: Subject) -> moe.MoETrace:
    """One launch of a quantizing arm, every stage kept.

    Args:
        number: of the decoder layer, so that atomic adds arrive in another order in each.
    """
    layer = subject.layer
    scales = input_scales(layer, InputScales.LAYER)
    if variant.arm is Arm.REFERENCE:
        launch = reference.exact_launch(layer, *scales)
        with forced(_OTHER_PRODUCTS[subject.x.device.type] if variant.seed else None):
            return moe.run(launch, subject.x, subject.routing, PUBLISHED)
    strategy, kernel = variant.arm.strategy, variant.kernel
    if strategy is None or kernel is None:
        raise InputError(f"{variant.arm.value} launches no kernel")
    launch = arguments(strategy, layer, *scales, contract_for(kernel.version)).launch(layer)
    order = variant.seed * 10_000 + number
    return moe.run(launch, subject.x, subject.routing, kernel.arithmetic(layer), order)


def w4a16(subject: Subject) -> Tensor:
    """NVFP4 weights, activations in bf16, sums in fp32: what no quantized activation costs.

    The product of a bf16 activation and a code times its block scale has at most 14 significant
    bits: exact in fp32.
    """
    layer, x, routing = subject.layer, subject.x, subject.routing
    tokens, routes = routing.expert_ids.shape
    rows = torch.arange(tokens, device=x.device).repeat_interleave(routes)
    with full_precision():
        up, gate = _multiply(layer.fc1, x, rows, routing).chunk(2, dim=-1)
        inner = (silu(gate) * up).to(torch.bfloat16)
        every = torch.arange(rows.numel(), device=x.device)
        y = _multiply(layer.fc2, inner, every, routing)
    y = y.view(tokens, routes, -1) * routing.weights.unsqueeze(-1)
    return y.sum(dim=1).to(torch.bfloat16)


def _multiply(matrices: ExpertMatrices, operand: Tensor, rows: Tensor, routing: Routing) -> Tensor:
    """``operand[rows] @ W.T`` of each route's expert, fp32 [routes, R]."""
    product = grouped_matmul(
        operand.to(operand_dtype(operand.device)),
        rows,
        matrices.packed,
        matrices.block_scale,
        moe.routes_by_expert(routing),
        [slice(0, matrices.columns)],
    ).squeeze(1)
    return product * matrices.weight_scale_2[routing.expert_ids.flatten()].unsqueeze(1)
