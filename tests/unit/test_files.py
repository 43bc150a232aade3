"""Writing a report: whole or not at all, with ordinary permissions, and never over a device."""

from __future__ import annotations

import os
import resource
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from trtllm_b12x_fix.errors import InputError
from trtllm_b12x_fix.report import files

OLD = "the report of an earlier run\n"


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """As a full disk would: writes beyond ``size`` bytes of any file fail with EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def old(tmp_path) -> Path:
    """A report that is already there, alone in its folder."""
    path = tmp_path / "report.json"
    path.write_text(OLD)
    return path


def test_a_new_file_holds_the_text_and_nothing_else_is_left(tmp_path):
    files.write(str(tmp_path / "report.svg"), "α × β\nsecond line\n")
    assert (tmp_path / "report.svg").read_bytes() == "α × β\nsecond line\n".encode()
    assert os.listdir(tmp_path) == ["report.svg"]


def test_an_old_file_is_replaced(old):
    files.write(str(old), "new\n")
    assert old.read_text() == "new\n"
    assert os.listdir(old.parent) == [old.name]


def test_a_bare_name_goes_to_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files.write("report.json", "{}\n")
    assert (tmp_path / "report.json").read_text() == "{}\n"


def test_a_dash_is_standard_output(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    files.write("-", "text\n")
    assert capsys.readouterr() == ("text\n", "")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o027, 0o077])
@pytest.mark.parametrize("existing", [False, True])
def test_permissions_follow_the_umask(tmp_path, mask, existing):
    path = tmp_path / "report.json"
    if existing:
        path.write_text(OLD)
    with umask(mask):
        files.write(str(path), "{}\n")
        assert os.umask(mask) == mask  # and the process keeps its own
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


def test_text_that_cannot_be_encoded_leaves_the_old_file(old):
    with pytest.raises((InputError, UnicodeEncodeError)):
        files.write(str(old), "a name that was not UTF-8: \udcff")
    assert old.read_text() == OLD
    assert os.listdir(old.parent) == [old.name]


def test_a_full_disk_leaves_the_old_file(old):
    with pytest.raises((InputError, OSError)), largest_file(1024):
        files.write(str(old), "x" * 100_000)
    assert old.read_text() == OLD
    assert os.listdir(old.parent) == [old.name]


def test_a_full_disk_leaves_no_new_file(tmp_path):
    with pytest.raises((InputError, OSError)), largest_file(1024):
        files.write(str(tmp_path / "report.json"), "x" * 100_000)
    assert os.listdir(tmp_path) == []


def test_a_full_disk_is_an_input_error_that_names_the_file(old):
    with pytest.raises(InputError, match=r"report\.json"), largest_file(1024):
        files.write(str(old), "x" * 100_000)


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyboardInterrupt()])
def test_a_failing_rename_leaves_the_old_file(old, monkeypatch, error):
    def fail(*_args):
        raise error

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises((InputError, type(error))):
        files.write(str(old), "new\n")
    assert old.read_text() == OLD
    assert os.listdir(old.parent) == [old.name]


def test_a_failing_rename_is_an_input_error_that_names_the_file(old, monkeypatch):
    def fail(*_args):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(InputError, match=r"report\.json"):
        files.write(str(old), "new\n")


def test_a_folder_is_refused_by_name(tmp_path):
    folder = tmp_path / "reports"
    folder.mkdir()
    with pytest.raises(InputError, match=r"reports.*folder"):
        files.write(str(folder), "{}")
    assert os.listdir(tmp_path) == ["reports"]
    assert os.listdir(folder) == []


def test_a_missing_folder_is_refused_by_name(tmp_path):
    with pytest.raises(InputError, match=r"absent/report\.json.*No such file"):
        files.write(str(tmp_path / "absent" / "report.json"), "{}")
    assert os.listdir(tmp_path) == []


def test_a_file_where_a_folder_should_be_is_refused(old):
    with pytest.raises(InputError, match=r"inner\.json"):
        files.write(str(old / "inner.json"), "{}")
    assert old.read_text() == OLD


def test_a_name_too_long_is_refused(tmp_path):
    with pytest.raises(InputError, match="too long"):
        files.write(str(tmp_path / ("x" * 300)), "{}")
    assert os.listdir(tmp_path) == []


def test_a_pipe_gets_the_text_and_stays_a_pipe(tmp_path):
    """Stands for /dev/null and /dev/stdout, which root must not replace by a file either."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    received: list[bytes] = []

    def read() -> None:
        with pipe.open("rb") as stream:
            received.append(stream.read())

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    files.write(str(pipe), "text\n")
    assert stat.S_ISFIFO(pipe.lstat().st_mode)
    reader.join(timeout=10)
    assert received == [b"text\n"]


def test_a_terminal_that_cannot_show_a_character_is_no_crash(monkeypatch, tmp_path):
    with (tmp_path / "out").open("w", encoding="ascii") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with suppress(InputError):  # either that, or an escape in place of the character
            files.write("-", "層\n")
