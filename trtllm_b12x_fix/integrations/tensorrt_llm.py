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
import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from types import ModuleType
from typing import Any

from trtllm_b12x_fix.emulator.contract import KernelContract
from trtllm_b12x_fix.errors import B12xFixError, UnsupportedVersionError
from trtllm_b12x_fix.integrations.b12x_dispatch import (
    DispatchHold,
    changes_for,
    narrowed,
    widen_static,
)
from trtllm_b12x_fix.integrations.flashinfer import installed_contract
from trtllm_b12x_fix.integrations.trtllm_contract import LayerView, layer_name
from trtllm_b12x_fix.integrations.trtllm_decode import (
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
    process = Process(settings, version)
    patches = [
        Patch(owner, name, process.replacement, takes_a_module, undone=process.dispatch.release)
    ]
    if (loader := loading_class(owner)) is not None:
        patches.append(Patch(loader, LOADING, lambda upstream: watch_halves(upstream, owner)))
    return TargetPlan(tuple(patches), f"{CLASS}.{name}", versions)


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
        except metadata.PackageNotFoundError:
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
        except B12xFixError as error:
            outcome = self._unknown(module, error)
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
        contract = self.contract

        def settle(view: LayerView) -> None:
            keep_out = plan(contract, view.activation).keep_out
            self.dispatch.hold(changes_for(contract, keep_out, self.settings.accumulate))

        return repair_layer(module, self.settings.mode, contract, self.version, settle)

    def _unknown(self, module: Any, error: B12xFixError) -> LayerOutcome:
        if self.settings.on_unknown is OnUnknown.FAIL:
            self.reporter.failed(layer_name(module), str(error))
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
        if outcome.strategy is None or outcome.view is None:
            return
        wanted = {Verify.OFF: 0, Verify.FIRST: 1}.get(self.settings.verify)
        if wanted is not None and self._verified >= wanted:
            return
        self._verified += 1
        contract = narrowed(self.contract, self.settings.accumulate)
        verification = verify_layer(module, outcome, contract)
        self.reporter.verified(verification)
        if verification.failed:
            raise VerificationError(
                f"{outcome.name}: {verification.words} (TRTLLM_B12X_FIX_VERIFY=off skips this)"
            )
