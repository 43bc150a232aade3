"""Experts of one layer, read one matrix at a time into one :class:`MoELayer`.

The layer is assembled as TensorRT-LLM loads it: FC1 is ``[up; gate]``, gate and up share the larger
``weight_scale_2``, FC1's input scale is the larger of theirs. Where that changes weights, a finding
says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trtllm_b12x_fix.checkpoint import damage
from trtllm_b12x_fix.checkpoint.conventions import TensorSource
from trtllm_b12x_fix.checkpoint.findings import Finding
from trtllm_b12x_fix.checkpoint.layers import LayerEntry, Storage
from trtllm_b12x_fix.checkpoint.matrices import (
    QuantizedLinear,
    read_fused,
    read_input_scale,
    read_linear,
)
from trtllm_b12x_fix.errors import InputError, ShapeError
from trtllm_b12x_fix.formats.gate_order import GateOrder, reorder
from trtllm_b12x_fix.layer import Activation, ExpertMatrices, MoELayer, validate


@dataclass(frozen=True)
class LoadedLayer:
    """A layer (of the experts asked for, in that order) and what reading it brought to light."""

    layer: MoELayer
    findings: tuple[Finding, ...]


def load_experts(
    source: TensorSource,
    entry: LayerEntry,
    experts: Sequence[int],
    activation: Activation,
    description: str,
) -> LoadedLayer:
    """Read the named experts of a layer; memory is theirs plus one matrix.

    The layer's largest input scales are taken over all its experts, named or not.

    Raises:
        InputError, ShapeError, ScaleError: a tensor that is missing or cannot be used, naming file,
            tensor and expert; experts whose shapes differ; an expert that is not there.
    """
    if not experts:
        raise InputError(f"{source.name}: {entry.prefix}: no experts to read")
    findings: list[Finding] = []
    fc1, fc2 = _Stacker(source, entry, "FC1"), _Stacker(source, entry, "down")
    for place, expert in enumerate(experts):
        if not 0 <= expert < entry.experts:
            raise InputError(
                f"{source.name}: {entry.prefix}: expert {expert} is not one of {entry.experts}"
            )
        first = _read_first(source, entry, expert, findings)
        fc1.put(place, expert, first, len(experts))
        down = _read(source, entry, expert, entry.names.down)
        findings += damage.of_matrix(source, entry, expert, entry.names.down, down)
        fc2.put(place, expert, down, len(experts))
    scales = _all_input_scales(source, entry)
    findings += damage.of_input_scales(source, entry, scales)
    first_scale, second_scale = _largest(entry, scales)
    layer = MoELayer(
        replace(fc1.matrices(), layer_input_scale=first_scale),
        replace(fc2.matrices(), layer_input_scale=second_scale),
        activation,
        description,
        fc1.matrices().columns,
        fc2.matrices().columns,
    )
    validate(layer)
    return LoadedLayer(layer, tuple(findings))


def _read(source: TensorSource, entry: LayerEntry, expert: int, name: str) -> QuantizedLinear:
    if entry.storage is Storage.SPLIT:
        return read_linear(source, entry.matrix(expert, name))
    return read_fused(source, entry.fused(name), expert, entry.experts)


def _read_first(
    source: TensorSource, entry: LayerEntry, expert: int, findings: list[Finding]
) -> QuantizedLinear:
    """FC1 of one expert in kernel order, [up; gate] where it is gated."""
    up = _read(source, entry, expert, entry.names.up)
    findings += damage.of_matrix(source, entry, expert, entry.names.up, up)
    if entry.names.gate is None:
        return _to_kernel_order(up) if entry.is_gated else up
    gate = _read(source, entry, expert, entry.names.gate)
    findings += damage.of_matrix(source, entry, expert, entry.names.gate, gate)
    if up.packed.shape != gate.packed.shape:
        raise ShapeError(
            f"{source.name}: {entry.prefix}.{expert}: {entry.names.gate} "
            f"{tuple(gate.packed.shape)} and {entry.names.up} {tuple(up.packed.shape)} must have "
            "one shape"
        )
    findings += damage.of_weight_scales(source, entry, expert, up, gate)
    return QuantizedLinear(
        torch.cat([up.packed, gate.packed]),
        torch.cat([up.block_scale, gate.block_scale]),
        torch.maximum(up.weight_scale_2, gate.weight_scale_2),
        # Both halves read the same activations; backends keep the larger scale.
        torch.maximum(up.input_scale, gate.input_scale),
    )


def _to_kernel_order(fused: QuantizedLinear) -> QuantizedLinear:
    return QuantizedLinear(
        reorder(fused.packed, GateOrder.GATE_UP, GateOrder.UP_GATE),
        reorder(fused.block_scale, GateOrder.GATE_UP, GateOrder.UP_GATE),
        fused.weight_scale_2,
        fused.input_scale,
    )


def largest_input_scales(source: TensorSource, entry: LayerEntry) -> tuple[Tensor, Tensor]:
    """The largest input scales of FC1 and FC2 over all experts of a layer: two fp32 scalars.

    Raises:
        InputError, ShapeError, ScaleError: a scale that is missing or cannot be used.
    """
    return _largest(entry, _all_input_scales(source, entry))


def _largest(entry: LayerEntry, scales: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    firsts = [scales[name].max() for name in (entry.names.gate, entry.names.up) if name]
    return torch.stack(firsts).max(), scales[entry.names.down].max()


def _all_input_scales(source: TensorSource, entry: LayerEntry) -> dict[str, Tensor]:
    """By projection, fp32 [E] of all experts."""
    return {
        name: torch.stack([_input_scale(source, entry, e, name) for e in range(entry.experts)])
        for name in (entry.names.gate, entry.names.up, entry.names.down)
        if name
    }


def _input_scale(source: TensorSource, entry: LayerEntry, expert: int, name: str) -> Tensor:
    if entry.storage is Storage.SPLIT:
        return read_input_scale(source, entry.matrix(expert, name))
    return read_input_scale(source, entry.fused(name), expert, entry.experts)


class _Stacker:
    """Fills tensors of the final size, so that nothing is held twice."""

    def __init__(self, source: TensorSource, entry: LayerEntry, what: str) -> None:
        self._source, self._entry, self._what = source, entry, what
        self._matrices: ExpertMatrices | None = None

    def put(self, place: int, expert: int, linear: QuantizedLinear, experts: int) -> None:
        if self._matrices is None:
            self._matrices = ExpertMatrices(
                linear.packed.new_empty(experts, *linear.packed.shape),
                linear.block_scale.new_empty(experts, *linear.block_scale.shape),
                torch.empty(experts),
                torch.empty(experts),
            )
        if linear.packed.shape != self._matrices.packed.shape[1:]:
            raise ShapeError(
                f"{self._source.name}: {self._entry.prefix}: {self._what} of expert {expert} has "
                f"codes {tuple(linear.packed.shape)}, another expert has "
                f"{tuple(self._matrices.packed.shape[1:])}"
            )
        self._matrices.packed[place] = linear.packed
        self._matrices.block_scale[place] = linear.block_scale
        self._matrices.weight_scale_2[place] = linear.weight_scale_2
        self._matrices.input_scale[place] = linear.input_scale

    def matrices(self) -> ExpertMatrices:
        if self._matrices is None:
            raise InputError(f"{self._source.name}: {self._entry.prefix}: nothing was read")
        return self._matrices
