"""The command: what it prints, writes and returns; JSON, matrix, options, several paths."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import textwrap

import pytest
import torch

from tests.checkpoints import UNGATED, save
from tests.scan_cases import (
    CONFIG,
    PREFIX,
    SMALL,
    codes,
    command,
    document,
    run,
    sound,
    tensor,
    with_dense,
)
from trtllm_b12x_fix import cli
from trtllm_b12x_fix.checkpoint import declared
from trtllm_b12x_fix.commands import scan as scan_command
from trtllm_b12x_fix.commands.progress import ProgressLine
from trtllm_b12x_fix.doctor import model as doctor_model
from trtllm_b12x_fix.doctor.advisories import LayerShape, second_copy_bytes
from trtllm_b12x_fix.emulator.contract import KNOWN_VERSIONS
from trtllm_b12x_fix.report.scan_document import SCHEMA, SEVERAL_SCHEMA
from trtllm_b12x_fix.scan import matrix
from trtllm_b12x_fix.scan.counting import Meter
from trtllm_b12x_fix.scan.matrix import Backend, Fit, backend_matrix
from trtllm_b12x_fix.scan.result import BLIND, FailOn


@pytest.fixture
def clean(tmp_path):
    return save(tmp_path / "clean", with_dense(), shards=2, index=True, config=CONFIG)


@pytest.fixture
def affected(tmp_path):
    return save(tmp_path / "affected", sound(scale=SMALL), config=CONFIG)


def lines(text: str) -> str:
    return " ".join(text.split())


def test_a_clean_report(clean):
    code, out, err = command(clean)
    assert (code, err) == (0, "")
    assert "VERDICT  clean: not affected" in lines(out).replace("VERDICT clean", "VERDICT  clean")
    for words in (BLIND, "check-layer --checkpoint", "dense NVFP4 linears", "Codes were not read"):
        assert words in lines(out)


def test_an_affected_report_says_what_to_do(affected):
    code, out, _ = command(affected)
    assert code == 1
    shown = lines(out)
    for words in (
        "VERDICT affected: the b12x bake (TensorRT-LLM, vLLM and SGLang do it) damages 12 of 12",
        "trtllm-b12x-fix run -- trtllm-serve",
        "moe_config.backend: CUTLASS",
        f"check-layer --checkpoint {affected} --layer 5",
        f"{PREFIX}.",
    ):
        assert words in shown


def test_what_cannot_be_seen_is_said_on_every_clean_result(clean, affected):
    for path, arguments in ((clean, ()), (clean, ("--weights",))):
        assert BLIND in lines(command(path, *arguments)[1])
    assert document(clean)[1]["cannot_be_seen"] == BLIND
    assert "check-layer" in BLIND


def test_the_json(clean, affected):
    code, report = document(affected)
    assert code == 1
    assert list(report)[:4] == ["schema", "tool", "source", "verdict"]
    assert (report["schema"], report["verdict"]) == (SCHEMA, "affected")
    assert (report["source"], report["weights_read"]) == ("affected", False)
    totals = report["totals"]
    assert (totals["layers"], totals["projections"], totals["matrices"]) == (1, 3, 12)
    assert totals["affected_matrices"] == 12
    assert totals["scale_bytes"] == totals["blocks"] == 12 * 128
    assert 0 < totals["mean_error"] < 1
    assert totals["weight_error"] is None
    assert len(report["projections"]) == 3
    for projection in report["projections"]:
        assert sum(projection["stored_bytes"]) == sum(projection["baked_bytes"]) == 4 * 128
        assert len(projection["worst"]) == 4
        assert projection["kind"] == "experts"
        rms = [one["rms_error"] for one in projection["worst"]]
        assert rms == sorted(rms, reverse=True)
    assert len(report["matrix"]) == 3 * 4
    assert document(clean)[1]["dense"][0]["kind"] == "dense"


def test_the_json_with_codes(clean):
    _, report = document(clean, "--weights")
    assert report["totals"]["weight_bytes"] == 8 * report["totals"]["scale_bytes"]
    assert 0 < report["totals"]["weight_error"] < 0.06
    assert all(one["zero_blocks"] == 0 for one in report["projections"])


def test_reports_go_to_files_and_the_table_is_printed(clean, tmp_path):
    targets = ("--json", tmp_path / "r.json", "--html", tmp_path / "r.html")
    code, out, _ = command(clean, *targets)
    assert code == 0
    assert "VERDICT" in out
    assert json.loads((tmp_path / "r.json").read_text())["verdict"] == "clean"
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--json", "-", "--html", "-"), "only one report"),
        (("--json", "/nowhere/x.json"), "cannot write"),
        (("--html", "/nowhere/x.html"), "cannot write"),
    ],
)
def test_targets_that_cannot_be_written(clean, arguments, word):
    code, out, err = command(clean, *arguments)
    assert (code, out) == (2, "")
    assert word in err


@pytest.mark.parametrize("threads", ["0", "-1", "x", "1.5", "65", "1000000"])
def test_threads_must_be_a_number(clean, threads):
    with pytest.raises(SystemExit) as error:
        command(clean, "--threads", threads)
    assert error.value.code == 2


def test_an_empty_path_is_not_the_working_directory(clean, monkeypatch, capsys):
    monkeypatch.chdir(clean)
    with pytest.raises(SystemExit) as error:
        scan_command.run(cli.build_parser().parse_args(["scan", ""]))
    assert error.value.code == 2
    assert "an empty path" in capsys.readouterr().err


@pytest.mark.parametrize(("fail_on", "expected"), [("damage", 1), ("findings", 1), ("never", 0)])
def test_fail_on(affected, fail_on, expected):
    assert command(affected, "--fail-on", fail_on)[0] == expected


def test_fail_on_findings(tmp_path):
    tensors = sound()
    tensors[tensor("gate_proj", "input_scale")] *= 2
    save(tmp_path / "noted", tensors)
    assert command(tmp_path / "noted")[0] == 0
    assert command(tmp_path / "noted", "--fail-on", "findings")[0] == 1
    assert "1 note below" in command(tmp_path / "noted")[1]


def test_several_paths(clean, affected):
    code, out, _ = command(clean, affected)
    assert code == 1
    assert out.count("VERDICT") == 2
    code, report = document(clean, affected)
    assert (code, report["schema"], report["verdict"]) == (1, SEVERAL_SCHEMA, "affected")
    assert [one["verdict"] for one in report["reports"]] == ["clean", "affected"]


def test_threads_and_storage_do_not_change_the_numbers(tmp_path):
    tensors = sound(scale=SMALL)
    reports = []
    for place, (shards, threads) in enumerate([(1, 1), (3, 2), (4, 5)]):
        path = save(tmp_path / str(place), tensors, shards=shards, index=shards > 1)
        reports.append(document(path, "--threads", threads, "--weights")[1])
    for report in reports:
        assert report["projections"] == reports[0]["projections"]


def test_names_agree():
    assert tuple(one.value for one in FailOn) == scan_command.FAIL_ON
    assert matrix.VERSIONS == KNOWN_VERSIONS
    assert declared.W4A16 == doctor_model.W4A16


def test_neither_torch_nor_safetensors_is_needed(clean):
    script = f"""
    import sys
    for name in ("torch", "safetensors", "numba", "matplotlib", "rich"):
        sys.modules[name] = None
    from trtllm_b12x_fix.cli import main
    code = main(["scan", {str(clean)!r}, "--weights", "--html", "{clean}/r.html"])
    sys.exit(code)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "numpy); no GPU" in lines(done.stdout)


def test_numpy_is_needed_and_its_absence_said(clean):
    script = (
        "import sys; sys.modules['numpy'] = None\n"
        f"from trtllm_b12x_fix.cli import main; sys.exit(main(['scan', {str(clean)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "trtllm-b12x-fix: scan needs numpy: pip install numpy\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_tells_bytes_rate_and_time_left(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with ProgressLine("scan", quiet=False) as progress:
        meter = Meter(4_000_000_000, progress)
        meter._told = meter._began = meter._began - 2
        meter.add(1_000_000_000)
        meter.tell()
        meter.tell()  # too soon
    assert terminal.getvalue().count("of 4.00 GB") == 1
    assert "1.00 of 4.00 GB, 0.50 GB/s, 6 s left" in terminal.getvalue()


def test_quiet_says_nothing_on_a_terminal(clean, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert scan_command.ProgressLine("x", quiet=True)._active is False


def test_control_characters_in_names_do_not_reach_the_terminal(tmp_path):
    tensors = {n.replace("layers.5", "lay\x1b[31mers.5"): t for n, t in sound().items()}
    out = command(save(tmp_path, tensors))[1]
    assert "\x1b" not in out
    assert "lay?[31mers.5" in out


# ---- the backend matrix

SUPER = LayerShape(512, 1024, 2688, gated=False, layers=40, top_k=22)


def rows(shape: LayerShape, backend: Backend):
    return {row.tp: row for row in backend_matrix([shape]) if row.backend is backend}


def test_a_shape_is_cut_and_padded():
    b12x = rows(SUPER, Backend.B12X)
    assert [(row.intermediate, row.padded_intermediate) for row in b12x.values()] == [
        (2688, 2688), (1344, 1408), (672, 768), (336, 384)
    ]  # fmt: skip
    assert [row.fit for row in b12x.values()] == [Fit.ALIGNED, *[Fit.PADDED] * 3]
    assert all(row.bakes for row in b12x.values())
    for backend in (Backend.CUTLASS, Backend.TRTLLM_GEN):
        assert not any(row.bakes or row.versions for row in rows(SUPER, backend).values())


def test_traps_and_copies_follow_version_and_size():
    b12x = rows(SUPER, Backend.B12X)
    traps = {
        (tp, one.version): "direct-micro-multiplies" in one.traps
        for tp, row in b12x.items()
        for one in row.versions
    }
    # Direct micro takes an intermediate of at most 512, and multiplies in 0.6.17 to 0.7.1.
    assert {key for key, trapped in traps.items() if trapped} == {
        (8, "0.6.17"), (8, "0.6.18"), (8, "0.7.0")
    }  # fmt: skip
    copies = {one.version: one.second_copy_bytes for one in b12x[1].versions}
    assert copies["0.6.18"] == copies["0.7.4"] == 0
    assert copies["0.7.2"] == 40 * second_copy_bytes(matrix.Version("0.7.2"), SUPER) > 10**9


def test_a_shape_that_cannot_be_cut():
    odd = LayerShape(8, 2048, 1872, gated=True, layers=2)
    fits = {tp: row.fit for tp, row in rows(odd, Backend.CUTLASS).items()}
    assert fits[1] is Fit.PADDED
    assert fits[2] is fits[4] is fits[8] is Fit.IMPOSSIBLE
    assert "whole blocks of 16" in rows(odd, Backend.B12X)[4].notes[0]


def test_trtllm_gens_hidden_size():
    nano = LayerShape(128, 2688, 1856, gated=False)
    assert rows(nano, Backend.TRTLLM_GEN)[1].padded_hidden == 2816
    assert "vllm#52308" in rows(nano, Backend.TRTLLM_GEN)[1].notes[0]
    assert rows(SUPER, Backend.TRTLLM_GEN)[1].notes == ()


def test_displaced_halves_are_noted():
    shape = LayerShape(8, 2048, 96, gated=True)
    assert "in the wrong place" in rows(shape, Backend.B12X)[1].notes[0]
    assert rows(shape, Backend.CUTLASS)[1].notes == ()


def test_the_table_shows_all_shapes(tmp_path):
    tensors = sound() | sound("model.layers.6.mlp.experts", UNGATED)
    result = run(save(tmp_path, tensors, config=CONFIG))
    assert len(result.matrix) == 24
    out = lines(command(tmp_path)[1])
    assert "1 x SwiGLU, 4 experts" in out
    assert "1 x relu2, 4 experts" in out
    assert codes(result) == []
    assert torch.is_tensor(tensors[tensor("up_proj", "weight")])
