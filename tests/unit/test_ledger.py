"""The record of a process: what is in it, who may read it, and that it never breaks serving."""

from __future__ import annotations

import enum
import json
import logging
import multiprocessing
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import fake_trtllm
from trtllm_b12x_fix import __version__, ledger_entries, ledger_folder, processes
from trtllm_b12x_fix.errors import InputError
from trtllm_b12x_fix.fix_state import FixState
from trtllm_b12x_fix.ledger import LayerCheck, Ledger
from trtllm_b12x_fix.ledger_entries import FORGET_AFTER_SECONDS, read_processes
from trtllm_b12x_fix.ledger_folder import Access, LedgerFolder
from trtllm_b12x_fix.processes import Life, life, shortened_arguments, start_time


class Outcome(enum.Enum):
    PASSED = "passed"
    FAILED = "failed"
    UNSURE = "not distinguishable"


@pytest.fixture
def folder(monkeypatch, tmp_path):
    return fake_trtllm.isolate(monkeypatch, tmp_path)


def only(folder):
    (record,) = fake_trtllm.records(folder)
    return record


def plant(folder, pid, started, **changes):
    """A record of some other process."""
    record = {**Ledger().as_json(), "pid": pid, "started": started, **changes}
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{pid}-{started}.json"
    path.write_text(json.dumps(record), encoding="utf-8")
    return path


def test_a_record_says_who_where_and_what(folder):
    Ledger.for_process().record(versions={"flashinfer": "0.6.18"}, note_of_ours="x")
    record = only(folder)
    assert record["schema"] == 1
    assert (record["pid"], record["started"]) == (os.getpid(), start_time(os.getpid()))
    assert record["executable"] == sys.executable
    assert record["package"] == __version__
    assert record["python"].count(".") == 2
    assert record["versions"]["flashinfer"] == "0.6.18"
    assert record["facts"] == {"note_of_ours": "x"}
    assert {"mode", "state", "targets"} <= set(record)
    assert time.time() - record["written_at"] < 60


def test_folder_and_file_are_for_this_user_alone(folder):
    Ledger.for_process().write()
    (path,) = folder.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.name == f"{os.getpid()}-{start_time(os.getpid())}.json"


def test_layers_are_counted_by_strategy(folder):
    ledger = Ledger.for_process()
    for strategy in ("alphas", "alphas", "cutlass"):
        ledger.record_layer(strategy, bytes_freed=100)
    ledger.record_layer("alphas", check=LayerCheck("3", Outcome.PASSED), warning="watch out")
    record = only(folder)
    assert record["layers"] == {"alphas": 3, "cutlass": 1}
    assert record["bytes_freed"] == 300
    assert record["warnings"] == ["watch out"]
    assert record["checks"]["counts"] == {"passed": 1}


def test_all_checks_are_counted_and_the_last_are_kept(folder):
    for number in range(20):
        Ledger.for_process().record_check(LayerCheck(str(number), Outcome.UNSURE, "x" * 10_000))
    checks = only(folder)["checks"]
    assert checks["counts"] == {"not distinguishable": 20}
    assert [check["layer"] for check in checks["last"]] == [str(n) for n in range(12, 20)]
    assert len(json.dumps(checks)) < 10_000


def test_the_state_is_looked_up_at_each_writing(folder, monkeypatch):
    states = iter(["active", "replaced by someone else"])
    monkeypatch.setattr(Ledger, "_probe", staticmethod(lambda: {"state": next(states)}))
    Ledger.for_process().write()
    assert only(folder)["state"] == "active"
    Ledger.for_process().record_layer("alphas")
    assert only(folder)["state"] == "replaced by someone else"


def test_the_environment_stays_out_but_for_our_variables(folder, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    monkeypatch.setenv("TRTLLM_B12X_FIX_VERIFY", "all")
    Ledger.for_process().write()
    (path,) = folder.iterdir()
    assert "verysecret" not in path.read_text()
    assert only(folder)["variables"]["TRTLLM_B12X_FIX_VERIFY"] == "all"


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["a", "b", "c", "d", "e"], ["a", "b", "c", "d"]),
        (["serve", "--api-key", "abc", "x"], ["serve", "--api-key", "***", "x"]),
        (["serve", "--api_key=abc"], ["serve", "--api_key=***"]),
        (["serve", "HF_TOKEN=abc"], ["serve", "HF_TOKEN=***"]),
        (["serve", "hf_abcdef"], ["serve", "***"]),
        (["serve", "https://me:pw@host/x"], ["serve", "https://***@host/x"]),
        (["x" * 200], ["x" * 77 + "..."]),
        ([], []),
    ],
)
def test_arguments_are_shortened_and_secrets_hidden(argv, shown):
    assert shortened_arguments(argv) == shown


def test_a_program_without_arguments(monkeypatch):
    monkeypatch.delattr(sys, "argv")
    assert shortened_arguments() == []


@pytest.mark.parametrize("how", ["link", "file", "foreign", "open"])
def test_a_folder_that_is_not_safe_is_refused_and_serving_goes_on(folder, how, monkeypatch, caplog):
    if how == "link":
        (folder.parent / "real").mkdir(mode=0o700)
        folder.symlink_to(folder.parent / "real")
    elif how == "file":
        folder.touch()
    else:
        folder.mkdir(mode=0o700)
    if how == "foreign":
        monkeypatch.setattr(ledger_folder.os, "geteuid", lambda: os.getuid() + 1)
    if how == "open":
        folder.chmod(0o777)
    words = {"link": "is a link", "file": "not a folder", "foreign": "belongs to user"}
    with pytest.raises(InputError, match=words.get(how, "written by others")):
        LedgerFolder(folder, Access.WRITE)
    with pytest.raises(InputError, match=words.get(how, "written by others")):
        read_processes(folder)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            Ledger.for_process().record_layer("alphas")
    assert [words.get(how, "by others") in record.message for record in caplog.records] == [True]
    assert not folder.is_dir() or list(folder.iterdir()) == []


def test_a_link_with_a_slash_is_still_a_link(tmp_path):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(InputError, match="is a link"):
        LedgerFolder(Path(f"{tmp_path}/link/"), Access.WRITE)


def test_a_link_in_the_place_of_a_record_is_not_followed(folder):
    folder.mkdir(mode=0o700)
    victim = folder.parent / "victim"
    victim.write_text("mine")
    name = f"{os.getpid()}-{start_time(os.getpid())}.json"
    (folder / name).symlink_to(victim)
    (folder / f".{name}.part").symlink_to(victim)
    Ledger.for_process().write()
    assert victim.read_text() == "mine"


def test_a_failed_write_leaves_the_old_record_and_no_rest(folder, monkeypatch):
    Ledger.for_process().record_layer("alphas")
    before = only(folder)

    def fail(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ledger_folder.os, "rename", fail)
    Ledger.for_process().record_layer("alphas")
    assert only(folder) == before
    assert len(list(folder.iterdir())) == 1


def test_a_fact_that_is_not_json_is_told_as_text(folder):
    Ledger.for_process().record(thing=Path("/x"))
    assert only(folder)["facts"]["thing"] == "/x"


def test_a_probe_that_raises_is_one_warning(folder, monkeypatch, caplog):
    monkeypatch.setattr(Ledger, "_probe", staticmethod(lambda: 1 / 0))
    with caplog.at_level(logging.WARNING):
        Ledger.for_process().write()
        Ledger.for_process().write()
    assert len(caplog.records) == 1
    assert "division" in caplog.text


def test_no_temporary_folder_is_one_warning(monkeypatch, tmp_path, caplog):
    fake_trtllm.isolate(monkeypatch, tmp_path)
    monkeypatch.delenv("TRTLLM_B12X_FIX_LEDGER")

    def none():
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", none)
    with caplog.at_level(logging.WARNING):
        Ledger.for_process().write()
    assert "No usable temporary directory" in caplog.text


def test_a_forked_child_writes_a_file_of_its_own(folder):
    Ledger.for_process().record_layer("alphas")
    child = multiprocessing.get_context("fork").Process(
        target=lambda: Ledger.for_process().record_layer("alphas")
    )
    child.start()
    child.join()
    counts = {record["pid"]: record["layers"] for record in fake_trtllm.records(folder)}
    assert counts == {os.getpid(): {"alphas": 1}, child.pid: {"alphas": 2}}


def fork(work=lambda: None):
    """A child that does that and ends at once, past all clean-up; its number and exit code."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return pid, os.waitpid(pid, 0)[1]


def test_a_forked_child_that_loads_nothing_has_a_record(folder):
    Ledger.for_process().record_layer("alphas")
    child, code = fork()
    assert code == 0
    counts = {record["pid"]: record["layers"] for record in fake_trtllm.records(folder)}
    assert counts == {os.getpid(): {"alphas": 1}, child: {"alphas": 1}}


def test_a_child_of_a_process_without_a_record_has_none(folder):
    Ledger.for_process()
    Ledger._current = None
    fork()
    assert not folder.exists()


def test_a_fork_waits_for_no_lock_and_says_nothing(folder, monkeypatch, caplog):
    ledger = Ledger.for_process()
    ledger.record_layer("alphas")
    with ledger._lock:  # as another thread may hold it
        child, code = fork()
    assert code == 0
    assert child in {record["pid"] for record in fake_trtllm.records(folder)}
    monkeypatch.setattr(Ledger, "_probe", staticmethod(lambda: 1 / 0))
    said = folder.parent / "said"
    _, code = fork(lambda: said.write_text(caplog.text))
    assert (code, said.read_text()) == (0, "")


def test_a_process_that_forks_often_does_not_fill_the_folder(folder, monkeypatch):
    monkeypatch.setattr("trtllm_b12x_fix.ledger._CHILDREN_WRITTEN", 3)
    monkeypatch.setattr(Ledger, "_forks", 0)
    Ledger.for_process().write()
    for _ in range(6):
        fork()
    assert len(fake_trtllm.records(folder)) == 4
    # One that loads a layer still has its record.
    child, _ = fork(lambda: Ledger.for_process().record_layer("alphas"))
    assert child in {record["pid"] for record in fake_trtllm.records(folder)}


def test_this_process_is_read_as_live(folder):
    Ledger.for_process().record_layer("alphas")
    (process,) = read_processes(folder)
    assert (process.pid, process.life) == (os.getpid(), Life.LIVE)
    assert process.age_s > 0
    assert process.layers == {"alphas": 1}


def test_a_process_that_is_gone_has_ended(folder):
    gone = subprocess.Popen(["true"])
    gone.wait()
    plant(folder, gone.pid, 12345)
    (process,) = read_processes(folder)
    assert process.life is Life.ENDED
    assert process.age_s is None


def test_a_dead_process_that_nobody_waited_for_has_ended(folder):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = start_time(child.pid)
    assert started > 0
    child.kill()
    deadline = time.monotonic() + 30
    while start_time(child.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert life(child.pid, started, processes.place()) is Life.ENDED
    child.communicate()


def test_a_number_given_out_again_is_not_the_same_process(folder):
    plant(folder, os.getpid(), start_time(os.getpid()) - 1)
    (process,) = read_processes(folder)
    assert process.life is Life.ENDED


def test_another_container_is_elsewhere(folder):
    plant(folder, os.getpid(), start_time(os.getpid()), place="other pid:[1]")
    (process,) = read_processes(folder)
    assert process.life is Life.ELSEWHERE


def test_a_start_time_is_read_past_a_name_with_parentheses(monkeypatch):
    stat_line = "7 (a) S 9) (b) S 1 " + " ".join(str(n) for n in range(100, 200))
    monkeypatch.setattr(processes.Path, "read_text", lambda *_a, **_k: stat_line)
    assert start_time(7) == 117


def age(path, seconds):
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_only_old_records_of_ended_processes_are_forgotten(folder):
    old = plant(folder, 999_999_999, 1)
    young = plant(folder, 999_999_998, 1)
    living = plant(folder, os.getpid(), start_time(os.getpid()))
    foreign = folder / "notes.json"
    foreign.touch()
    part = folder / ".5-5.json.part"
    part.touch()
    for path in (old, living, foreign, part):
        age(path, FORGET_AFTER_SECONDS + 60)
    age(young, FORGET_AFTER_SECONDS - 60)
    read_processes(folder)
    assert set(folder.iterdir()) == {young, living, foreign}


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"schema": 99}', "x" * (2 << 20), "[" * 100_000, "\udcff"]
)
def test_one_damaged_record_does_not_hide_the_others(folder, content):
    plant(folder, 999_999_998, 1, state="active")
    damaged = folder / f"{os.getpid()}-{start_time(os.getpid())}.json"
    damaged.write_bytes(content.encode("utf-8", "surrogateescape"))
    found = {process.pid: process for process in read_processes(folder)}
    assert found[999_999_998].state is FixState.ACTIVE
    assert found[os.getpid()].state is FixState.UNKNOWN
    assert found[os.getpid()].life is Life.LIVE
    assert "unreadable" in found[os.getpid()].note


@pytest.mark.parametrize(
    "changes",
    [
        {"place": None},
        {"place": 5},
        {"written_at": None},
        {"written_at": True},
        {"written_at": "now"},
        {"written_at": 10**400},
        {"written_at": float("inf")},
        {"layers": {"a": float("inf")}},
        {"layers": {"a": float("nan")}},
        {"layers": {"a": 1.5}},
        {"layers": {"a": -1}},
        {"layers": {"a": True}},
        {"layers": {"a": 10**400}},
        {"layers": ["a"]},
        {"checks": 5},
        {"checks": {"counts": 5}},
        {"checks": {"last": 5}},
        {"checks": {"last": [5]}},
        {"warnings": 5},
        {"warnings": "text"},
        {"warnings": [5]},
        {"argv": None},
        {"argv": [None]},
        {"note": {}},
        {"mode": []},
        {"program": 5},
        {"facts": {"x": float("inf")}},
        {"schema": "x" * 10_000},
    ],
    ids=lambda changes: str(changes)[:30],
)
def test_a_record_with_wrong_content_is_unreadable_and_hides_no_other(folder, changes):
    plant(folder, 999_999_998, 1, state="active")
    plant(folder, os.getpid(), start_time(os.getpid()), **changes)
    found = {process.pid: process for process in read_processes(folder)}
    assert found[999_999_998].state is FixState.ACTIVE
    damaged = found[os.getpid()]
    assert (damaged.state, damaged.life) == (FixState.UNKNOWN, Life.LIVE)
    assert "unreadable" in damaged.note
    assert len(damaged.note) <= 400
    assert damaged.record == {}


def test_a_number_that_overflows_is_unreadable(folder):
    path = plant(folder, os.getpid(), start_time(os.getpid()), written_at=-7)
    path.write_text(path.read_text().replace("-7", "1e999"))
    (process,) = read_processes(folder)
    assert "1e999 is no finite number" in process.note


def test_an_unreadable_record_does_not_stop_whoever_asks_for_the_repair(folder):
    folder.mkdir(mode=0o700)
    (folder / "1-5.json").write_text('{"schema":1}')
    environ = {**os.environ, "TRTLLM_B12X_FIX_LEDGER": str(folder)}
    subprocess.run([sys.executable, "-c", "import trtllm_b12x_fix.auto"], env=environ, check=True)


def test_a_process_that_became_another_program_is_not_the_recorded_one(folder):
    code = "import os; input(); os.execvp('sh', ['sh', '-c', 'echo; read x'])"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    started = start_time(child.pid)
    plant(folder, child.pid, started, state="active")
    (process,) = read_processes(folder)
    assert process.life is Life.LIVE
    child.stdin.write("\n")
    child.stdin.flush()
    child.stdout.readline()
    (process,) = read_processes(folder)
    assert (start_time(child.pid), process.life) == (started, Life.REPLACED)
    assert process.age_s is None
    child.communicate("\n")


@pytest.mark.parametrize("now", ["/usr/bin/python3 (deleted)", OSError(13, "not yours")])
def test_a_program_that_was_upgraded_or_cannot_be_seen_is_the_same(folder, monkeypatch, now):
    real = os.readlink

    def readlink(path, *args, **kwargs):
        if not str(path).endswith("/exe"):
            return real(path, *args, **kwargs)
        if isinstance(now, OSError):
            raise now
        return now

    monkeypatch.setattr(processes.os, "readlink", readlink)
    plant(folder, os.getpid(), start_time(os.getpid()), program="/usr/bin/python3")
    (process,) = read_processes(folder)
    assert process.life is Life.LIVE


def test_a_record_of_before_programs_were_recorded_is_read(folder):
    path = plant(folder, os.getpid(), start_time(os.getpid()))
    record = json.loads(path.read_text())
    assert record.pop("program") == os.readlink("/proc/self/exe")
    path.write_text(json.dumps(record))
    (process,) = read_processes(folder)
    assert process.life is Life.LIVE


def test_a_pipe_in_the_place_of_a_record_does_not_hang(folder):
    folder.mkdir(mode=0o700)
    os.mkfifo(folder / "5-5.json")
    (process,) = read_processes(folder)
    assert process.state is FixState.UNKNOWN


def test_no_folder_is_no_process(tmp_path):
    assert read_processes(tmp_path / "none") == ()
    assert not (tmp_path / "none").exists()


def test_records_are_whole_while_they_are_rewritten(folder):
    writer = multiprocessing.get_context("fork").Process(target=_write_often)
    Ledger.for_process().write()
    writer.start()
    try:
        for _ in range(200):
            for process in read_processes(folder):
                assert process.state is not FixState.UNKNOWN, process.note
    finally:
        writer.kill()
        writer.join()


def _write_often():
    while True:
        Ledger.for_process().record_layer("alphas")


def test_the_week_is_a_week():
    assert ledger_entries.FORGET_AFTER_SECONDS == 7 * 86400
