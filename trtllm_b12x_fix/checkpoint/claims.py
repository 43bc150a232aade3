"""Sizes that a config claims, beside what the tensors are; no torch."""

from __future__ import annotations

from typing import Any, NamedTuple

from trtllm_b12x_fix.checkpoint import conventions
from trtllm_b12x_fix.checkpoint.layers import LayerEntry
from trtllm_b12x_fix.errors import InputError

_END_OF_SIZES = 2**31


def brief(value: object) -> str:
    """A value of a config for a message, cut where it would fill the terminal."""
    # Only the start of a long text or number is rendered: repr of a huge integer is slow, too.
    if isinstance(value, int) and value.bit_length() > 200:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value[:61] if isinstance(value, str) else value)
    return text if len(text) <= 60 else f"{text[:56]} ..."


class Claim(NamedTuple):
    """A size that a config says otherwise than the tensors; ``claimed`` may be anything."""

    what: str
    claimed: object
    actual: int


class Claims:
    """A ``config.json``, its text section where it has several laid over it."""

    def __init__(self, raw: dict[str, Any]) -> None:
        sections = [raw.get(name) for name in conventions.CONFIG_SECTIONS]
        inner = next((section for section in sections if isinstance(section, dict)), {})
        self._values = {**raw, **inner}

    def get(self, key: str) -> Any:
        """A value, ``None`` where there is none."""
        return self._values.get(key)

    def first(self, keys: tuple[str, ...]) -> Any:
        """The first value there is under one of ``keys``."""
        return next((self._values[key] for key in keys if self._values.get(key) is not None), None)

    def integer(self, key: str, default: int) -> int:
        """A positive integer.

        Raises:
            InputError: it is something else.
        """
        value = self._values.get(key)
        if value is None:
            return default
        if not is_size(value):
            raise InputError(f"config.json: {key} must be a positive integer, got {brief(value)}")
        number: int = value
        return number

    def top_k(self) -> int | None:
        """Experts per token, where the config says.

        Raises:
            InputError: it is not a positive integer.
        """
        key = next((k for k in conventions.TOP_K_KEYS if self._values.get(k) is not None), None)
        return self.integer(key, 1) if key else None

    def experts(self) -> int | None:
        """How many experts a layer has, where the config gives a sensible number."""
        value = self.first(conventions.EXPERT_COUNT_KEYS)
        return value if is_size(value) else None

    def sizes_otherwise(self, entry: LayerEntry) -> list[Claim]:
        """Sizes of a layer that the config says otherwise."""
        claims = (
            ("experts", conventions.EXPERT_COUNT_KEYS, entry.experts),
            ("intermediate size", conventions.INTERMEDIATE_KEYS, entry.intermediate),
            ("hidden size", (conventions.HIDDEN_KEY,), entry.hidden),
        )
        found = (Claim(what, self.first(keys), actual) for what, keys, actual in claims)
        # Sizes are 0 where the shard that would tell is missing.
        return [one for one in found if one.actual and one.claimed not in (None, one.actual)]


def is_size(value: object) -> bool:
    """Whether it is a positive integer that a tensor's size can be."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return whole and 0 < value < _END_OF_SIZES  # type: ignore[operator]
