"""The fix inside vLLM: what replaces the method that prepares a layer for b12x.

What is replaced: ``FlashInferB12xExperts.process_weights_after_loading``, looked up on the class
for every layer. What is not: its ``apply`` and everything else of vLLM's; a repaired layer's
``_ensure_wrapper`` puts :class:`.vllm_entries.RepairedWrapper` around the wrapper that upstream
makes, on that one object, so layers stay repaired when the patch is undone.

Upstream's own method runs first. If it kept the block scales intact, that is that; if it baked
them, all it changed is put back, and the layer's scales go to the kernel as arguments.
"""

from __future__ import annotations

import functools
import gc
import inspect
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from trtllm_b12x_fix.emulator.contract import InputScaleArgument, KernelContract
from trtllm_b12x_fix.errors import B12xFixError, InputError, UnsupportedVersionError
from trtllm_b12x_fix.integrations.b12x_dispatch import (
    DispatchHold,
    changes_for,
    narrowed,
    widen_static,
)
from trtllm_b12x_fix.integrations.b12x_wrapper import FORCE_W4A16
from trtllm_b12x_fix.integrations.flashinfer import NeededContract, installed_contract
from trtllm_b12x_fix.integrations.trtllm_contract import INPUT_GLOBAL_SCALE, ContractError
from trtllm_b12x_fix.integrations.trtllm_entries import ScaleState
from trtllm_b12x_fix.integrations.trtllm_layer import LayerOutcome, choose_strategy
from trtllm_b12x_fix.integrations.trtllm_verify import Verification, VerifyState
from trtllm_b12x_fix.integrations.vllm_cutlass import BACKEND, send_to_cutlass
from trtllm_b12x_fix.integrations.vllm_entries import RepairedWrapper, new_entries
from trtllm_b12x_fix.integrations.vllm_layer import (
    WAYS_OUT,
    LostScalesError,
    Originals,
    check_scales,
    layer_name,
    read_originals,
    scale_state,
)
from trtllm_b12x_fix.integrations.vllm_report import Reporter
from trtllm_b12x_fix.integrations.vllm_verify import verify
from trtllm_b12x_fix.repair import Strategy, plan
from trtllm_b12x_fix.settings import ActScale, OnUnknown, Settings, Verify

PREPARING = "process_weights_after_loading"
ENSURING = "_ensure_wrapper"

Method = Callable[[Any, Any], None]

#: Of the whole process: layers stay repaired, and need it, when patches are undone or made anew.
_HOLD = DispatchHold()
_REPAIRED: weakref.WeakSet[Any] = weakref.WeakSet()


class VerificationError(B12xFixError):
    """A repaired layer's live output is not what its kernel should give."""


def let_go() -> None:
    """The patch is gone; the dispatch stays as repaired layers need it while there are any."""
    if not _REPAIRED:
        _HOLD.release()


@dataclass
class Process:
    """The fix in this process: settings, FlashInfer's contract, what was done so far."""

    settings: Settings
    version: str
    reporter: Reporter = field(init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    # By name at the call: what is installed is looked up when the first layer needs it.
    _flashinfer: NeededContract = field(
        default_factory=lambda: NeededContract(lambda: installed_contract())
    )
    _verified: int = 0
    #: Why b12x is not to be trusted in this process: a live check that failed.
    _condemned: str = ""

    def __post_init__(self) -> None:
        self.reporter = Reporter(self.version)

    def replacement(self, upstream: Method) -> Method:
        """The method that takes ``upstream``'s place."""

        @functools.wraps(upstream)
        def process_weights_after_loading(experts: Any, layer: Any) -> None:
            with self.reporter.summary.quiet.interrupted():
                self._prepare(upstream, experts, layer)

        return process_weights_after_loading

    def tell_of_earlier_layers(self, owner: type) -> None:
        """Layers prepared before the fix was on stay baked: CUDA graphs may hold their memory."""
        for one in gc.get_objects():
            if not issubclass(type(one), owner) or one in _REPAIRED:
                continue
            if getattr(one, "w1_sf_mma", None) is not None:
                self.reporter.loaded_before("a layer")

    def _prepare(self, upstream: Method, experts: Any, layer: Any) -> None:
        try:
            before = read_originals(experts, layer, self.version)
            upstream(experts, layer)
            with self._lock:
                outcome = self._settle(experts, layer, before)
        except B12xFixError as error:
            outcome = self._unknown(experts, layer, error)
        self.reporter.layer(layer, outcome, self.contract_version)
        if names := _HOLD.changed_by_others():
            self.reporter.warn(f"someone changed {', '.join(names)} of FlashInfer's dispatch")

    def _settle(self, experts: Any, layer: Any, before: Originals) -> LayerOutcome:
        """Look at what upstream did, and repair it.

        Raises:
            B12xFixError: it cannot be repaired; whatever could be put back is.
        """
        try:
            state = scale_state(experts, before)
            if state is ScaleState.INTACT:
                return LayerOutcome(before.name, None, "upstream keeps block scales intact")
            before.put_back(experts, layer)
            if state is not ScaleState.BAKED:
                raise ContractError(
                    f"vLLM {self.version}, {before.name}: what is handed to b12x is neither the "
                    "checkpoint's block scales with weight_scale_2 beside them, nor their product: "
                    + WAYS_OUT
                )
            return self._repair(experts, layer, before)
        except B12xFixError:
            raise
        except Exception as error:  # memory, a device: the layer is as upstream baked it
            words = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise UnsupportedVersionError(
                f"vLLM {self.version}, {before.name}: the repair failed: {words}"
            ) from error

    @property
    def contract(self) -> KernelContract:
        """Of the installed FlashInfer; see :meth:`NeededContract.get` for what it raises."""
        return self._flashinfer.get()

    @property
    def contract_version(self) -> str:
        """FlashInfer's version for reports."""
        return self._flashinfer.version

    def _repair(self, experts: Any, layer: Any, before: Originals) -> LayerOutcome:
        # With every layer checked, each one speaks for itself.
        if self._condemned and self.settings.verify is Verify.FIRST:
            raise VerificationError(self._condemned)
        _refuse_forced_w4a16()
        _refuse_half(experts, before)
        _check_sizes(experts, before)
        contract = self.contract
        scale = self.settings.act_scale if before.is_calibrated else ActScale.UNIT
        check_scales(before, scale)
        strategy, reason = choose_strategy(
            self.settings.mode, contract, before.activation, before.name
        )
        if strategy is Strategy.CUTLASS:
            words = _without_exact_form(before, contract)
            send_to_cutlass(experts, layer, self.version)
            self.reporter.warn(words)
            return LayerOutcome(before.name, strategy, words)
        entries = new_entries(before, strategy, scale, contract)
        keep_out = plan(contract, before.activation).keep_out
        _HOLD.hold(changes_for(contract, keep_out, self.settings.accumulate))
        if words := widen_static(contract, int(experts.topk), self.settings.accumulate):
            self.reporter.warn(words)
        _put_in_place(experts, entries, self.version, contract)
        outcome = LayerOutcome(before.name, strategy, f"{reason}; {scale.value} input scales")
        self._verify(experts, before, outcome, scale)
        _REPAIRED.add(experts)
        return outcome

    def _verify(
        self, experts: Any, before: Originals, outcome: LayerOutcome, scale: ActScale
    ) -> None:
        """Check the layer live, if it is one of those to be checked.

        Raises:
            VerificationError: the live output is wrong.
        """
        wanted = {Verify.OFF: 0, Verify.FIRST: 1}.get(self.settings.verify)
        if wanted is not None and self._verified >= wanted:
            return
        self._verified += 1
        contract = narrowed(self.contract, self.settings.accumulate)
        assert outcome.strategy is not None
        try:
            experts._ensure_wrapper()
            wrapper, entries = experts._wrapper.wrapped, experts._wrapper.entries
        except B12xFixError:
            raise
        except Exception as error:  # no GPU, no memory: that does not say the layer is wrong
            words = f"not verified: {type(error).__name__}: {error}"
            self.reporter.verified(Verification(before.name, VerifyState.NOT_VERIFIED, words))
            return
        verification = verify(wrapper, before, entries, outcome.strategy, scale, contract)
        # vLLM makes it at the first forward pass, when its memory is counted: so be it.
        experts._wrapper = None
        self.reporter.verified(verification)
        if verification.failed:
            self._condemned = f"{before.name}: {verification.words}"
            raise VerificationError(self._condemned)

    def _unknown(self, experts: Any, layer: Any, error: B12xFixError) -> LayerOutcome:
        name = layer_name(layer)
        # Whoever goes on in spite of the error must not run with what upstream prepared.
        experts.__dict__.pop(ENSURING, None)
        experts._wrapper = experts.w1_sf_mma = experts.w2_sf_mma = None
        if self.settings.on_unknown is OnUnknown.FAIL or isinstance(error, LostScalesError):
            if not isinstance(error, VerificationError):  # which is on record already
                self.reporter.failed(name, str(error))
            raise type(error)(
                f"{error}. (TRTLLM_B12X_FIX_ON_UNKNOWN=cutlass would run this layer on {BACKEND}; "
                "for dummy weights set TRTLLM_B12X_FIX=off)"
            ) from error
        send_to_cutlass(experts, layer, self.version)
        self.reporter.warn(f"{error} (this layer runs on {BACKEND})")
        return LayerOutcome(name, Strategy.CUTLASS, f"it runs on {BACKEND}: {error}")


def _put_in_place(
    experts: Any, entries: dict[str, Any], version: str, contract: KernelContract
) -> None:
    """Have the object call the wrapper with our arguments, once it has made one.

    Raises:
        ContractError: it makes its wrapper in another way.
    """
    upstream = getattr(type(experts), ENSURING, None)
    if not callable(upstream) or not hasattr(experts, "_wrapper"):
        raise ContractError(
            f"vLLM {version}: FlashInferB12xExperts has no {ENSURING} or no _wrapper, so where it "
            f"calls b12x is not known: {WAYS_OUT}"
        )
    experts.w1_sf_mma = entries["w1_weight_sf"]
    experts.w2_sf_mma = entries["w2_weight_sf"]
    experts._fc2_input_scale = entries["fc2_input_scale"]
    experts._wrapper = None
    # Not a method of the object: that would be a cycle, and keep its memory until a collection.
    reference = weakref.ref(experts)

    def ensure() -> None:
        one = reference()
        if one is None or isinstance(one._wrapper, RepairedWrapper):
            return
        upstream(one)
        _check_run(one._wrapper, contract, version)
        one._wrapper = RepairedWrapper(one._wrapper, entries, version)

    setattr(experts, ENSURING, ensure)


def _check_run(wrapper: Any, contract: KernelContract, version: str) -> None:
    run = getattr(wrapper, "run", None)
    if not callable(run):
        raise ContractError(f"vLLM {version}: its b12x wrapper has no run: {WAYS_OUT}")
    takes = INPUT_GLOBAL_SCALE in inspect.signature(run).parameters
    if takes != (contract.input_scale is InputScaleArgument.SEPARATE):
        raise ContractError(
            f"FlashInfer {contract.version}: B12xMoEWrapper.run "
            f"{'takes' if takes else 'does not take'} {INPUT_GLOBAL_SCALE}, against what its files "
            "say"
        )


def _without_exact_form(before: Originals, contract: KernelContract) -> str:
    return (
        f"FlashInfer {contract.version} has no input_global_scale, without which "
        f"{before.activation_name} has no exact form on b12x: these layers run on {BACKEND} "
        "instead of the flashinfer_b12x asked for (FlashInfer 0.6.17 and later would do; "
        "TRTLLM_B12X_FIX=off leaves them baked)"
    )


def _refuse_forced_w4a16() -> None:
    if os.environ.get(FORCE_W4A16, "0") == "1":
        raise InputError(
            f"{FORCE_W4A16}=1 makes every b12x wrapper W4A16, which reads the alphas otherwise: "
            "unset it"
        )


def _refuse_half(experts: Any, before: Originals) -> None:
    dtype = str(getattr(getattr(experts, "moe_config", None), "in_dtype", "torch.bfloat16"))
    if dtype != "torch.bfloat16":
        raise InputError(
            f"{before.name}: the model runs in {dtype.removeprefix('torch.')}, whose activations "
            "b12x's dynamic kernel reads as bfloat16: use --dtype bfloat16, or --moe-backend "
            "flashinfer_cutlass"
        )


def _check_sizes(experts: Any, before: Originals) -> None:
    """The wrapper must be told the sizes of the tensors, and split FC1 where gate and up meet."""
    layer = before.moe_layer(ActScale.UNIT)
    told = getattr(experts, "intermediate_size_per_partition", None)
    if told != layer.intermediate:
        raise ContractError(
            f"vLLM {before.version}, {before.name}: the wrapper is told intermediate size {told}, "
            f"the tensors have {layer.intermediate} (padded): b12x raises at the first call. Use "
            "--moe-backend flashinfer_cutlass"
        )
    wanted = layer.activation.fc1_rows(layer.intermediate)
    if layer.fc1.rows != wanted or layer.fc2.rows != layer.hidden:
        raise ContractError(
            f"vLLM {before.version}, {before.name}: FC1 is {list(layer.fc1.packed.shape)}, FC2 "
            f"{list(layer.fc2.packed.shape)}, known is FC1 with {wanted} rows: {WAYS_OUT}"
        )
