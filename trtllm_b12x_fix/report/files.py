"""Write a report whole or not at all."""

from __future__ import annotations

import os
import sys
import tempfile
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
        sys.stdout.write(text)
        return
    path = Path(target)
    try:
        # Checked here: renaming onto a folder would fail with a less helpful error.
        if path.is_dir():
            raise InputError(f"cannot write {target}: it is a folder")
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror}") from error
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
