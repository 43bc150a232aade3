"""What the fix says: one INFO line per process, warnings, and the process's ledger entry."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trtllm_b12x_fix.integrations.trtllm_contract import layer_name
from trtllm_b12x_fix.integrations.trtllm_summary import Summary, watch
from trtllm_b12x_fix.integrations.trtllm_verify import VerifyState
from trtllm_b12x_fix.ledger import LayerCheck, Ledger

if TYPE_CHECKING:
    from trtllm_b12x_fix.integrations.trtllm_layer import LayerOutcome
    from trtllm_b12x_fix.integrations.trtllm_verify import Verification

_UNCHANGED = "unchanged"


@dataclass
class Reporter:
    """Speaks through TensorRT-LLM's own logger where there is one."""

    version: str
    summary: Summary = field(default_factory=lambda: SUMMARY)
    _warned: set[str] = field(default_factory=set)

    def layer(self, module: Any, outcome: LayerOutcome, flashinfer: str) -> None:
        """Record one layer; the line that tells of all comes when loading has ended.

        Some versions prepare a layer twice, and a reload prepares all again: it counts once, with
        what was done last.
        """
        strategy = outcome.strategy.value if outcome.strategy else _UNCHANGED
        before = self.summary.strategy_of(module)
        freed = outcome.freed if before is None else 0
        if before != strategy:
            ledger = Ledger.for_process()
            ledger.record(versions={"tensorrt_llm": self.version, "flashinfer": flashinfer})
            ledger.record_layer(strategy, bytes_freed=freed, instead_of=before)
        versions = f"TensorRT-LLM {self.version}, FlashInfer {flashinfer}"
        self.summary.layer(module, strategy, outcome.reason, freed, versions)

    def verified(self, verification: Verification) -> None:
        """Record a live check; whatever has not passed is a warning at once."""
        Ledger.for_process().record_check(
            LayerCheck(verification.layer, verification.state, verification.words)
        )
        self.summary.verified(verification)
        if verification.state is not VerifyState.PASSED:
            _logger().warning(f"trtllm-b12x-fix: {verification.layer}: {verification.words}")

    def warn(self, words: str) -> None:
        """Warn, once for the same words."""
        if words not in self._warned:
            self._warned.add(words)
            Ledger.for_process().record_warning(words)
            _logger().warning(f"trtllm-b12x-fix: {words}")

    def failed(self, layer: str, words: str) -> None:
        """Record what is about to be raised: whoever catches it has a layer that cannot decode."""
        ledger = Ledger.for_process()
        ledger.record_warning(f"{layer} stopped the start: {words}")
        ledger.record_check(LayerCheck(layer, VerifyState.FAILED, "stopped the start"))

    def loaded_before(self, module: Any) -> None:
        """Record a layer that the fix came too late for."""
        self._baked(
            module, "loaded before the fix was on: its block scales are baked; load it again"
        )

    def bypassed(self, module: Any) -> None:
        """Record a layer that was prepared without ever coming to the replaced method."""
        kind = type(getattr(module, "quant_method", None)).__qualname__
        self._baked(
            module,
            f"prepared past the fix, by a method ({kind}) that does not call the one that is "
            "replaced: its block scales are baked; set moe_config.backend: CUTLASS",
        )

    def _baked(self, module: Any, words: str) -> None:
        name = layer_name(module)
        Ledger.for_process().record_check(LayerCheck(name, VerifyState.FAILED, words))
        self.warn(f"{name}: {words}")


def _logger() -> Any:
    """TensorRT-LLM's logger, whose lines an operator reads; Python's where it is not loaded."""
    module = sys.modules.get("tensorrt_llm.logger")
    return getattr(module, "logger", None) or logging.getLogger("trtllm_b12x_fix")


#: Of the whole process: modules are imported again, layers stay.
SUMMARY: Summary = Summary(_logger)
watch(SUMMARY)
