"""One linear from two dialects: the same record from both, and an error that names what is wrong.

Everything is read from real safetensors files, so messages can be held to name the file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from trtllm_b12x_fix.checkpoint.conventions import Dialect, detect
from trtllm_b12x_fix.checkpoint.matrices import QuantizedLinear, read_linear
from trtllm_b12x_fix.checkpoint.safetensors_source import SafetensorsSource
from trtllm_b12x_fix.errors import B12xFixError, InputError, ScaleError, ShapeError

PREFIX = "model.layers.3.mlp.experts.7.up_proj"
FILE = "model-00002-of-00005.safetensors"
ROWS, COLUMNS = 6, 64

MODELOPT = ("weight", "weight_scale", "weight_scale_2", "input_scale")
COMPRESSED = ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale")
DIALECTS = {Dialect.MODELOPT: MODELOPT, Dialect.COMPRESSED_TENSORS: COMPRESSED}
#: (dialect, tensor) for both global scales of both dialects.
GLOBAL_SCALES = [(dialect, name) for dialect, names in DIALECTS.items() for name in names[2:]]

Read = Callable[[dict[str, Tensor]], QuantizedLinear]


def codes_and_scales() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (ROWS, COLUMNS // 2), dtype=torch.uint8, generator=generator)
    # Every positive finite E4M3 byte may occur, subnormals included.
    scales = torch.randint(1, 0x7F, (ROWS, COLUMNS // 16), dtype=torch.uint8, generator=generator)
    return packed, scales


def linear(
    dialect: Dialect, weight: float = 2.0**-15, inputs: float = 2.0**-9
) -> dict[str, Tensor]:
    """Tensors of one linear by short name; reciprocals are exact for powers of two."""
    packed, scales = codes_and_scales()
    if dialect is Dialect.COMPRESSED_TENSORS:
        weight, inputs = 1 / weight, 1 / inputs
    values = (packed, scales.view(torch.float8_e4m3fn), torch.tensor(weight), torch.tensor(inputs))
    return dict(zip(DIALECTS[dialect], values, strict=True))


def save(folder: Path, tensors: dict[str, Tensor]) -> SafetensorsSource:
    named = {f"{PREFIX}.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, folder / FILE)
    return SafetensorsSource(folder / FILE)


@pytest.fixture
def read(tmp_path) -> Read:
    return lambda tensors: read_linear(save(tmp_path, tensors), PREFIX)


def names_all(error: pytest.ExceptionInfo[B12xFixError], *wanted: str) -> None:
    message = str(error.value)
    for text in (FILE, *wanted):
        assert text in message


def same(a: QuantizedLinear, b: QuantizedLinear) -> bool:
    return all(
        getattr(a, field).dtype == getattr(b, field).dtype
        and torch.equal(getattr(a, field), getattr(b, field))
        for field in ("packed", "block_scale", "weight_scale_2", "input_scale")
    )


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_linear_is_read_as_it_was_written(read, dialect):
    packed, scales = codes_and_scales()
    found = read(linear(dialect))
    expected = QuantizedLinear(packed, scales, torch.tensor(2.0**-15), torch.tensor(2.0**-9))
    assert same(found, expected)


def test_both_dialects_give_the_same_record(read):
    assert same(read(linear(Dialect.MODELOPT)), read(linear(Dialect.COMPRESSED_TENSORS)))


def test_reciprocals_are_the_correctly_rounded_fp32_ones(read):
    tensors = linear(Dialect.COMPRESSED_TENSORS)
    tensors["weight_global_scale"] = torch.tensor(48_731.4)
    tensors["input_global_scale"] = torch.tensor(0.3)
    found = read(tensors)
    assert np.float32(found.weight_scale_2) == np.float32(1) / np.float32(48_731.4)
    assert np.float32(found.input_scale) == np.float32(1) / np.float32(0.3)


def test_multipliers_of_modelopt_are_not_touched(read):
    found = read(linear(Dialect.MODELOPT, weight=1e-40, inputs=3e38))  # a subnormal, a huge one
    assert float(found.weight_scale_2) == float(torch.tensor(1e-40))
    assert float(found.input_scale) == float(torch.tensor(3e38))


@pytest.mark.parametrize(("dialect", "name"), GLOBAL_SCALES)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_global_scale_may_have_any_shape_of_one_element(read, dialect, name, shape):
    tensors = linear(dialect)
    tensors[name] = tensors[name].reshape(shape)
    assert same(read(tensors), read(linear(dialect)))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_block_scales_may_be_raw_bytes(read, dialect):
    tensors = linear(dialect)
    tensors["weight_scale"] = tensors["weight_scale"].view(torch.uint8)
    assert same(read(tensors), read(linear(dialect)))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_dialect_is_detected(tmp_path, dialect):
    assert detect(save(tmp_path, linear(dialect)), PREFIX).dialect is dialect


def test_an_unquantized_weight_is_no_dialect(tmp_path):
    source = save(tmp_path, {"weight": torch.zeros(4, 32, dtype=torch.bfloat16)})
    with pytest.raises(InputError) as error:
        detect(source, PREFIX)
    names_all(error, PREFIX, "weight_scale", "weight_packed")


def test_another_prefix_is_not_found(tmp_path):
    source = save(tmp_path, linear(Dialect.MODELOPT))
    with pytest.raises(InputError) as error:
        read_linear(source, "model.layers.4.mlp.experts.7.up_proj")
    names_all(error, "model.layers.4.mlp.experts.7.up_proj")


@pytest.mark.parametrize(
    ("dialect", "name"), [(dialect, name) for dialect in DIALECTS for name in DIALECTS[dialect]]
)
def test_a_missing_tensor_is_named(read, dialect, name):
    tensors = linear(dialect)
    del tensors[name]
    with pytest.raises(InputError) as error:
        read(tensors)
    names_all(error, PREFIX, name)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float8_e4m3fn, torch.int32])
def test_codes_of_another_dtype_are_refused(read, dialect, dtype):
    tensors = linear(dialect)
    name = DIALECTS[dialect][0]
    tensors[name] = torch.ones(ROWS, COLUMNS // 2).to(dtype)
    with pytest.raises(InputError) as error:
        read(tensors)
    names_all(error, f"{PREFIX}.{name}", str(dtype))


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e5m2, torch.float8_e8m0fnu]
)
def test_block_scales_of_another_dtype_are_refused(read, dialect, dtype):
    tensors = linear(dialect)
    tensors["weight_scale"] = torch.ones(ROWS, COLUMNS // 16).to(dtype)
    with pytest.raises(InputError) as error:
        read(tensors)
    names_all(error, f"{PREFIX}.weight_scale", str(dtype))


@pytest.mark.parametrize(("dialect", "name"), GLOBAL_SCALES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool, torch.complex64])
@pytest.mark.filterwarnings("ignore:Casting complex values")
def test_global_scales_that_are_not_floating_are_refused(read, dialect, name, dtype):
    tensors = linear(dialect)
    tensors[name] = torch.ones((), dtype=dtype)
    with pytest.raises(InputError) as error:
        read(tensors)
    names_all(error, f"{PREFIX}.{name}")


@pytest.mark.parametrize(("dialect", "name"), GLOBAL_SCALES)
def test_a_global_scale_packed_as_fp4_is_refused(read, dialect, name):
    tensors = linear(dialect)
    tensors[name] = torch.ones(1, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    with pytest.raises(InputError) as error:
        read(tensors)
    names_all(error, f"{PREFIX}.{name}")


@pytest.mark.parametrize(("dialect", "name"), GLOBAL_SCALES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, -0.5])
def test_a_useless_global_scale_is_named(read, dialect, name, value):
    tensors = linear(dialect)
    tensors[name] = torch.tensor(value)
    with pytest.raises(ScaleError) as error:
        read(tensors)
    names_all(error, f"{PREFIX}.{name}", repr(value))


@pytest.mark.parametrize(("dialect", "name"), GLOBAL_SCALES)
@pytest.mark.parametrize("value", [1e-60, 1e60])
def test_a_global_scale_beyond_fp32_is_named(read, dialect, name, value):
    tensors = linear(dialect)
    tensors[name] = torch.tensor(value, dtype=torch.float64)
    with pytest.raises(ScaleError) as error:
        read(tensors)
    names_all(error, f"{PREFIX}.{name}")


@pytest.mark.parametrize("name", COMPRESSED[2:])
def test_a_reciprocal_that_overflows_is_named(read, name):
    tensors = linear(Dialect.COMPRESSED_TENSORS)
    tensors[name] = torch.tensor(1e-45)
    with pytest.raises(ScaleError) as error:
        read(tensors)
    names_all(error, f"{PREFIX}.{name}")


@pytest.mark.parametrize(("dialect", "name"), GLOBAL_SCALES)
@pytest.mark.parametrize("elements", [0, 2, ROWS])
def test_a_global_scale_is_one_number(read, dialect, name, elements):
    tensors = linear(dialect)
    tensors[name] = torch.ones(elements)
    with pytest.raises(ShapeError) as error:
        read(tensors)
    names_all(error, f"{PREFIX}.{name}", str(elements))


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    "shape",
    [(ROWS, 3), (ROWS, 5), (ROWS + 1, 4), (4, ROWS), (ROWS * 4,), (ROWS, 4, 1), (1, ROWS, 4), ()],
)
def test_block_scales_of_another_shape_are_refused(read, dialect, shape):
    tensors = linear(dialect)
    tensors["weight_scale"] = torch.ones(shape).to(torch.float8_e4m3fn)
    with pytest.raises(ShapeError) as error:
        read(tensors)
    names_all(error, PREFIX, "weight_scale", str(shape), f"({ROWS}, {COLUMNS // 2})")


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("shape", [(), (ROWS * COLUMNS // 2,), (1, ROWS, COLUMNS // 2), (0,)])
def test_codes_that_are_no_matrix_are_refused(read, dialect, shape):
    tensors = linear(dialect)
    name = DIALECTS[dialect][0]
    tensors[name] = torch.ones(shape, dtype=torch.uint8)
    with pytest.raises(ShapeError) as error:
        read(tensors)
    names_all(error, PREFIX, name)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_columns_that_are_no_whole_blocks_are_refused(read, dialect):
    tensors = linear(dialect)
    tensors[DIALECTS[dialect][0]] = torch.ones(ROWS, COLUMNS // 2 + 4, dtype=torch.uint8)
    with pytest.raises(ShapeError) as error:
        read(tensors)
    names_all(error, PREFIX)
