"""Repairing one layer right after TensorRT-LLM prepared it for b12x."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trtllm_b12x_fix.emulator.contract import InputScaleArgument, KernelContract
from trtllm_b12x_fix.errors import InputError
from trtllm_b12x_fix.integrations.b12x_wrapper import FORCE_W4A16
from trtllm_b12x_fix.integrations.trtllm_contract import (
    INPUT_GLOBAL_SCALE,
    ContractError,
    LayerView,
    layer_name,
    read_layer,
)
from trtllm_b12x_fix.integrations.trtllm_decode import baked_bytes, send_to_cutlass
from trtllm_b12x_fix.integrations.trtllm_entries import (
    ScaleState,
    carries_weight_scale_2,
    new_entries,
    scale_state,
)
from trtllm_b12x_fix.layer import Activation
from trtllm_b12x_fix.repair import Strategy, plan
from trtllm_b12x_fix.settings import Mode


@dataclass(frozen=True)
class LayerOutcome:
    """What was done to one layer.

    Attributes:
        strategy: how weight_scale_2 reaches the kernel now; ``None`` where nothing was changed.
        reason: why, in words.
        freed: bytes of baked scales that the layer no longer holds.
        view: the layer's tensors; ``None`` where the layer is not served by b12x in FP4.
    """

    name: str
    strategy: Strategy | None
    reason: str
    freed: int = 0
    view: LayerView | None = None


def repair_layer(
    module: Any,
    mode: Mode,
    contract: KernelContract,
    version: str,
    settle: Callable[[LayerView], None] = lambda _: None,
) -> LayerOutcome:
    """Replace the baked scales of a layer, or say why not.

    Args:
        module: the layer, after upstream's own method.
        mode: ``auto``, ``alphas`` or ``fp32-rescale``.
        contract: of the installed FlashInfer.
        version: of TensorRT-LLM, for messages.
        settle: called when nothing can go wrong with the layer any more, before it is changed.

    Raises:
        ContractError: something is not what is known; nothing was changed.
        ScaleError: a scale no kernel can use, naming layer and expert; nothing was changed.
        InputError: the process runs b12x in a way that cannot be repaired.
    """
    name = layer_name(module)
    if is_weight_only(module):
        return LayerOutcome(name, None, "W4A16_NVFP4 is not baked")
    _refuse_forced_w4a16()
    _refuse_half(module, name)
    view = read_layer(module, version)
    state = scale_state(view)
    if state is ScaleState.INTACT and carries_weight_scale_2(view.entries):
        settle(view)  # a kernel that misreads input scales misreads upstream's, too
        return LayerOutcome(name, None, "upstream keeps block scales intact", view=view)
    if state is not ScaleState.BAKED:
        raise ContractError(
            f"TensorRT-LLM {version}, {name}: the block scales handed to b12x are neither the "
            "checkpoint's nor those multiplied by weight_scale_2"
            if state is ScaleState.UNKNOWN
            else f"TensorRT-LLM {version}, {name}: block scales are intact, but no argument "
            "carries weight_scale_2"
        )
    _check_wrapper(module, view, contract, version)
    strategy, reason = choose_strategy(mode, contract, view.activation, name)
    freed = baked_bytes(module)
    if strategy is Strategy.CUTLASS:
        send_to_cutlass(module, version)
        return LayerOutcome(name, strategy, reason, freed)
    if strategy is Strategy.FP32_RESCALE and view.entries.get(INPUT_GLOBAL_SCALE) is not None:
        raise ContractError(
            f"TensorRT-LLM {version}, {name}: upstream passes {INPUT_GLOBAL_SCALE} itself, which "
            "fp32-rescale has no use for: use TRTLLM_B12X_FIX=auto"
        )
    entries = new_entries(view, strategy)
    settle(view)
    view.entries.update(entries)
    return LayerOutcome(name, strategy, reason, freed, view)


def is_weight_only(module: Any) -> bool:
    """Whether the layer runs W4A16, whose block scales upstream leaves alone.

    Not by the name of the format alone: versions that do not know it bake it like any other. What
    upstream prepared as W4A16 has no scale for FC2's input.
    """
    config = getattr(module, "quant_config", None)
    algorithm = getattr(config, "quant_algo", None)
    named = getattr(algorithm, "name", str(algorithm)) == "W4A16_NVFP4"
    entries = getattr(module, "_b12x_weights", None)
    prepared = isinstance(entries, dict) and entries.get("fc2_input_scale") is not None
    return named and not prepared


def choose_strategy(
    mode: Mode, contract: KernelContract, activation: Activation, name: str = "the layer"
) -> tuple[Strategy, str]:
    """The plan of the contract, or the one asked for.

    Raises:
        InputError: the strategy asked for has no exact form here.
    """
    planned = plan(contract, activation)
    if mode is Mode.AUTO or mode.value == planned.strategy.value:
        return planned.strategy, planned.reason
    if mode is Mode.FP32_RESCALE and activation is Activation.RELU2:
        return Strategy.FP32_RESCALE, "asked for"
    needs = "relu2" if mode is Mode.FP32_RESCALE else "FlashInfer 0.6.17 or later"
    raise InputError(
        f"TRTLLM_B12X_FIX={mode.value} needs {needs}; {name} is {activation.value} on "
        f"FlashInfer {contract.version}: use TRTLLM_B12X_FIX=auto"
    )


def _refuse_forced_w4a16() -> None:
    if os.environ.get(FORCE_W4A16, "0") == "1":
        raise InputError(
            f"{FORCE_W4A16}=1 makes every b12x wrapper W4A16, which reads the alphas otherwise: "
            "unset it"
        )


def _refuse_half(module: Any, name: str) -> None:
    dtype = str(getattr(module, "dtype", "torch.bfloat16"))
    if dtype == "torch.float16":
        raise InputError(
            f"{name}: the model runs in float16, whose activations b12x's dynamic kernel reads as "
            "bfloat16: set dtype bfloat16, or moe_config.backend: CUTLASS"
        )


def _check_wrapper(module: Any, view: LayerView, contract: KernelContract, version: str) -> None:
    """The wrapper must take what the contract says, and split FC1 where gate and up meet."""
    wrapper = module.b12x_wrapper
    run = getattr(wrapper, "run", None)
    if not callable(run):
        raise ContractError(
            f"TensorRT-LLM {version}, {view.name}: b12x_wrapper.run is missing; set "
            "TRTLLM_B12X_FIX=off and moe_config.backend: CUTLASS, or report the version"
        )
    takes = INPUT_GLOBAL_SCALE in inspect.signature(run).parameters
    if takes != (contract.input_scale is InputScaleArgument.SEPARATE):
        raise ContractError(
            f"FlashInfer {contract.version}, {view.name}: B12xMoEWrapper.run "
            f"{'takes' if takes else 'does not take'} {INPUT_GLOBAL_SCALE}, against what its files "
            "say"
        )
    told = getattr(wrapper, "intermediate_size", None)
    if told != view.intermediate:
        raise ContractError(
            f"TensorRT-LLM {version}, {view.name}: the wrapper was told intermediate size {told}, "
            f"the tensors have {view.intermediate} (padded): b12x raises at the first call. Use a "
            "TensorRT-LLM that passes the padded size, or moe_config.backend: CUTLASS"
        )
    halves = 2 if view.activation.is_gated else 1
    if view.fc1_rows != halves * view.intermediate:
        raise ContractError(
            f"TensorRT-LLM {version}, {view.name}: FC1 has {view.fc1_rows} rows, FC2 takes "
            f"{view.intermediate}"
        )
    logical = getattr(module, "intermediate_size_per_partition", None)
    if view.activation.is_gated and isinstance(logical, int) and 2 * logical != view.fc1_rows:
        raise ContractError(
            f"{view.name}: gate and up of {logical} rows each were padded to {view.fc1_rows} "
            f"together, but the kernels split at {view.fc1_rows // 2}: the halves are displaced, "
            "on CUTLASS too. Choose a tensor-parallel size that leaves 2 * intermediate a "
            "multiple of 128"
        )
