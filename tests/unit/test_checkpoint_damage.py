"""Every damage that a checkpoint of three shards can have: named by file, layer, expert, tensor.

Damage that makes a tensor unusable is an error; damage that changes what the model computes is a
finding, and the check ends with exit code 1.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.checkpoints import GATED, QWEN, experts, router, save, shard_names, write_index
from trtllm_b12x_fix import cli
from trtllm_b12x_fix.checkpoint import embedded
from trtllm_b12x_fix.checkpoint.findings import Finding, Severity
from trtllm_b12x_fix.errors import B12xFixError, InputError, ScaleError, ShapeError
from trtllm_b12x_fix.formats.scale_layout import swizzle
from trtllm_b12x_fix.layer_check.from_checkpoint import Request, load

CONFIG = {"model_type": "qwen3_moe", "num_experts_per_tok": 4, "hidden_act": "silu"}
PREFIX = QWEN.format(5)
EXPERT = 2
NAMES = shard_names(3)
FLOAT8 = torch.float8_e4m3fn


def sound() -> dict[str, Tensor]:
    return experts(PREFIX) | router(PREFIX)


def shard_of(tensor: str) -> str:
    return NAMES[list(sound()).index(tensor) % 3]


def write(folder: Path, tensors: dict[str, Tensor]) -> Path:
    """Every tensor in the shard that the sound checkpoint has it in."""
    for name in NAMES:
        part = {n: t.contiguous() for n, t in tensors.items() if shard_of(n) == name}
        save(folder, part)
        (folder / "model.safetensors").rename(folder / name)
    write_index(folder, {n: shard_of(n) for n in tensors})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def check(folder: Path) -> tuple[Finding, ...]:
    """Load the layer; all four experts have work."""
    return load(Request(folder, "5", tokens=1, seed=0)).findings


def named(folder: Path, kind: type[B12xFixError], *words: str) -> None:
    """Loading ends in an error that says all of this, and so does the command, with exit code 2."""
    with pytest.raises(kind) as error:
        check(folder)
    for word in words:
        assert word in str(error.value)
    code, out = command(folder)
    assert code == 2
    assert str(error.value) in out


def command(folder: Path) -> tuple[int, str]:
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(out):
        arguments = ["check-layer", "--checkpoint", str(folder), "--layer", "5", "--rows", "1"]
        code = cli.main([*arguments, "--device", "cpu", "--flashinfer", "0.6.18", "--json", "-"])
    return code, out.getvalue()


def tensor(projection: str, short: str) -> str:
    return f"{PREFIX}.{EXPERT}.{projection}.{short}"


def test_the_sound_checkpoint_has_no_findings(tmp_path):
    assert check(write(tmp_path, sound())) == ()
    code, _ = command(tmp_path)
    assert code == 0


# ---- errors


@pytest.mark.parametrize("projection", GATED)
@pytest.mark.parametrize("short", ["weight_scale", "weight_scale_2", "input_scale"])
def test_a_missing_scale(tmp_path, projection, short):
    tensors = sound()
    del tensors[tensor(projection, short)]
    named(write(tmp_path, tensors), InputError, tmp_path.name, tensor(projection, short))


@pytest.mark.parametrize("projection", GATED)
def test_a_missing_weight(tmp_path, projection):
    tensors = sound()
    del tensors[tensor(projection, "weight")]
    words = (tmp_path.name, f"{PREFIX}.{EXPERT}", projection, "missing")
    named(write(tmp_path, tensors), InputError, *words)


@dataclass(frozen=True)
class Damage:
    """One tensor's damage: what to do to it, and what the message says beside its name."""

    short: str
    do: Callable[[Tensor], Tensor]
    kind: type[B12xFixError]
    word: str


def with_byte(byte: int) -> Callable[[Tensor], Tensor]:
    def damage(scales: Tensor) -> Tensor:
        raw = scales.view(torch.uint8).clone()
        raw[3, 1] = byte
        return raw.view(FLOAT8)

    return damage


def constant(value: float) -> Callable[[Tensor], Tensor]:
    return lambda _: torch.tensor(value)


USELESS = {"nan": float("nan"), "inf": float("inf"), "0.0": 0.0, "-1.5": -1.5}
DAMAGES = {
    "weight dtype": Damage("weight", lambda t: t.view(torch.int8), InputError, "got I8"),
    "weight rows": Damage("weight", lambda t: t[:-1], ShapeError, "needs"),
    "weight columns": Damage("weight", lambda t: t[:, :-1], ShapeError, "multiple of 16"),
    "weight flat": Damage("weight", lambda t: t.flatten(), ShapeError, "rows, columns / 2"),
    "scale dtype": Damage("weight_scale", lambda t: t.float(), InputError, "is F32"),
    "scale e5m2": Damage(
        "weight_scale", lambda t: t.to(torch.float8_e5m2), InputError, "is F8_E5M2"
    ),
    "scale shape": Damage("weight_scale", lambda t: t[:, :1], ShapeError, "got"),
    "scale turned": Damage("weight_scale", lambda t: t.t(), ShapeError, "got"),
    "NaN 0x7f": Damage("weight_scale", with_byte(0x7F), ScaleError, "NaN at [3, 1] (byte 0x7f)"),
    "NaN 0xff": Damage("weight_scale", with_byte(0xFF), ScaleError, "NaN at [3, 1] (byte 0xff)"),
    "negative": Damage(
        "weight_scale", with_byte(0xB8), ScaleError, "negative at [3, 1] (byte 0xb8)"
    ),
    "swizzled, padded": Damage(
        "weight_scale", swizzle, ShapeError, "already swizzled into 128x4 tiles"
    ),
    **{
        f"{short} {word}": Damage(short, constant(value), ScaleError, word)
        for short in ("weight_scale_2", "input_scale")
        for word, value in USELESS.items()
    },
    "weight_scale_2 dtype": Damage(
        "weight_scale_2", lambda t: t.to(torch.int32), InputError, "torch.int32"
    ),
    "input_scale shape": Damage("input_scale", lambda t: t.expand(2), ShapeError, "got 2"),
}


@pytest.mark.parametrize("projection", GATED)
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_tensor_that_cannot_be_used(tmp_path, projection, damage):
    tensors = sound()
    name = tensor(projection, damage.short)
    tensors[name] = damage.do(tensors[name])
    # Of a weight and a scale that do not fit each other, either may be at fault: both are named.
    mismatch = damage.kind is ShapeError and damage.word in ("needs", "got")
    file = shard_of(tensor(projection, "weight_scale")) if mismatch else shard_of(name)
    named(write(tmp_path, tensors), damage.kind, file, name, damage.word)


def test_gate_and_up_of_different_sizes(tmp_path):
    tensors = sound()
    for short in ("weight", "weight_scale"):
        tensors[tensor("gate_proj", short)] = tensors[tensor("gate_proj", short)][:16]
    words = (tmp_path.name, f"{PREFIX}.{EXPERT}", "gate_proj", "up_proj", "one shape")
    named(write(tmp_path, tensors), ShapeError, *words)


@pytest.mark.parametrize("keep", [0, 7, 8, 200, -1])
def test_a_truncated_shard(tmp_path, keep):
    shard = write(tmp_path, sound()) / NAMES[1]
    shard.write_bytes(shard.read_bytes()[:keep])
    named(tmp_path, InputError, NAMES[1])


def test_a_header_that_lies(tmp_path):
    shard = write(tmp_path, sound()) / NAMES[shard_index("weight")]
    name = tensor("up_proj", "weight").encode()
    content = shard.read_bytes()
    at = content.index(b"[32,32]", content.index(name))
    shard.write_bytes(content[:at] + b"[32,99]" + content[at + 7 :])
    named(tmp_path, InputError, shard.name, name.decode(), "[32, 99]")


def shard_index(short: str) -> int:
    return NAMES.index(shard_of(tensor("up_proj", short)))


def test_a_missing_shard(tmp_path):
    write(tmp_path, sound())
    (tmp_path / NAMES[1]).unlink()
    with pytest.raises(InputError) as error:
        check(tmp_path)
    assert NAMES[1] in str(error.value)
    assert PREFIX in str(error.value)
    assert "download" in str(error.value)


def test_one_tensor_in_two_shards(tmp_path):
    write(tmp_path, sound())
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "copy.safetensors").write_bytes((tmp_path / NAMES[0]).read_bytes())
    named(tmp_path, InputError, NAMES[0], "copy.safetensors", PREFIX)


def test_a_shard_that_is_a_pickle(tmp_path):
    write(tmp_path, sound())
    torch.save({}, tmp_path / NAMES[2])
    named(tmp_path, InputError, NAMES[2], "pickle")
    write_index(tmp_path, dict.fromkeys(sound(), "pytorch_model.bin"))
    named(tmp_path, InputError, "pytorch_model.bin", "pickle")


# ---- findings


def found(folder: Path, code: str, name: str) -> Finding:
    """The one finding, with its place; the command ends with exit code 1 and shows it."""
    (finding,) = check(folder)
    assert (finding.code, finding.severity) == (code, Severity.DAMAGE)
    assert (finding.layer, finding.expert) == (PREFIX, EXPERT)
    assert (finding.file, finding.tensor) == (shard_of(name), name)
    status, out = command(folder)
    assert status == 1
    (shown,) = json.loads(out)["findings"]
    assert (shown["code"], shown["tensor"], shown["file"]) == (code, finding.tensor, finding.file)
    return finding


@pytest.mark.parametrize("projection", GATED)
def test_zero_scales_over_weights(tmp_path, projection):
    tensors = sound()
    name = tensor(projection, "weight_scale")
    scales = tensors[name].view(torch.uint8).clone()
    scales[3, 1] = 0
    tensors[name] = scales.view(FLOAT8)
    finding = found(write(tmp_path, tensors), "zero-scale-over-weights", name)
    assert finding.message.startswith(f"1 of {scales.numel()} ")


@pytest.mark.parametrize("zero", [0x00, 0x88, 0x80])
def test_zero_scales_over_zeros_are_sound(tmp_path, zero):
    tensors = sound()
    scales = tensors[tensor("up_proj", "weight_scale")].view(torch.uint8).clone()
    scales[3, 1] = 0
    tensors[tensor("up_proj", "weight_scale")] = scales.view(FLOAT8)
    tensors[tensor("up_proj", "weight")][3, 8:16] = zero
    assert check(write(tmp_path, tensors)) == ()


@pytest.mark.parametrize(
    ("smaller", "larger"), [("gate_proj", "up_proj"), ("up_proj", "gate_proj")]
)
def test_gate_and_up_scales_that_differ(tmp_path, smaller, larger):
    tensors = sound()
    name = tensor(smaller, "weight_scale_2")
    tensors[name] = tensors[name] / 3
    finding = found(write(tmp_path, tensors), "gate-up-scales-differ", name)
    for text in ("weight_scale_2", smaller, larger, "3 times too large"):
        assert text in finding.message


def test_scales_that_differ_by_a_rounding_are_a_note(tmp_path):
    tensors = sound()
    name = tensor("gate_proj", "weight_scale_2")
    tensors[name] = torch.nextafter(tensors[name], torch.tensor(0.0))
    (finding,) = check(write(tmp_path, tensors))
    assert (finding.code, finding.severity) == ("gate-up-scales-differ", Severity.NOTE)
    assert finding.tensor == name
    for text in ("3.05175781e-05", "3.05175763e-05", "1.00000006 times"):
        assert text in finding.message


def test_gate_and_up_input_scales_that_differ_are_a_note(tmp_path):
    tensors = sound()
    name = tensor("gate_proj", "input_scale")
    tensors[name] = torch.tensor(2.0**-10)
    (finding,) = check(write(tmp_path, tensors))
    assert (finding.code, finding.severity) == ("input-scales-differ", Severity.NOTE)
    assert (finding.expert, finding.tensor, finding.file) == (EXPERT, name, shard_of(name))
    for text in ("1 of 4 experts differ", "TensorRT-LLM asserts", "0.0009765625", "0.001953125"):
        assert text in finding.message


@pytest.mark.parametrize("factor", [1 / 200, 200.0])
def test_an_input_scale_far_from_all_others_is_a_note(tmp_path, factor):
    tensors = sound()
    name = tensor("down_proj", "input_scale")
    tensors[name] = tensors[name] * factor
    (finding,) = check(write(tmp_path, tensors))
    assert (finding.code, finding.severity) == ("input-scales-differ", Severity.NOTE)
    assert (finding.expert, finding.tensor) == (EXPERT, name)
    assert "1 of 4 experts are more than 100 times off" in finding.message
    tensors[name] = sound()[name] * factor**0.5
    assert check(write(tmp_path, tensors)) == ()


def test_findings_are_shown_where_there_is_nothing_to_compare(tmp_path):
    """All scales zero: the exact output is zero, and the findings say why."""
    tensors = sound()
    for name in tensors:
        if name.endswith("down_proj.weight_scale"):
            tensors[name] = torch.zeros(64, 2).to(FLOAT8)
    code, out = command(write(tmp_path, tensors))
    assert code == 2
    for text in ("exact output is zero", tensor("down_proj", "weight_scale"), "lost in the file"):
        assert text in out


@pytest.mark.parametrize("projection", ["gate_proj"])
def test_swizzled_scales_of_the_same_size(tmp_path, projection):
    """The embedded real layer, with one expert's scales in a kernel's order."""
    tensors = load_file(embedded.PATH)
    (name,) = [n for n in tensors if n.endswith(f".experts.3.{projection}.weight_scale")]
    damaged = tensors | {name: swizzle(tensors[name])}
    assert damaged[name].shape == tensors[name].shape
    save(tmp_path / "sound", tensors)
    save(tmp_path / "swizzled", damaged)

    def findings(folder: Path) -> tuple[Finding, ...]:
        return load(Request(folder, "1", tokens=2, seed=0, top_k=6)).findings

    assert findings(tmp_path / "sound") == ()
    (finding,) = findings(tmp_path / "swizzled")
    assert (finding.code, finding.severity) == ("scales-look-swizzled", Severity.DAMAGE)
    assert (finding.expert, finding.file) == (3, "model.safetensors")
    assert finding.tensor == name
    assert finding.layer == name.partition(".3.")[0]
    assert "128x4" in finding.message
