"""What the fix says: one INFO line per process, warnings, and the process's ledger entry."""

from __future__ import annotations

import logging
import sys
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trtllm_b12x_fix import __version__
from trtllm_b12x_fix.integrations.trtllm_contract import layer_name
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
    _told: bool = False
    _warned: set[str] = field(default_factory=set)
    _counted: weakref.WeakKeyDictionary[Any, str] = field(default_factory=weakref.WeakKeyDictionary)

    def layer(self, module: Any, outcome: LayerOutcome, flashinfer: str) -> None:
        """Record one layer; the first one is announced.

        Some versions prepare a layer twice, and a reload prepares all again: it counts once, with
        what was done last.
        """
        strategy = outcome.strategy.value if outcome.strategy else _UNCHANGED
        before = self._counted.get(module)
        if before != strategy:
            self._counted[module] = strategy
            freed = outcome.freed if before is None else 0
            ledger = Ledger.for_process()
            ledger.record(versions={"tensorrt_llm": self.version, "flashinfer": flashinfer})
            ledger.record_layer(strategy, bytes_freed=freed, instead_of=before)
        if not self._told:
            self._told = True
            _logger().info(
                f"trtllm-b12x-fix {__version__}: {strategy} ({outcome.reason}) on TensorRT-LLM "
                f"{self.version}, FlashInfer {flashinfer}; {outcome.name} gave back "
                f"{outcome.freed / 2**20:.1f} MiB of baked scales. All layers of all processes: "
                "trtllm-b12x-fix status"
            )

    def verified(self, verification: Verification) -> None:
        """Record and log a live check."""
        Ledger.for_process().record_check(
            LayerCheck(verification.layer, verification.state, verification.words)
        )
        log = _logger()
        say = log.info if verification.state is VerifyState.PASSED else log.warning
        say(f"trtllm-b12x-fix: {verification.layer}: {verification.words}")

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
        words = "loaded before the fix was on: its block scales are baked; load it again"
        name = layer_name(module)
        Ledger.for_process().record_check(LayerCheck(name, VerifyState.FAILED, words))
        self.warn(f"{name}: {words}")


def _logger() -> Any:
    """TensorRT-LLM's logger, whose lines an operator reads; Python's where it is not loaded."""
    module = sys.modules.get("tensorrt_llm.logger")
    return getattr(module, "logger", None) or logging.getLogger("trtllm_b12x_fix")
