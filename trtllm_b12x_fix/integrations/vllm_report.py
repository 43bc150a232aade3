"""What the plugin says: one INFO line per process, warnings, and the process's ledger entry."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trtllm_b12x_fix.integrations.trtllm_summary import Summary, watch
from trtllm_b12x_fix.integrations.trtllm_verify import VerifyState
from trtllm_b12x_fix.ledger import LayerCheck, Ledger

if TYPE_CHECKING:
    from trtllm_b12x_fix.integrations.trtllm_layer import LayerOutcome
    from trtllm_b12x_fix.integrations.trtllm_verify import Verification

OFF = "TRTLLM_B12X_FIX=off switches this off"
_UNCHANGED = "unchanged"
#: Below vLLM's own, which has a handler.
_LOG = logging.getLogger("vllm.trtllm_b12x_fix")


def logger() -> logging.Logger:
    """Where vLLM's operator looks."""
    return _LOG


#: Of the whole process: modules are imported again, layers stay.
SUMMARY: Summary = Summary(logger)
watch(SUMMARY)
#: What was said once; two modules are guarded, and say the same.
SAID: set[str] = set()


@dataclass
class Reporter:
    """Speaks through vLLM's logger."""

    version: str
    summary: Summary = field(default_factory=lambda: SUMMARY)

    def layer(self, layer: Any, outcome: LayerOutcome, flashinfer: str) -> None:
        """Record one layer; a reload prepares all again, and it counts once."""
        strategy = outcome.strategy.value if outcome.strategy else _UNCHANGED
        before = self.summary.strategy_of(layer)
        if before != strategy:
            ledger = Ledger.for_process()
            ledger.record(versions={"vllm": self.version, "flashinfer": flashinfer})
            ledger.record_layer(strategy, instead_of=before)
        versions = f"vLLM {self.version}, FlashInfer {flashinfer} ({OFF})"
        self.summary.layer(layer, strategy, outcome.reason, 0, versions)

    def verified(self, verification: Verification) -> None:
        """Record a live check; whatever has not passed is a warning at once."""
        Ledger.for_process().record_check(
            LayerCheck(verification.layer, verification.state, verification.words)
        )
        self.summary.verified(verification)
        if verification.state is not VerifyState.PASSED:
            _LOG.warning("trtllm-b12x-fix: %s: %s", verification.layer, verification.words)

    def warn(self, words: str) -> None:
        """Warn, once for the same words."""
        if self._is_news(words):
            Ledger.for_process().record_warning(words)
            _LOG.warning("trtllm-b12x-fix: %s", words)

    def say(self, words: str) -> None:
        """Tell, once for the same words."""
        if self._is_news(words):
            Ledger.for_process().record_warning(words)
            _LOG.info("trtllm-b12x-fix: %s", words)

    def failed(self, layer: str, words: str) -> None:
        """Record what is about to be raised: whoever catches it has a layer that cannot run."""
        ledger = Ledger.for_process()
        ledger.record_warning(f"{layer} stopped the start: {words}")
        ledger.record_check(LayerCheck(layer, VerifyState.FAILED, "stopped the start"))

    def loaded_before(self, name: str) -> None:
        """Record a layer that the fix came too late for."""
        words = "loaded before the fix was on: its block scales are baked; load it again"
        Ledger.for_process().record_check(LayerCheck(name, VerifyState.FAILED, words))
        self.warn(f"{name}: {words}")

    def _is_news(self, words: str) -> bool:
        if words in SAID:
            return False
        SAID.add(words)
        return True
