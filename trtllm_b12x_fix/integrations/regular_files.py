"""Reading another package's files: whole, and only where they are files.

What stands in the place of a module may be a pipe or a device: reading it would never end.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def regular_bytes(path: Path) -> bytes:
    """All of a file, links followed.

    Raises:
        OSError: it cannot be read; ``strerror`` says why, also that it is no regular file.
    """
    # Opening a pipe waits for whoever writes; not with this flag.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        with open(handle, "rb", closefd=False) as stream:
            return stream.read()
    finally:
        os.close(handle)
