"""One b12x layer of vLLM: what it holds before upstream's method, and what that method did to it.

The contract, as read in vLLM 0.27.0 and 0.33.0, with R the rows of FC1 and I the width of FC2 after
padding; the layer's parameters are at the same time what ``experts.quant_config`` refers to:

======================== ============= ===========================================================
layer.w13_weight         uint8         [E, R, H/2], rows [up; gate] where gated
layer.w2_weight          uint8         [E, H, I/2]
layer.w13_weight_scale   float8_e4m3fn [E, R, H/16], swizzled expert by expert (tiles of 128 x 4)
layer.w2_weight_scale    float8_e4m3fn [E, H, I/16]
layer.w13_weight_scale_2 fp32          [E], ``experts.g1_alphas`` is this very tensor
layer.w2_weight_scale_2  fp32          [E], ``experts.g2_alphas``
layer.w13_input_scale    fp32          [E], the layer's largest, repeated
layer.w2_input_scale     fp32          [E]
======================== ============= ===========================================================

Upstream's method multiplies weight_scale_2 into the block scales, in the parameters themselves, and
overwrites weight_scale_2 and ``experts.a2_gscale`` with 1.0. All of that is put back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trtllm_b12x_fix.errors import ScaleError
from trtllm_b12x_fix.formats import scale_layout
from trtllm_b12x_fix.formats.e4m3 import NAN_BYTES
from trtllm_b12x_fix.integrations.trtllm_contract import ContractError
from trtllm_b12x_fix.integrations.trtllm_entries import ScaleState
from trtllm_b12x_fix.layer import Activation, ExpertMatrices, MoELayer
from trtllm_b12x_fix.settings import ActScale

WAYS_OUT = (
    "set --moe-backend flashinfer_cutlass, or TRTLLM_B12X_FIX=off to keep vLLM as it is, or report "
    "the version"
)


class LostScalesError(ContractError):
    """The checkpoint's scales are gone, so no other backend can have the layer either."""


#: Upstream's names for FC1 and FC2.
_PREFIXES = ("w13", "w2")
#: vLLM's names of activations, as the wrapper takes them. Only the first two can be emulated; for
#: the arguments it matters alone that the third is gated.
_ACTIVATIONS = {
    "relu2": Activation.RELU2,
    "silu": Activation.SILU,
    "gelu_tanh": Activation.SILU,
}


@dataclass(frozen=True)
class Half:
    """FC1 or FC2 of a layer, as the checkpoint has it.

    Attributes:
        weight: uint8 [E, R, C/2].
        block_scale: float8_e4m3fn [E, R', C'/16], swizzled: the parameter's own storage.
        weight_scale_2: fp32 [E], a copy.
        input_scale: fp32 [], the layer's largest; ``None`` where the checkpoint has none.
        tiles: the first tile of rows of the first and the last expert, copies.
    """

    weight: Tensor
    block_scale: Tensor
    weight_scale_2: Tensor
    input_scale: Tensor | None
    tiles: dict[int, Tensor]


@dataclass(frozen=True)
class Originals:
    """A layer before upstream's method."""

    name: str
    version: str
    activation: Activation
    #: As the wrapper is told.
    activation_name: str
    fc1: Half
    fc2: Half
    #: ``experts.a2_gscale``, a copy.
    fc2_reciprocal: Tensor | None

    @property
    def experts(self) -> int:
        return int(self.fc1.weight.shape[0])

    @property
    def is_emulated(self) -> bool:
        """Whether the emulator has this activation."""
        return self.activation.value == self.activation_name

    @property
    def is_calibrated(self) -> bool:
        """Whether the checkpoint has input scales."""
        return self.fc1.input_scale is not None and self.fc2.input_scale is not None

    def moe_layer(self, scale: ActScale) -> MoELayer:
        """As the repair wants it; block scales swizzled, which it never looks into."""
        return MoELayer(
            self._matrices(self.fc1, scale),
            self._matrices(self.fc2, scale),
            self.activation,
            self.name,
            int(self.fc1.weight.shape[2]) * 2,
            int(self.fc2.weight.shape[2]) * 2,
        )

    def _matrices(self, half: Half, scale: ActScale) -> ExpertMatrices:
        used = torch.ones_like(half.weight_scale_2)
        if scale is ActScale.CALIBRATED and half.input_scale is not None:
            used = half.input_scale.expand(self.experts).contiguous()
        return ExpertMatrices(
            half.weight, half.block_scale.view(torch.uint8), half.weight_scale_2, used
        )

    def put_back(self, experts: Any, layer: Any) -> None:
        """Undo what upstream's method did to tensors that others read."""
        with torch.no_grad():
            for prefix, half in zip(_PREFIXES, (self.fc1, self.fc2), strict=True):
                getattr(layer, f"{prefix}_weight_scale").data = half.block_scale
                getattr(layer, f"{prefix}_weight_scale_2").data.copy_(half.weight_scale_2)
            if self.fc2_reciprocal is not None:
                experts.a2_gscale.copy_(self.fc2_reciprocal)


def layer_name(layer: Any) -> str:
    """What to call a layer in messages."""
    return str(getattr(layer, "layer_name", "") or "a layer without a name")


def is_weight_only(layer: Any) -> bool:
    """Whether the checkpoint is W4A16: its input scales, if there are any, were never loaded."""
    return bool(getattr(getattr(layer, "quant_method", None), "use_a16", False))


def read_originals(experts: Any, layer: Any, version: str) -> Originals:
    """What upstream's method is about to change.

    Raises:
        ContractError: an attribute, shape or dtype is not what is known.
    """
    contract = _Contract(experts, layer, version)
    activation = contract.attribute(experts, "_activation_str")
    if activation not in _ACTIVATIONS:
        raise contract.broken("experts._activation_str", f"is {activation!r}")
    halves = [contract.half(prefix) for prefix in _PREFIXES]
    reciprocal = getattr(experts, "a2_gscale", None)
    return Originals(
        layer_name(layer),
        version,
        _ACTIVATIONS[activation],
        activation,
        halves[0],
        halves[1],
        reciprocal.clone() if isinstance(reciprocal, Tensor) else None,
    )


class _Contract:
    """Attribute access that names what is missing."""

    def __init__(self, experts: Any, layer: Any, version: str) -> None:
        self._experts = experts
        self._layer = layer
        self._version = version

    def broken(self, symbol: str, words: str) -> ContractError:
        return ContractError(
            f"vLLM {self._version}, {layer_name(self._layer)}: {symbol} {words}. This package does "
            f"not know such a version: {WAYS_OUT}"
        )

    def attribute(self, owner: Any, name: str) -> Any:
        try:
            return getattr(owner, name)
        except AttributeError as error:
            whose = "layer" if owner is self._layer else "experts"
            raise self.broken(f"{whose}.{name}", "is missing") from error

    def tensor(self, name: str, dtype: torch.dtype, dimensions: int) -> Tensor:
        value = self.attribute(self._layer, name)
        if not isinstance(value, Tensor):
            raise self.broken(f"layer.{name}", f"must be a tensor, is {type(value).__name__}")
        if value.dtype != dtype or value.dim() != dimensions:
            raise self.broken(
                f"layer.{name}",
                f"must be {dtype} of {dimensions} dimensions, is {value.dtype} {list(value.shape)}",
            )
        return value.data

    def half(self, prefix: str) -> Half:
        weight = self.tensor(f"{prefix}_weight", torch.uint8, 3)
        scales = self.tensor(f"{prefix}_weight_scale", torch.float8_e4m3fn, 3)
        experts, rows, packed = weight.shape
        padded = scale_layout.padded_shape(rows, packed // 8)
        if tuple(scales.shape) != (experts, *padded) or not scales.is_contiguous():
            raise self.broken(
                f"layer.{prefix}_weight_scale",
                f"must be contiguous {[experts, *padded]} for weights {list(weight.shape)}, is "
                f"{list(scales.shape)}",
            )
        second = self.tensor(f"{prefix}_weight_scale_2", torch.float32, 1)
        if second.numel() != experts:
            raise self.broken(f"layer.{prefix}_weight_scale_2", f"is {list(second.shape)}")
        tiles = {e: scales[e, : scale_layout.ROW_TILE].clone() for e in {0, experts - 1}}
        return Half(weight, scales, second.clone(), self._input_scale(prefix), tiles)

    def _input_scale(self, prefix: str) -> Tensor | None:
        if is_weight_only(self._layer):
            return None
        scale = getattr(self._layer, f"{prefix}_input_scale", None)
        if scale is None:
            return None
        if not isinstance(scale, Tensor) or scale.dtype != torch.float32 or not scale.numel():
            raise self.broken(f"layer.{prefix}_input_scale", "must be fp32")
        return scale.data.max().clone()


def scale_state(experts: Any, before: Originals) -> ScaleState:
    """What upstream hands to the wrapper now, by the bytes of two tiles of each projection.

    Raises:
        LostScalesError: it changed the checkpoint's block scales where they lay.
    """
    states = {
        _state(getattr(experts, name, None), half, expert, before)
        for name, half in (("w1_sf_mma", before.fc1), ("w2_sf_mma", before.fc2))
        for expert in half.tiles
    }
    state = states.pop() if len(states) == 1 else ScaleState.UNKNOWN
    if state is ScaleState.INTACT and not _carries(experts, before):
        return ScaleState.UNKNOWN
    return state


def _state(handed: Any, half: Half, expert: int, before: Originals) -> ScaleState:
    tile = half.tiles[expert]
    if not torch.equal(
        half.block_scale[expert, : tile.shape[0]].view(torch.uint8), tile.view(torch.uint8)
    ):
        raise LostScalesError(
            f"vLLM {before.version}, {before.name}: the block scales were changed where they lay, "
            f"so they cannot be put back: {WAYS_OUT}"
        )
    if (
        not isinstance(handed, Tensor)
        or handed.shape != scale_layout.to_mma(half.block_scale).shape
    ):
        return ScaleState.UNKNOWN
    mine = handed.view(torch.uint8)[:, :, :1, ..., expert].reshape(-1)
    baked = (tile.float() * half.weight_scale_2[expert]).to(torch.float8_e4m3fn)
    # Baked first: where both agree (weight_scale_2 of 1), replacing changes nothing.
    for state, expected in ((ScaleState.BAKED, baked), (ScaleState.INTACT, tile)):
        layout = scale_layout.to_mma(expected.view(torch.uint8)[None])[..., 0].reshape(-1)
        if torch.equal(mine, layout):
            return state
    return ScaleState.UNKNOWN


def _carries(experts: Any, before: Originals) -> bool:
    """Whether an upstream that keeps block scales intact hands weight_scale_2 over elsewhere."""
    for name, half in (("g1_alphas", before.fc1), ("g2_alphas", before.fc2)):
        alphas = getattr(experts, name, None)
        if not isinstance(alphas, Tensor) or alphas.shape != half.weight_scale_2.shape:
            return False
        known = [half.weight_scale_2]
        if half.input_scale is not None:
            known.append(half.weight_scale_2 * half.input_scale)
        if not any(torch.allclose(alphas.float(), one, rtol=1e-5, atol=0) for one in known):
            return False
    return True


def check_scales(before: Originals, scale: ActScale) -> None:
    """Every scale must be one that a kernel can use: upstream looks at none of them.

    Raises:
        ScaleError: one is not; names layer, projection and expert.
    """
    for what, half in (("FC1", before.fc1), ("FC2", before.fc2)):
        largest = half.block_scale.view(torch.uint8).flatten(1).amax(dim=1)
        # 0x7F is NaN and all bytes above are negative or NaN.
        bad = (largest >= NAN_BYTES[0]).nonzero().flatten().tolist()
        if bad:
            raise ScaleError(
                f"{before.name}, expert {bad[0]}: {what} has a block scale that is NaN or negative "
                f"({len(bad)} of {before.experts} experts): the checkpoint is damaged"
            )
        for expert, value in enumerate(half.weight_scale_2.tolist()):
            if not 0 < value < float("inf"):
                raise ScaleError(
                    f"{before.name}, expert {expert}: {what}'s weight_scale_2 is {value!r}; it "
                    "must be positive and finite"
                )
        value = 1.0 if half.input_scale is None else float(half.input_scale)
        if scale is ActScale.CALIBRATED and not 0 < value < float("inf"):
            raise ScaleError(
                f"{before.name}: {what}'s largest input_scale is {value!r}: the checkpoint lacks "
                "it, or it is damaged; TRTLLM_B12X_FIX_ACT_SCALE=unit does without"
            )
