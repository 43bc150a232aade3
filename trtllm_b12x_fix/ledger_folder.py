"""The folder of the ledger: of this user alone, never a link, every file replaced whole.

Its default place is below /tmp, where others can put a link or a folder of theirs first. The
folder is opened once and files are reached through that handle, so it cannot be swapped between
the look and the write.
"""

from __future__ import annotations

import contextlib
import os
import stat
from enum import Enum
from pathlib import Path
from types import TracebackType

from trtllm_b12x_fix.errors import InputError

#: More than any honest record; a reader must not swell on a file that is none.
LARGEST_FILE = 1 << 20


class Access(Enum):
    """What the folder is opened for."""

    READ = "read"
    WRITE = "write"
    """Makes the folder if it is missing."""


class LedgerFolder:
    """An open ledger folder; a context manager."""

    def __init__(self, path: Path, access: Access) -> None:
        """Open it.

        Raises:
            InputError: a link, not a folder, someone else's, or open for others to write.
            FileNotFoundError: there is none, and nothing is to be written.
            OSError: whatever else the system says.
        """
        self.path = path
        if access is Access.WRITE:
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):  # looked at below
                path.mkdir(mode=0o700)
        self._handle = self._open()
        try:
            self._require_ours()
        except BaseException:
            os.close(self._handle)
            raise

    def __enter__(self) -> LedgerFolder:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        os.close(self._handle)

    def names(self) -> list[str]:
        """All files, sorted."""
        return sorted(os.listdir(self._handle))

    def read(self, name: str) -> str:
        """One file's text.

        Raises:
            OSError, ValueError: it cannot be read, is too large, or is not UTF-8.
        """
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self._handle)
        with os.fdopen(handle, "rb") as stream:
            content = stream.read(LARGEST_FILE + 1)
        if len(content) > LARGEST_FILE:
            raise ValueError(f"larger than {LARGEST_FILE} bytes")
        return content.decode("utf-8")

    def write(self, name: str, text: str) -> None:
        """Replace one file whole; readable by this user alone."""
        part = f".{name}.part"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        handle = os.open(part, flags, 0o600, dir_fd=self._handle)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.write(text)
            os.rename(part, name, src_dir_fd=self._handle, dst_dir_fd=self._handle)
        except BaseException:
            self.delete(part)
            raise

    def delete(self, name: str) -> None:
        """Delete one file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._handle)

    def changed_at(self, name: str) -> float:
        """When a file was last written, in seconds since 1970."""
        return os.stat(name, dir_fd=self._handle, follow_symlinks=False).st_mtime

    def _open(self) -> int:
        # Path drops a trailing slash, which would make O_NOFOLLOW follow.
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
        try:
            return os.open(self.path, flags)
        except OSError as error:
            if self.path.is_symlink():
                raise InputError(f"ledger {self.path} is a link: name the folder itself") from error
            if self.path.exists() and not self.path.is_dir():
                raise InputError(f"ledger {self.path} is not a folder") from error
            raise

    def _require_ours(self) -> None:
        found = os.fstat(self._handle)
        if found.st_uid != os.geteuid():
            raise InputError(
                f"ledger {self.path} belongs to user {found.st_uid}, not to {os.geteuid()}"
            )
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise InputError(f"ledger {self.path} can be written by others: chmod 700 it")
