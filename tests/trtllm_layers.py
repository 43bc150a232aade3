"""What TensorRT-LLM's b12x hook leaves on a layer, made from a MoELayer without either package.

The wrapper computes with the emulator, so a live check of the layer has something to run, and can
be told to misbehave. ``Method.transform_weights`` is upstream's hook: it bakes, or does not.
:class:`Bench` is a process with the fix in it.
"""

from __future__ import annotations

import enum
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.layers import make_layer
from trtllm_b12x_fix.emulator import moe
from trtllm_b12x_fix.emulator.arithmetic import KernelFamily
from trtllm_b12x_fix.emulator.contract import (
    InputQuantization,
    InputScaleArgument,
    KernelContract,
    Shape,
    contract_for,
)
from trtllm_b12x_fix.formats import scale_layout
from trtllm_b12x_fix.integrations import tensorrt_llm, trtllm_report
from trtllm_b12x_fix.integrations.b12x_dispatch import CUTOVER, DISPATCH
from trtllm_b12x_fix.integrations.b12x_wrapper import FORCE_W4A16
from trtllm_b12x_fix.integrations.trtllm_summary import QuietPeriod, Summary
from trtllm_b12x_fix.layer import Activation, ExpertMatrices, MoELayer
from trtllm_b12x_fix.ledger import Ledger
from trtllm_b12x_fix.settings import LEDGER, Mode, Settings

VERSION = "1.4.0rc1"
TOP_K = 2
THRESHOLD_OF_CLASS = 64
ROW_ALIGNMENT = 128
PARAMETERS = (
    "w3_w1_weight",
    "w2_weight",
    "w3_w1_weight_scale",
    "w2_weight_scale",
    "fc31_alpha",
    "fc2_alpha",
    "fc31_input_scale",
    "fc2_input_scale",
)
#: Small, and so light that baking loses most block scales.
RELU2, SILU = (
    make_layer(activation, experts=4, hidden=128, intermediate=128, sigma=0.005)
    for activation in Activation
)


class Misbehaviour(enum.Enum):
    """What a wrapper does instead of its work."""

    NONE = "nothing"
    BAKED = "computes with the baked scales, whatever it is handed"
    NAN = "one output is NaN"
    TOO_LARGE = "everything is 1.2 times too large"
    ALL_ONES = "every output is 1"
    RAISES = "FlashInfer raises"
    OUT_OF_MEMORY = "CUDA has no memory left"


class Upstream(enum.Enum):
    """What the hook does with block scales."""

    BAKES = "multiplies them by weight_scale_2"
    INTACT_VIEW = "hands over the parameters' own memory"
    INTACT_COPY = "hands over a copy"
    LOST = "hands over something else"


class Layer(nn.Module):
    """The b12x backend's class: fewer tokens than the threshold go to b12x."""

    _PREFILL_VIA_CUTLASS_THRESHOLD = THRESHOLD_OF_CLASS

    def _route_to_cutlass(self, x: Tensor) -> bool:
        return x.shape[0] >= self._PREFILL_VIA_CUTLASS_THRESHOLD

    def decode(self, tokens: int = 2) -> str:
        """Where so many tokens go."""
        return "CUTLASS" if self._route_to_cutlass(torch.empty(tokens, 1)) else "b12x"


@dataclass
class Wrapper:
    """B12xMoEWrapper: what TensorRT-LLM tells it, and the emulator in the kernel's place."""

    contract: KernelContract
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    activation: str
    use_cuda_graph: bool = False
    misbehaviour: Misbehaviour = Misbehaviour.NONE
    #: The hook's block scales and alphas, for a wrapper that never lets go of them.
    baked: dict[str, Tensor] = field(default_factory=dict)
    calls: list[dict[str, Any]] = field(default_factory=list)
    #: Products of w1_alpha and input_global_scale that were computed; the last one is kept.
    folds: list[Tensor] = field(default_factory=list)
    _fold_key: Any = None

    def launch(self, x: Tensor, token_selected_experts: Tensor, **call: Any) -> Tensor:
        """One call, in the family that the contract picks."""
        self.calls.append({"x": x, **call})
        if self.misbehaviour is Misbehaviour.RAISES:
            raise ValueError("micro MoE kernel cannot launch")
        if self.misbehaviour is Misbehaviour.OUT_OF_MEMORY:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if self.misbehaviour is Misbehaviour.BAKED:
            call = {**call, "input_global_scale": None, **self.baked}
        output = self._emulate(x, token_selected_experts.long(), call)
        if self.misbehaviour is Misbehaviour.NAN:
            output[0, 0] = float("nan")
        if self.misbehaviour is Misbehaviour.TOO_LARGE:
            output = output * 1.2
        if self.misbehaviour is Misbehaviour.ALL_ONES:
            output = torch.ones_like(output)
        return output

    def _emulate(self, x: Tensor, ids: Tensor, call: dict[str, Any]) -> Tensor:
        input_scale = call.get("input_global_scale")
        alpha = call["w1_alpha"]
        if input_scale is not None:
            # As the real wrapper keys its cached fold; inference tensors have no version.
            key = (id(alpha), id(input_scale), alpha._version, input_scale._version)
            if key != self._fold_key:
                self.folds.append(alpha * input_scale)
                self._fold_key = key
            alpha = self.folds[-1]
        launch = moe.LaunchTensors(
            w1_packed=call["w1_weight"],
            w1_block_scale=_linear(call["w1_weight_sf"]),
            w2_packed=call["w2_weight"],
            w2_block_scale=_linear(call["w2_weight_sf"]),
            w1_alpha=alpha,
            w2_alpha=call["w2_alpha"],
            input_global_scale=call["w1_alpha"] if input_scale is None else input_scale,
            fc2_input_scale=call["fc2_input_scale"],
            activation=Activation(self.activation),
        )
        shape = Shape(
            tokens=x.shape[0],
            top_k=self.top_k,
            hidden=self.hidden_size,
            intermediate=self.intermediate_size,
            experts=self.num_experts,
            activation=launch.activation,
            sharing=(
                InputQuantization.SHARED
                if launch.input_global_scale.numel() == 1
                else InputQuantization.PER_ROUTE
            ),
        )
        arithmetic = self.contract.arithmetic(self._family(shape), shape)
        routing = moe.Routing(ids, call["token_final_scales"])
        return moe.run(launch, x, routing, arithmetic, order_seed=5).output

    def _family(self, shape: Shape) -> KernelFamily:
        """The contract's choice, but for what the fix took out of the dispatch."""
        held = getattr(sys.modules.get(DISPATCH), "_DIRECT_MICRO_MAX_N", 512) == 0
        out = {KernelFamily.DIRECT_MICRO} if held else set()
        return self.contract.without(*out).select(shape)


class SeparateWrapper(Wrapper):
    """From FlashInfer 0.6.17."""

    def run(
        self,
        x,
        w1_weight,
        w1_weight_sf,
        w2_weight,
        w2_weight_sf,
        token_selected_experts,
        token_final_scales,
        *,
        w1_alpha,
        w2_alpha,
        fc2_input_scale,
        input_global_scale=None,
    ):
        return self.launch(**{k: v for k, v in locals().items() if k != "self"})


class FoldedWrapper(Wrapper):
    """Before FlashInfer 0.6.17: no ``input_global_scale``."""

    def run(
        self,
        x,
        w1_weight,
        w1_weight_sf,
        w2_weight,
        w2_weight_sf,
        token_selected_experts,
        token_final_scales,
        *,
        w1_alpha,
        w2_alpha,
        fc2_input_scale,
    ):
        return self.launch(**{k: v for k, v in locals().items() if k != "self"})


def _linear(mma: Tensor) -> Tensor:
    swizzled = scale_layout.from_mma(mma.view(torch.uint8))
    return scale_layout.unswizzle(swizzled, swizzled.shape[1], swizzled.shape[2])


@dataclass
class Method:
    """The quantization method; ``transform_weights`` of the instance is upstream's hook."""

    contract: KernelContract
    upstream: Upstream = Upstream.BAKES
    carries: bool = False
    misbehaviour: Misbehaviour = Misbehaviour.NONE
    top_k: int = TOP_K
    told: int | None = None
    knows_w4a16: bool = True
    use_cuda_graph: bool = False
    #: Static's band as FlashInfer would have read it when the wrapper was made.
    bands: list[str | None] = field(default_factory=list)

    def transform_weights(self, module: Any) -> None:
        self.bands.append(os.environ.get(CUTOVER))
        module._b12x_weights = entries_of(module, self.upstream)
        if self.carries:
            add_carrier(module)
        if self.knows_w4a16 and module.quant_config.quant_algo.name == "W4A16_NVFP4":
            module._b12x_weights = entries_of(module, Upstream.INTACT_VIEW)
            module._b12x_weights["fc2_input_scale"] = None
        separate = self.contract.input_scale is InputScaleArgument.SEPARATE
        kind = SeparateWrapper if separate else FoldedWrapper
        gated = module.w3_w1_weight.shape[1] > module.w2_weight.shape[2] * 16
        module.b12x_wrapper = kind(
            contract=self.contract,
            num_experts=module.num_experts,
            top_k=self.top_k,
            hidden_size=module.hidden_size,
            intermediate_size=self.told or module.w2_weight.shape[2] * 16,
            activation="silu" if gated else "relu2",
            use_cuda_graph=self.use_cuda_graph,
            misbehaviour=self.misbehaviour,
            baked=dict(module._b12x_weights),
        )


def entries_of(module: Any, upstream: Upstream) -> dict[str, Any]:
    """``_b12x_weights`` as the hook makes it."""

    def block_scales(scale: Tensor, alpha: Tensor, reciprocal: Tensor) -> Tensor:
        swizzled = scale.data.view(torch.float8_e4m3fn)
        if upstream is Upstream.BAKES:
            factor = (alpha * reciprocal)[:, None, None]
            swizzled = (swizzled.float() * factor).to(torch.float8_e4m3fn)
        if upstream is Upstream.INTACT_COPY:
            swizzled = swizzled.clone()
        if upstream is Upstream.LOST:
            swizzled = swizzled.float().mul(0.5).to(torch.float8_e4m3fn)
        return scale_layout.to_mma(swizzled)

    s1, s2 = 1.0 / module.fc31_input_scale, 1.0 / module.fc2_input_scale
    fc1 = module.w3_w1_weight_scale, module.fc31_alpha, module.fc31_input_scale
    fc2 = module.w2_weight_scale, module.fc2_alpha, module.fc2_input_scale
    return {
        "w1_weight": module.w3_w1_weight.data.view(torch.uint8),
        "w1_weight_sf": block_scales(*fc1),
        "w1_alpha": s1.expand(module.num_experts).contiguous(),
        "w2_weight": module.w2_weight.data.view(torch.uint8),
        "w2_weight_sf": block_scales(*fc2),
        "w2_alpha": s2.expand(module.num_experts).contiguous(),
        "fc2_input_scale": s2,
    }


def add_carrier(module: Any) -> None:
    """The arguments of an upstream that stopped baking."""
    module._b12x_weights |= {
        "w1_alpha": module.fc31_alpha * module.fc31_input_scale,
        "w2_alpha": module.fc2_alpha.data.clone(),
        "input_global_scale": 1.0 / module.fc31_input_scale,
    }


def make_module(
    layer: MoELayer = RELU2,
    *,
    index: int | None = 3,
    dynamic: bool = False,
    quant_algo: str = "NVFP4",
    inference: bool = False,
) -> Layer:
    """A loaded layer on which no hook has run: parameters as CUTLASS reads them.

    Args:
        dynamic: keep ``weight_scale_2``, as dynamic quantization does.
        inference: make every tensor under ``torch.inference_mode``.
    """
    with torch.inference_mode(inference):
        module = Layer()
        module.layer_idx = index
        module.dtype = torch.bfloat16
        module.quant_config = SimpleNamespace(quant_algo=SimpleNamespace(name=quant_algo))
        module.routing_method = SimpleNamespace(experts_per_token=TOP_K)
        module.num_experts, module.hidden_size = layer.experts, layer.hidden
        module.intermediate_size_per_partition = layer.intermediate
        module.fc31_act_scale = None
        padded = pad_rows(layer)
        _add_matrices(module, padded.fc1, "w3_w1_weight", "fc31", dynamic)
        _add_matrices(module, padded.fc2, "w2_weight", "fc2", dynamic)
    return module


def _add_matrices(
    module: Any, matrices: ExpertMatrices, weight: str, which: str, dynamic: bool
) -> None:
    reciprocal = matrices.largest_input_scale.reciprocal()
    # Two reciprocals, as upstream has them.
    alpha = 1.0 / (reciprocal * (1.0 / matrices.weight_scale_2))
    set_parameter(module, weight, matrices.packed.clone().view(torch.int64))
    scales = scale_layout.swizzle(matrices.block_scale)
    set_parameter(module, f"{weight}_scale", scales.view(torch.int32))
    set_parameter(module, f"{which}_alpha", alpha)
    set_parameter(module, f"{which}_input_scale", reciprocal)
    if dynamic:
        set_parameter(module, f"{which}_weight_scale_2", matrices.weight_scale_2.clone())


def set_parameter(module: Any, name: str, tensor: Tensor) -> None:
    """Register or replace a parameter."""
    module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


def pad_rows(layer: MoELayer) -> MoELayer:
    """Zero rows after [up; gate] as a whole, as upstream pads, and FC2's columns to fit."""
    missing = -layer.fc1.rows % ROW_ALIGNMENT
    if not missing:
        return layer
    columns = missing // (2 if layer.activation.is_gated else 1)

    def grow(tensor: Tensor, right: int, below: int) -> Tensor:
        return nn.functional.pad(tensor, (0, right, 0, below))

    fc1, fc2 = layer.fc1, layer.fc2
    return replace(
        layer,
        fc1=replace(
            fc1,
            packed=grow(fc1.packed, 0, missing),
            block_scale=grow(fc1.block_scale, 0, missing),
        ),
        fc2=replace(
            fc2,
            packed=grow(fc2.packed, columns // 2, 0),
            block_scale=grow(fc2.block_scale, columns // 16, 0),
        ),
    )


def prepared(
    layer: MoELayer = RELU2,
    flashinfer: str = "0.6.18",
    upstream: Upstream = Upstream.BAKES,
    *,
    carries: bool = False,
    misbehaviour: Misbehaviour = Misbehaviour.NONE,
    top_k: int = TOP_K,
    told: int | None = None,
    **options: Any,
) -> Layer:
    """A layer on which upstream's hook has run."""
    module = make_module(layer, **options)
    contract = contract_for(flashinfer)
    Method(contract, upstream, carries, misbehaviour, top_k, told).transform_weights(module)
    return module


def digest(module: Any) -> dict[str, bytes]:
    """Bytes of every parameter."""
    return {
        name: tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in module.named_parameters()
    }


def set_block_scale(module: Any, name: str, expert: int, byte: int) -> None:
    """Write one byte of a block-scale parameter."""
    getattr(module, name).data.view(torch.uint8)[expert].reshape(-1)[7] = byte


def set_scale(name: str, value: float, expert: int | None = None) -> Callable[[Any], None]:
    """A change of one alpha or reciprocal."""

    def change(module: Any) -> None:
        target = getattr(module, name).data
        if expert is None:
            target.fill_(value)
        else:
            target[expert] = value

    return change


def storage(tensor: Tensor) -> int:
    """Address of a tensor's memory."""
    return tensor.untyped_storage().data_ptr()


def with_powers_of_two(layer: MoELayer, exponent: int, input_exponent: int = -9) -> MoELayer:
    """The layer with weight_scale_2 and input scales that are powers of two: alphas are exact."""

    def exact(matrices: ExpertMatrices) -> ExpertMatrices:
        return replace(
            matrices,
            weight_scale_2=torch.full_like(matrices.weight_scale_2, 2.0**exponent),
            input_scale=torch.full_like(matrices.input_scale, 2.0**input_exponent),
        )

    return replace(layer, fc1=exact(layer.fc1), fc2=exact(layer.fc2))


# ---- a process with the fix in it

MICRO_BANDS = {"_MICRO_COMPACT_CUTOVER_PAIRS": 20, "_MICRO_COMPACT_CUTOVER_PAIRS_MULTI_TOPK": 40}


class Lines:
    """TensorRT-LLM's logger."""

    def __init__(self) -> None:
        self.info_lines: list[str] = []
        self.warnings: list[str] = []
        self.info = self.info_lines.append
        self.warning = self.warnings.append


class NoTimer(QuietPeriod):
    """Loading ends when the test says so."""

    def _start(self) -> None:
        pass


@dataclass
class Bench:
    """A process of its own: no variables, no records, a FlashInfer made of its contract."""

    patch: pytest.MonkeyPatch
    ledger: Path
    dispatch: ModuleType
    log: Lines
    summary: Summary
    flashinfer: str = "0.6.18"

    def use(self, flashinfer: str) -> None:
        """Have that FlashInfer installed."""
        self.flashinfer = flashinfer
        self.patch.setattr(tensorrt_llm, "installed_contract", lambda: contract_for(flashinfer))

    def use_error(self, error: Exception | None) -> None:
        """Have a FlashInfer whose contract cannot be told, or none."""

        def installed_contract() -> None:
            if error is not None:
                raise error

        self.patch.setattr(tensorrt_llm, "installed_contract", installed_contract)

    def process(self, **settings: Any) -> tensorrt_llm.Process:
        """The fix, switched on."""
        return tensorrt_llm.Process(Settings(**{"mode": Mode.AUTO, **settings}), VERSION)

    def method(self, **options: Any) -> Method:
        """Upstream's, for the FlashInfer that is installed."""
        return Method(contract_for(self.flashinfer), **options)

    def prepare(
        self,
        module: Any,
        process: tensorrt_llm.Process | None = None,
        method: Method | None = None,
    ) -> Any:
        """Run the replacement of upstream's hook on a layer."""
        process = process or self.process()
        process.replacement(Method.transform_weights)(method or self.method(), module)
        return module

    def line(self) -> str:
        """The one line of the process, once loading has ended; empty where there is none."""
        assert self.log.info_lines == []
        self.summary.loading_ended()
        self.summary.quiet.finish()  # and at the end of the interpreter
        assert len(self.log.info_lines) <= 1
        return "".join(self.log.info_lines)

    def record(self) -> dict[str, Any]:
        """What this process wrote to the ledger."""
        (path,) = self.ledger.glob("*.json")
        return json.loads(path.read_text(encoding="utf-8"))


def make_bench(patch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    """Isolate; everything is put back when ``patch`` is undone."""
    for name in [n for n in os.environ if n.startswith("TRTLLM_B12X_FIX")]:
        patch.delenv(name)
    for name in (CUTOVER, FORCE_W4A16):
        patch.setenv(name, "")  # so that whatever a test sets is taken away again
        patch.delenv(name)
    ledger = tmp_path / "ledger"
    patch.setenv(LEDGER, str(ledger))
    patch.setattr(Ledger, "_current", None)
    # A wrong fix may set it on the class.
    patch.setattr(Layer, "_PREFILL_VIA_CUTLASS_THRESHOLD", THRESHOLD_OF_CLASS)
    dispatch = ModuleType(DISPATCH)
    vars(dispatch).update(MICRO_BANDS, _DIRECT_MICRO_MAX_N=512)
    patch.setitem(sys.modules, DISPATCH, dispatch)
    log = Lines()
    patch.setitem(sys.modules, "tensorrt_llm.logger", SimpleNamespace(logger=log))
    summary = Summary(trtllm_report._logger, NoTimer)
    patch.setattr(trtllm_report, "SUMMARY", summary)
    bench = Bench(patch, ledger, dispatch, log, summary)
    bench.use(bench.flashinfer)
    return bench
