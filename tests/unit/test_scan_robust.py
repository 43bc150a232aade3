"""Corrupted checkpoints: never a traceback, and never a wrong "clean".

Every corruption ends in exit code 0, 1 or 2 of the command. A result without any finding is only
right where the corruption cannot be seen in principle: other codes, another valid scale byte.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.checkpoints import save, shard_names
from tests.scan_cases import CONFIG, DENSE, command, document, run, with_dense
from trtllm_b12x_fix.checkpoint.header import read_header
from trtllm_b12x_fix.scan import reading
from trtllm_b12x_fix.scan.result import Verdict

SOUND = with_dense()
NAMES = shard_names(2)
SCALED = sorted(n for n in SOUND if n.endswith("weight_scale"))
WHOLE = sorted(n for n in SOUND if n.endswith(("weight_scale_2", "input_scale")))
NVFP4 = sorted(n for n in SOUND if n.endswith(".weight") and "gate.weight" not in n)
MANY = settings(
    max_examples=120,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    report_multiple_bugs=False,
    # Examples are small as they are; shrinking would take a minute for each mutant.
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("corrupt")


def write(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    for old in folder.glob("*"):
        old.unlink()
    return save(folder, tensors, shards=2, index=True, config=CONFIG)


def judged(folder: Path, *arguments: str) -> tuple[int, str, list[str]]:
    """Exit code, verdict and findings; a traceback fails the test."""
    code, out, err = command(folder, "--json", "-", "--threads", "1", *arguments)
    assert code in (0, 1, 2)
    assert "Traceback" not in err
    report = json.loads(out)
    if code == 2:
        assert err.startswith("trtllm-b12x-fix: ")
        return code, "unusable", []
    return code, report["verdict"], [finding["code"] for finding in report["findings"]]


def test_the_sound_one_is_clean(folder):
    write(folder, SOUND)
    assert judged(folder) == (0, "clean", [])
    assert judged(folder, "--weights") == (0, "clean", [])


@MANY
@given(data=st.data())
def test_changed_bytes(folder, data):
    """Bytes anywhere in a shard: header, scales, codes."""
    write(folder, SOUND)
    shard = folder / data.draw(st.sampled_from(NAMES))
    header = read_header(shard)
    content = bytearray(shard.read_bytes())
    start = len(content) - max(info.end for info in header.values())
    visible = False
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        byte = data.draw(st.integers(0, 255))
        visible = visible or _shows(header, at - start, content[at], byte)
        content[at] = byte
    shard.write_bytes(content)
    code, verdict, findings = judged(folder)
    if visible:
        assert (code, verdict) != (0, "clean") or findings


def _shows(header: dict, at: int, old: int, new: int) -> bool:
    """Whether a byte of a block scale became one that no block scale is."""
    names = [n for n, info in header.items() if info.begin <= at < info.end]
    return bool(names) and names[0] in SCALED and old != new and not 0 < new < 0x7F


@MANY
@given(data=st.data())
def test_damaged_tensors(folder, data):
    """Each of these is in the list of what must be seen."""
    tensors = dict(SOUND)
    kind = data.draw(st.sampled_from(sorted(DAMAGES)))
    DAMAGES[kind](tensors, data)
    write(folder, tensors)
    weights = data.draw(st.booleans())
    code, verdict, findings = judged(folder, *(["--weights"] if weights else []))
    assert verdict != "clean" or findings, kind
    assert code or verdict == "clean", kind


def _drop(tensors, data):
    del tensors[data.draw(st.sampled_from([*SCALED, *WHOLE, *NVFP4]))]


def _bad_number(tensors, data):
    bad = st.sampled_from([0.0, -1.0, -0.0, float("nan"), float("inf"), float("-inf"), 1e-44])
    name = data.draw(st.sampled_from(WHOLE))
    value = data.draw(bad)
    if value == 1e-44 and name.endswith("input_scale"):
        value = 0.0
    tensors[name] = torch.tensor(value)


def _bad_byte(tensors, data):
    name = data.draw(st.sampled_from(SCALED))
    scales = tensors[name].view(torch.uint8).clone().flatten()
    at = data.draw(st.integers(0, scales.numel() - 1))
    scales[at] = data.draw(st.sampled_from([0, 0x7F, 0x80, 0x88, 0xFE, 0xFF]))
    tensors[name] = scales.reshape(tensors[name].shape).view(torch.float8_e4m3fn)


def _constant(tensors, data):
    name = data.draw(st.sampled_from(SCALED))
    byte = data.draw(st.integers(0, 0x7E))
    tensors[name] = torch.full_like(tensors[name].view(torch.uint8), byte).view(torch.float8_e4m3fn)


def _other_dtype(tensors, data):
    name = data.draw(st.sampled_from([*SCALED, *WHOLE]))
    other = torch.int32 if name in WHOLE else torch.bfloat16
    tensors[name] = tensors[name].float().to(other)


def _other_shape(tensors, data):
    name = data.draw(st.sampled_from([*SCALED, *WHOLE, *NVFP4]))
    old = tensors[name]
    if old.dim() == 0:
        tensors[name] = old.expand(3).clone()
    elif data.draw(st.booleans()):
        tensors[name] = old[:-1].clone()
    else:
        tensors[name] = old.flatten().clone()


def _smaller(tensors, data):
    """Codes and scales of one expert, which fit each other."""
    name = data.draw(st.sampled_from([n for n in NVFP4 if ".experts." in n]))
    for one in (name, f"{name}_scale"):
        tensors[one] = tensors[one][: len(tensors[one]) // 2].clone()


def _reciprocal(tensors, data):
    name = data.draw(st.sampled_from([n for n in WHOLE if n.endswith("weight_scale_2")]))
    tensors[name] = 1.0 / tensors[name]


def _far_input(tensors, data):
    name = data.draw(st.sampled_from([n for n in WHOLE if n.endswith("input_scale")]))
    tensors[name] = torch.tensor(1.0)


def _one_half(tensors, data):
    name = data.draw(
        st.sampled_from([n for n in WHOLE if n.endswith("weight_scale_2") and "gate_" in n])
    )
    tensors[name] = tensors[name] * data.draw(st.sampled_from([0.5, 1.5, 0.999]))


DAMAGES = {
    "tensor dropped": _drop,
    "number that no scale is": _bad_number,
    "byte that no block scale is": _bad_byte,
    "one byte everywhere": _constant,
    "other dtype": _other_dtype,
    "other shape": _other_shape,
    "expert of another size": _smaller,
    "reciprocal": _reciprocal,
    "input scale of one": _far_input,
    "gate and up apart": _one_half,
}


@settings(MANY, max_examples=60)
@given(keep=st.integers(0, 40_000), which=st.sampled_from(NAMES))
def test_truncated_shards(folder, keep, which):
    write(folder, SOUND)
    shard = folder / which
    content = shard.read_bytes()
    shard.write_bytes(content[: min(keep, len(content) - 1)])
    assert judged(folder)[0] == 2


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=5,
)
KEYS = st.sampled_from(
    ["num_experts", "hidden_size", "moe_intermediate_size", "num_experts_per_tok", "text_config",
     "quantization_config", "hidden_act"]
)  # fmt: skip


@settings(MANY, max_examples=80)
@given(config=st.dictionaries(KEYS, JSON), other=st.one_of(st.none(), JSON))
def test_strange_configs(folder, config, other):
    write(folder, SOUND)
    (folder / "config.json").write_text(json.dumps(config))
    if other is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(other))
    code, verdict, _ = judged(folder)
    assert verdict in ("clean", "unusable", "not-applicable")
    assert code in (0, 2)


@settings(MANY, max_examples=60)
@given(data=st.data())
def test_strange_indexes(folder, data):
    """Tensors put elsewhere, left out, or into a file that is not there."""
    write(folder, SOUND)
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    name = data.draw(st.sampled_from([*SCALED, *WHOLE, *NVFP4]))
    change = data.draw(st.sampled_from(["drop", "elsewhere", "absent"]))
    if change == "drop":
        del weight_map[name]
    else:
        others = [n for n in NAMES if n != weight_map[name]]
        weight_map[name] = others[0] if change == "elsewhere" else "absent.safetensors"
    index.write_text(json.dumps({"weight_map": weight_map}))
    code, verdict, findings = judged(folder)
    assert verdict != "clean" or findings
    assert (code == 0) == (verdict == "clean")


def test_a_file_that_shrinks_after_its_header_was_read(folder, monkeypatch):
    write(folder, SOUND)
    original = reading.Shards.span

    def shrink(self, tensor, info):
        span = original(self, tensor, info)
        for name in NAMES:
            with (folder / name).open("r+b") as file:
                file.truncate(1000)
        return span

    monkeypatch.setattr(reading.Shards, "span", shrink)
    code, out, err = command(folder, "--json", "-")
    assert code == 2
    assert "truncated while it was read?" in err
    assert json.loads(out)["unusable"][0]["source"] == str(folder)


def test_one_bad_path_spares_the_other(folder, tmp_path):
    write(folder, SOUND)
    code, report = document(folder, tmp_path / "nowhere")
    assert (code, report["verdict"]) == (2, "unusable")
    assert [one["verdict"] for one in report["reports"]] == ["clean"]
    assert "no such file or folder" in report["unusable"][0]["reason"]


def test_a_dense_linear_is_broken_like_any_other(folder):
    tensors = dict(SOUND)
    del tensors[f"{DENSE}.weight_scale"], tensors[f"{DENSE}.weight_scale_2"]
    result = run(write(folder, tensors))
    assert result.verdict is Verdict.BROKEN
    assert result.findings[0].code == "missing-tensor"
