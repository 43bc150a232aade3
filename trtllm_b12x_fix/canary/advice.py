"""What to do about a verdict."""

from __future__ import annotations

from trtllm_b12x_fix.canary.protocol import Endpoint
from trtllm_b12x_fix.canary.records import Verdict

#: Said beside every healthy verdict: what it does not mean.
BLIND = (
    "healthy says that the model answers, not that its scales are exact: a few percent of error "
    "in every layer, as baked block scales make it, change no such answer (status, doctor, "
    "check-layer)"
)
_CUTLASS = (
    "mixture of experts: serve once more on CUTLASS and ask again: vLLM --moe-backend "
    "flashinfer_cutlass, TensorRT-LLM moe_config.backend: CUTLASS"
)
_TELLS = (
    "healthy there: the MoE backend is at fault, stay on CUTLASS (vllm#52308 is one such case); "
    "the same there: look at the checkpoint (trtllm-b12x-fix scan DIR), its tokenizer and template"
)


def advice(verdict: Verdict, endpoint: Endpoint) -> tuple[str, ...]:
    """Steps, most useful first; none for a healthy server."""
    if verdict is Verdict.HEALTHY:
        return ()
    steps = [_CUTLASS, _TELLS]
    if verdict is Verdict.SUSPICIOUS:
        steps.append(
            "a model far smaller than 135M parameters, or one that speaks no English, may know no "
            "better: compare with the same model under another engine"
        )
    if endpoint is Endpoint.CHAT:
        steps.append("a chat template that is missing or of another model does the same")
    return tuple(steps)
