"""Base URLs as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_b12x_fix.canary.address import parse_address
from trtllm_b12x_fix.errors import InputError


@pytest.mark.parametrize(
    ("text", "root"),
    [
        ("http://localhost:8000", "http://localhost:8000/v1"),
        ("http://localhost:8000/", "http://localhost:8000/v1"),
        ("http://localhost:8000/v1", "http://localhost:8000/v1"),
        ("http://localhost:8000/v1/", "http://localhost:8000/v1"),
        ("http://localhost:8000/v1/chat/completions", "http://localhost:8000/v1"),
        ("http://localhost:8000/v1/completions", "http://localhost:8000/v1"),
        ("http://localhost:8000/v1/models", "http://localhost:8000/v1"),
        ("https://host", "https://host/v1"),
        ("https://host:443/serve/", "https://host/serve/v1"),
        ("https://host/api/v3", "https://host/api/v3"),
        ("HTTP://LOCALHOST:80", "http://localhost/v1"),
        ("http://[::1]:8000", "http://[::1]:8000/v1"),
        (" http://localhost ", "http://localhost/v1"),
        ("http://b\u00fccher.example", "http://xn--bcher-kva.example/v1"),
    ],
)
def test_the_root_of_the_api(text, root):
    assert str(parse_address(text)) == root


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "http://HOST:PORT"),
        ("localhost:8000", "http://HOST:PORT"),
        ("ftp://host", "http://HOST:PORT"),
        ("file:///etc/passwd", "http://HOST:PORT"),
        ("http://", "http://HOST:PORT"),
        ("http://host:port", "cannot be read"),
        ("http://host:99999", "cannot be read"),
        ("http://host:0", "0 is no port"),
        ("http://[::1", "cannot be read"),
        ("http://host/v1?key=1", "query"),
        ("http://host/#x", "query"),
        ("http://host/a b", "space"),
        ("http://host/\r\nX: y", "control character"),
        ("http://host/\u00e9", "%XX"),
        ("http://" + "a" * 70 + "\u00e9.example", "no host name"),
    ],
)
def test_what_is_no_root_is_named(text, words):
    with pytest.raises(InputError, match=words):
        parse_address(text)


def test_a_password_is_not_repeated():
    with pytest.raises(InputError) as caught:
        parse_address("https://me:s3cret@host/v1")
    assert "s3cret" not in str(caught.value)
    assert "--api-key-env" in str(caught.value)


@pytest.mark.parametrize(
    ("host", "here"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("[::1]", True),
        ("10.0.0.1", False),
        ("gpu", False),
    ],
)
def test_loopback(host, here):
    assert parse_address(f"http://{host}").is_loopback is here


@given(st.text(max_size=40))
def test_no_text_makes_it_fail_otherwise(text):
    for candidate in (text, f"http://{text}", f"http://host{text}"):
        try:
            address = parse_address(candidate)
        except InputError:
            continue
        assert str(address).isascii()
        assert "\n" not in str(address)
