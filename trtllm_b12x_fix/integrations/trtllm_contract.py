"""What TensorRT-LLM's b12x quantization method leaves on a layer, checked before it is touched.

The contract, as read in TensorRT-LLM's sources (both module paths, method ``transform_weights`` or
``post_load_weights``), with R the rows of FC1 after padding and I the width of FC2:

=================== =================== ========================================================
w3_w1_weight        int64 [E, R, H/16]  16 codes a word, rows [up; gate]
w2_weight           int64 [E, H, I/16]
w3_w1_weight_scale  int32 [E, R, H/64]  E4M3 bytes, swizzled expert by expert; CUTLASS reads them
w2_weight_scale     int32 [E, H, I/64]
fc31_alpha          fp32 [E]            weight_scale_2 * input scale
fc2_alpha           fp32 [E]
fc31_input_scale    fp32 []             RECIPROCAL of the layer's largest input scale
fc2_input_scale     fp32 []
=================== =================== ========================================================

``_b12x_weights`` holds the keyword arguments of ``B12xMoEWrapper.run``. Whatever is not so is an
error that names the version, the symbol and what was expected; nothing is repaired by guessing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trtllm_b12x_fix.errors import ScaleError, UnsupportedVersionError
from trtllm_b12x_fix.formats.e4m3 import NAN_BYTES
from trtllm_b12x_fix.layer import Activation

#: Keys of ``_b12x_weights`` in every state of TensorRT-LLM that bakes.
ENTRIES = (
    "w1_weight",
    "w1_weight_sf",
    "w1_alpha",
    "w2_weight",
    "w2_weight_sf",
    "w2_alpha",
    "fc2_input_scale",
)
INPUT_GLOBAL_SCALE = "input_global_scale"

_PARAMETERS = (
    "w3_w1_weight",
    "w2_weight",
    "w3_w1_weight_scale",
    "w2_weight_scale",
    "fc31_alpha",
    "fc2_alpha",
    "fc31_input_scale",
    "fc2_input_scale",
)
#: Two reciprocals and a product in fp32 are a few ulps.
_ROUNDING = 1e-5
#: A scale of exactly this was never loaded: parameters are created so.
_NEVER_LOADED = 1.0


class ContractError(UnsupportedVersionError):
    """TensorRT-LLM is not what this package knows under any of its versions."""


@dataclass(frozen=True)
class LayerView:
    """A layer's own tensors, none of them copied.

    Attributes:
        name: for messages, ``layer 7``.
        w1_block_scale, w2_block_scale: float8_e4m3fn [E, R, H/16] and [E, H, I/16], swizzled; views
            of the parameters that CUTLASS reads.
        fc1_reciprocal, fc2_reciprocal: fp32 [], reciprocals of the input scales.
        fc1_alpha, fc2_alpha: fp32 [E], weight_scale_2 * input scale.
        fc1_weight_scale_2, fc2_weight_scale_2: fp32 [E]; exact where the layer keeps them (dynamic
            quantization), else recovered from the alphas to a few ulps.
        entries: ``_b12x_weights``, the layer's own dict.
    """

    name: str
    activation: Activation
    experts: int
    hidden: int
    fc1_rows: int
    intermediate: int
    w1_block_scale: Tensor
    w2_block_scale: Tensor
    fc1_reciprocal: Tensor
    fc2_reciprocal: Tensor
    fc1_alpha: Tensor
    fc2_alpha: Tensor
    fc1_weight_scale_2: Tensor
    fc2_weight_scale_2: Tensor
    entries: dict[str, Any]


def layer_name(module: Any) -> str:
    """What to call a layer in messages."""
    index = getattr(module, "layer_idx", None)
    return "a layer without an index" if index is None else f"layer {index}"


def read_layer(module: Any, version: str) -> LayerView:
    """Check a layer that upstream has just prepared, and give its tensors names.

    Args:
        module: the MoE layer.
        version: of TensorRT-LLM, for messages.

    Raises:
        ContractError: an attribute, key, shape or dtype is not what is known.
        ScaleError: a scale that no kernel can use, naming layer and expert.
    """
    contract = _Contract(module, version)
    if getattr(module, "fc31_act_scale", None) is not None:
        raise contract.broken(
            "fc31_act_scale",
            "is there (NVFP4_AWQ): b12x's decode path ignores it, CUTLASS applies it",
        )
    for name in _PARAMETERS:
        contract.tensor(name)
    view = _view(contract)
    _check_entries(contract, view)
    _check_sizes(contract, view)
    _check_scales(view)
    return view


class _Contract:
    """Attribute access that names what is missing."""

    def __init__(self, module: Any, version: str) -> None:
        self.module = module
        self.name = layer_name(module)
        self._version = version

    def broken(self, symbol: str, expected: str) -> ContractError:
        return ContractError(
            f"TensorRT-LLM {self._version}, {self.name}: {symbol} {expected}. This package does "
            "not know such a version: set TRTLLM_B12X_FIX=off and moe_config.backend: CUTLASS, or "
            "report the version"
        )

    def attribute(self, name: str) -> Any:
        try:
            return getattr(self.module, name)
        except AttributeError as error:
            raise self.broken(name, "is missing") from error

    def tensor(self, name: str) -> Tensor:
        value = self.attribute(name)
        if not isinstance(value, Tensor):
            raise self.broken(name, f"must be a tensor, is {type(value).__name__}")
        return value.data

    def shaped(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        tensor = self.tensor(name)
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise self.broken(
                name,
                f"must be {dtype} {list(shape)}, is {tensor.dtype} {list(tensor.shape)}",
            )
        return tensor

    def integer(self, name: str) -> int:
        value = self.attribute(name)
        if not isinstance(value, int) or value < 1:
            raise self.broken(name, f"must be a positive integer, is {value!r}")
        return value


def _view(contract: _Contract) -> LayerView:
    experts, hidden = contract.integer("num_experts"), contract.integer("hidden_size")
    rows = _dimension(contract, "w3_w1_weight", 1)
    inner = _dimension(contract, "w2_weight", 2) * 16
    contract.shaped("w3_w1_weight", torch.int64, (experts, rows, hidden // 16))
    contract.shaped("w2_weight", torch.int64, (experts, hidden, inner // 16))
    entries = contract.attribute("_b12x_weights")
    if not isinstance(entries, dict):
        raise contract.broken("_b12x_weights", f"must be a dict, is {type(entries).__name__}")
    return LayerView(
        name=contract.name,
        activation=_activation(contract),
        experts=experts,
        hidden=hidden,
        fc1_rows=rows,
        intermediate=inner,
        w1_block_scale=_scales(contract, "w3_w1_weight_scale", experts, rows, hidden),
        w2_block_scale=_scales(contract, "w2_weight_scale", experts, hidden, inner),
        fc1_reciprocal=contract.shaped("fc31_input_scale", torch.float32, ()),
        fc2_reciprocal=contract.shaped("fc2_input_scale", torch.float32, ()),
        fc1_alpha=contract.shaped("fc31_alpha", torch.float32, (experts,)),
        fc2_alpha=contract.shaped("fc2_alpha", torch.float32, (experts,)),
        fc1_weight_scale_2=_weight_scale_2(contract, "fc31", experts),
        fc2_weight_scale_2=_weight_scale_2(contract, "fc2", experts),
        entries=entries,
    )


def _weight_scale_2(contract: _Contract, which: str, experts: int) -> Tensor:
    kept = f"{which}_weight_scale_2"
    if getattr(contract.module, kept, None) is not None:
        return contract.shaped(kept, torch.float32, (experts,))
    with torch.inference_mode(False), torch.no_grad():
        return contract.tensor(f"{which}_alpha") * contract.tensor(f"{which}_input_scale")


def _dimension(contract: _Contract, name: str, index: int) -> int:
    tensor = contract.tensor(name)
    if tensor.dim() != 3:
        raise contract.broken(name, f"must have three dimensions, has {list(tensor.shape)}")
    return int(tensor.shape[index])


def _scales(contract: _Contract, name: str, experts: int, rows: int, columns: int) -> Tensor:
    tensor = contract.tensor(name)
    wanted = experts * rows * (columns // 16)
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize != 1:
        raise contract.broken(name, f"must hold E4M3 bytes, is {tensor.dtype}")
    if not tensor.is_contiguous() or tensor.numel() * tensor.element_size() != wanted:
        raise contract.broken(
            name,
            f"must be {wanted} contiguous bytes ({experts} experts of {rows} x {columns // 16}), "
            f"is {tensor.dtype} {list(tensor.shape)}",
        )
    return tensor.view(torch.float8_e4m3fn).view(experts, rows, columns // 16)


def _activation(contract: _Contract) -> Activation:
    """From the wrapper, whose own word decides which kernel runs."""
    named = getattr(contract.attribute("b12x_wrapper"), "activation", None)
    try:
        return Activation(named)
    except ValueError as error:
        raise contract.broken(
            "b12x_wrapper.activation", f"must be relu2 or silu, is {named!r}"
        ) from error


def _check_entries(contract: _Contract, view: LayerView) -> None:
    if lacking := [key for key in ENTRIES if key not in view.entries]:
        raise contract.broken(f"_b12x_weights[{lacking[0]!r}]", "is missing")
    for key in ENTRIES:
        if not isinstance(view.entries[key], Tensor):
            shown = f"{view.entries[key]!r:.40}"
            raise contract.broken(f"_b12x_weights[{key!r}]", f"is no tensor but {shown}")
    for key in ("w1_alpha", "w2_alpha"):
        _check_entry(contract, view, key, (torch.float32,), (view.experts,))
    second = view.entries["fc2_input_scale"]
    if second.dim():
        _check_entry(contract, view, "fc2_input_scale", (torch.float32,), (view.experts,))
    bytes_ = (torch.uint8, torch.float8_e4m3fn)
    for key, count in (
        ("w1_weight", view.experts * view.fc1_rows * view.hidden // 2),
        ("w2_weight", view.experts * view.hidden * view.intermediate // 2),
        ("w1_weight_sf", view.w1_block_scale.numel()),
        ("w2_weight_sf", view.w2_block_scale.numel()),
    ):
        _check_entry(contract, view, key, bytes_, count)


def _check_entry(
    contract: _Contract,
    view: LayerView,
    key: str,
    dtypes: tuple[torch.dtype, ...],
    size: tuple[int, ...] | int,
) -> None:
    value = view.entries[key]
    fits = value.numel() == size if isinstance(size, int) else tuple(value.shape) == size
    if value.dtype not in dtypes or not fits:
        wanted = f"of {size} elements" if isinstance(size, int) else str(list(size))
        raise contract.broken(
            f"_b12x_weights[{key!r}]",
            f"must be {' or '.join(map(str, dtypes))} {wanted}, is {value.dtype} "
            f"{list(value.shape)}",
        )


def _check_sizes(contract: _Contract, view: LayerView) -> None:
    wrapper = contract.attribute("b12x_wrapper")
    for name, wanted in (("num_experts", view.experts), ("hidden_size", view.hidden)):
        actual = getattr(wrapper, name, None)
        if actual != wanted:
            raise contract.broken(f"b12x_wrapper.{name}", f"must be {wanted}, is {actual!r}")


def _check_scales(view: LayerView) -> None:
    """Every scale must be one that a kernel can use: upstream looks at none of them."""
    for what, reciprocal in (("FC1", view.fc1_reciprocal), ("FC2", view.fc2_reciprocal)):
        value = float(reciprocal)
        if value == _NEVER_LOADED:
            raise ScaleError(
                f"{view.name}: the {what} input_scale was never loaded (it is exactly 1): the "
                "checkpoint lacks it; calibrate activations again, or use W4A16"
            )
        if not 0 < value < float("inf"):
            raise ScaleError(
                f"{view.name}: the reciprocal of the {what} input_scale is {value!r}: the "
                "checkpoint's input_scale is zero, negative, infinite or NaN"
            )
    for what, alpha, weight_scale_2 in (
        ("FC1", view.fc1_alpha, view.fc1_weight_scale_2),
        ("FC2", view.fc2_alpha, view.fc2_weight_scale_2),
    ):
        _check_loaded(view.name, what, alpha)
        _check_usable(view.name, f"{what}'s weight_scale_2 * input_scale", alpha)
        _check_usable(view.name, f"{what}'s weight_scale_2", weight_scale_2)
    for what, alpha, reciprocal, kept in (
        ("FC1", view.fc1_alpha, view.fc1_reciprocal, view.fc1_weight_scale_2),
        ("FC2", view.fc2_alpha, view.fc2_reciprocal, view.fc2_weight_scale_2),
    ):
        _check_agreement(view.name, what, alpha * reciprocal, kept)
    for what, scales in (("FC1", view.w1_block_scale), ("FC2", view.w2_block_scale)):
        _check_block_scales(view.name, what, scales)


def _check_loaded(name: str, what: str, alpha: Tensor) -> None:
    for expert, value in enumerate(alpha.tolist()):
        if value == _NEVER_LOADED:
            raise ScaleError(
                f"{name}, expert {expert}: {what}'s weight_scale_2 was never loaded (its alpha is "
                "exactly 1): the checkpoint lacks it"
            )


def _check_usable(name: str, what: str, values: Tensor) -> None:
    for expert, value in enumerate(values.tolist()):
        if not 0 < value < float("inf"):
            raise ScaleError(
                f"{name}, expert {expert}: {what} is {value!r}; it must be positive and finite"
            )


def _check_agreement(name: str, what: str, recovered: Tensor, kept: Tensor) -> None:
    """What the layer keeps and what upstream baked with must be one weight_scale_2."""
    apart = (recovered / kept - 1).abs()
    bad = (apart > _ROUNDING).nonzero().flatten().tolist()
    if bad:
        expert = bad[0]
        raise ScaleError(
            f"{name}, expert {expert}: {what}'s weight_scale_2 is kept as {float(kept[expert]):.6g}"
            f", but the alphas hold {float(recovered[expert]):.6g}: one of them was never loaded"
        )


def _check_block_scales(name: str, what: str, scales: Tensor) -> None:
    # 0x7F is NaN and all bytes above are negative or NaN, so one maximum for each expert tells,
    # with no temporary of the scales' size.
    largest = scales.view(torch.uint8).flatten(1).amax(dim=1)
    bad = (largest >= NAN_BYTES[0]).nonzero().flatten().tolist()
    if bad:
        word = "NaN" if int(largest[bad[0]]) in NAN_BYTES else "negative or NaN"
        raise ScaleError(
            f"{name}, expert {bad[0]}: {what} has a block scale that is {word} ({len(bad)} of "
            f"{scales.shape[0]} experts): the checkpoint is damaged"
        )
