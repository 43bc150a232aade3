"""Plain values as JSON and back, for the line between program and test.

Nothing that arrives can run: decoding builds exact built-in types and nothing else, so a list that
claims to equal everything arrives as the list it is, and an object that is no plain value arrives
as an :class:`Opaque`, which equals nothing but itself.
"""

from __future__ import annotations

import json
import sys
from typing import Any

#: Containers in containers; HumanEval's deepest has 4.
MAX_DEPTH = 60
_SMALL = 1 << 53
_SEQUENCES: tuple[tuple[Any, str], ...] = (
    (list, "l"), (tuple, "t"), (set, "s"), (frozenset, "z"),
)  # fmt: skip


class CodecError(ValueError):
    """Text that :func:`encode` does not write."""


class Opaque:
    """A value that is not plain data: its type's name and its truth, as the other side claims."""

    __slots__ = ("truth", "type_name")

    def __init__(self, type_name: str, truth: bool) -> None:
        self.type_name = type_name
        self.truth = truth

    def __bool__(self) -> bool:
        return self.truth

    def __repr__(self) -> str:
        return f"<{self.type_name}>"


def dumps(value: Any) -> bytes:
    """JSON of an encoded message."""
    return json.dumps(value, separators=(",", ":")).encode()


def loads(data: bytes) -> Any:
    """The message that :func:`dumps` wrote.

    Raises:
        CodecError: it is no JSON, or too deep.
    """
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CodecError(f"no JSON: {type(error).__name__}") from None


def encode(value: Any, depth: int = 0) -> Any:
    """A value as JSON can carry it; subclasses as the built-in type that they extend."""
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        number = int.__pos__(value)
        return number if -_SMALL < number < _SMALL else ["n", hex(number)]
    if isinstance(value, float):
        return float.__pos__(value)
    if depth < MAX_DEPTH:
        packed = _container(value, depth + 1) or _rare(value)
        if packed is not None:
            return packed
    return _opaque(value)


def _container(value: Any, depth: int) -> list[Any] | None:
    for kind, tag in _SEQUENCES:
        if isinstance(value, kind):
            return [tag, [encode(item, depth) for item in kind.__iter__(value)]]
    if isinstance(value, dict):
        return ["d", [[encode(k, depth), encode(v, depth)] for k, v in dict.items(value)]]
    return None


def _rare(value: Any) -> list[Any] | None:
    if isinstance(value, complex):
        return ["c", value.real, value.imag]
    if isinstance(value, (bytes, bytearray)):
        return ["y" if isinstance(value, bytes) else "a", bytes(value).hex()]
    if isinstance(value, range):
        return ["r", *(encode(part) for part in (value.start, value.stop, value.step))]
    # Only a program that imported these modules can have such a value.
    fractions, decimal = sys.modules.get("fractions"), sys.modules.get("decimal")
    if fractions and isinstance(value, fractions.Fraction):
        return ["f", encode(value.numerator), encode(value.denominator)]
    if decimal and isinstance(value, decimal.Decimal):
        return ["e", str(value)]
    return None


def _opaque(value: Any) -> list[Any]:
    try:
        truth = bool(value)
    except Exception:
        truth = True
    return ["o", type(value).__name__[:100], truth]


def decode(packed: Any, depth: int = 0) -> Any:
    """The value that :func:`encode` packed, of exact built-in types.

    Raises:
        CodecError: it was not packed by encode.
    """
    if packed is None or isinstance(packed, (bool, str, int, float)):
        return packed
    if depth > MAX_DEPTH or not isinstance(packed, list) or not packed:
        raise CodecError("not a packed value")
    try:
        return _decode_tagged(packed[0], packed[1:], depth + 1)
    except (TypeError, ValueError, KeyError, ArithmeticError) as error:
        raise CodecError(f"not a packed value: {type(error).__name__}") from None


def _decode_tagged(tag: str, body: list[Any], depth: int) -> Any:
    if tag in ("l", "t", "s", "z"):
        (items,) = body
        kind = {"l": list, "t": tuple, "s": set, "z": frozenset}[tag]
        return kind([decode(item, depth) for item in _list(items)])
    if tag == "d":
        (pairs,) = body
        return {decode(key, depth): decode(value, depth) for key, value in map(_list, _list(pairs))}
    if tag in ("n", "y", "a"):
        (digits,) = body
        if tag == "n":
            return int(digits, 16)
        return bytes.fromhex(digits) if tag == "y" else bytearray.fromhex(digits)
    if tag == "c":
        real, imaginary = body
        return complex(float(real), float(imaginary))
    if tag == "o":
        name, truth = body
        return Opaque(str(name), truth is True)
    return _decode_number(tag, [decode(part, depth) for part in body])


def _decode_number(tag: str, parts: list[Any]) -> Any:
    if tag == "r":
        start, stop, step = parts
        return range(start, stop, step)
    if tag == "f":
        from fractions import Fraction

        numerator, denominator = parts
        return Fraction(numerator, denominator)
    if tag == "e":
        from decimal import Decimal

        (digits,) = parts
        return Decimal(digits)
    raise CodecError("unknown tag")


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise CodecError("not a list")
    return value


def write_back(old: Any, new: Any) -> Any:
    """Make an argument what the function left of it, keeping the caller's own containers.

    Containers that two arguments share, or the result shares with an argument, part here: such
    sharing does not cross the line.
    """
    if type(old) is not type(new):
        return new
    if isinstance(old, list):
        kept = [write_back(before, after) for before, after in zip(old, new, strict=False)]
        old[:] = kept + new[len(kept) :]
    elif isinstance(old, dict):
        merged = {key: write_back(old[key], new[key]) if key in old else new[key] for key in new}
        old.clear()
        old.update(merged)
    elif isinstance(old, set):
        old.clear()
        old.update(new)
    elif isinstance(old, tuple) and len(old) == len(new):
        kept = [write_back(before, after) for before, after in zip(old, new, strict=True)]
        same = all(before is after for before, after in zip(old, kept, strict=True))
        return old if same else tuple(kept)
    elif isinstance(old, bytearray):
        old[:] = new
    else:
        return new
    return old
