"""The line between program and test carries plain values, and nothing else. 1 second."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, namedtuple
from enum import IntEnum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evals.sandbox.inside.codec import (
    MAX_DEPTH,
    CodecError,
    Opaque,
    decode,
    dumps,
    encode,
    loads,
    write_back,
)

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers() | st.text()
    | st.binary() | st.fractions() | st.decimals(allow_nan=False),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple)
    | st.dictionaries(st.text() | st.integers(), inner)
    | st.sets(st.integers() | st.text()) | st.frozensets(st.floats(allow_nan=False)),
    max_leaves=20,
)  # fmt: skip


def there_and_back(value):
    return decode(loads(dumps(encode(value))))


def same(left, right) -> bool:
    """Equal in type and value, not-a-number and negative zero included."""
    if type(left) is not type(right):
        return False
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    return repr(left) == repr(right) or left == right != 0


@given(plain)
def test_plain_values_survive(value):
    assert same(there_and_back(value), value)


def test_subclasses_arrive_as_what_they_extend():
    class Count(IntEnum):
        ONE = 1

    Point = namedtuple("Point", "x y")
    for value, base in (
        (Count.ONE, 1),
        (Counter("aab"), {"a": 2, "b": 1}),
        (OrderedDict(a=1), {"a": 1}),
        (Point(1, 2), (1, 2)),
        (type("Text", (str,), {"__str__": lambda self: "lie"})("truth"), "truth"),
        (type("Number", (float,), {"__float__": lambda self: 0.0})(1.5), 1.5),
    ):
        assert same(there_and_back(value), base)


def test_anything_else_is_opaque_and_equals_itself_alone():
    for value, truth in ((object(), True), (iter([]), True), (memoryview(b""), False), (len, True)):
        arrived = there_and_back([value])[0]
        assert isinstance(arrived, Opaque)
        assert bool(arrived) is truth
        assert arrived != 5
        assert arrived != there_and_back([value])[0]


def test_depth_ends_in_an_opaque_value():
    value: list[object] = []
    value.append(value)
    arrived = there_and_back(value)
    for _ in range(MAX_DEPTH - 1):
        (arrived,) = arrived
    assert isinstance(arrived[0], Opaque)


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[" * 100_000, '{"a": 1}', "[]", '["l"]', '["l", 5]', '["x", 1]', '["d", [[1]]]',
        '["d", [[["l", []], 1]]]', '["s", [["l", []]]]', '["n", "zz"]', '["n", 5]', '["y", "zz"]',
        '["c", "a", 1]', '["r", 1, 2, 0]', '["r", "a", 2, 1]', '["f", 1, 0]', '["e", "abc"]',
        '["e", 5, 6]', '["o"]', '[["l"], 1]', '[null, 1]', "[" + '["l",[' * 70 + "]]" * 70 + "]",
    ],
)  # fmt: skip
def test_what_encode_does_not_write_is_refused(text):
    with pytest.raises(CodecError):
        decode(loads(text.encode()))


messages = st.recursive(
    st.none() | st.integers() | st.text(max_size=3) | st.sampled_from("ltszdnycaofer"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=1), inner),
)


@given(messages)
def test_decoding_builds_plain_values_or_refuses(message):
    try:
        value = decode(json.loads(json.dumps(message)))
    except CodecError:
        return
    assert type(value).__module__ in ("builtins", "fractions", "decimal", Opaque.__module__)


@given(plain, plain)
def test_write_back_makes_the_old_what_the_new_is(old, new):
    before = old
    after = write_back(old, new)
    assert same(after, new)
    if type(old) is type(new) and isinstance(old, (list, dict, set)):
        assert after is before
