"""Messages over a pair of pipes: four bytes of length, then JSON."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from evals.sandbox.inside.codec import CodecError, dumps, loads


@dataclass(frozen=True)
class Channel:
    """Reads one pipe and writes another."""

    reading: int
    writing: int
    limit: int
    """Longest message that is accepted, bytes."""

    def send(self, message: dict[str, Any]) -> None:
        """Write one message whole.

        Raises:
            OSError: the other side is gone.
        """
        data = dumps(message)
        left = memoryview(len(data).to_bytes(4, "little") + data)
        while left:
            left = left[os.write(self.writing, left) :]

    def receive(self) -> dict[str, Any]:
        """Wait for one message.

        Raises:
            EOFError: the other side is gone.
            CodecError: too long, or not JSON of an object.
        """
        size = int.from_bytes(self._exactly(4), "little")
        if size > self.limit:
            raise CodecError(f"a message of {size} bytes, {self.limit} are allowed")
        message = loads(self._exactly(size))
        if not isinstance(message, dict):
            raise CodecError("a message that is no object")
        return message

    def _exactly(self, size: int) -> bytes:
        parts = []
        while size:
            part = os.read(self.reading, min(size, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)
