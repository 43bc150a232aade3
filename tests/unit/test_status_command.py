"""`trtllm-b12x-fix status`: the table, the JSON, and an exit code that tells the truth."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from tests import fake_trtllm
from trtllm_b12x_fix import cli
from trtllm_b12x_fix.fix_state import FixState
from trtllm_b12x_fix.ledger import Ledger
from trtllm_b12x_fix.processes import start_time


@pytest.fixture
def folder(monkeypatch, tmp_path):
    return fake_trtllm.isolate(monkeypatch, tmp_path)


@pytest.fixture
def living():
    """Processes that live for as long as the test."""
    children = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1) for _ in range(3)]
    yield [child.pid for child in children]
    for child in children:
        child.communicate()


def plant(folder, pid, state=FixState.ACTIVE, started=None, **changes):
    started = start_time(pid) if started is None else started
    record = Ledger().as_json()
    record |= {"pid": pid, "started": started, "state": state.value, "mode": "auto", "note": ""}
    record |= {"argv": ["trtllm-serve", "model"], **changes}
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / f"{pid}-{started}.json").write_text(json.dumps(record), encoding="utf-8")


def test_nobody_ever(folder, capsys):
    assert cli.main(["status"]) == 0
    out = capsys.readouterr().out
    assert "No live process has left a record" in out
    assert "TRTLLM_B12X_FIX_LEDGER" in out


def test_all_repaired(folder, living, capsys):
    plant(folder, living[0], layers={"alphas": 88}, checks={"counts": {"passed": 1}})
    plant(folder, living[1], FixState.NOT_NEEDED, note="class absent")
    assert cli.main(["status"]) == 0
    out = capsys.readouterr().out
    (row,) = [line for line in out.splitlines() if line.startswith(str(living[0]))]
    for word in ("active", "auto", "88 alphas", "1 passed", "trtllm-serve model"):
        assert word in row
    assert "class absent" in out
    assert "2 live processes, none without the repair" in out.replace("\n", " ")


@pytest.mark.parametrize("state", [state for state in FixState if state is not FixState.UNKNOWN])
def test_the_exit_code_follows_each_state(folder, living, state):
    plant(folder, living[0])
    plant(folder, living[1], state)
    good = {FixState.WAITING, FixState.NOT_NEEDED, FixState.ACTIVE, FixState.WOULD_REFUSE}
    assert cli.main(["status"]) == (0 if state in good else 1)


def test_the_reason_is_told(folder, living, capsys):
    plant(folder, living[0], FixState.REPLACED, note="replaced by someone else: f of plugin")
    assert cli.main(["status"]) == 1
    out = capsys.readouterr().out
    assert f"{living[0]}: replaced by someone else: f of plugin" in out
    assert "WITHOUT the repair: 1 of 1 live process." in out


def test_a_failed_check_is_a_finding(folder, living, capsys):
    check = {"layer": "model.layers.3", "outcome": "failed", "detail": "9% from repaired"}
    plant(folder, living[0], checks={"counts": {"failed": 1, "passed": 2}, "last": [check]})
    assert cli.main(["status"]) == 1
    assert "layer model.layers.3: 9% from repaired" in capsys.readouterr().out


def test_a_check_that_could_not_tell_is_shown_and_no_finding(folder, living, capsys):
    check = {"layer": "3", "outcome": "not distinguishable", "detail": "arms too close"}
    plant(folder, living[0], checks={"counts": {"not distinguishable": 1}, "last": [check]})
    assert cli.main(["status"]) == 0
    assert "arms too close" in capsys.readouterr().out


def test_processes_that_ended_are_shown_and_not_judged(folder, capsys):
    for pid in range(999_999_990, 999_999_999):
        plant(folder, pid, FixState.FAILED, started=1)
    assert cli.main(["status"]) == 0
    out = capsys.readouterr().out
    assert out.count("ended; was failed") == 5
    assert "and 4 more" in out
    assert cli.main(["status", "--all"]) == 0
    assert capsys.readouterr().out.count("ended; was failed") == 9


def test_other_containers_are_shown_and_not_judged(folder, capsys):
    plant(folder, os.getpid(), FixState.OFF, place="other pid:[1]")
    assert cli.main(["status"]) == 0
    out = capsys.readouterr().out
    assert "elsewhere; was off" in out
    assert "1 of other hosts or containers were not judged" in out.replace("\n", " ")


@pytest.mark.parametrize(
    "content",
    ["{", '{"schema": 2}', '{"schema": 1}', '{"schema": 1, "place": 1, "checks": {"last": 5}}'],
)
def test_a_live_process_with_an_unreadable_record_is_unusable(folder, living, content, capsys):
    folder.mkdir(mode=0o700)
    (folder / f"{living[0]}-{start_time(living[0])}.json").write_text(content)
    assert cli.main(["status"]) == 2
    assert "cannot be read" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["{", '{"schema": 1}'])
def test_an_unreadable_record_of_a_process_that_ended_is_nobodys_problem(folder, content, capsys):
    folder.mkdir(mode=0o700)
    (folder / "999999999-1.json").write_text(content)
    assert cli.main(["status"]) == 0
    assert "999999999-1.json is unreadable" in capsys.readouterr().out


def test_a_process_that_became_another_program_is_shown_and_not_judged(folder, living, capsys):
    plant(folder, living[0], program="/no/such/program")
    assert cli.main(["status"]) == 0
    out = capsys.readouterr().out
    assert "became another program; was active" in out
    assert "No live process has left a record" in out
    assert cli.main(["status", "--require-live"]) == 1


def test_a_relative_folder_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("TRTLLM_B12X_FIX_LEDGER", "records")
    assert cli.main(["status"]) == 2
    assert "TRTLLM_B12X_FIX_LEDGER='records' is a relative path" in capsys.readouterr().err


def row_of(pid, capsys):
    """The columns of a process."""
    cli.main(["status"])
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(str(pid))]
    return [cell for cell in row.split("  ") if cell]


def test_nothing_is_said_twice_and_the_last_writing_is_shown(folder, capsys):
    then = time.time() - 300
    plant(folder, 999_999_998, FixState.NOT_ASKED, started=1, mode="not asked for", written_at=then)
    cells = [cell.strip() for cell in row_of(999_999_998, capsys)]
    assert cells[:4] == ["999999998", "- / 5m ago", "ended; was off", "not asked for"]


def test_without_a_live_process_the_text_names_the_option(folder, capsys):
    assert cli.main(["status"]) == 0
    assert "--require-live" in capsys.readouterr().out


def test_a_folder_that_is_a_link_is_unusable(folder, capsys):
    folder.symlink_to(folder.parent)
    assert cli.main(["status"]) == 2
    assert "is a link" in capsys.readouterr().err


def test_json_to_a_file_and_to_stdout(folder, living, tmp_path, capsys):
    plant(folder, living[0], FixState.OFF)
    assert cli.main(["status", "--json", str(tmp_path / "status.json")]) == 1
    assert "WITHOUT" in capsys.readouterr().out
    written = json.loads((tmp_path / "status.json").read_text())
    assert cli.main(["status", "--json", "-"]) == 1
    printed = json.loads(capsys.readouterr().out)
    for answer in (written, printed):
        (process,) = answer["processes"]
        assert (answer["exit_code"], answer["ledger"]) == (1, str(folder))
        assert (process["pid"], process["state"], process["life"]) == (living[0], "off", "live")
        assert process["record"]["argv"] == ["trtllm-serve", "model"]


def test_escape_sequences_do_not_reach_the_terminal(folder, living, capsys):
    plant(folder, living[0], note="\x1b[31mred", argv=["\x1b]0;title\x07"], mode="\x1b[0m")
    cli.main(["status"])
    assert "\x1b" not in capsys.readouterr().out


def test_a_long_command_keeps_its_end_and_its_place(folder, living, capsys):
    plant(folder, living[0], argv=["x" * 60, "y" * 60, "end"])
    cli.main(["status"])
    out = capsys.readouterr().out
    assert "yyy end" in out
    assert max(len(line) for line in out.splitlines()) <= 120
