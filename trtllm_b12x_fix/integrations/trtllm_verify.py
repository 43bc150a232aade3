"""Running a repaired layer's own wrapper on made-up tokens, against the emulation of both arms.

The kernel that answers is the one that will serve. What is compared with is the emulated repair and
the emulated bake of the same experts, in the arithmetic of the family that the dispatch picks. A
right kernel can be a few percent from the emulation (its output is summed in bf16 in random order),
so only gross disagreement fails: not finite, clearly nearer to the bake, or beyond 10%.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trtllm_b12x_fix.emulator import moe
from trtllm_b12x_fix.emulator.contract import InputQuantization, KernelContract, Shape
from trtllm_b12x_fix.emulator.reference import intermediate_amax
from trtllm_b12x_fix.formats import scale_layout
from trtllm_b12x_fix.formats.nvfp4 import CALIBRATION_MAX
from trtllm_b12x_fix.integrations.trtllm_contract import LayerView
from trtllm_b12x_fix.integrations.trtllm_layer import LayerOutcome
from trtllm_b12x_fix.integrations.trtllm_trial import TOKENS, call, make_trial
from trtllm_b12x_fix.layer import ExpertMatrices, MoELayer
from trtllm_b12x_fix.metrics import distance
from trtllm_b12x_fix.repair import Strategy, arguments, plan

#: Beyond this a live output is wrong; right ones were up to 6% away in the report.
FAILED_BEYOND = 0.10
#: Nearer to the bake than to the repair by this factor is no accident.
_NEARER = 0.5


class VerifyState(enum.Enum):
    """How a live check ended."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_DISTINGUISHABLE = "not distinguishable"
    NOT_VERIFIED = "not verified"


@dataclass(frozen=True)
class Verification:
    """A live check of one layer; figures are relative RMS, fractions.

    Attributes:
        from_repaired, from_baked: the live output's distance to each emulated arm.
        apart: distance between the arms.
        noise: what another order of the family's adds changes.
    """

    layer: str
    state: VerifyState
    words: str
    from_repaired: float | None = None
    from_baked: float | None = None
    apart: float | None = None
    noise: float | None = None

    @property
    def failed(self) -> bool:
        return self.state is VerifyState.FAILED


def verify_layer(module: Any, outcome: LayerOutcome, contract: KernelContract) -> Verification:
    """Check one repaired layer; an error of the check itself is "not verified", never "failed"."""
    try:
        with torch.inference_mode(False), torch.no_grad():
            return _verify(module, outcome, contract)
    except Exception as error:
        # Memory, compilation, a machine without the kernels: none of them says the layer is wrong.
        words = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return Verification(
            outcome.name, VerifyState.NOT_VERIFIED, f"not verified: the check failed with {words}"
        )


def _verify(module: Any, outcome: LayerOutcome, contract: KernelContract) -> Verification:
    view, strategy = outcome.view, outcome.strategy
    assert view is not None
    assert strategy is not None
    top_k = int(module.b12x_wrapper.top_k)
    trial = make_trial(view, top_k)
    used, local = trial.ids.unique(return_inverse=True)
    layer = _used_experts(module, view, used)
    routing = moe.Routing(local, trial.weights)
    trial = replace(trial, x=_fitting(trial.x, layer, view, routing))
    live = call(module, view, trial)
    if not bool(torch.isfinite(live).all()):
        return Verification(outcome.name, VerifyState.FAILED, "the live output is not finite")
    shape = _shape(view, top_k, strategy)
    return _judge(outcome, live, _Arms(layer, trial.x, routing, contract, shape))


def _used_experts(module: Any, view: LayerView, used: Tensor) -> MoELayer:
    """The experts with work as a layer of their own, scales unswizzled."""

    def matrices(
        weight: Tensor, scales: Tensor, weight_scale_2: Tensor, reciprocal: Tensor
    ) -> ExpertMatrices:
        columns = scales.shape[2]
        return ExpertMatrices(
            weight.data[used].view(torch.uint8),
            scale_layout.unswizzle(scales.view(torch.uint8)[used], scales.shape[1], columns),
            weight_scale_2[used],
            (1.0 / reciprocal).expand(used.numel()).contiguous(),
        )

    return MoELayer(
        matrices(
            module.w3_w1_weight, view.w1_block_scale, view.fc1_weight_scale_2, view.fc1_reciprocal
        ),
        matrices(
            module.w2_weight, view.w2_block_scale, view.fc2_weight_scale_2, view.fc2_reciprocal
        ),
        view.activation,
        view.name,
        view.hidden,
        view.intermediate,
    )


def _fitting(x: Tensor, layer: MoELayer, view: LayerView, routing: moe.Routing) -> Tensor:
    """The activations, halved until FC2's input fits its own scale."""
    limit = CALIBRATION_MAX / float(view.fc2_reciprocal)
    for _ in range(20):
        if intermediate_amax(layer, x, routing) <= limit:
            break
        x = x / 2
    return x


def _shape(view: LayerView, top_k: int, strategy: Strategy) -> Shape:
    return Shape(
        tokens=TOKENS,
        top_k=top_k,
        hidden=view.hidden,
        intermediate=view.intermediate,
        experts=view.experts,
        activation=view.activation,
        sharing=InputQuantization.SHARED
        if strategy is Strategy.ALPHAS
        else InputQuantization.PER_ROUTE,
    )


@dataclass(frozen=True)
class _Arms:
    """Emulated outputs for the tokens that the live wrapper ran."""

    layer: MoELayer
    x: Tensor
    routing: moe.Routing
    contract: KernelContract
    shape: Shape

    def output(self, strategy: Strategy, order: int | None = None) -> Tensor:
        keep_out = plan(self.contract, self.layer.activation).keep_out
        family = self.contract.without(*keep_out).select(self.shape)
        scales = self.layer.fc1.largest_input_scale, self.layer.fc2.largest_input_scale
        launch = arguments(strategy, self.layer, *scales, self.contract).launch(self.layer)
        arithmetic = self.contract.arithmetic(family, self.shape)
        return moe.run(launch, self.x, self.routing, arithmetic, order).output


def _judge(outcome: LayerOutcome, live: Tensor, arms: _Arms) -> Verification:
    assert outcome.strategy is not None
    repaired = arms.output(outcome.strategy)
    baked = arms.output(Strategy.BAKED)
    if not bool(live.any() or repaired.any() or baked.any()):
        words = "not verified: the layer's output is zero for these tokens, nothing was compared"
        return Verification(outcome.name, VerifyState.NOT_VERIFIED, words)
    figures = {
        "from_repaired": distance(live, repaired).relative_rms,
        "from_baked": distance(live, baked).relative_rms,
        "apart": distance(baked, repaired).relative_rms,
        "noise": distance(arms.output(outcome.strategy, 1), repaired).relative_rms,
    }
    state = _state(**figures)
    words = (
        f"live output {state.value}: {100 * figures['from_repaired']:.2g}% from the emulated "
        f"repair, {100 * figures['from_baked']:.2g}% from the emulated bake"
    )
    return Verification(outcome.name, state, words, **figures)


def _state(from_repaired: float, from_baked: float, apart: float, noise: float) -> VerifyState:
    if math.isnan(from_repaired):
        return VerifyState.NOT_VERIFIED  # the live output is finite, so the emulation is not
    if from_repaired > FAILED_BEYOND:
        return VerifyState.FAILED
    if apart <= 2 * noise or apart == 0:
        return VerifyState.NOT_DISTINGUISHABLE
    if from_baked < _NEARER * from_repaired:
        return VerifyState.FAILED
    return VerifyState.PASSED
