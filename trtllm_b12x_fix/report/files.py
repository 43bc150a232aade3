"""Write a report whole or not at all."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from trtllm_b12x_fix.errors import InputError

STDOUT = "-"


def write(target: str, text: str) -> None:
    """Write ``text`` to a file, or to standard output for ``-``.

    The file appears under its name only once it is complete, so an interrupted run leaves the old
    one, or none.

    Raises:
        InputError: the folder is missing or not writable.
    """
    if target == STDOUT:
        _print(text)
        return
    # A link is followed: renaming onto it would replace the link and leave the file behind.
    path = Path(os.path.realpath(target))
    try:
        # Checked here: renaming onto a folder would fail with a less helpful error.
        if path.is_dir():
            raise InputError(f"cannot write {target}: it is a folder")
        if path.exists() and not path.is_file():
            # A pipe or a device (/dev/null) is written to: renaming would replace it.
            path.write_text(text, encoding="utf-8")
        else:
            _replace(path, text)
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror}") from error
    except UnicodeEncodeError as error:
        raise InputError(f"cannot write {target}: {error}") from error


def check_writable(target: str) -> None:
    """Find out before a long run what :func:`write` would find out after it.

    Raises:
        InputError: the target is a folder, or its folder is missing or not writable.
    """
    if target == STDOUT:
        return
    if not target:
        raise InputError("cannot write a report to an empty file name")
    path = Path(target)
    if path.is_dir():
        raise InputError(f"cannot write {target}: it is a folder")
    if not path.parent.is_dir():
        raise InputError(f"cannot write {target}: No such file or directory")
    if not os.access(path.parent, os.W_OK) and not path.exists():
        raise InputError(f"cannot write {target}: Permission denied")


def check_apart(target: str, sources: Iterable[Path]) -> None:
    """A report must not take the place of what it is about.

    Raises:
        InputError: the target is one of the files that are read.
    """
    if target == STDOUT or not os.path.exists(target):
        return
    for source in sources:
        if source.exists() and os.path.samefile(target, source):
            raise InputError(f"cannot write {target}: it is {source}, which is read")


def _print(text: str) -> None:
    if sys.stdout is None:
        raise InputError("cannot write -: standard output is closed")
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))


def _replace(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        # mkstemp makes files for their owner alone; a report is as readable as any other file.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
