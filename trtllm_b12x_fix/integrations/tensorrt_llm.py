"""The fix inside TensorRT-LLM: what replaces the method that prepares a layer for b12x.

What is replaced: ``NVFP4CuteDslB12xFusedMoEMethod.transform_weights``, or ``post_load_weights``
where the class has its work there, at either module path. The class is imported when the first
layer is built, and the method is looked up on it at every call, so replacing the class attribute
reaches every caller. What is not: the backend class, its ``run_moe`` and CUTLASS, which go on
reading the parameters that TensorRT-LLM loaded.

Upstream's own method runs first; then the entries of ``_b12x_weights`` are exchanged, so wrapper,
shared buffers and whatever else a version adds stay upstream's.

A class whose work is not known is refused when it is built (:mod:`.trtllm_refusal`): on GPUs that
never build it the import must go on.
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
from pathlib import Path
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
from trtllm_b12x_fix.integrations.flashinfer import NeededContract, installed_contract
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
from trtllm_b12x_fix.integrations.trtllm_halves import differing, watching
from trtllm_b12x_fix.integrations.trtllm_layer import LayerOutcome, is_weight_only, repair_layer
from trtllm_b12x_fix.integrations.trtllm_refusal import refusing
from trtllm_b12x_fix.integrations.trtllm_report import Reporter
from trtllm_b12x_fix.integrations.trtllm_source import wrapper_maker
from trtllm_b12x_fix.integrations.trtllm_trial import prime
from trtllm_b12x_fix.integrations.trtllm_verify import verify_layer
from trtllm_b12x_fix.patching import Patch, TargetPlan
from trtllm_b12x_fix.repair import Strategy, plan
from trtllm_b12x_fix.settings import OnUnknown, Settings, Verify

CLASS = "NVFP4CuteDslB12xFusedMoEMethod"
#: The method with the work, newest first: a class may inherit the other one.
HOOKS = ("transform_weights", "post_load_weights")
DISTRIBUTIONS = ("tensorrt_llm", "tensorrt-llm")
_WAYS_OUT = "Set TRTLLM_B12X_FIX=off and moe_config.backend: CUTLASS, or report the version"

Hook = Callable[[Any, Any], None]


class VerificationError(B12xFixError):
    """A repaired layer's live output is not what its kernel should give."""


def on_import(module: ModuleType, settings: Settings) -> TargetPlan:
    """What to patch in a quantization module of TensorRT-LLM that was just imported."""
    version = tensorrt_llm_version()
    versions = {"tensorrt_llm": version}
    process = Process(settings, version, dispatch=_HOLD)
    if not getattr(getattr(module, "__spec__", None), "_initializing", False):
        process.tell_of_earlier_layers()
    try:
        owner = getattr(module, CLASS, None)
    except Exception as error:  # a module that imports what it is asked for
        return _out_of_reach(f"{CLASS} cannot be looked at: {error}", process, versions)
    if owner is None:
        return _without_class(module, process, versions)
    if not isinstance(owner, type):
        return _out_of_reach(f"{module.__name__}.{CLASS} is no class", process, versions)
    name = next((hook for hook in HOOKS if hook in vars(owner)), None)
    if words := _unknown_work(owner, name):
        words = f"TensorRT-LLM {version}: {module.__name__}.{words}. {_WAYS_OUT}"
        patch = refusing(owner, words, process.reporter, settings.on_unknown)
        return TargetPlan((patch,), versions=versions, refusal=words)
    assert name is not None
    patches = [Patch(owner, name, process.replacement, undone=_let_go)]
    if (watch := watching(owner, process.loaded)) is not None:
        patches.append(watch)
        process.reporter.summary.checks_at_end.append(process.tell_of_bypassed_layers)
    return TargetPlan(tuple(patches), f"{CLASS}.{name}", versions)


def _without_class(module: ModuleType, process: Process, versions: dict[str, str]) -> TargetPlan:
    """Nothing to fix, unless b12x is prepared elsewhere, as in drafts of the backend."""
    file = getattr(module, "__file__", None)
    maker = wrapper_maker(Path(file).parent) if file else None
    if maker is None:
        return TargetPlan((), f"{module.__name__} has no {CLASS}: nothing to fix", versions)
    words = f"{module.__name__} has no {CLASS}, but {maker} beside it makes b12x wrappers"
    return _out_of_reach(words, process, versions)


def _out_of_reach(words: str, process: Process, versions: dict[str, str]) -> TargetPlan:
    """Nothing can be patched, so nobody can be refused: said now, and by the status."""
    words = f"TensorRT-LLM {process.version}: {words}, where this package repairs nothing"
    process.reporter.warn(f"{words}. On SM120 and SM121 {_WAYS_OUT}")
    return TargetPlan((), versions=versions, refusal=words)


def _unknown_work(owner: type, name: str | None) -> str:
    """What is not as known about the method that prepares b12x, or nothing."""
    if name is None:
        return (
            f"{CLASS} defines neither {' nor '.join(HOOKS)}, so where it prepares b12x's scales "
            "is not known"
        )
    complaint = takes_a_module(vars(owner)[name])
    return f"{CLASS}.{name} is not as known: {complaint}" if complaint else ""


#: Of the whole process: layers stay repaired, and need it, when patches are undone or made anew.
_HOLD = DispatchHold()
_REPAIRED: weakref.WeakSet[Any] = weakref.WeakSet()


def _let_go() -> None:
    """The patch is gone; the dispatch stays as repaired layers need it while there are any."""
    if not _REPAIRED:
        _HOLD.release()


def takes_a_module(upstream: Any) -> str | None:
    """What is not as known about the method's parameters, or ``None``."""
    try:
        if isinstance(upstream, staticmethod):  # which can be called, but gets no self
            raise TypeError
        signature = inspect.signature(upstream)
    except (TypeError, ValueError):  # also a classmethod, a property, a C function
        return f"it is a {type(upstream).__name__}, known is a method (self, module)"
    parameters = list(signature.parameters.values())
    needed = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(parameters) == len(needed) == 2 and needed[1].name == "module":
        return None
    return f"it takes {signature}, known is (self, module)"


def tensorrt_llm_version() -> str:
    """Version of the installed TensorRT-LLM, from its metadata."""
    for name in DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except Exception:  # absent, or metadata that cannot be read: it is for messages alone
            continue
    return "of unknown version"


def _is_baked(layer: Any) -> bool:
    """By memory: scales that lie in the parameters are no copy, so nobody baked them."""
    try:
        return bool(baked_bytes(layer)) and not is_weight_only(layer)
    except Exception:  # any module at all: some raise whatever they like when asked for something
        return False


@dataclass
class Process:
    """The fix in this process: settings, FlashInfer's contract, what was done so far."""

    settings: Settings
    version: str
    reporter: Reporter = field(init=False)
    dispatch: DispatchHold = field(default_factory=DispatchHold)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    # By name at the call: what is installed is looked up when the first layer needs it.
    _flashinfer: NeededContract = field(
        default_factory=lambda: NeededContract(lambda: installed_contract())
    )
    _verified: int = 0
    #: Why b12x is not to be trusted in this process: a live check that failed.
    _condemned: str = ""
    #: Layers whose weights were loaded, and that are to be prepared.
    _awaited: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)

    def __post_init__(self) -> None:
        self.reporter = Reporter(self.version)

    def replacement(self, upstream: Hook) -> Hook:
        """The method that takes ``upstream``'s place."""

        @functools.wraps(upstream)
        def prepare(method: Any, module: Any) -> None:
            with self.reporter.summary.quiet.interrupted():
                self._awaited.discard(module)
                restore_decode(module)
                self._before(module)
                upstream(method, module)
                try:
                    with self._lock:
                        self._after(module)
                except BaseException:  # an interrupt, too
                    # Whoever goes on in spite of it must not decode with what upstream prepared.
                    module._b12x_weights = None
                    module.b12x_wrapper = None
                    raise

        return prepare

    def loaded(self, module: Any) -> None:
        """A layer of the class, or of a subclass, has its weights: our method should be next."""
        with self.reporter.summary.quiet.interrupted():
            self._awaited.add(module)

    def tell_of_bypassed_layers(self) -> None:
        """Layers that someone else prepared: a subclass whose method does not call upstream's."""
        for layer in list(self._awaited):
            if _is_baked(layer):
                self._awaited.discard(layer)
                self.reporter.bypassed(layer)

    def tell_of_earlier_layers(self) -> None:
        """Layers prepared before the fix was on stay baked: CUDA graphs may hold their memory."""
        for layer in gc.get_objects():
            # By type: proxies of other libraries import things when asked for an attribute.
            if not issubclass(type(layer), torch.nn.Module) or layer in _REPAIRED:
                continue
            if _is_baked(layer):
                self.reporter.loaded_before(layer)

    @property
    def contract(self) -> KernelContract:
        """Of the installed FlashInfer; see :meth:`NeededContract.get` for what it raises."""
        return self._flashinfer.get()

    def _before(self, module: Any) -> None:
        """What has to be settled before upstream builds FlashInfer's wrapper."""
        if is_weight_only(module):
            return
        top_k = getattr(getattr(module, "routing_method", None), "experts_per_token", 1)
        try:
            if words := widen_static(self.contract, int(top_k), self.settings.accumulate):
                self.reporter.warn(words)
        except Exception:  # told after upstream's method, where the policy for unknowns applies
            return

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
        return self._flashinfer.version

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
