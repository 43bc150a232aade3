"""Experts from a file to one layer: both dialects alike, and every damaged file an error.

A damaged file must end in :class:`B12xFixError`, never in an exception of torch or safetensors:
the command maps that class to "input that cannot be used".
"""

from __future__ import annotations

import itertools
import json
import pickle
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file
from torch import Tensor

from trtllm_b12x_fix.checkpoint.assemble import load_experts
from trtllm_b12x_fix.checkpoint.conventions import SPLIT_NAMES, Dialect, ProjectionNames
from trtllm_b12x_fix.checkpoint.findings import Severity
from trtllm_b12x_fix.checkpoint.layers import LayerEntry, Stack, Storage
from trtllm_b12x_fix.checkpoint.safetensors_source import SafetensorsSource
from trtllm_b12x_fix.errors import B12xFixError, InputError, ScaleError, ShapeError
from trtllm_b12x_fix.formats.e4m3 import NAN_BYTES
from trtllm_b12x_fix.layer import Activation, MoELayer

PREFIX = "backbone.layers.5.mixer.experts"
FILE = "experts.safetensors"
EXPERTS, HIDDEN, INTERMEDIATE = 3, 48, 32
RENAMED = {
    "weight": "weight_packed",
    "weight_scale": "weight_scale",
    "weight_scale_2": "weight_global_scale",
    "input_scale": "input_global_scale",
}


def assemble(source, prefix: str, experts: int, activation: Activation, text: str) -> MoELayer:
    """All experts of a split layer, without asking the header what there is."""
    names = SPLIT_NAMES[0]
    if not activation.is_gated:
        names = ProjectionNames(None, names.up, names.down)
    entry = LayerEntry(
        prefix, None, Stack.MODEL, Storage.SPLIT, Dialect.MODELOPT, names, experts, 0, 0, True
    )
    return load_experts(source, entry, range(experts), activation, text).layer


def load_all(folder: Path, tensors: dict[str, Tensor], activation: Activation):
    """Like load(), with the findings."""
    save_file(tensors, folder / FILE)
    source = SafetensorsSource(folder / FILE)
    names = SPLIT_NAMES[0]
    if not activation.is_gated:
        names = ProjectionNames(None, names.up, names.down)
    entry = LayerEntry(
        PREFIX, 5, Stack.MODEL, Storage.SPLIT, Dialect.MODELOPT, names, EXPERTS, 0, 0, True
    )
    return load_experts(source, entry, range(EXPERTS), activation, "")


def linear_names(activation: Activation) -> tuple[str, ...]:
    gated = ("gate_proj",) if activation.is_gated else ()
    return (*gated, "up_proj", "down_proj")


def modelopt(activation: Activation, experts: int = EXPERTS) -> dict[str, Tensor]:
    """Tensors of a small layer; scales are powers of two, so that reciprocals are exact."""
    generator = torch.Generator().manual_seed(7)

    def random_bytes(rows: int, columns: int, low: int, high: int) -> Tensor:
        size = (rows, columns)
        return torch.randint(low, high, size, dtype=torch.uint8, generator=generator)

    tensors: dict[str, Tensor] = {}
    for expert in range(experts):
        for linear in linear_names(activation):
            down = linear == "down_proj"
            rows, columns = (HIDDEN, INTERMEDIATE) if down else (INTERMEDIATE, HIDDEN)
            base = f"{PREFIX}.{expert}.{linear}"
            scales = random_bytes(rows, columns // 16, 1, 0x7F)
            tensors[f"{base}.weight"] = random_bytes(rows, columns // 2, 0, 256)
            tensors[f"{base}.weight_scale"] = scales.view(torch.float8_e4m3fn)
            # gate and up share one, as ModelOpt exports them
            tensors[f"{base}.weight_scale_2"] = torch.tensor(2.0 ** -(10 + 4 * down + expert))
            # gate and up read one input
            tensors[f"{base}.input_scale"] = torch.tensor(2.0 ** (3 * down - 2 * expert))
    return tensors


def compressed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same layer as compressed-tensors stores it."""
    result = {}
    for name, tensor in tensors.items():
        base, _, short = name.rpartition(".")
        value = 1 / tensor if short in ("weight_scale_2", "input_scale") else tensor
        result[f"{base}.{RENAMED[short]}"] = value
    return result


def load(
    folder: Path, tensors: dict[str, Tensor], activation: Activation, experts: int = EXPERTS
) -> MoELayer:
    save_file(tensors, folder / FILE)
    source = SafetensorsSource(folder / FILE)
    return assemble(source, PREFIX, experts, activation, "a small layer")


def fields(layer: MoELayer) -> dict[str, Tensor]:
    return {
        f"{which}.{name}": getattr(getattr(layer, which), name)
        for which in ("fc1", "fc2")
        for name in ("packed", "block_scale", "weight_scale_2", "input_scale")
    }


@pytest.mark.parametrize("activation", Activation)
def test_both_dialects_give_the_same_layer(tmp_path, activation):
    ours = load(tmp_path, modelopt(activation), activation)
    theirs = load(tmp_path, compressed(modelopt(activation)), activation)
    for name, tensor in fields(ours).items():
        assert tensor.dtype == fields(theirs)[name].dtype
        assert torch.equal(tensor, fields(theirs)[name])
    assert (ours.source, ours.activation) == ("a small layer", activation)


def test_a_gated_first_projection_is_up_then_gate(tmp_path):
    tensors = modelopt(Activation.SILU)
    layer = load(tmp_path, tensors, Activation.SILU)
    assert layer.fc1.packed.shape == (EXPERTS, 2 * INTERMEDIATE, HIDDEN // 2)
    for expert in range(EXPERTS):
        base = f"{PREFIX}.{expert}"
        for half, linear in enumerate(("up_proj", "gate_proj")):
            rows = slice(half * INTERMEDIATE, (half + 1) * INTERMEDIATE)
            scales = tensors[f"{base}.{linear}.weight_scale"].view(torch.uint8)
            assert torch.equal(layer.fc1.packed[expert, rows], tensors[f"{base}.{linear}.weight"])
            assert torch.equal(layer.fc1.block_scale[expert, rows], scales)


def test_a_gated_first_projection_has_the_larger_input_scale(tmp_path):
    tensors = modelopt(Activation.SILU)
    tensors[f"{PREFIX}.1.gate_proj.input_scale"] = torch.tensor(0.5)
    tensors[f"{PREFIX}.1.up_proj.input_scale"] = torch.tensor(0.25)
    tensors[f"{PREFIX}.2.gate_proj.input_scale"] = torch.tensor(0.125)
    tensors[f"{PREFIX}.2.up_proj.input_scale"] = torch.tensor(4.0)
    layer = load(tmp_path, tensors, Activation.SILU)
    assert layer.fc1.input_scale[1:].tolist() == [0.5, 4.0]


@pytest.mark.parametrize("activation", Activation)
def test_sizes_and_scales_are_the_files(tmp_path, activation):
    tensors = modelopt(activation)
    layer = load(tmp_path, tensors, activation)
    assert (layer.experts, layer.hidden, layer.intermediate) == (EXPERTS, HIDDEN, INTERMEDIATE)
    assert (layer.logical_hidden, layer.logical_intermediate) == (HIDDEN, INTERMEDIATE)
    assert layer.fc1.weight_scale_2.tolist() == [2.0**-10, 2.0**-11, 2.0**-12]
    assert layer.fc2.weight_scale_2.tolist() == [2.0**-14, 2.0**-15, 2.0**-16]
    for expert in range(EXPERTS):
        down = f"{PREFIX}.{expert}.down_proj"
        assert torch.equal(layer.fc2.packed[expert], tensors[f"{down}.weight"])
        assert torch.equal(layer.fc2.input_scale[expert], tensors[f"{down}.input_scale"])


def test_fewer_experts_than_the_file_holds_may_be_read(tmp_path):
    layer = load(tmp_path, modelopt(Activation.RELU2), Activation.RELU2, experts=2)
    assert layer.experts == 2


@pytest.mark.parametrize("experts", [0, EXPERTS + 1])
def test_a_wrong_number_of_experts_is_an_input_error(tmp_path, experts):
    with pytest.raises(InputError):
        load(tmp_path, modelopt(Activation.RELU2), Activation.RELU2, experts)


def test_one_dialect_may_follow_another(tmp_path):
    tensors = modelopt(Activation.RELU2)
    other = compressed(tensors)
    mixed = {n: t for n, t in tensors.items() if not n.startswith(f"{PREFIX}.1.")}
    mixed |= {n: t for n, t in other.items() if n.startswith(f"{PREFIX}.1.")}
    layer = load(tmp_path, mixed, Activation.RELU2)
    plain = load(tmp_path, tensors, Activation.RELU2)
    assert all(torch.equal(t, fields(plain)[name]) for name, t in fields(layer).items())


@pytest.mark.parametrize("linear", linear_names(Activation.SILU))
@pytest.mark.parametrize("short", RENAMED)
def test_a_missing_tensor_is_named(tmp_path, linear, short):
    tensors = modelopt(Activation.SILU)
    del tensors[f"{PREFIX}.2.{linear}.{short}"]
    with pytest.raises(InputError) as error:
        load(tmp_path, tensors, Activation.SILU)
    for text in (FILE, f"{PREFIX}.2.{linear}", short):
        assert text in str(error.value)


@pytest.mark.parametrize("linear", linear_names(Activation.SILU))
@pytest.mark.parametrize(
    ("byte", "word"),
    [(NAN_BYTES[0], "NaN"), (NAN_BYTES[1], "NaN"), (0x80, "negative"), (0xB8, "negative")],
)
def test_a_useless_block_scale_names_file_tensor_and_expert(tmp_path, linear, byte, word):
    tensors = modelopt(Activation.SILU)
    name = f"{PREFIX}.1.{linear}.weight_scale"
    scales = tensors[name].view(torch.uint8).clone()
    scales[5, 1] = byte
    tensors[name] = scales.view(torch.float8_e4m3fn)
    with pytest.raises(ScaleError, match=word) as error:
        load(tmp_path, tensors, Activation.SILU)
    assert "expert 1" in str(error.value) or f"{PREFIX}.1." in str(error.value)
    assert "weight_scale" in str(error.value)
    assert FILE in str(error.value)
    # Row 5 of "fc1" would be row 37 of the file's gate_proj: only its own name helps.
    assert linear in str(error.value)


def test_a_block_scale_of_zero_is_allowed(tmp_path):
    tensors = modelopt(Activation.RELU2)
    tensors[f"{PREFIX}.1.up_proj.weight_scale"] = torch.zeros(INTERMEDIATE, HIDDEN // 16).to(
        torch.float8_e4m3fn
    )
    assert not load(tmp_path, tensors, Activation.RELU2).fc1.block_scale[1].any()


def test_gate_and_up_with_different_weight_scale_2_are_a_finding(tmp_path):
    tensors = modelopt(Activation.SILU)
    tensors[f"{PREFIX}.1.gate_proj.weight_scale_2"] = torch.tensor(2.0**-13)
    loaded = load_all(tmp_path, tensors, Activation.SILU)
    (finding,) = loaded.findings
    assert (finding.code, finding.severity) == ("gate-up-scales-differ", Severity.DAMAGE)
    assert (finding.layer, finding.expert, finding.file) == (PREFIX, 1, FILE)
    assert (
        finding.tensor == f"{PREFIX}.1.gate_proj.weight_scale_2"
    )  # the smaller one is read too large
    for text in ("weight_scale_2", "gate_proj", "up_proj", "0.00012207", "4 times too large"):
        assert text in finding.message
    # As TensorRT-LLM loads it: the larger for both.
    assert float(loaded.layer.fc1.weight_scale_2[1]) == 2.0**-11


def test_zero_scales_over_weights_are_a_finding(tmp_path):
    tensors = modelopt(Activation.RELU2)
    name = f"{PREFIX}.2.down_proj"
    scales = tensors[f"{name}.weight_scale"].view(torch.uint8).clone()
    scales[3, 1] = 0
    tensors[f"{name}.weight_scale"] = scales.view(torch.float8_e4m3fn)
    tensors[f"{name}.weight"][3, 8:16] = 0x11
    (finding,) = load_all(tmp_path, tensors, Activation.RELU2).findings
    assert (finding.code, finding.tensor, finding.expert) == (
        "zero-scale-over-weights",
        f"{name}.weight_scale",
        2,
    )
    assert finding.message.startswith("1 of ")


@pytest.mark.parametrize("linear", linear_names(Activation.SILU))
@pytest.mark.parametrize("short", ["weight_scale_2", "input_scale"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_useless_global_scale_is_named(tmp_path, linear, short, value):
    tensors = modelopt(Activation.SILU)
    tensors[f"{PREFIX}.2.{linear}.{short}"] = torch.tensor(value)
    with pytest.raises(ScaleError) as error:
        load(tmp_path, tensors, Activation.SILU)
    for text in (FILE, f"{PREFIX}.2.{linear}.{short}", repr(value)):
        assert text in str(error.value)


@pytest.mark.parametrize(
    ("linear", "rows", "columns"),
    [
        ("up_proj", INTERMEDIATE + 16, HIDDEN),
        ("gate_proj", INTERMEDIATE, HIDDEN + 16),
        ("gate_proj", INTERMEDIATE + 16, HIDDEN),
        ("down_proj", HIDDEN, INTERMEDIATE + 16),
        ("down_proj", HIDDEN + 16, INTERMEDIATE),
    ],
)
def test_an_expert_of_another_size_is_named(tmp_path, linear, rows, columns):
    tensors = modelopt(Activation.SILU)
    base = f"{PREFIX}.1.{linear}"
    tensors[f"{base}.weight"] = torch.ones(rows, columns // 2, dtype=torch.uint8)
    tensors[f"{base}.weight_scale"] = torch.ones(rows, columns // 16).to(torch.float8_e4m3fn)
    with pytest.raises(ShapeError) as error:
        load(tmp_path, tensors, Activation.SILU)
    assert FILE in str(error.value)
    assert f"{PREFIX}.1" in str(error.value) or "expert 1" in str(error.value)


def test_halves_of_unequal_height_are_refused_even_if_their_sum_fits(tmp_path):
    """up of 48 rows and gate of 16 add up to twice 32: cut in the middle, both would be wrong."""
    tensors = modelopt(Activation.SILU)
    for expert, (linear, rows) in itertools.product(
        range(EXPERTS), (("up_proj", INTERMEDIATE + 16), ("gate_proj", INTERMEDIATE - 16))
    ):
        base = f"{PREFIX}.{expert}.{linear}"
        tensors[f"{base}.weight"] = torch.ones(rows, HIDDEN // 2, dtype=torch.uint8)
        tensors[f"{base}.weight_scale"] = torch.ones(rows, HIDDEN // 16).to(torch.float8_e4m3fn)
    with pytest.raises(ShapeError):
        load(tmp_path, tensors, Activation.SILU)


def test_a_layer_without_gates_is_no_swiglu_layer(tmp_path):
    with pytest.raises(InputError, match=f"{FILE}.*gate_proj"):
        load(tmp_path, modelopt(Activation.RELU2), Activation.SILU)


# ---- the file itself


@pytest.fixture(scope="module")
def intact() -> bytes:
    """A safetensors file of one expert, as bytes."""
    return save(modelopt(Activation.SILU, experts=1))


def open_bytes(folder: Path, data: bytes) -> SafetensorsSource:
    (folder / FILE).write_bytes(data)
    return SafetensorsSource(folder / FILE)


def test_the_intact_file_is_read(tmp_path, intact):
    source = open_bytes(tmp_path, intact)
    assert (source.name, source.metadata) == (FILE, {})
    assert assemble(source, PREFIX, 1, Activation.SILU, "").experts == 1


def test_metadata_is_read(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / FILE, metadata={"made_by": "a test"})
    assert SafetensorsSource(tmp_path / FILE).metadata == {"made_by": "a test"}


@pytest.mark.parametrize("kept", [1, 7, 8, 9, 100, -1])
def test_a_truncated_file_is_an_input_error(tmp_path, intact, kept):
    with pytest.raises(InputError, match=FILE):
        open_bytes(tmp_path, intact[:kept])


def test_an_empty_file_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match=FILE):
        open_bytes(tmp_path, b"")


@pytest.mark.parametrize("zipped", [True, False])
def test_a_torch_pickle_is_an_input_error(tmp_path, zipped):
    torch.save({"a": torch.zeros(1)}, tmp_path / FILE, _use_new_zipfile_serialization=zipped)
    with pytest.raises(InputError, match=FILE):
        SafetensorsSource(tmp_path / FILE)


def test_a_pickle_is_never_run(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "exploded",))

    with pytest.raises(InputError, match=FILE):
        open_bytes(tmp_path, pickle.dumps(Bomb()))
    assert not (tmp_path / "exploded").exists()


def test_a_folder_is_an_input_error(tmp_path):
    (tmp_path / FILE).mkdir()
    with pytest.raises(InputError, match=FILE):
        SafetensorsSource(tmp_path / FILE)


def test_a_missing_file_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match=f"{FILE}.*No such file"):
        SafetensorsSource(tmp_path / FILE)


def test_a_tensor_that_is_not_there_is_an_input_error(tmp_path, intact):
    with pytest.raises(InputError, match=FILE):
        open_bytes(tmp_path, intact).get("no.such.tensor")


@pytest.mark.parametrize("dtype", ["F6_E2M3", "F6_E3M2"])
def test_a_dtype_that_torch_lacks_is_an_input_error(tmp_path, dtype):
    entry = {"dtype": dtype, "shape": [4], "data_offsets": [0, 3]}
    header = json.dumps({"strange": entry}).encode()
    source = open_bytes(tmp_path, struct.pack("<Q", len(header)) + header + bytes(3))
    with pytest.raises(InputError, match=f"{FILE}.*strange"):
        source.get("strange")


def _read_everything(path: Path) -> None:
    source = SafetensorsSource(path)
    assert source.metadata is not None
    assemble(source, PREFIX, 1, Activation.SILU, "")


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_flipped_byte_is_an_error_of_ours_or_no_error(tmp_path, intact, data):
    header = 8 + struct.unpack("<Q", intact[:8])[0]
    # The header is a small part of the file and does most of the damage.
    where = data.draw(st.integers(0, header - 1) | st.integers(0, len(intact) - 1))
    damaged = bytearray(intact)
    damaged[where] = data.draw(st.integers(0, 255))
    (tmp_path / FILE).write_bytes(damaged)
    try:
        _read_everything(tmp_path / FILE)
    except B12xFixError as error:
        assert str(error)  # noqa: PT017


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_cut_or_padded_file_is_an_error_of_ours(tmp_path, intact, data):
    if data.draw(st.booleans()):
        damaged = intact[: data.draw(st.integers(0, len(intact) - 1))]
    else:
        damaged = intact + data.draw(st.binary(min_size=1, max_size=64))
    (tmp_path / FILE).write_bytes(damaged)
    with pytest.raises(B12xFixError):
        _read_everything(tmp_path / FILE)
