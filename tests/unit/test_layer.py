"""The layer record: validation names what is wrong, padding and moving change nothing."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.layers import make_inputs, make_layer
from trtllm_b12x_fix.emulator import moe, reference
from trtllm_b12x_fix.emulator.arithmetic import PUBLISHED
from trtllm_b12x_fix.errors import InputError, ScaleError, ShapeError
from trtllm_b12x_fix.formats.gate_order import GateOrder, reorder
from trtllm_b12x_fix.layer import (
    Activation,
    MoELayer,
    move_magnitude,
    pad_activations,
    pad_to_tiles,
    validate,
)


def spoil(layer: MoELayer, projection: str, field: str, change) -> MoELayer:
    matrices = getattr(layer, projection)
    tensor = getattr(matrices, field).clone()
    return replace(layer, **{projection: replace(matrices, **{field: change(tensor)})})


def put(*index_and_value):
    *index, value = index_and_value

    def change(tensor):
        tensor[tuple(index)] = value
        return tensor

    return change


@pytest.mark.parametrize("activation", Activation)
def test_a_sound_layer_is_valid(activation):
    validate(make_layer(activation, experts=2, hidden=64, intermediate=32))


@pytest.mark.parametrize("projection", ["fc1", "fc2"])
@pytest.mark.parametrize("field", ["weight_scale_2", "input_scale"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_bad_scale_is_named_with_its_expert(projection, field, value):
    layer = make_layer(Activation.RELU2, experts=3, hidden=64, intermediate=32)
    with pytest.raises(ScaleError, match=f"{projection}: {field} of expert 2"):
        validate(spoil(layer, projection, field, put(2, value)))


@pytest.mark.parametrize(
    ("byte", "word"), [(0x7F, "NaN"), (0xFF, "NaN"), (0x81, "negative"), (0x80, "negative")]
)
def test_a_bad_block_scale_is_named_with_its_place(byte, word):
    layer = make_layer(Activation.SILU, experts=2, hidden=64, intermediate=32)
    spoiled = spoil(layer, "fc1", "block_scale", put(1, 5, 3, byte))
    with pytest.raises(ScaleError, match=rf"fc1: weight_scale of expert 1 is {word} at \[5, 3\]"):
        validate(spoiled)


@pytest.mark.parametrize(
    ("projection", "field", "change", "error"),
    [
        ("fc1", "block_scale", lambda t: t[:, :-1], ShapeError),
        ("fc1", "packed", lambda t: t[:, :, :-8], ShapeError),
        ("fc2", "packed", lambda t: t[:1], ShapeError),
        ("fc1", "packed", lambda t: t.to(torch.int32), InputError),
        ("fc2", "weight_scale_2", lambda t: t.double(), ShapeError),
        ("fc2", "input_scale", lambda t: t[0], ShapeError),
    ],
)
def test_contradicting_tensors_are_refused(projection, field, change, error):
    layer = make_layer(Activation.RELU2, experts=2, hidden=64, intermediate=32)
    with pytest.raises(error):
        validate(spoil(layer, projection, field, change))


def test_relu2_weights_are_no_gated_layer():
    layer = make_layer(Activation.RELU2, experts=2, hidden=64, intermediate=32)
    with pytest.raises(ShapeError, match="silu"):
        validate(replace(layer, activation=Activation.SILU))


@pytest.mark.parametrize("activation", Activation)
def test_padding_leaves_the_function_alone(activation):
    layer = make_layer(activation, experts=3, hidden=192, intermediate=80)
    x, routing = make_inputs(layer, tokens=4, top_k=2)
    padded = pad_to_tiles(layer)
    validate(padded)
    assert (padded.hidden, padded.intermediate) == (256, 128)
    assert (padded.logical_hidden, padded.logical_intermediate) == (192, 80)
    wide = pad_activations(x, padded.hidden)
    assert torch.allclose(
        reference.truth(padded, wide, routing)[:, :192],
        reference.truth(layer, x, routing),
        rtol=1e-12,
        atol=0,
    )
    scales = (layer.fc1.input_scale.max(), layer.fc2.input_scale.max())
    narrow = moe.run(reference.exact_launch(layer, *scales), x, routing, PUBLISHED)
    broad = moe.run(reference.exact_launch(padded, *scales), wide, routing, PUBLISHED)
    assert torch.equal(broad.intermediate[..., :80], narrow.intermediate)
    assert not broad.intermediate[..., 80:].any()


def test_padding_wider_activations_is_refused():
    with pytest.raises(ShapeError):
        pad_activations(torch.zeros(1, 300), 256)


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("k", [-3, 1, 5, 9])
def test_moving_the_magnitude_changes_no_bit(activation, k):
    layer = make_layer(activation, experts=3, hidden=128, intermediate=64)
    x, routing = make_inputs(layer, tokens=4, top_k=2)
    moved = move_magnitude(layer, k)
    moved_x = torch.ldexp(x, torch.tensor(k)).to(torch.bfloat16)
    assert torch.equal(moved_x.double(), x.double() * 2.0**k)
    assert torch.equal(reference.truth(moved, moved_x, routing), reference.truth(layer, x, routing))
    run = [
        moe.run(
            reference.exact_launch(one, one.fc1.input_scale.max(), one.fc2.input_scale.max()),
            inputs,
            routing,
            PUBLISHED,
        )
        for one, inputs in ((layer, x), (moved, moved_x))
    ]
    assert torch.equal(run[0].input.codes, run[1].input.codes)
    assert torch.equal(run[0].output, run[1].output)


def test_gate_order_is_an_involution_and_refuses_odd_rows():
    rows = torch.arange(12).view(1, 4, 3)
    swapped = reorder(rows, GateOrder.GATE_UP, GateOrder.UP_GATE)
    assert swapped.tolist() == [rows[0, [2, 3, 0, 1]].tolist()]
    assert torch.equal(reorder(swapped, GateOrder.UP_GATE, GateOrder.GATE_UP), rows)
    assert reorder(rows, GateOrder.UP_GATE, GateOrder.UP_GATE) is rows
    with pytest.raises(ShapeError, match="even"):
        reorder(rows[:, :3], GateOrder.GATE_UP, GateOrder.UP_GATE)
