"""The command line, called in this process on the embedded layer, and in processes of its own.

Exit codes are the contract: 0 good, 1 a finding, 2 input that cannot be used. Python's own exit
code for a crash is 1, so a crash must never get out: it would read as a finding.
"""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import xml.etree.ElementTree as ET
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from trtllm_b12x_fix import cli
from trtllm_b12x_fix.commands import COMMANDS, check_layer, parsing
from trtllm_b12x_fix.emulator.arithmetic import KernelFamily
from trtllm_b12x_fix.layer_check.arms import Arm

ROOT = Path(__file__).resolve().parents[2]
#: Whatever FlashInfer is installed here, the tests speak of this one.
BASE = ("check-layer", "--device", "cpu", "--flashinfer", "0.6.18")
QUICK = (*BASE, "--rows", "1", "--arms", "fix,baked")


@dataclass(frozen=True)
class Outcome:
    code: object
    out: str
    err: str


def call(*arguments: str) -> Outcome:
    """Run the command in this process; standard error is no terminal."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code: object = cli.main(arguments)
        except SystemExit as stop:  # argparse
            code = stop.code
    return Outcome(code, out.getvalue(), err.getvalue())


def in_shell(line: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash in which ``$CLI`` is the command."""
    program = f"CLI='{sys.executable} -m trtllm_b12x_fix'\n{line}"
    return subprocess.run(
        ["bash", "-c", program],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def parse_strictly(text: str) -> dict:
    def refuse(word: str) -> None:
        pytest.fail(f"not JSON: {word}")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Small products, often on a busy machine: a second thread costs more than it brings."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def good() -> Outcome:
    """Every default arm at two row counts, as JSON on standard output."""
    return call(*BASE, "--rows", "1,8", "--json", "-")


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[Outcome, Path]:
    """A run with a gate that fails and both kinds of report in files."""
    folder = tmp_path_factory.mktemp("reports")
    targets = ("--json", str(folder / "r.json"), "--plot", str(folder / "r.svg"))
    return call(*QUICK, "--gate", "baked:1", *targets), folder


# ---- good, finding


def test_the_fix_is_good(good):
    assert (good.code, good.err) == (0, "")


def test_json_alone_is_on_standard_output(good):
    document = parse_strictly(good.out)
    assert document["schema"] == "trtllm-b12x-fix/check-layer/1"
    assert document["verdict"] == "good"
    assert document["flashinfer"]["version"] == "0.6.18"
    assert document["flashinfer"]["contract"] == "data"
    assert document["evidence"] == "emulated on cpu; no FP4 kernel ran"
    assert document["own_magnitude"]["baked"]["arm"] == "baked"


def test_the_document_has_every_default_arm_at_every_row_count(good):
    results = parse_strictly(good.out)["results"]
    cells = [(result["rows"], result["arm"]) for result in results]
    arms = ["fix", "baked", "alphas", "unit"]  # the layer is SwiGLU: no fp32-rescale
    assert cells == [(rows, arm) for rows in (1, 8) for arm in arms]


def test_figures_are_fractions(good):
    document = parse_strictly(good.out)
    by_cell = {(r["rows"], r["arm"]): r for r in document["results"]}
    assert by_cell[1, "fix"]["fidelity"]["relative_rms"] == 0
    assert by_cell[8, "fix"]["fidelity"]["relative_rms"] == 0
    assert 0.1 < by_cell[8, "baked"]["fidelity"]["relative_rms"] < 0.5
    assert document["gates"][0]["limit"] == 0.01


def test_the_trap_of_this_version_is_in_the_document(good):
    by_cell = {(r["rows"], r["arm"]): r for r in parse_strictly(good.out)["results"]}
    assert by_cell[1, "alphas"]["kernel"] == "direct-micro"
    assert "multiplies" in by_cell[1, "alphas"]["trap"]
    assert by_cell[1, "fix"]["kernel"] == "micro"
    assert by_cell[1, "fix"]["trap"] is None


def test_a_gate_that_fails_is_exit_1(written):
    outcome, _ = written
    assert (outcome.code, outcome.err) == (1, "")
    assert "VERDICT  FINDING" in outcome.out.splitlines()
    assert "gate baked at most 1.00%: FAILED" in outcome.out


def test_reports_in_files_leave_the_text_on_standard_output(written):
    outcome, folder = written
    assert outcome.out.startswith("layer    SmolLM2")
    assert sorted(os.listdir(folder)) == ["r.json", "r.svg"]


def test_the_json_file_says_what_the_text_says(written):
    document = parse_strictly((written[1] / "r.json").read_text(encoding="utf-8"))
    assert document["verdict"] == "finding"
    assert [(gate["arm"], gate["limit"], gate["passed"]) for gate in document["gates"]] == [
        ("baked", 0.01, False)
    ]


def test_the_svg_file_is_self_contained(written):
    text = (written[1] / "r.svg").read_text(encoding="utf-8")
    for element in ET.fromstring(text).iter():
        assert element.tag.rpartition("}")[2] not in {"script", "image", "foreignObject"}
        for name, value in element.attrib.items():
            assert name.rpartition("}")[2] != "href" or value.startswith("#")
            assert all(url.startswith("#") for url in re.findall(r"url\(([^)]*)\)", value))
    assert "@import" not in text


def test_every_gate_counts():
    outcome = call(*QUICK, "--gate", "fix:1", "--gate", "baked:0.5%")
    assert outcome.code == 1
    assert "gate fix at most 1.00%: passed" in outcome.out
    assert "gate baked at most 0.50%: FAILED" in outcome.out


def test_swiglu_on_a_version_without_an_exact_form_is_a_finding():
    outcome = call("check-layer", "--flashinfer", "0.6.16", "--rows", "1", "--arms", "fix,baked")
    assert (outcome.code, outcome.err) == (1, "")
    assert "VERDICT  FINDING" in outcome.out
    # The line is wrapped; the verdict's paragraph ends at the first empty line.
    gate = " ".join(outcome.out.partition("gate fix")[2].partition("\n\n")[0].split())
    assert "FAILED" in gate
    assert "CUTLASS" in gate
    assert re.search(r"cutlass +fix .*no figures: see notes", outcome.out)


def test_a_forced_kernel_is_the_one_that_runs():
    outcome = call(*QUICK, "--kernel", "dynamic", "--json", "-")
    results = parse_strictly(outcome.out)["results"]
    assert outcome.code == 0
    assert {result["kernel"] for result in results} == {"dynamic"}


def test_without_the_fix_there_is_no_gate():
    outcome = call(*BASE, "--rows", "1", "--arms", "baked", "--json", "-")
    assert outcome.code == 0
    assert parse_strictly(outcome.out)["gates"] == []


# ---- input that cannot be used


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--arms", "fix", "--gate", "baked:1"), ("baked", "--arms")),
        (("--flashinfer", "0.6.19"), ("0.6.19", "--flashinfer")),
        (("--flashinfer", "newest"), ("newest",)),
        (("--kernel", "direct-micro", "--rows", "17"), ("direct-micro", "0.6.18", "17", "--rows")),
        (("--kernel", "micro", "--rows", "17"), ("micro", "0.6.18", "17", "--rows")),
        (
            ("--kernel", "direct-micro", "--flashinfer", "0.6.16"),
            ("0.6.16", "direct micro"),
        ),
        (("--rows", "999"), ("999", "128")),
    ],
)
def test_unusable_input_is_exit_2_with_one_line(arguments, words):
    outcome = call(*QUICK, *arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("trtllm-b12x-fix: ")
    assert outcome.err.count("\n") == 1
    assert all(word in outcome.err for word in words)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--rows", "0"),
        ("--rows", "-1"),
        ("--rows", "a"),
        ("--rows", "1,1"),
        ("--rows", ""),
        ("--rows", "1,"),
        ("--rows", "1.5"),
        ("--arms", "nope"),
        ("--arms", "fix,fix"),
        ("--arms", ""),
        ("--gate", "fix"),
        ("--gate", "fix:"),
        ("--gate", "fix:-1"),
        ("--gate", "fix:nan"),
        ("--gate", "fix:1e400"),
        ("--gate", "nope:1"),
        ("--kernel", "cutlass"),
        ("--device", "tpu"),
        ("--seed", "x"),
    ],
)
def test_a_wrong_argument_is_exit_2_with_the_usage(arguments):
    outcome = call("check-layer", *arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("usage: trtllm-b12x-fix check-layer")
    assert arguments[0] in outcome.err


@pytest.mark.parametrize("arguments", [(), ("no-such-command",), ("check-layer", "--no-such")])
def test_a_command_line_that_is_not_understood_is_exit_2(arguments):
    outcome = call(*arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert "usage:" in outcome.err
    assert outcome.err.startswith("usage: ")


@pytest.mark.parametrize("seed", ["99999999999999999999", "9223372036854775807"])
def test_a_seed_too_large_for_torch_is_exit_2(seed):
    outcome = call(*QUICK, "--seed", seed)
    assert (outcome.code, outcome.out) == (2, "")
    assert "seed" in outcome.err
    assert seed in outcome.err


def test_a_cuda_device_that_is_not_there_is_exit_2(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    outcome = call(*QUICK, "--device", "cuda")
    assert (outcome.code, outcome.out) == (2, "")
    assert "--device cpu" in outcome.err


def test_a_report_that_cannot_be_written_is_exit_2(tmp_path):
    outcome = call(*QUICK, "--json", str(tmp_path / "nonexistent" / "x.json"))
    assert outcome.code == 2
    assert "nonexistent/x.json" in outcome.err
    assert os.listdir(tmp_path) == []


def test_a_failure_leaves_no_half_report(tmp_path):
    targets = ("--plot", str(tmp_path / "x.svg"), "--json", str(tmp_path / "absent" / "x.json"))
    assert call(*QUICK, *targets).code == 2
    assert os.listdir(tmp_path) == []


def test_two_reports_cannot_share_standard_output():
    outcome = call(*QUICK, "--json", "-", "--plot", "-")
    assert (outcome.code, outcome.out) == (2, "")


@pytest.mark.parametrize(
    ("module", "arguments"), [("safetensors", ()), ("matplotlib", ("--plot",))]
)
def test_a_missing_package_is_named(monkeypatch, tmp_path, module, arguments):
    monkeypatch.setitem(sys.modules, module, None)
    target = tmp_path / "x.svg"
    outcome = call(*QUICK, *arguments, *([str(target)] if arguments else []))
    assert (outcome.code, outcome.out) == (2, "")
    assert module in outcome.err
    assert "pip install" in outcome.err
    assert not target.exists()


def test_without_torch_the_check_says_so():
    done = python(
        "import sys; sys.modules['torch'] = None\n"
        "from trtllm_b12x_fix.cli import main\n"
        "sys.exit(main(['check-layer']))"
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("trtllm-b12x-fix: check-layer needs torch")
    assert done.stderr.count("\n") == 1


# ---- help, and names that must agree


@pytest.fixture(scope="module")
def help_texts() -> dict[str, str]:
    """Help of the program and of every subcommand, printed where torch is not importable."""
    names = ["", *(command.NAME for command in COMMANDS)]
    texts = {}
    for name in names:
        done = python(
            "import sys; sys.modules['torch'] = None\n"
            "from trtllm_b12x_fix.cli import main\n"
            f"main([*{name.split()!r}, '--help'])"
        )
        assert (done.returncode, done.stderr) == (0, "")
        texts[name] = done.stdout
    return texts


def test_help_lists_every_subcommand(help_texts):
    assert "exit codes: 0 good, 1" in help_texts[""]
    for command in COMMANDS:
        assert re.search(rf"^ +{re.escape(command.NAME)}\b", help_texts[""], re.MULTILINE)


def test_help_explains_every_arm(help_texts):
    for arm in Arm:
        assert re.search(rf"^  {arm.value} +\w", help_texts["check-layer"], re.MULTILINE)


def test_help_lists_every_kernel(help_texts):
    assert "{auto,direct-micro,micro,static,dynamic}" in help_texts["check-layer"]


def test_arm_names_are_the_arms():
    assert list(parsing.ARM_NAMES) == [arm.value for arm in Arm]


def test_kernel_names_are_auto_and_the_families():
    assert list(check_layer.KERNEL_NAMES) == ["auto", *(family.value for family in KernelFamily)]


def test_every_command_is_complete():
    assert len({command.NAME for command in COMMANDS}) == len(COMMANDS) > 0
    for command in COMMANDS:
        assert command.HELP
        assert command.__doc__


# ---- interruption, pipes, terminals


def test_an_interrupted_check_is_exit_130_without_a_report(monkeypatch, tmp_path):
    def interrupt(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("trtllm_b12x_fix.layer_check.check.check", interrupt)
    targets = ("--json", str(tmp_path / "x.json"), "--plot", str(tmp_path / "x.svg"))
    outcome = call(*QUICK, *targets)
    assert (outcome.code, outcome.out) == (130, "")
    assert outcome.err == "trtllm-b12x-fix: interrupted; unfinished reports were not written\n"
    assert os.listdir(tmp_path) == []


def test_a_reader_that_leaves_is_no_traceback():
    """`head` reads one line and goes; standard error, which is no terminal, stays silent."""
    done = in_shell(f"$CLI {' '.join(QUICK)} | head -n 1")
    assert done.stdout.startswith("layer ")
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


def test_a_reader_that_left_before_is_exit_2():
    done = in_shell(f"set -o pipefail; $CLI {' '.join(QUICK)} --json - | true")
    assert (done.returncode, done.stderr) == (2, "")


def test_a_full_disk_at_standard_output_is_exit_2():
    done = in_shell(f"$CLI {' '.join(QUICK)} > /dev/full")
    assert "Traceback" not in done.stderr
    assert "No space left" in done.stderr
    assert done.returncode == 2


def test_a_closed_standard_error_changes_no_exit_code():
    done = in_shell(f"$CLI {' '.join(QUICK)} 2>&-")
    assert "VERDICT  good" in done.stdout
    assert done.returncode == 0


def test_a_closed_standard_output_is_exit_2():
    done = in_shell(f"$CLI {' '.join(QUICK)} >&-")
    assert "Traceback" not in done.stderr
    assert done.returncode == 2


def on_terminal(*arguments: str) -> tuple[Outcome, str]:
    """Run with a terminal as standard error; also what was sent to it."""
    master, slave = pty.openpty()
    out = io.StringIO()
    with os.fdopen(slave, "w") as terminal, redirect_stdout(out), redirect_stderr(terminal):
        code = cli.main(arguments)
        terminal.flush()
        sent = b""
        while select.select([master], [], [], 0)[0]:
            sent += os.read(master, 65_536)
    os.close(master)
    return Outcome(code, out.getvalue(), ""), sent.decode()


def left_on_screen(sent: str) -> str:
    """What a terminal shows in the end: CR and erase-to-end wipe the line so far."""
    assert set(re.findall(r"\x1b\[[0-9;]*[A-Za-z]", sent)) <= {"\x1b[K"}
    return sent.rpartition("\r\x1b[K")[2]


def test_progress_is_shown_on_a_terminal_and_wiped():
    outcome, sent = on_terminal(*QUICK)
    assert outcome.code == 0
    for doing in ("loading torch", "loading the layer", "1 rows, fix", "1 rows, baked"):
        assert f"check-layer: {doing} (" in sent
    assert "\n" not in sent
    assert left_on_screen(sent) == ""
    assert "\x1b" not in outcome.out


def test_quiet_shows_nothing_on_a_terminal():
    assert on_terminal(*QUICK, "--quiet")[1] == ""


def test_an_error_replaces_the_progress_line():
    outcome, sent = on_terminal(*QUICK, "--rows", "999")
    assert outcome.code == 2
    assert "check-layer: " in sent
    assert left_on_screen(sent).startswith("trtllm-b12x-fix: rows must be")
