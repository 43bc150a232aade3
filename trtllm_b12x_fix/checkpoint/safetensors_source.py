"""A safetensors file as a :class:`~trtllm_b12x_fix.checkpoint.conventions.TensorSource`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from trtllm_b12x_fix.checkpoint.header import shown
from trtllm_b12x_fix.errors import InputError, MissingDependencyError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

#: What torch raises for shapes and dtypes that a header may hold and a tensor may not; its
#: messages go on with a C++ stack, so only their first line is shown.
_TORCH_REFUSALS = (IndexError, RuntimeError, TypeError, ValueError)


class SafetensorsSource:
    """Lazy access to one safetensors file; tensors are read one at a time.

    Raises:
        MissingDependencyError: the safetensors package is not importable.
        InputError: the file is missing, truncated or not safetensors (a pickle is not).
    """

    def __init__(self, path: Path) -> None:
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError as error:
            raise MissingDependencyError(
                "reading checkpoints needs the safetensors package: pip install safetensors"
            ) from error
        self._path = path
        try:
            self._size = os.stat(path).st_size
            self._error = SafetensorError
            self._file: Any = safe_open(str(path), framework="pt")
        except (OSError, SafetensorError) as error:
            raise InputError(f"{path}: not a readable safetensors file: {error}") from error
        self._names = frozenset(self._file.keys())

    @property
    def name(self) -> str:
        return shown(self._path.name)

    @property
    def metadata(self) -> dict[str, str]:
        """The file's own string metadata."""
        return dict(self._file.metadata() or {})

    def has(self, tensor: str) -> bool:
        return tensor in self._names

    def file_of(self, tensor: str) -> str:  # noqa: ARG002
        """The one file there is."""
        return self.name

    def get_row(self, tensor: str, index: int) -> Tensor:
        """Read ``tensor[index]`` alone.

        Raises:
            InputError: it cannot be read, or the index is out of range.
        """
        self._require_unchanged(tensor)
        try:
            rows: Tensor = self._file.get_slice(tensor)[index : index + 1]
        except (self._error, *_TORCH_REFUSALS) as error:
            raise self._unreadable(tensor, error) from error
        if rows.dim() == 0 or rows.shape[0] != 1:
            raise InputError(f"{self.name}: tensor {tensor} has no entry {index}")
        return rows[0]

    def get(self, tensor: str) -> Tensor:
        self._require_unchanged(tensor)
        try:
            result: Tensor = self._file.get_tensor(tensor)
        except (self._error, *_TORCH_REFUSALS) as error:
            raise self._unreadable(tensor, error) from error
        return result

    def _require_unchanged(self, tensor: str) -> None:
        """Reading past the end of a mapped file that shrank would kill the process (SIGBUS)."""
        try:
            size = os.stat(self._path).st_size
        except OSError as error:
            raise self._unreadable(tensor, error) from error
        if size != self._size:
            raise InputError(
                f"{self.name}: tensor {tensor} cannot be read: the file had {self._size} bytes "
                f"when it was opened and has {size}; it must not change meanwhile"
            )

    def _unreadable(self, tensor: str, error: Exception) -> InputError:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        return InputError(f"{self.name}: tensor {tensor} cannot be read: {reason}")
