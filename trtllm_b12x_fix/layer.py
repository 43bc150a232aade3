"""One mixture-of-experts layer in one language, whatever file or framework it came from.

Everything downstream (emulator, repair, layer check) reads this record only. Scales are
dequantizing multipliers; block scales are in linear layout; a gated FC1 is ``[up; gate]``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from trtllm_b12x_fix.errors import InputError, ScaleError, ShapeError
from trtllm_b12x_fix.formats.e4m3 import NAN_BYTES
from trtllm_b12x_fix.formats.nvfp4 import BLOCK


class Activation(enum.Enum):
    """What stands between FC1 and FC2."""

    #: ``relu(h)^2``, not gated (Nemotron-H).
    RELU2 = "relu2"
    #: ``silu(gate) * up`` (SwiGLU).
    SILU = "silu"

    @property
    def is_gated(self) -> bool:
        return self is Activation.SILU

    def fc1_rows(self, intermediate: int) -> int:
        """Rows of FC1 for this intermediate size."""
        return 2 * intermediate if self.is_gated else intermediate


class Projection(enum.Enum):
    """The two quantized matrices of an expert."""

    FC1 = "fc1"
    FC2 = "fc2"


@dataclass(frozen=True)
class ExpertMatrices:
    """One projection of all experts.

    Attributes:
        packed: uint8 [E, R, C/2], E2M1 codes, low nibble first.
        block_scale: uint8 [E, R, C/16], E4M3 bytes (``weight_scale``), linear layout.
        weight_scale_2: fp32 [E], dequantizing multiplier of the whole matrix.
        input_scale: fp32 [E], calibrated dequantizing multiplier of its input (amax / 2688).
        layer_input_scale: fp32 [], the largest of the whole layer where only some of its experts
            are here; ``None`` means the largest of these.
    """

    packed: Tensor
    block_scale: Tensor
    weight_scale_2: Tensor
    input_scale: Tensor
    layer_input_scale: Tensor | None = None

    @property
    def largest_input_scale(self) -> Tensor:
        """fp32 [], the largest input scale of the layer."""
        if self.layer_input_scale is not None:
            return self.layer_input_scale
        return self.input_scale.max()

    @property
    def experts(self) -> int:
        return self.packed.shape[0]

    @property
    def rows(self) -> int:
        return self.packed.shape[1]

    @property
    def columns(self) -> int:
        return self.packed.shape[2] * 2

    def to(self, device: torch.device) -> ExpertMatrices:
        return ExpertMatrices(
            self.packed.to(device),
            self.block_scale.to(device),
            self.weight_scale_2.to(device),
            self.input_scale.to(device),
            None if self.layer_input_scale is None else self.layer_input_scale.to(device),
        )


@dataclass(frozen=True)
class MoELayer:
    """A routed-experts layer: FC1 [E, I or 2I, H], FC2 [E, H, I].

    Attributes:
        fc1, fc2: the quantized projections.
        activation: decides whether FC1 is gated.
        source: where it came from, for reports.
        hidden, intermediate: sizes as stored. ``logical_hidden`` and ``logical_intermediate``
            are the sizes before zero padding.
    """

    fc1: ExpertMatrices
    fc2: ExpertMatrices
    activation: Activation
    source: str
    logical_hidden: int
    logical_intermediate: int

    @property
    def experts(self) -> int:
        return self.fc1.experts

    @property
    def hidden(self) -> int:
        return self.fc1.columns

    @property
    def intermediate(self) -> int:
        return self.fc2.columns

    def projection(self, which: Projection) -> ExpertMatrices:
        return self.fc1 if which is Projection.FC1 else self.fc2

    def to(self, device: torch.device) -> MoELayer:
        return replace(self, fc1=self.fc1.to(device), fc2=self.fc2.to(device))


def validate(layer: MoELayer) -> None:
    """Check shapes, dtypes and every scale; name the projection and expert of what is wrong.

    Raises:
        ShapeError: sizes that contradict each other.
        ScaleError: a scale that is NaN, infinite, zero or negative.
        InputError: a wrong dtype.
    """
    for which in Projection:
        _validate_projection(which, layer.projection(which))
    expected_rows = layer.activation.fc1_rows(layer.intermediate)
    if layer.fc1.rows != expected_rows or layer.fc2.rows != layer.hidden:
        raise ShapeError(
            f"{layer.activation.value} with FC2 [{layer.fc2.rows}, {layer.intermediate}] needs "
            f"FC1 [{expected_rows}, {layer.fc2.rows}], got [{layer.fc1.rows}, {layer.hidden}]"
        )
    if layer.fc1.experts != layer.fc2.experts:
        raise ShapeError(f"FC1 has {layer.fc1.experts} experts, FC2 has {layer.fc2.experts}")


def _validate_projection(which: Projection, matrices: ExpertMatrices) -> None:
    name = which.value
    if matrices.packed.dtype != torch.uint8 or matrices.block_scale.dtype != torch.uint8:
        raise InputError(
            f"{name}: packed codes and block scales must be uint8, got "
            f"{matrices.packed.dtype} and {matrices.block_scale.dtype}"
        )
    want = (matrices.experts, matrices.rows, matrices.columns // BLOCK)
    if matrices.columns % BLOCK or tuple(matrices.block_scale.shape) != want:
        raise ShapeError(
            f"{name}: codes {tuple(matrices.packed.shape)} need block scales {want}, "
            f"got {tuple(matrices.block_scale.shape)}"
        )
    _validate_block_scales(name, matrices.block_scale)
    for label, scale in (
        ("weight_scale_2", matrices.weight_scale_2),
        ("input_scale", matrices.input_scale),
    ):
        if scale.dtype != torch.float32 or tuple(scale.shape) != (matrices.experts,):
            raise ShapeError(
                f"{name}: {label} must be fp32 [{matrices.experts}], got "
                f"{scale.dtype} {tuple(scale.shape)}"
            )
        bad = ~(torch.isfinite(scale) & (scale > 0))
        if bool(bad.any()):
            expert = int(bad.nonzero()[0, 0])
            raise ScaleError(
                f"{name}: {label} of expert {expert} is {float(scale[expert])!r}; it must be "
                "positive and finite"
            )


def _validate_block_scales(name: str, block_scale: Tensor) -> None:
    for expert, scales in enumerate(block_scale):
        nan = (scales == NAN_BYTES[0]) | (scales == NAN_BYTES[1])
        if bool(nan.any()):
            row, column = nan.nonzero()[0].tolist()
            raise ScaleError(f"{name}: weight_scale of expert {expert} is NaN at [{row}, {column}]")
        negative = (scales & 0x80) != 0
        if bool(negative.any()):
            row, column = negative.nonzero()[0].tolist()
            raise ScaleError(
                f"{name}: weight_scale of expert {expert} is negative at [{row}, {column}] "
                f"(byte 0x{int(scales[row, column]):02x})"
            )


def pad_to_tiles(layer: MoELayer, multiple: int = 128) -> MoELayer:
    """Zero-pad hidden and intermediate sizes to a multiple, each half of a gated FC1 by itself.

    Padded codes and scales are zero bytes, so the function is unchanged; activations must be
    padded with zeros to the new hidden size (:func:`pad_activations`).
    """
    hidden = -(-layer.hidden // multiple) * multiple
    intermediate = -(-layer.intermediate // multiple) * multiple
    if (hidden, intermediate) == (layer.hidden, layer.intermediate):
        return layer
    halves = 2 if layer.activation.is_gated else 1
    fc1 = _pad(layer.fc1, halves, intermediate, hidden)
    fc2 = _pad(layer.fc2, 1, hidden, intermediate)
    return replace(layer, fc1=fc1, fc2=fc2)


def _pad(matrices: ExpertMatrices, halves: int, rows: int, columns: int) -> ExpertMatrices:
    def grow(tensor: Tensor, per_column: int) -> Tensor:
        split = tensor.unflatten(1, (halves, -1))
        grown = pad(
            split,
            (0, columns // per_column - split.shape[3], 0, rows - split.shape[2]),
        )
        return grown.flatten(1, 2)

    return replace(
        matrices, packed=grow(matrices.packed, 2), block_scale=grow(matrices.block_scale, BLOCK)
    )


def pad_activations(x: Tensor, hidden: int) -> Tensor:
    """Zero-pad activations [T, H] to [T, hidden].

    Raises:
        ShapeError: ``x`` is already wider.
    """
    if x.shape[-1] > hidden:
        raise ShapeError(f"activations {tuple(x.shape)} are wider than hidden size {hidden}")
    return pad(x, (0, hidden - x.shape[-1]))


def move_magnitude(layer: MoELayer, k: int) -> MoELayer:
    """Divide FC1's weights by 2^k and expect inputs times 2^k: the same function, bit for bit.

    Codes and block scales stay as they are; ``weight_scale_2`` of FC1 falls by 2^k and its
    ``input_scale`` rises by 2^k. This is how a layer with large weights is moved to the magnitude
    where backends lose scales, without inventing a single weight. In a network the norm before
    the layer carries the factor.
    """
    up = torch.tensor(k)
    largest = layer.fc1.layer_input_scale
    fc1 = replace(
        layer.fc1,
        weight_scale_2=torch.ldexp(layer.fc1.weight_scale_2, -up),
        input_scale=torch.ldexp(layer.fc1.input_scale, up),
        layer_input_scale=None if largest is None else torch.ldexp(largest, up),
    )
    return replace(layer, fc1=fc1)
