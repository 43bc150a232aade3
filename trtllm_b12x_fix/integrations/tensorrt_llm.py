"""The fix inside TensorRT-LLM: what replaces the method that prepares a layer for b12x.

What is replaced: ``NVFP4CuteDslB12xFusedMoEMethod.transform_weights``, or ``post_load_weights``
where the class has its work there, at either module path. The class is imported when the first
layer is built, and the method is looked up on it at every call, so replacing the class attribute
reaches every caller. What is not: the backend class, its ``run_moe`` and CUTLASS, which go on
reading the parameters that TensorRT-LLM loaded.

Upstream's own method runs first; then the entries of ``_b12x_weights`` are exchanged, so wrapper,
shared buffers and whatever else a version adds stay upstream's.
"""

from __future__ import annotations

import functools
import gc
import inspect
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import metadata
from types import ModuleType
from typing import Any

import torch

from trtllm_b12x_fix.emulator.contract import KernelContract
from trtllm_b12x_fix.errors import B12xFixError, UnsupportedVersionError
from trtllm_b12x_fix.integrations.b12x_dispatch import (
    DispatchHold,
    changes_for,
    narrowed,
    widen_static,
)
from trtllm_b12x_fix.integrations.flashinfer import installed_contract
from trtllm_b12x_fix.integrations.trtllm_contract import (
    INPUT_GLOBAL_SCALE,
    LayerView,
    layer_name,
)
from trtllm_b12x_fix.integrations.trtllm_decode import (
    baked_bytes,
    goes_to_cutlass,
    restore_decode,
    send_to_cutlass,
)
from trtllm_b12x_fix.integrations.trtllm_halves import (
    LOADING,
    differing,
    loading_class,
    watch_halves,
)
from trtllm_b12x_fix.integrations.trtllm_layer import LayerOutcome, is_weight_only, repair_layer
from trtllm_b12x_fix.integrations.trtllm_report import Reporter
from trtllm_b12x_fix.integrations.trtllm_trial import prime
from trtllm_b12x_fix.integrations.trtllm_verify import verify_layer
from trtllm_b12x_fix.patching import Patch, TargetPlan
from trtllm_b12x_fix.repair import Strategy, plan
from trtllm_b12x_fix.settings import OnUnknown, Settings, Verify

CLASS = "NVFP4CuteDslB12xFusedMoEMethod"
#: The method with the work, newest first: a class may inherit the other one.
HOOKS = ("transform_weights", "post_load_weights")
DISTRIBUTIONS = ("tensorrt_llm", "tensorrt-llm")

Hook = Callable[[Any, Any], None]


class VerificationError(B12xFixError):
    """A repaired layer's live output is not what its kernel should give."""


def on_import(module: ModuleType, settings: Settings) -> TargetPlan:
    """What to patch in a quantization module of TensorRT-LLM that was just imported.

    Raises:
        UnsupportedVersionError: the class is there, but no method is known to hold the work.
    """
    version = tensorrt_llm_version()
    versions = {"tensorrt_llm": version}
    owner = getattr(module, CLASS, None)
    if owner is None:
        return TargetPlan((), f"{module.__name__} has no {CLASS}: nothing to fix", versions)
    name = next((hook for hook in HOOKS if hook in vars(owner)), None)
    if name is None:
        raise UnsupportedVersionError(
            f"TensorRT-LLM {version}: {module.__name__}.{CLASS} defines neither "
            f"{' nor '.join(HOOKS)}, so where it prepares b12x's scales is not known. Set "
            "TRTLLM_B12X_FIX=off and moe_config.backend: CUTLASS, or report the version"
        )
    process = Process(settings, version, dispatch=_HOLD)
    if not getattr(module.__spec__, "_initializing", False):
        process.tell_of_earlier_layers()
    patches = [Patch(owner, name, process.replacement, takes_a_module, undone=_let_go)]
    if (loader := loading_class(owner)) is not None:
        patches.append(Patch(loader, LOADING, lambda upstream: watch_halves(upstream, owner)))
    return TargetPlan(tuple(patches), f"{CLASS}.{name}", versions)


#: Of the whole process: layers stay repaired, and need it, when patches are undone or made anew.
_HOLD = DispatchHold()
_REPAIRED: weakref.WeakSet[Any] = weakref.WeakSet()


def _let_go() -> None:
    """The patch is gone; the dispatch stays as repaired layers need it while there are any."""
    if not _REPAIRED:
        _HOLD.release()


def takes_a_module(upstream: Hook) -> str | None:
    """What is not as known about the method's parameters, or ``None``."""
    parameters = list(inspect.signature(upstream).parameters.values())
    needed = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(parameters) == len(needed) == 2 and needed[1].name == "module":
        return None
    return (
        f"it takes {inspect.signature(upstream)}, known is (self, module); set "
        "TRTLLM_B12X_FIX=off and moe_config.backend: CUTLASS, or report the version"
    )


def tensorrt_llm_version() -> str:
    """Version of the installed TensorRT-LLM, from its metadata."""
    for name in DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except Exception:  # absent, or metadata that cannot be read: it is for messages alone
            continue
    return "of unknown version"


@dataclass
class Process:
    """The fix in this process: settings, FlashInfer's contract, what was done so far."""

    settings: Settings
    version: str
    reporter: Reporter = field(init=False)
    dispatch: DispatchHold = field(default_factory=DispatchHold)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _contract: KernelContract | None = None
    _verified: int = 0
    #: Why b12x is not to be trusted in this process: a live check that failed.
    _condemned: str = ""

    def __post_init__(self) -> None:
        self.reporter = Reporter(self.version)

    def replacement(self, upstream: Hook) -> Hook:
        """The method that takes ``upstream``'s place."""

        @functools.wraps(upstream)
        def prepare(method: Any, module: Any) -> None:
            restore_decode(module)
            self._before(module)
            upstream(method, module)
            with self._lock:
                self._after(module)

        return prepare

    def tell_of_earlier_layers(self) -> None:
        """Layers prepared before the fix was on stay baked: CUDA graphs may hold their memory."""
        for layer in gc.get_objects():
            # By type: proxies of other libraries import things when asked for an attribute.
            if not issubclass(type(layer), torch.nn.Module) or layer in _REPAIRED:
                continue
            # By memory: scales that lie in the parameters are no copy, so nobody baked them.
            if baked_bytes(layer) and not is_weight_only(layer):
                self.reporter.loaded_before(layer)

    @property
    def contract(self) -> KernelContract:
        """Of the installed FlashInfer, read from its files once.

        Raises:
            UnsupportedVersionError: FlashInfer is missing or not known.
        """
        if self._contract is None:
            found = installed_contract()
            if found is None:
                raise UnsupportedVersionError("FlashInfer is not installed: b12x cannot run")
            self._contract = found
        return self._contract

    def _before(self, module: Any) -> None:
        """What has to be settled before upstream builds FlashInfer's wrapper."""
        if is_weight_only(module):
            return
        top_k = getattr(getattr(module, "routing_method", None), "experts_per_token", 1)
        try:
            if words := widen_static(self.contract, int(top_k), self.settings.accumulate):
                self.reporter.warn(words)
        except B12xFixError:
            return  # told after upstream's method, where the policy for unknown versions applies

    def _after(self, module: Any) -> None:
        try:
            outcome = self._repair(module)
            self._verify(module, outcome)
            if outcome.view is not None:
                _REPAIRED.add(module)
        except B12xFixError as error:
            outcome = self._unknown(module, error)
        except Exception as error:  # meta tensors, memory: the layer is as upstream baked it
            words = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            wrapped = UnsupportedVersionError(
                f"TensorRT-LLM {self.version}, {layer_name(module)}: the repair failed: {words}"
            )
            wrapped.__cause__ = error
            outcome = self._unknown(module, wrapped)
        self.reporter.layer(module, outcome, self.contract_version)
        if words := differing(module):
            self.reporter.warn(f"{outcome.name}: {words}")
        if names := self.dispatch.changed_by_others():
            self.reporter.warn(f"someone changed {', '.join(names)} of FlashInfer's dispatch")
        self._prime(module, outcome)

    def _prime(self, module: Any, outcome: LayerOutcome) -> None:
        # After the check, which may have sent the layer's decode to CUTLASS.
        if outcome.view is None or goes_to_cutlass(module):
            return
        if words := prime(module, outcome.view):
            self.reporter.warn(words)

    @property
    def contract_version(self) -> str:
        """FlashInfer's version for reports."""
        return self._contract.version if self._contract else "unknown"

    def _repair(self, module: Any) -> LayerOutcome:
        if is_weight_only(module):
            return LayerOutcome(layer_name(module), None, "W4A16_NVFP4 is not baked")
        # With every layer checked, each one speaks for itself.
        if self._condemned and self.settings.verify is Verify.FIRST:
            raise VerificationError(self._condemned)
        contract = self.contract

        def settle(view: LayerView) -> None:
            keep_out = plan(contract, view.activation).keep_out
            self.dispatch.hold(changes_for(contract, keep_out, self.settings.accumulate))

        return repair_layer(module, self.settings.mode, contract, self.version, settle)

    def _unknown(self, module: Any, error: B12xFixError) -> LayerOutcome:
        if self.settings.on_unknown is OnUnknown.FAIL:
            if not isinstance(error, VerificationError):  # which is on record already
                self.reporter.failed(layer_name(module), str(error))
            # Whoever goes on in spite of the error must not decode with what upstream prepared.
            module._b12x_weights = None
            module.b12x_wrapper = None
            raise type(error)(
                f"{error}. (TRTLLM_B12X_FIX_ON_UNKNOWN=cutlass would send this layer's decode to "
                "CUTLASS; for dummy weights set TRTLLM_B12X_FIX=off)"
            ) from error
        freed = send_to_cutlass(module, self.version)
        self.reporter.warn(f"{error} (this layer's decode goes to CUTLASS)")
        return LayerOutcome(
            layer_name(module), Strategy.CUTLASS, f"decode goes to CUTLASS: {error}", freed
        )

    def _verify(self, module: Any, outcome: LayerOutcome) -> None:
        """Check the layer live, if it is one of those to be checked.

        Raises:
            VerificationError: the live output is wrong.
        """
        if outcome.view is None:
            return
        if outcome.strategy is None:  # upstream's own repair: as ours, by who carries the scale
            separate = outcome.view.entries.get(INPUT_GLOBAL_SCALE) is not None
            own = Strategy.ALPHAS if separate else Strategy.FP32_RESCALE
            outcome = replace(outcome, strategy=own)
        wanted = {Verify.OFF: 0, Verify.FIRST: 1}.get(self.settings.verify)
        if wanted is not None and self._verified >= wanted:
            return
        self._verified += 1
        contract = narrowed(self.contract, self.settings.accumulate)
        verification = verify_layer(module, outcome, contract)
        self.reporter.verified(verification)
        if verification.failed:
            self._condemned = (
                f"{outcome.name}: {verification.words} (TRTLLM_B12X_FIX_VERIFY=off skips this)"
            )
            raise VerificationError(self._condemned)
