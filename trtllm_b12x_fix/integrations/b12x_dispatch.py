"""Process-wide choices in FlashInfer's b12x dispatch, held for as long as the fix is on.

Unlike :mod:`.b12x_families`, which forces one family for a measurement and puts everything back,
this narrows the dispatch's own choice, so that every shape still has a family:

direct micro kept out
    ``_DIRECT_MICRO_MAX_N`` = 0, read at every call, where direct micro multiplies by the input
    scales (0.6.17 to 0.7.1); its calls go to micro or static.
families that sum in fp32 (``TRTLLM_B12X_FIX_ACCUMULATE=fp32``)
    where static sums in fp32 (0.7.0 on): micro's bands 0, and static's band wide enough for every
    decode step by FlashInfer's own variable, which it reads once, before the first wrapper.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass, field
from typing import Any

from trtllm_b12x_fix.emulator.arithmetic import KernelFamily, OutputSum
from trtllm_b12x_fix.emulator.contract import KernelContract
from trtllm_b12x_fix.errors import UnsupportedVersionError
from trtllm_b12x_fix.settings import Accumulate

DISPATCH = "flashinfer.fused_moe.cute_dsl.blackwell_sm12x.moe_dispatch"
CUTOVER = "FLASHINFER_B12X_STATIC_COMPACT_CUTOVER_PAIRS"
#: TensorRT-LLM sends 64 tokens and more to CUTLASS.
DECODE_TOKENS = 63
_MICRO_BANDS = ("_MICRO_COMPACT_CUTOVER_PAIRS", "_MICRO_COMPACT_CUTOVER_PAIRS_MULTI_TOPK")
#: Routes of a token in models of today, and some more.
_MOST_ROUTES = 32


@dataclass
class DispatchHold:
    """What is held, and what was there before."""

    held: dict[str, object] = field(default_factory=dict)
    _before: dict[str, object] = field(default_factory=dict)
    _module: Any = None

    def hold(self, changes: dict[str, object]) -> None:
        """Set names of moe_dispatch; again is fine.

        Raises:
            UnsupportedVersionError: FlashInfer has no such name.
        """
        if not changes:
            return
        try:
            self._module = importlib.import_module(DISPATCH)
        except Exception as error:
            raise UnsupportedVersionError(f"{DISPATCH} cannot be imported: {error}") from error
        if missing := [name for name in changes if not hasattr(self._module, name)]:
            raise UnsupportedVersionError(f"{DISPATCH} has no {', '.join(missing)}")
        for name, value in changes.items():
            self._before.setdefault(name, getattr(self._module, name))
            setattr(self._module, name, value)
            self.held[name] = value

    def release(self) -> None:
        """Put back what is still ours."""
        for name, value in self._before.items():
            if getattr(self._module, name) == self.held[name]:
                setattr(self._module, name, value)
        self.held.clear()
        self._before.clear()

    def changed_by_others(self) -> list[str]:
        """Names that no longer have the value held; re-read, not remembered."""
        return [n for n, v in self.held.items() if getattr(self._module, n, None) != v]


def changes_for(
    contract: KernelContract, keep_out: frozenset[KernelFamily], accumulate: Accumulate
) -> dict[str, object]:
    """Names of moe_dispatch and what the fix sets them to."""
    changes: dict[str, object] = {}
    if KernelFamily.DIRECT_MICRO in keep_out:
        changes["_DIRECT_MICRO_MAX_N"] = 0
    if accumulate is Accumulate.FP32 and sums_in_fp32(contract):
        changes |= dict.fromkeys(_MICRO_BANDS, 0)
    return changes


def sums_in_fp32(contract: KernelContract) -> bool:
    """Whether this FlashInfer has a family for every decode step that sums its output in fp32."""
    return contract.static_output is OutputSum.FP32_SLOTS


def widen_static(contract: KernelContract, top_k: int, accumulate: Accumulate) -> str:
    """Make static's band cover every decode step; must come before the first wrapper.

    Returns:
        What could not be done, in words, or nothing.
    """
    if accumulate is not Accumulate.FP32:
        return ""
    if not sums_in_fp32(contract):
        return (
            f"TRTLLM_B12X_FIX_ACCUMULATE=fp32: FlashInfer {contract.version} has no b12x kernel "
            "that sums decode in fp32 (0.7.0 and later have); it has no effect"
        )
    needed = DECODE_TOKENS * top_k
    asked = os.environ.get(CUTOVER)
    if asked is None:
        # Also where this layer does not need it: a later one may, and the variable is read once.
        os.environ[CUTOVER] = str(max(needed, DECODE_TOKENS * _MOST_ROUTES))
        return ""
    if not asked.isdecimal() or int(asked) < needed:
        return f"{CUTOVER}={asked} keeps static from {needed} rows of decode, which sum in bf16"
    return ""


def narrowed(contract: KernelContract, accumulate: Accumulate) -> KernelContract:
    """The contract as the dispatch behaves under these choices."""
    if accumulate is Accumulate.FP32 and sums_in_fp32(contract):
        return contract.without(KernelFamily.MICRO)
    return contract
