"""The router beside a layer's experts, or why it cannot be used."""

from __future__ import annotations

from torch import Tensor

from trtllm_b12x_fix.checkpoint import conventions
from trtllm_b12x_fix.checkpoint.config import ModelConfig
from trtllm_b12x_fix.checkpoint.files import Checkpoint
from trtllm_b12x_fix.checkpoint.layers import LayerEntry
from trtllm_b12x_fix.checkpoint.router import Router
from trtllm_b12x_fix.errors import InputError


def read_router(
    checkpoint: Checkpoint, entry: LayerEntry, config: ModelConfig, top_k: int
) -> tuple[Router | None, str]:
    """The layer's router, or ``None`` and the reason.

    Raises:
        InputError: tensors or config values that make no sense, naming file and tensor.
    """
    base = entry.prefix.removesuffix("experts")
    name = next((base + n for n in conventions.ROUTER_WEIGHTS if checkpoint.has(base + n)), None)
    if name is None:
        return None, "the file has no router"
    if not config.names_a_model:
        return None, "no config.json names the model_type, whose rules it would follow"
    if unknown := config.unknown_routing():
        return None, unknown
    bias = _bias(checkpoint, base, config)
    if other := _unread(checkpoint, base, {name, bias}):
        return None, f"{other} beside the router is not emulated"
    weight = checkpoint.get(name)
    if weight.dtype.itemsize == 1:
        return None, f"the router itself is quantized ({weight.dtype})"
    if not weight.is_floating_point() or weight.dim() != 2 or weight.shape[0] != entry.experts:
        raise InputError(
            f"{checkpoint.file_of(name)}: {name} must be floating [{entry.experts}, hidden], got "
            f"{weight.dtype} {tuple(weight.shape)}"
        )
    if weight.shape[1] != entry.hidden:
        return None, _latent(checkpoint, entry, config, name, weight)
    values = _bias_values(checkpoint, bias, entry.experts) if bias else None
    _require_finite(checkpoint, name, weight)
    return Router(weight, values, config.router_spec(top_k)), ""


def _bias(checkpoint: Checkpoint, base: str, config: ModelConfig) -> str | None:
    if not config.takes_correction_bias():
        return None
    return next((base + n for n in conventions.ROUTER_BIASES if checkpoint.has(base + n)), None)


def _unread(checkpoint: Checkpoint, base: str, read: set[str | None]) -> str:
    """A tensor of the router, or a bias beside it, that nothing here reads."""
    beside = sorted(set(checkpoint.names_below(base)) - read)
    return next((t for t in beside if conventions.ROUTER_OTHER.fullmatch(t[len(base) :])), "")


def _latent(
    checkpoint: Checkpoint, entry: LayerEntry, config: ModelConfig, name: str, weight: Tensor
) -> str:
    """Why the router works at another size than the experts.

    Raises:
        InputError: nothing says that it may.
    """
    base = entry.prefix.removesuffix("experts")
    projected = all(checkpoint.has(base + n) for n in conventions.LATENT_PROJECTIONS)
    if not (config.is_latent or projected):
        raise InputError(
            f"{checkpoint.file_of(name)}: {name} {tuple(weight.shape)} does not fit experts that "
            f"work on {entry.hidden}, and neither the config nor the file has a latent size"
        )
    return f"the router works on {weight.shape[1]}, the experts on {entry.hidden}: a latent MoE"


def _bias_values(checkpoint: Checkpoint, bias: str, experts: int) -> Tensor:
    values = checkpoint.get(bias)
    if not values.is_floating_point() or tuple(values.shape) != (experts,):
        raise InputError(
            f"{checkpoint.file_of(bias)}: {bias} must be floating [{experts}], got "
            f"{values.dtype} {tuple(values.shape)}"
        )
    _require_finite(checkpoint, bias, values)
    return values


def _require_finite(checkpoint: Checkpoint, tensor: str, values: Tensor) -> None:
    if not bool(values.float().isfinite().all()):
        raise InputError(f"{checkpoint.file_of(tensor)}: {tensor} holds NaN or infinity")
