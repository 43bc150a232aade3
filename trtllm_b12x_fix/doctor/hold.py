"""Whether the fix would hold here: the kernels' contract, and the strategy of each kind of layer.

What the fix would do is asked of the fix's own functions. They need torch, as does everything they
stand for: without it neither TensorRT-LLM nor FlashInfer can run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trtllm_b12x_fix.doctor.model import Model
from trtllm_b12x_fix.doctor.switch import FORCE_W4A16, Switch
from trtllm_b12x_fix.errors import B12xFixError
from trtllm_b12x_fix.integrations.flashinfer_wrapper import read_wrapper
from trtllm_b12x_fix.integrations.installed import Package
from trtllm_b12x_fix.integrations.trtllm_patch_block import PatchStrategy
from trtllm_b12x_fix.integrations.trtllm_source import ScaleHandling, SourceReading, ToldSize
from trtllm_b12x_fix.settings import Mode, OnUnknown

if TYPE_CHECKING:
    from trtllm_b12x_fix.emulator.contract import KernelContract
    from trtllm_b12x_fix.layer import Activation

_RELU2, _SILU = "relu2", "silu"
_USE_CUTLASS = "moe_config.backend: CUTLASS"


@dataclass(frozen=True)
class LayerHold:
    """One kind of layer.

    Attributes:
        strategy: as :class:`repair.Strategy` names it, ``None`` where the fix refuses.
        reason: why this strategy, or the refusal that comes.
    """

    activation: str
    strategy: str | None
    reason: str


@dataclass(frozen=True)
class Hold:
    """What the fix would do.

    Attributes:
        contract: FlashInfer's version, where its kernels are known.
        keeps_out: kernel families that would never be launched.
        layers: relu2 and silu, or what the model has of them.
        refusals: what the fix would raise, whatever the layer.
        way_out: what to do about the refusals.
        unknown: why it cannot be told.
    """

    contract: str | None = None
    keeps_out: tuple[str, ...] = ()
    layers: tuple[LayerHold, ...] = ()
    refusals: tuple[str, ...] = ()
    way_out: tuple[str, ...] = ()
    unknown: str = ""

    @property
    def holds(self) -> bool:
        """Whether every kind of layer ends up with exact scales."""
        refused = self.refusals or any(layer.strategy is None for layer in self.layers)
        return not self.unknown and not refused and bool(self.layers)


def would_hold(switch: Switch, reading: SourceReading, model: Model | None) -> Hold:
    """What the fix would do to the layers of a TensorRT-LLM that bakes."""
    try:
        from trtllm_b12x_fix.integrations.flashinfer import installed_contract
        from trtllm_b12x_fix.layer import Activation
    except Exception as error:  # a broken torch raises OSError and worse
        return Hold(
            unknown=f"torch cannot be imported ({type(error).__name__}: {error}), and neither "
            "TensorRT-LLM nor FlashInfer can run without it"
        )
    refusals, way_out = _refusals(switch, reading, model)
    if (problem := _unknown_hook(reading)) and _sends_unknown_to_cutlass(switch):
        return _all_to_cutlass(problem, refusals, way_out)
    try:
        contract = installed_contract()
    except B12xFixError as error:
        return _without_contract(switch, refusals, way_out, str(error))
    except Exception as error:  # metadata that is no text
        return Hold(unknown=f"FlashInfer cannot be read ({type(error).__name__}: {error})")
    if contract is None:
        missing = "FlashInfer is not installed: b12x cannot run, with or without the fix"
        return Hold(refusals=(*refusals, missing), way_out=("install FlashInfer 0.6.17 or later",))
    mode = switch.mode if switch.mode.wants_repair else Mode.AUTO
    wanted = [a for a in Activation if model is None or a.is_gated in _gated(model)]
    layers = tuple(_layer(switch, mode, contract, activation) for activation in wanted)
    if any(layer.strategy is None for layer in layers):
        way_out = (*way_out, "set TRTLLM_B12X_FIX=auto")
    from trtllm_b12x_fix.repair import plan

    keeps_out = {family.value for one in wanted for family in plan(contract, one).keep_out}
    return Hold(contract.version, tuple(sorted(keeps_out)), layers, refusals, way_out)


def _layer(
    switch: Switch, mode: Mode, contract: KernelContract, activation: Activation
) -> LayerHold:
    from trtllm_b12x_fix.integrations.trtllm_layer import choose_strategy

    try:
        strategy, reason = choose_strategy(mode, contract, activation)
    except B12xFixError as error:
        if _sends_unknown_to_cutlass(switch):
            return LayerHold(activation.value, "cutlass", f"TRTLLM_B12X_FIX_ON_UNKNOWN: {error}")
        return LayerHold(activation.value, None, str(error))
    return LayerHold(activation.value, strategy.value, reason)


def _without_contract(
    switch: Switch, refusals: tuple[str, ...], way_out: tuple[str, ...], words: str
) -> Hold:
    """FlashInfer is there, but its kernels are not known."""
    words = _without_option(words)
    if _sends_unknown_to_cutlass(switch):
        return _all_to_cutlass(words, refusals, way_out)
    ways = (
        "install a FlashInfer whose kernels are known (0.6.16 to 0.6.18, 0.7.0 to 0.7.2, 0.7.4), "
        "set TRTLLM_B12X_FIX_ON_UNKNOWN=cutlass, or serve with " + _USE_CUTLASS,
    )
    return Hold(refusals=(*refusals, words), way_out=(*way_out, *ways))


def _all_to_cutlass(words: str, refusals: tuple[str, ...], way_out: tuple[str, ...]) -> Hold:
    reason = f"TRTLLM_B12X_FIX_ON_UNKNOWN=cutlass: {words}"
    layers = tuple(LayerHold(name, "cutlass", reason) for name in (_RELU2, _SILU))
    return Hold(layers=layers, refusals=refusals, way_out=way_out)


def _unknown_hook(reading: SourceReading) -> str:
    """Why the fix refuses each layer of a class that it finds, empty where it repairs them."""
    if not reading.is_watched or not reading.unknown_hook:
        return ""
    return f"{reading.unknown_hook}: the fix does not know what to patch"


def _refusals(
    switch: Switch, reading: SourceReading, model: Model | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What the fix would raise, and ways out; a file that it cannot judge is one."""
    refusals, ways = [], []
    if switch.forces_w4a16:
        refusals.append(f"{FORCE_W4A16}=1 makes every b12x wrapper W4A16")
        ways.append(f"unset {FORCE_W4A16}")
    if not reading.is_watched:
        refusals.append(f"the fix does not know {reading.module}, so it would do nothing")
        ways.append(f"serve with {_USE_CUTLASS}, and report the version of TensorRT-LLM")
    elif problem := _unknown_hook(reading):
        if not _sends_unknown_to_cutlass(switch):
            refusals.append(problem)
            ways.append(f"serve with {_USE_CUTLASS}, and report the version of TensorRT-LLM")
    elif reading.handling is ScaleHandling.UNKNOWN and reading.hook is None:
        refusals.append(f"{reading.reason}: the fix does not know what to patch")
        ways.append(f"serve with {_USE_CUTLASS}, and report the version of TensorRT-LLM")
    if model is not None and model.displaced_halves:
        refusals.append(
            "gate and up of this model are padded together, and the kernels split them in the "
            "wrong place (on CUTLASS, too)"
        )
        ways.append("choose a tensor-parallel size that leaves 2 * intermediate a multiple of 128")
    elif model is not None and model.changed_by_padding and reading.told_size is ToldSize.LOGICAL:
        sizes = ", ".join(str(size) for size in model.changed_by_padding)
        refusals.append(
            f"the wrapper is told the logical intermediate size ({sizes}), the tensors are padded: "
            "b12x raises at the first call, with or without the fix"
        )
        ways.append(f"use a TensorRT-LLM that passes the padded size, or {_USE_CUTLASS}")
    return tuple(refusals), tuple(ways)


def patch_problem(reading: SourceReading, flashinfer: Package) -> str:
    """Why a file that emit-patch changed will not run here, empty where it will."""
    if reading.patch_strategy != PatchStrategy.ALPHAS.value:
        return ""
    try:
        wrapper = read_wrapper(flashinfer)
    except B12xFixError as error:
        return str(error)
    if wrapper is None or wrapper.takes_input_global_scale:
        return ""
    return (
        f"it was patched for a FlashInfer with input_global_scale, {wrapper.version} has none: "
        "loading a layer raises"
    )


def _without_option(words: str) -> str:
    """Without advice on an option that only check-layer has."""
    head, option, _ = words.partition("--flashinfer")
    return head[: max(head.rfind(". "), head.rfind("; "))] if option else words


def _gated(model: Model) -> set[bool]:
    return {shape.gated for shape in model.shapes}


def _sends_unknown_to_cutlass(switch: Switch) -> bool:
    return switch.settings is not None and switch.settings.on_unknown is OnUnknown.CUTLASS
