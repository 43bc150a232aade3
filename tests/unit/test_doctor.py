"""What doctor finds and says: poisoned packages on the path, so that any import would end the run.

FlashInfer's files are the real wheels', TensorRT-LLM's those of the stand-in.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.version import Version

from tests.checkpoints import GATED, QWEN, UNGATED, experts, save
from tests.trtllm.stand_in import Era, write_stand_in
from tests.unit.test_flashinfer_contract import copy, metadata_of
from trtllm_b12x_fix import cli, startup
from trtllm_b12x_fix.doctor import advisories, diagnosis, environment, switch
from trtllm_b12x_fix.doctor.advisories import Key, LayerShape, advisories_for, is_known
from trtllm_b12x_fix.doctor.diagnosis import Verdict
from trtllm_b12x_fix.doctor.environment import Gpu, parse_smi, read_driver
from trtllm_b12x_fix.doctor.model import read_model, tensor_intermediate
from trtllm_b12x_fix.emulator.contract import KNOWN_VERSIONS, contract_for
from trtllm_b12x_fix.errors import UnsupportedVersionError
from trtllm_b12x_fix.integrations import b12x_dispatch, b12x_wrapper

POISON = "raise SystemExit('imported')\n"
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    """None of our variables set, no GPU, the hook not in place."""
    for name in switch.SHOWN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(environment, "read_gpus", lambda: ((), "nobody"))
    monkeypatch.setattr(startup, "is_in_place", lambda: False)
    for name in ("tensorrt_llm", "flashinfer"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.fixture
def site(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


def bring_trtllm(site: Path, era: Era = Era.MOE_TRANSFORM) -> Path:
    write_stand_in(site, era)
    (site / "tensorrt_llm" / "__init__.py").write_text(POISON)
    return site.joinpath(*era.value.quantization_module.split(".")).with_suffix(".py")


def bring_flashinfer(site: Path, oracle_dir, version: str, label: str | None = None) -> None:
    copy(oracle_dir(f"flashinfer-{version}") / "flashinfer", site / "flashinfer")
    (site / "flashinfer" / "__init__.py").write_text(POISON)
    record = site / "flashinfer_python-0.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(metadata_of(label or version))


def turn_on(monkeypatch, mode: str = "auto") -> None:
    monkeypatch.setenv("TRTLLM_B12X_FIX", mode)
    monkeypatch.setattr(startup, "is_in_place", lambda: True)


def examine(capsys, *options: str) -> tuple[int, dict]:
    """Exit code and JSON; the text must be printable and say the same verdict."""
    code = cli.main(["doctor", "--json", "-", *options])
    document = json.loads(capsys.readouterr().out)
    assert document["exit_code"] == code
    assert cli.main(["doctor", *options]) == code
    text = capsys.readouterr().out
    word = {0: "good", 1: "FINDING", 2: "UNUSABLE"}[code]
    assert text.startswith(f"VERDICT  {word}: ")
    assert all(line.isprintable() for line in text.splitlines())
    assert {"tensorrt_llm", "flashinfer"}.isdisjoint(sys.modules)
    return code, document


# ---- verdicts


def test_nothing_installed_is_nothing_to_judge(site, capsys):
    """The likeliest mistake is the wrong Python: nothing looked at must not read as good."""
    code, document = examine(capsys)
    assert code == 2
    assert document["schema"] == "trtllm-b12x-fix/doctor/1"
    assert document["verdict"] == "nothing to judge"
    assert document["tensorrt_llm"]["kind"] == "absent"
    assert document["advisories"] == []


@pytest.mark.parametrize("era", Era)
def test_with_the_fix_off(site, capsys, oracle_dir, era):
    bring_trtllm(site, era)
    bring_flashinfer(site, oracle_dir, "0.6.18")
    code, document = examine(capsys)
    assert code == era.value.bakes
    assert document["tensorrt_llm"]["version"] == era.value.version
    assert document["source"]["module"] == era.value.quantization_module
    if era.value.bakes:
        assert "the fix is off: TRTLLM_B12X_FIX is not set" in document["reason"]
        assert document["hold"]["holds"]
        assert any("TRTLLM_B12X_FIX=auto" in words for words in document["to_do"])
    else:
        assert "intact" in document["reason"]


@pytest.mark.parametrize(
    ("version", "strategies"),
    [
        ("0.6.16", {"relu2": "fp32-rescale", "silu": "cutlass"}),
        ("0.6.18", {"relu2": "alphas", "silu": "alphas"}),
        ("0.7.4", {"relu2": "alphas", "silu": "alphas"}),
    ],
)
def test_with_the_fix_on(site, capsys, oracle_dir, monkeypatch, version, strategies):
    bring_trtllm(site)
    bring_flashinfer(site, oracle_dir, version)
    turn_on(monkeypatch)
    code, document = examine(capsys)
    assert code == 0
    assert document["verdict"] == Verdict.FIXED.value
    layers = document["hold"]["layers"]
    assert {layer["activation"]: layer["strategy"] for layer in layers} == strategies
    assert document["hold"]["keeps_out"] == (["direct-micro"] if version == "0.6.18" else [])


@pytest.mark.parametrize(
    ("mode", "words"),
    [("off", "TRTLLM_B12X_FIX=off"), ("on", "TRTLLM_B12X_FIX='on' is not known")],
)
def test_modes_that_do_not_repair(site, capsys, oracle_dir, monkeypatch, mode, words):
    bring_trtllm(site)
    bring_flashinfer(site, oracle_dir, "0.7.4")
    turn_on(monkeypatch, mode)
    code, document = examine(capsys)
    assert code == 1
    assert words in document["reason"]


def test_a_variable_that_nothing_reads_is_off(site, capsys, oracle_dir, monkeypatch):
    bring_trtllm(site)
    bring_flashinfer(site, oracle_dir, "0.7.4")
    monkeypatch.setenv("TRTLLM_B12X_FIX", "auto")
    monkeypatch.setattr(switch, "startup_files", lambda: ())
    code, document = examine(capsys)
    assert code == 1
    assert "trtllm_b12x_fix.pth is missing" in document["reason"]
    monkeypatch.setattr(switch, "startup_files", lambda: ("somewhere/trtllm_b12x_fix.pth",))
    code, document = examine(capsys)
    assert code == 1
    assert "did not run in this interpreter" in document["reason"]


@pytest.mark.parametrize("mode", ["alphas", "fp32-rescale"])
def test_a_strategy_without_an_exact_form_is_refused(site, capsys, oracle_dir, monkeypatch, mode):
    bring_trtllm(site)
    bring_flashinfer(site, oracle_dir, "0.6.16")
    turn_on(monkeypatch, mode)
    code, document = examine(capsys)
    assert code == 1
    assert "the fix would refuse" in document["reason"]
    assert "set TRTLLM_B12X_FIX=auto" in document["to_do"]
    monkeypatch.setenv("TRTLLM_B12X_FIX_ON_UNKNOWN", "cutlass")
    assert examine(capsys)[0] == 0


def test_an_unknown_flashinfer(site, capsys, oracle_dir, monkeypatch):
    bring_trtllm(site)
    bring_flashinfer(site, oracle_dir, "0.7.4", label="0.7.9")
    turn_on(monkeypatch)
    code, document = examine(capsys)
    assert code == 1
    assert "0.7.9" in document["reason"]
    assert "--flashinfer" not in json.dumps(document)
    assert not document["advisories_known"]
    assert document["advisories"] == []
    monkeypatch.setenv("TRTLLM_B12X_FIX_ON_UNKNOWN", "cutlass")
    assert examine(capsys)[0] == 0


def test_without_flashinfer(site, capsys, monkeypatch):
    bring_trtllm(site)
    turn_on(monkeypatch)
    code, document = examine(capsys)
    assert code == 1
    assert "FlashInfer is not installed" in document["reason"]


def test_forced_w4a16_is_refused(site, capsys, oracle_dir, monkeypatch):
    bring_trtllm(site)
    bring_flashinfer(site, oracle_dir, "0.7.4")
    turn_on(monkeypatch)
    monkeypatch.setenv(switch.FORCE_W4A16, "1")
    code, document = examine(capsys)
    assert code == 1
    assert f"unset {switch.FORCE_W4A16}" in document["to_do"]
    monkeypatch.setenv(switch.FORCE_W4A16, "0")
    assert examine(capsys)[0] == 0


@pytest.mark.parametrize(
    ("gpus", "code"),
    [
        ([Gpu("NVIDIA B200", (10, 0))], 0),
        ([Gpu("NVIDIA H200", (9, 0)), Gpu("NVIDIA B200", (10, 0))], 0),
        ([Gpu("NVIDIA GB10", (12, 1))], 1),
        ([Gpu("NVIDIA B200", (10, 0)), Gpu("NVIDIA RTX PRO 6000", (12, 0))], 1),
        ([Gpu("NVIDIA B200", (10, 0)), Gpu("unknown")], 1),
        ([], 1),
    ],
)
def test_gpus_on_which_b12x_is_never_built(site, capsys, oracle_dir, monkeypatch, gpus, code):
    bring_trtllm(site)
    bring_flashinfer(site, oracle_dir, "0.7.4")
    monkeypatch.setattr(environment, "read_gpus", lambda: (tuple(gpus), "nvidia-smi"))
    found, document = examine(capsys)
    assert found == code
    assert ("never built" in document["reason"]) == (code == 0)


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (lambda text: text.replace("class NVFP4", "class class NVFP4"), 2, "is not Python"),
        (lambda text: text.replace("NVFP4CuteDslB12xFusedMoEMethod", "Other"), 1, "is not there"),
        (lambda _: "", 1, "uses NVFP4CuteDslB12xFusedMoEMethod, which no source file here"),
        (lambda text: text.replace("def transform_weights", "def prepare"), 1, "defines neither"),
        (lambda text: text.replace(".to(torch.float8_e4m3fn)", ".half()"), 1, "may bake"),
    ],
)
def test_other_sources(site, capsys, oracle_dir, change, code, words):
    path = bring_trtllm(site)
    bring_flashinfer(site, oracle_dir, "0.7.4")
    path.write_text(change(path.read_text()))
    found, document = examine(capsys)
    assert found == code
    assert words in document["reason"]


def without_b12x(path: Path) -> None:
    """As a release of before b12x: no file of the package knows of the class or of the wrapper."""
    for file in path.parent.glob("*.py"):
        text = file.read_text()
        if "B12x" in text and file != path:
            file.unlink()
    path.write_text("")


def test_a_release_without_b12x_is_not_affected(site, capsys, oracle_dir):
    path = bring_trtllm(site)
    bring_flashinfer(site, oracle_dir, "0.7.4")
    without_b12x(path)
    code, document = examine(capsys)
    assert code == 0
    assert "has no NVFP4" in document["reason"]


@pytest.mark.parametrize(
    "name", ["quantization.pyc", "quantization.so", "quantization.cpython-312-x86_64-linux-gnu.so"]
)
@pytest.mark.parametrize("with_backend", [True, False])
def test_a_compiled_class_is_not_judged(site, capsys, oracle_dir, name, with_backend):
    path = bring_trtllm(site)
    bring_flashinfer(site, oracle_dir, "0.7.4")
    content = path.read_bytes()
    if not with_backend:
        without_b12x(path)
    path.unlink()
    path.with_name(name).write_bytes(content)
    code, document = examine(capsys)
    assert code == 1
    assert "NVFP4CuteDslB12xFusedMoEMethod" in document["reason"]
    assert document["source"]["handling"] == "unknown"
    if not with_backend:
        assert document["source"]["module"] == "tensorrt_llm._torch.moe.fused_moe.quantization"
        assert "is compiled" in document["reason"]


def test_compiled_copies_of_sources_are_not_modules(site, capsys, oracle_dir):
    path = bring_trtllm(site)
    bring_flashinfer(site, oracle_dir, "0.7.4")
    content = path.read_bytes()
    without_b12x(path)
    (path.parent / "__pycache__").mkdir(exist_ok=True)
    (path.parent / "__pycache__" / "quantization.cpython-312.pyc").write_bytes(content)
    assert examine(capsys)[0] == 0


def test_a_scale_that_is_none_and_a_cast_by_copying_are_not_intact(site, capsys, oracle_dir):
    path = bring_trtllm(site)
    bring_flashinfer(site, oracle_dir, "0.7.4")
    text = path.read_text()
    old = "(scale.float() * factor[:, None, None]).to(torch.float8_e4m3fn)"
    assert old in text
    text = text.replace(old, "torch.empty_like(scale).copy_(scale.float() * factor)")
    path.write_text(text.replace('"fc2_input_scale":', '"input_global_scale": None, "fc2_":'))
    code, document = examine(capsys)
    assert code == 1
    assert "may bake" in document["reason"]


@pytest.mark.parametrize("part", ["METADATA", "direct_url.json"])
@pytest.mark.parametrize("package", ["tensorrt_llm-1.4.0rc1", "flashinfer_python-0.0"])
def test_damaged_metadata_ends_in_a_note(site, capsys, oracle_dir, package, part):
    bring_trtllm(site)
    bring_flashinfer(site, oracle_dir, "0.7.4")
    content = b"Name: \xff\n" if part == "METADATA" else b"[" * 100_000
    (site / f"{package}.dist-info" / part).write_bytes(content)
    code, document = examine(capsys)
    assert code == 1
    assert any("is damaged" in note and part in note for note in document["notes"])


@pytest.mark.timeout(60)
def test_a_pipe_in_the_place_of_the_source_is_unusable(site, capsys, oracle_dir):
    path = bring_trtllm(site)
    path.unlink()
    os.mkfifo(path)
    code, document = examine(capsys)
    assert code == 2
    assert "not a regular file" in document["reason"]
    assert cli.main(["emit-patch"]) == 2
    assert "not a regular file" in capsys.readouterr().err


def test_folders_and_dead_links_with_a_modules_name_are_none(site, capsys, oracle_dir):
    path = bring_trtllm(site)
    bring_flashinfer(site, oracle_dir, "0.7.4")
    without_b12x(path)
    torch_folder = site / "tensorrt_llm" / "_torch"
    (torch_folder / "dir.py").mkdir()
    (torch_folder / "link.py").symlink_to("nowhere")
    (torch_folder / "loop.py").symlink_to("loop.py")
    path.unlink()
    path.mkdir()
    code, document = examine(capsys)
    assert code == 0
    assert "has no NVFP4" in document["reason"]


def test_a_mark_alone_is_no_patch(site, capsys, oracle_dir):
    path = bring_trtllm(site)
    bring_flashinfer(site, oracle_dir, "0.7.4")
    mark = "# trtllm-b12x-fix 0.1.0, begin: strategy alphas\n"
    path.write_text(mark + path.read_text())
    code, document = examine(capsys)
    assert code == 1
    assert document["source"]["handling"] == "bakes"


def test_a_class_at_a_place_that_the_fix_does_not_watch(site, capsys, oracle_dir, monkeypatch):
    path = bring_trtllm(site)
    bring_flashinfer(site, oracle_dir, "0.7.4")
    path.rename(path.with_name("moved.py"))
    turn_on(monkeypatch)
    code, document = examine(capsys)
    assert code == 1
    assert document["source"]["handling"] == "bakes"
    assert "does not know tensorrt_llm._torch.moe.fused_moe.moved" in document["reason"]


def test_a_source_without_a_known_hook_is_refused_with_the_fix_on(
    site, capsys, oracle_dir, monkeypatch
):
    path = bring_trtllm(site)
    bring_flashinfer(site, oracle_dir, "0.7.4")
    path.write_text(path.read_text().replace("def transform_weights", "def prepare"))
    turn_on(monkeypatch)
    code, document = examine(capsys)
    assert code == 1
    assert "does not know what to patch" in document["reason"]
    monkeypatch.setenv("TRTLLM_B12X_FIX_ON_UNKNOWN", "cutlass")
    code, document = examine(capsys)
    assert code == 0
    assert {layer["strategy"] for layer in document["hold"]["layers"]} == {"cutlass"}


SIGNATURE = "def transform_weights(self, module: torch.nn.Module)"


@pytest.mark.parametrize(
    "signature",
    [
        "def transform_weights(self, layer: torch.nn.Module)",
        "def transform_weights(self, module: torch.nn.Module, stage)",
        "def transform_weights(self, module: torch.nn.Module, stage=None)",
        "def transform_weights(self, module, *args)",
        "def transform_weights(self, module, **kwargs)",
        "def transform_weights(self, *, module)",
        "def transform_weights(self, module, /)",
        "@staticmethod\n    def transform_weights(module)",
    ],
)
def test_a_hook_of_another_signature_is_refused_with_the_fix_on(
    site, capsys, oracle_dir, monkeypatch, signature
):
    """As the fix does: see tests/unit/test_trtllm_refusal.py."""
    path = bring_trtllm(site)
    bring_flashinfer(site, oracle_dir, "0.7.4")
    assert SIGNATURE in path.read_text()
    path.write_text(path.read_text().replace(SIGNATURE, signature))
    turn_on(monkeypatch)
    code, document = examine(capsys)
    assert code == 1
    assert "known is (self, module)" in document["reason"]
    assert "does not know what to patch" in document["reason"]
    monkeypatch.setenv("TRTLLM_B12X_FIX_ON_UNKNOWN", "cutlass")
    assert examine(capsys)[0] == 0


def test_an_upstream_that_needs_no_fix_but_would_be_refused_gets_a_note(site, capsys, oracle_dir):
    path = bring_trtllm(site, Era.FIXED)
    bring_flashinfer(site, oracle_dir, "0.7.4")
    assert SIGNATURE in path.read_text()
    path.write_text(path.read_text().replace(SIGNATURE, SIGNATURE[:-1] + ", stage=0)"))
    code, document = examine(capsys)
    assert code == 0
    assert any("leave TRTLLM_B12X_FIX unset" in note for note in document["notes"])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["b12x_moe.py", "blackwell_sm12x/moe_dispatch.py"])
@pytest.mark.parametrize("command", ["doctor", "emit-patch"])
def test_a_pipe_in_the_place_of_flashinfers_files_is_refused(
    site, capsys, oracle_dir, monkeypatch, name, command
):
    bring_trtllm(site)
    bring_flashinfer(site, oracle_dir, "0.7.4")
    path = site / "flashinfer" / "fused_moe" / "cute_dsl" / name
    path.unlink()
    os.mkfifo(path)
    turn_on(monkeypatch)
    if command == "doctor":
        code, document = examine(capsys)
        assert code == 1
        assert name in document["reason"]
    elif name == "b12x_moe.py":  # the one that it reads
        assert cli.main([command]) == 2
        assert "not a regular file" in capsys.readouterr().err


@pytest.mark.parametrize(("version", "code"), [("0.7.4", 0), ("0.6.16", 1)])
def test_a_patched_source(site, capsys, oracle_dir, version, code):
    path = bring_trtllm(site)
    bring_flashinfer(site, oracle_dir, version)
    target = site.parent / "out.patch"
    assert cli.main(["emit-patch", "--strategy", "alphas", "-o", str(target)]) == 0
    subprocess.run(["git", "apply", str(target)], cwd=site, check=True)
    capsys.readouterr()
    found, document = examine(capsys)
    assert document["source"]["handling"] == "patched"
    assert found == code
    assert "patched" in document["reason"]
    assert path.is_file()


# ---- with a model


def model(folder: Path, *, hidden=128, intermediate=256, gated=False, **config) -> Path:
    names = GATED if gated else UNGATED
    tensors = {}
    for block in range(2):
        tensors |= experts(QWEN.format(block), names, hidden=hidden, intermediate=intermediate)
    config = {"num_experts_per_tok": 2, **config}
    return save(folder / "model", tensors, config=config)


def test_a_model_of_relu2_alone(site, tmp_path, capsys, oracle_dir, monkeypatch):
    bring_trtllm(site)
    bring_flashinfer(site, oracle_dir, "0.6.16")
    turn_on(monkeypatch, "fp32-rescale")
    assert examine(capsys)[0] == 1  # a gated layer would be refused
    code, document = examine(capsys, "--model", str(model(tmp_path)))
    assert code == 0
    assert [layer["activation"] for layer in document["hold"]["layers"]] == ["relu2"]
    (shape,) = document["model"]["shapes"]
    assert shape == {
        "experts": 4,
        "hidden": 128,
        "intermediate": 256,
        "gated": False,
        "layers": 2,
        "top_k": 2,
    }


def test_padding_that_the_wrapper_is_not_told_of(site, tmp_path, capsys, oracle_dir, monkeypatch):
    path = model(tmp_path, intermediate=144)
    bring_flashinfer(site, oracle_dir, "0.7.4")
    bring_trtllm(site, Era.MODULES_TRANSFORM)
    turn_on(monkeypatch)
    assert examine(capsys)[0] == 0
    code, document = examine(capsys, "--model", str(path))
    assert code == 1
    assert "logical intermediate size (144)" in document["reason"]


def test_displaced_halves(site, tmp_path, capsys, oracle_dir, monkeypatch):
    bring_flashinfer(site, oracle_dir, "0.7.4")
    bring_trtllm(site)
    turn_on(monkeypatch)
    path = model(tmp_path, intermediate=96, gated=True)
    code, document = examine(capsys, "--model", str(path))
    assert code == 1
    assert "padded together" in document["reason"]


@pytest.mark.parametrize(("era", "code"), [(Era.MOE_TRANSFORM, 0), (Era.MODULES_TRANSFORM, 1)])
def test_a_w4a16_model(site, tmp_path, capsys, oracle_dir, era, code):
    bring_flashinfer(site, oracle_dir, "0.7.4")
    bring_trtllm(site, era)
    path = model(tmp_path)
    quantization = {"quantization": {"quant_algo": "W4A16_NVFP4"}}
    (path / "hf_quant_config.json").write_text(json.dumps(quantization))
    assert examine(capsys, "--model", str(path))[0] == code


def test_a_model_without_nvfp4_layers(site, tmp_path, capsys, oracle_dir):
    import torch

    bring_flashinfer(site, oracle_dir, "0.7.4")
    bring_trtllm(site)
    path = save(tmp_path / "model", {"lm_head.weight": torch.zeros(4, 4)})
    code, document = examine(capsys, "--model", str(path))
    assert code == 0
    assert "no NVFP4" in document["reason"]


def test_a_model_that_is_not_there(site, tmp_path, capsys):
    assert cli.main(["doctor", "--model", str(tmp_path / "absent")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "absent" in err


def test_a_quantization_config_that_is_no_json(tmp_path, capsys, site):
    path = model(tmp_path)
    (path / "hf_quant_config.json").write_text("{")
    assert cli.main(["doctor", "--model", str(path)]) == 2
    assert "hf_quant_config.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("intermediate", "gated", "size"),
    [(2688, False, 2688), (144, False, 256), (144, True, 192), (512, True, 512), (96, True, 128)],
)
def test_sizes_of_tensorrt_llms_tensors(intermediate, gated, size):
    assert tensor_intermediate(intermediate, gated=gated) == size


# ---- secrets and strange text


def test_only_named_variables_are_shown(site, capsys, oracle_dir, monkeypatch):
    bring_trtllm(site)
    bring_flashinfer(site, oracle_dir, "0.7.4")
    monkeypatch.setenv("HF_TOKEN", "hf_secret_value")
    monkeypatch.setenv("TRTLLM_B12X_FIX_TOKEN", "hf_secret_value")
    monkeypatch.setenv("TLLM_WORKER_USE_SINGLE_PROCESS", "1")
    monkeypatch.setenv(switch.CUTOVER, "1386")
    for options in ([], ["--json", "-"]):
        cli.main(["doctor", *options])
        text = capsys.readouterr().out
        assert "hf_secret_value" not in text
        assert "1386" in text
        assert "TLLM_WORKER_USE_SINGLE_PROCESS" in text


def test_escape_sequences_do_not_reach_the_terminal(site, capsys, monkeypatch):
    bring_trtllm(site)
    monkeypatch.setenv(switch.CUTOVER, "\x1b[31m" + "9" * 500)
    monkeypatch.setattr(
        environment, "read_gpus", lambda: ((Gpu("\x1b]0;title\x07"),), "nvidia-smi")
    )
    cli.main(["doctor"])
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "9" * 300 not in text


# ---- odd installations


def test_a_leftover_folder(site, capsys):
    (site / "tensorrt_llm" / "libs").mkdir(parents=True)
    code, document = examine(capsys)
    assert code == 2
    assert any("without __init__.py" in note for note in document["notes"])


def test_several_distributions(site, capsys, oracle_dir):
    bring_trtllm(site)
    bring_flashinfer(site, oracle_dir, "0.7.4")
    older = site / "tensorrt_llm-1.2.0.dist-info"
    older.mkdir()
    (older / "METADATA").write_text("Name: tensorrt_llm\nVersion: 1.2.0\n")
    _, document = examine(capsys)
    assert any("several distributions" in note for note in document["notes"])


def test_a_checkout_on_the_path(tmp_path, monkeypatch, capsys):
    (tmp_path / "setup.py").touch()
    bring_trtllm(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    code, document = examine(capsys)
    assert code == 1
    assert any("source checkout" in note for note in document["notes"])


# ---- the environment


def distribution(site: Path, name: str, version: str, files: tuple[str, ...] = ()) -> None:
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    (folder / "RECORD").write_text("".join(f"{file},,\n" for file in files))


def cutlass(site: Path, **payloads: tuple[str, ...]) -> environment.Cutlass:
    distribution(site, "nvidia-cutlass-dsl", "4.8.1")
    for name, files in payloads.items():
        distribution(site, f"nvidia-cutlass-dsl-libs-{name}", "4.8.1", files)
    return environment.read_cutlass()


def test_payloads_side_by_side_are_fine(site):
    found = cutlass(site, base=(), cu12=("d/a.cu12.so",), cu13=("d/a.cu13.so",))
    assert [name for name, _ in found.payloads] == ["base", "cu12", "cu13"]
    assert found.problems == ()


def test_payloads_that_overwrite_each_other(site):
    found = cutlass(site, cu12=("d/a.so", "d/b.so"), cu13=("d/a.so",))
    assert len(found.problems) == 1
    assert "overwrite each other (1 files, such as d/a.so)" in found.problems[0]


def test_one_payload_alone_clashes_with_nothing(site):
    assert cutlass(site, cu12=("d/a.so",)).problems == ()


def test_a_payload_of_another_version(site):
    distribution(site, "nvidia-cutlass-dsl-libs-base", "4.5.0")
    found = cutlass(site)
    assert "libs-base is 4.5.0, nvidia-cutlass-dsl is 4.8.1" in found.problems[0]


def test_the_real_payloads(oracle_dir, monkeypatch):
    monkeypatch.syspath_prepend(str(oracle_dir("flashinfer-deps")))
    found = environment.read_cutlass()
    assert found.version == dict(found.payloads)["cu12"]
    assert found.problems == ()


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.95.05  Release\n",
            "580.95.05",
        ),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.133.20  Thu\n", "570.133.20"),
        ("something else\n", None),
    ],
)
def test_the_driver(tmp_path, text, version):
    (tmp_path / "version").write_text(text)
    assert read_driver(tmp_path / "version") == version
    assert read_driver(tmp_path / "absent") is None


def test_what_nvidia_smi_says():
    text = "NVIDIA GB10, 12.1\nA, B, 9.0\nNVIDIA Thor, [N/A]\n\nno comma\n"
    assert parse_smi(text) == (Gpu("NVIDIA GB10", (12, 1)), Gpu("A, B", (9, 0)), Gpu("NVIDIA Thor"))


@pytest.mark.parametrize(
    ("script", "gpus"),
    [
        ("echo 'NVIDIA GB10, 12.1'", (Gpu("NVIDIA GB10", (12, 1)),)),
        ("exit 9", ()),
        ("sleep 30", ()),
    ],
    ids=["answers", "fails", "hangs"],
)
def test_asking_nvidia_smi(tmp_path, monkeypatch, script, gpus):
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    monkeypatch.undo()  # the fixture's own read_gpus
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(environment, "SMI_SECONDS", 1.0)
    monkeypatch.setattr(environment, "GPU_FOLDER", tmp_path / "gpus")
    assert environment.read_gpus()[0] == gpus


def test_names_from_the_driver_without_nvidia_smi(tmp_path, monkeypatch):
    monkeypatch.undo()
    (tmp_path / "0000:01:00.0").mkdir()
    (tmp_path / "0000:01:00.0" / "information").write_text("Model: \t\t NVIDIA GB10\nIRQ: 1\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(environment, "GPU_FOLDER", tmp_path)
    assert environment.read_gpus() == ((Gpu("NVIDIA GB10"),), "the driver")


def test_torch_is_read_from_its_version_file(site):
    package = site / "torch"
    package.mkdir()
    (package / "__init__.py").write_text(POISON)
    (package / "version.py").write_text("__version__ = '2.11.0a0+nv26.02'\ncuda: str = '13.1'\n")
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        "from trtllm_b12x_fix.doctor.environment import _torch; print(_torch())"
    )
    command = [sys.executable, "-c", script, str(site)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert "'13.1'" in done.stdout


BASE_INSTALL = """
import sys
for name in ("torch", "numpy", "safetensors", "rich", "matplotlib", "numba"):
    sys.modules[name] = None
from trtllm_b12x_fix.cli import main
sys.exit(main(sys.argv[1:]))
"""


def base_install(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": f"{site}:{ROOT}"}
    command = [sys.executable, "-c", BASE_INSTALL, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environ)


def test_the_base_install_without_torch(site, oracle_dir):
    bring_trtllm(site)
    bring_flashinfer(site, oracle_dir, "0.6.18")
    done = base_install(site, "doctor", "--json", "-")
    assert done.returncode == 1, done.stderr
    document = json.loads(done.stdout)
    assert "torch cannot be imported" in document["hold"]["unknown"]
    assert document["source"]["handling"] == "bakes"
    assert document["advisories"]
    done = base_install(site, "doctor", "--model", str(site))
    assert done.returncode == 2
    assert "--model needs torch and safetensors" in done.stderr
    done = base_install(site, "emit-patch")
    assert done.returncode == 0, done.stderr
    assert "begin: strategy alphas" in done.stdout


# ---- the start-up file


def test_the_hook_is_seen(monkeypatch):
    monkeypatch.undo()
    startup.install()
    try:
        assert switch.read_switch({"TRTLLM_B12X_FIX": "auto"}).is_on
        assert not switch.read_switch({}).is_on
    finally:
        startup.uninstall()
    assert not switch.read_switch({"TRTLLM_B12X_FIX": "auto"}).is_on


def test_the_start_up_file_is_found(site):
    assert str(site / switch.STARTUP_FILE) not in switch.startup_files()
    (site / switch.STARTUP_FILE).write_text("")
    assert str(site / switch.STARTUP_FILE) in switch.startup_files()
    assert (ROOT / switch.STARTUP_FILE).is_file()


def test_names_of_variables_are_those_that_others_use():
    assert switch.FORCE_W4A16 == b12x_wrapper.FORCE_W4A16
    assert switch.CUTOVER == b12x_dispatch.CUTOVER


# ---- advisories

SUPER = LayerShape(512, 1024, 2688, gated=False, layers=40, top_k=22)
SMALL = LayerShape(128, 2048, 512, gated=True, layers=48, top_k=8)


def keys(version: str, *shapes: LayerShape) -> set[str]:
    return {one.key.value for one in advisories_for(version, shapes)}


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.6.16", {"micro-race", "static-race", "subnormals-misread"}),
        ("0.6.17", {"micro-race", "direct-micro-multiplies", "fold-raises"}),
        ("0.6.18", {"micro-race", "direct-micro-multiplies", "fold-raises"}),
        ("0.7.0", {"micro-race", "direct-micro-multiplies", "fold-raises"}),
        ("0.7.1", {"micro-race", "direct-micro-multiplies", "fold-raises"}),
        ("0.7.2.post1", {"micro-race", "fold-raises"}),
        ("0.7.4", set()),
    ],
)
def test_advisories_of_each_version(version, expected):
    assert keys(version) == expected | {"bf16-atomics", "second-copy"}


@pytest.mark.parametrize(
    "version",
    [
        *KNOWN_VERSIONS,
        *("0.6.15", "0.6.18.post2", "0.6.19", "0.7.2.post1", "0.7.3", "0.7.4.post1", "0.7.5"),
        "0.7.4rc1",
    ],
)
def test_advisories_are_known_for_what_the_contracts_know(version):
    try:
        contract = contract_for(version)
    except UnsupportedVersionError:
        assert not is_known(version)
        assert advisories_for(version) == ()
        return
    assert is_known(version)
    multiplies = contract.direct_micro.value == "multiplies"
    assert ("direct-micro-multiplies" in keys(version)) == multiplies
    misreads = "misreading" in contract.quantizer.value
    assert ("subnormals-misread" in keys(version)) == misreads
    # The fold came with the argument that is folded.
    separate = contract.input_scale.value == "input_global_scale"
    assert ("fold-raises" in keys(version)) <= separate


def copies(version: str, **changes: int) -> int | None:
    shape = replace(SUPER, layers=1, **changes)
    found = [one for one in advisories_for(version, (shape,)) if one.key is Key.SECOND_COPY]
    return found[0].bytes if found else None


def test_second_copies_of_the_reported_layer():
    """512 experts of two 1024 x 2816 matrices, at 9/16 byte a weight."""
    assert copies("0.6.18") is None
    assert copies("0.7.2") == 512 * 2 * 1024 * 2816 * 9 // 16
    assert copies("0.7.2", intermediate=2560) is None
    assert copies("0.7.4") is None


@pytest.mark.parametrize(
    ("version", "intermediate", "size"),
    [
        ("0.6.16", 192, 256 * 9 / 16),
        ("0.6.18", 128, None),
        ("0.7.0", 192, 256 * 9 / 16),
        ("0.7.0", 320, (384 + 512) * 9 / 16),
        ("0.7.4", 192, 256 / 16),
        ("0.7.4", 200, 256 * 9 / 16),
        ("0.7.4", 128, 256 * 9 / 16),
        ("0.7.4", 256, None),
    ],
)
def test_second_copies(version, intermediate, size):
    expected = None if size is None else round(512 * 2 * 1024 * size)
    assert copies(version, intermediate=intermediate) == expected


def test_a_gated_layer_has_three_matrices():
    gated = advisories.second_copy_bytes(Version("0.7.2"), replace(SUPER, gated=True))
    assert 2 * gated == 3 * advisories.second_copy_bytes(Version("0.7.2"), SUPER)


def test_shapes_narrow_what_is_said():
    assert "direct-micro-multiplies" not in keys("0.6.18", SUPER)
    assert "direct-micro-multiplies" in keys("0.6.18", SUPER, SMALL)
    assert "direct-micro-multiplies" not in keys("0.6.18", replace(SMALL, hidden=8192))
    assert "direct-micro-multiplies" not in keys("0.6.18", replace(SMALL, top_k=32))
    (atomics,) = (a for a in advisories_for("0.7.4", (SUPER,)) if a.key is Key.BF16_ATOMICS)
    assert re.search(r"462 adds, about 2\.4%", atomics.shapes[0])


def test_the_report_names_sizes(site, tmp_path, capsys, oracle_dir):
    bring_trtllm(site)
    bring_flashinfer(site, oracle_dir, "0.7.2")
    path = model(tmp_path, intermediate=384)
    code, document = examine(capsys, "--model", str(path))
    assert code == 1
    (copy_,) = (one for one in document["advisories"] if one["key"] == "second-copy")
    # Two layers of four experts.
    assert copy_["bytes"] == 2 * 4 * 2 * 128 * 512 * 9 // 16
    assert copy_["cured_by"] == "0.7.4"
    cli.main(["doctor", "--model", str(path)])
    assert "here 0.6 MiB in all" in capsys.readouterr().out


def test_reading_a_model_reads_no_tensor(tmp_path, monkeypatch):
    from trtllm_b12x_fix.checkpoint.files import Checkpoint

    def fail(*_args: object) -> None:
        raise AssertionError("a tensor was read")

    path = model(tmp_path)
    monkeypatch.setattr(Checkpoint, "get", fail)
    monkeypatch.setattr(Checkpoint, "get_row", fail)
    assert read_model(path).shapes[0].layers == 2


def test_gathering_without_a_model_is_one_look():
    """What the mutants replace is what the command calls."""
    assert diagnosis.diagnose(diagnosis.gather(None)).verdict is Verdict.NOTHING
