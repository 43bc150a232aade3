"""Headers of safetensors files: what is sound is read, every lie is named before it is believed."""

from __future__ import annotations

import itertools
import json
import pickle
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tests.checkpoints import entry, raw
from trtllm_b12x_fix.checkpoint.header import TensorInfo, parse_object, read_header
from trtllm_b12x_fix.errors import InputError

FILE = "model-00001-of-00002.safetensors"


def write(folder: Path, content: bytes) -> Path:
    (folder / FILE).write_bytes(content)
    return folder / FILE


def refused(folder: Path, content: bytes) -> str:
    """The message with which a file is refused; it names the file."""
    with pytest.raises(InputError) as error:
        read_header(write(folder, content))
    assert FILE in str(error.value)
    return str(error.value)


def test_a_file_that_safetensors_wrote_is_read(tmp_path):
    tensors = {
        "codes": torch.zeros(3, 8, dtype=torch.uint8),
        "scales": torch.zeros(3, 1).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(1.0),
        "empty": torch.zeros(0, 4),
    }
    save_file(tensors, tmp_path / FILE, metadata={"format": "pt"})
    found = read_header(tmp_path / FILE)
    assert {name: (info.dtype, info.shape) for name, info in found.items()} == {
        "codes": ("U8", (3, 8)),
        "scales": ("F8_E4M3", (3, 1)),
        "scalar": ("F32", ()),
        "empty": ("F32", (0, 4)),
    }
    assert all(info.end - info.begin == tensors[name].nbytes for name, info in found.items())


@pytest.mark.parametrize(
    "dtype",
    [
        "bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
        "float16", "bfloat16", "float32", "float64", "complex64", "float8_e4m3fn", "float8_e5m2",
        "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn_x2",
    ],
)  # fmt: skip
def test_every_dtype_that_safetensors_writes_has_its_size_checked(tmp_path, dtype):
    save_file({"a": torch.empty(4, dtype=getattr(torch, dtype))}, tmp_path / FILE)
    (info,) = read_header(tmp_path / FILE).values()
    header = {"a": entry(info.dtype, [*info.shape, 2], 0, info.end)}
    assert "tensor a" in refused(tmp_path, raw(header, bytes(info.end)))


@pytest.mark.parametrize("length", [640, 896, 1152, 1408, 640 + 65536])
def test_a_header_length_that_looks_like_a_pickle_is_none(tmp_path, length):
    """Lengths of 640 bytes and so on begin with 0x80 0x02, the first bytes of a pickle."""
    header = json.dumps({"a": entry("U8", [1], 0, 1)}).encode().ljust(length)
    assert read_header(write(tmp_path, raw(header, b"x"))) == {"a": TensorInfo("U8", (1,), 0, 1)}


@pytest.mark.parametrize("content", [b"", b"\0", bytes(7)])
def test_a_file_too_short_for_a_length_is_refused(tmp_path, content):
    assert "truncated" in refused(tmp_path, content)


@pytest.mark.parametrize("length", [1, 99, 100_000_001, 2**62, 2**64 - 1])
def test_a_length_beyond_the_file_is_refused(tmp_path, length):
    assert str(length) in refused(tmp_path, struct.pack("<Q", length))


def test_a_header_beyond_the_limit_is_refused_though_the_file_holds_it(tmp_path):
    path = write(tmp_path, struct.pack("<Q", 200_000_000))
    with path.open("r+b") as file:
        file.truncate(300_000_000)  # sparse
    with pytest.raises(InputError, match=f"{FILE}.*200000000"):
        read_header(path)


@pytest.mark.parametrize("kept", range(0, 80, 7))
def test_a_truncated_file_is_refused(tmp_path, kept):
    whole = raw({"a": entry("F32", [4], 0, 16)}, bytes(16))
    assert kept < len(whole)
    refused(tmp_path, whole[:kept])


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"1",
        b'"a"',
        b"\xff\xfe{}",
        b"\xef\xbb\xbf{}",
        b'{"a": }',
        b"{} {}",
    ],
)
def test_what_is_no_json_object_is_refused(tmp_path, header):
    assert "JSON" in refused(tmp_path, raw(header))


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_deep_nesting_is_refused(tmp_path, opening):
    assert "JSON" in refused(tmp_path, raw(opening * 100_000))


@pytest.mark.parametrize("filler", [b"[],", b"{},", b"1.5,", b'"ab",'])
def test_json_that_would_swell_in_memory_is_refused_unparsed(filler):
    """60 MB of empty lists are 1.8 GB of Python objects."""
    raw_header = b'{"a": [' + filler * 4_000_001 + b"0]}"
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match="no checkpoint needs more than"):
            parse_object("name", raw_header)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000


def test_a_header_of_many_tensors_is_read(tmp_path):
    """More tensors than any checkpoint has in one file."""
    tensors = {f"model.layers.0.x.{i}": entry("U8", [1], i, i + 1) for i in range(200_000)}
    path = write(tmp_path, raw(tensors, bytes(200_000)))
    assert len(read_header(path)) == 200_000


@pytest.mark.parametrize("name", ["\ud800", "layers.\udfff.x"])
def test_a_name_that_is_not_text_is_refused(tmp_path, name):
    """JSON can spell half of a surrogate pair."""
    text = refused(tmp_path, raw({name: entry("U8", [1], 0, 1)}, bytes(1)))
    assert "is not text" in text
    text.encode()


def test_an_endless_number_is_refused(tmp_path):
    assert "JSON" in refused(tmp_path, raw(b'{"a": ' + b"9" * 5000 + b"}"))


def test_a_tensor_named_twice_is_refused(tmp_path):
    one = json.dumps(entry("U8", [1], 0, 1))
    header = f'{{"a": {one}, "twice": {one}, "twice": {one}}}'.encode()
    assert "'twice' twice" in refused(tmp_path, raw(header, b"x"))


def test_a_repeated_key_inside_an_entry_is_refused(tmp_path):
    header = b'{"a": {"dtype": "U8", "shape": [1], "shape": [2], "data_offsets": [0, 1]}}'
    assert "'shape' twice" in refused(tmp_path, raw(header, b"x"))


@pytest.mark.parametrize("repeated", ["a", "z"])
def test_many_keys_with_one_repeated_take_no_time(repeated):
    keys = [f"k{i}" for i in range(100_000)]
    text = ",".join(f'"{key}":1' for key in (repeated, *keys, repeated))
    with pytest.raises(InputError, match=f"'{repeated}' twice"):
        parse_object("file", f"{{{text}}}".encode())


BAD_ENTRIES = [
    None, 1, "text", [], {}, {"dtype": "U8"}, {"dtype": "U8", "shape": [1]},
    entry("U8", [1], 0, 1) | {"data_offsets": [0]},
    entry("U8", [1], 0, 1) | {"data_offsets": [0, 1, 2]},
    entry("U8", [1], 0, 1) | {"data_offsets": None},
    entry("U8", [1], 0, 1) | {"data_offsets": "01"},
    entry("U8", [1], 0, 1) | {"shape": None},
    entry("U8", [1], 0, 1) | {"shape": 1},
    entry("U8", [1], 0, 1) | {"shape": "1"},
    entry("U8", [1], 0, 1) | {"shape": {"1": 1}},
    entry("U8", [1], 0, 1) | {"dtype": None},
    entry("U8", [1], 0, 1) | {"dtype": ["U8"]},
    entry("U8", [1.0], 0, 1), entry("U8", ["1"], 0, 1), entry("U8", [True], 0, 1),
    entry("U8", [[1]], 0, 1), entry("U8", [None], 0, 1), entry("U8", [-1], 0, 1),
    entry("U8", [-1, -1], 0, 1), entry("U8", [1], -1, 0), entry("U8", [1], 0, 1.0),
    entry("U8", [1], False, 1), entry("U8", [1], 0, float("nan")),
    entry("U8", [1], 0, float("inf")), entry("U8", [1], 0, "1"),
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD_ENTRIES, ids=range(len(BAD_ENTRIES)))
def test_an_entry_that_is_none_is_refused(tmp_path, bad):
    assert "tensor broken" in refused(tmp_path, raw({"broken": bad}, b"xx"))


@pytest.mark.parametrize(
    ("begin", "end"), [(0, 2), (1, 2), (2**40, 2**40 + 1), (0, 2**62), (2**64, 2**64 + 1)]
)
def test_offsets_past_the_end_are_refused(tmp_path, begin, end):
    assert "tensor far" in refused(tmp_path, raw({"far": entry("U8", [1], begin, end)}, b"x"))


def test_offsets_that_run_backwards_are_refused(tmp_path):
    message = refused(tmp_path, raw({"back": entry("U8", [1], 1, 0)}, b"x"))
    assert "tensor back" in message
    assert "backwards" in message


@pytest.mark.parametrize(
    "spans", [((0, 4), (0, 4)), ((0, 4), (3, 7)), ((3, 7), (0, 4)), ((0, 8), (2, 6))]
)
def test_tensors_that_overlap_are_refused(tmp_path, spans):
    header = {n: entry("U8", [e - b], b, e) for n, (b, e) in zip("ab", spans, strict=True)}
    message = refused(tmp_path, raw(header, bytes(8)))
    assert "overlap" in message
    assert "a and b" in message or "b and a" in message


@pytest.mark.parametrize(
    ("dtype", "shape", "size"),
    [
        ("U8", [2], 1), ("U8", [1], 2), ("F32", [2], 4), ("F32", [], 0), ("F8_E4M3", [], 2),
        ("BF16", [3], 5), ("F32", [0], 4), ("F4", [4], 4), ("F6_E2M3", [4], 4), ("C64", [1], 4),
        ("U8", [2**30, 2**30], 8), ("F32", [2**60], 8), ("FUTURE", [2**60], 8), ("FUTURE", [65], 8),
    ],
)  # fmt: skip
def test_bytes_that_do_not_fit_dtype_and_shape_are_refused(tmp_path, dtype, shape, size):
    message = refused(tmp_path, raw({"lie": entry(dtype, shape, 0, size)}, bytes(size)))
    for text in ("tensor lie", dtype, str(shape), str(size)):
        assert text in message


@pytest.mark.parametrize("shape", [[1] * 17, [10**18] * 10_000, [0, 2**63], [2**63, 0]])
def test_a_shape_that_no_tensor_has_is_refused(tmp_path, shape):
    assert "tensor wide" in refused(tmp_path, raw({"wide": entry("U8", shape, 0, 0)}))


def test_a_dtype_of_the_future_is_let_through_within_its_bytes(tmp_path):
    path = write(tmp_path, raw({"new": entry("F3_E1M1", [8], 0, 3)}, bytes(3)))
    assert read_header(path)["new"].dtype == "F3_E1M1"


def test_metadata_is_no_tensor(tmp_path):
    header = {"__metadata__": {"format": "pt"}, "a": entry("U8", [1], 0, 1)}
    assert list(read_header(write(tmp_path, raw(header, b"x")))) == ["a"]


@pytest.mark.parametrize("metadata", [[], "pt", 1, {"a": 1}, {"a": None}, {"a": {}}])
def test_metadata_of_another_kind_is_refused_as_by_the_library(tmp_path, metadata):
    content = raw({"__metadata__": metadata, "a": entry("U8", [1], 0, 1)}, b"x")
    assert "__metadata__" in refused(tmp_path, content)
    with pytest.raises(SafetensorError):
        safe_open(tmp_path / FILE, "pt")


@pytest.mark.parametrize("metadata", [None, {}, {"a": ""}])
def test_metadata_that_the_library_takes_is_taken(tmp_path, metadata):
    path = write(tmp_path, raw({"__metadata__": metadata, "a": entry("U8", [1], 0, 1)}, b"x"))
    assert list(read_header(path)) == list(safe_open(path, "pt").keys())


@pytest.mark.parametrize("spans", [(), ((0, 1),), ((1, 2),), ((0, 1), (2, 3)), ((1, 1), (1, 3))])
def test_bytes_that_belong_to_no_tensor_are_refused_as_by_the_library(tmp_path, spans):
    header = {f"t{i}": entry("U8", [e - b], b, e) for i, (b, e) in enumerate(spans)}
    assert " bytes " in refused(tmp_path, raw(header, bytes(3)))
    with pytest.raises(SafetensorError):
        safe_open(tmp_path / FILE, "pt")


@pytest.mark.parametrize("spans", [((2, 3), (0, 2)), ((0, 3), (0, 0), (3, 3))])
def test_tensors_in_any_order_are_read_as_by_the_library(tmp_path, spans):
    header = {f"t{i}": entry("U8", [e - b], b, e) for i, (b, e) in enumerate(spans)}
    path = write(tmp_path, raw(header, bytes(3)))
    assert sorted(read_header(path)) == sorted(safe_open(path, "pt").keys())


# ---- pickles


class Bomb:
    """Would leave a file behind if it were ever unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_refused_unread(tmp_path, protocol):
    message = refused(tmp_path, pickle.dumps(Bomb(tmp_path / "exploded"), protocol=protocol))
    # Protocols 0 and 1 have no mark of their own: not safetensors is all that can be said.
    assert ("pickle" in message) == (protocol >= 2)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_what_torch_saved_is_refused_as_a_pickle(tmp_path, zipped):
    torch.save({"a": torch.zeros(64)}, tmp_path / FILE, _use_new_zipfile_serialization=zipped)
    with pytest.raises(InputError, match=f"{FILE}.*pickle.*convert"):
        read_header(tmp_path / FILE)


# ---- the file system


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=f"{FILE}.*No such file"):
        read_header(tmp_path / FILE)


def test_a_folder_is_no_file(tmp_path):
    (tmp_path / FILE).mkdir()
    with pytest.raises(InputError, match=FILE):
        read_header(tmp_path / FILE)


# ---- memory


def test_lies_about_sizes_allocate_nothing(tmp_path):
    """Every lie in one process that may not hold 64 MB more than when it started."""
    shapes = ([2**60], [2**30, 2**30], [2**20] * 3, [10**18] * 16)
    dtypes = ("U8", "F32", "F4", "UNKNOWN")
    paths = []
    for number, (shape, dtype) in enumerate(itertools.product(shapes, dtypes)):
        path = tmp_path / f"{number}.safetensors"
        path.write_bytes(raw({"huge": entry(dtype, shape, 0, 8)}, bytes(8)))
        paths.append(str(path))
    for number, length in enumerate((2**63, 99_999_999)):
        path = tmp_path / f"long{number}.safetensors"
        path.write_bytes(struct.pack("<Q", length) + b"{}")
        paths.append(str(path))
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from trtllm_b12x_fix.checkpoint.header import read_header\n"
        "from trtllm_b12x_fix.errors import InputError\n"
        "pages = int(open('/proc/self/statm').read().split()[0])\n"
        "limit = pages * resource.getpagesize() + 64 * 2**20\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "for path in sys.argv[1:]:\n"
        "    try:\n"
        "        read_header(Path(path))\n"
        "    except InputError:\n"
        "        continue\n"
        "    sys.exit(path)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *paths], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
