"""Servers that load, drip, lie, redirect, or are not there."""

from __future__ import annotations

import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.canary.fake_server import Made, completion, serve, serve_raw, unused_port
from trtllm_b12x_fix.canary import client as client_module
from trtllm_b12x_fix.canary.address import parse_address
from trtllm_b12x_fix.canary.client import Client, ServerError, read_key
from trtllm_b12x_fix.errors import InputError

ROUTE = "/completions"
KEY = "sk-verysecret123"
OK = b'{"choices": [{"text": "hi"}]}'


def client(url: str, timeout: float = 5, wait: float = 0, **more) -> Client:
    return Client(parse_address(url), timeout, wait, **more)


def raw(*parts: bytes, pause: float = 0.0):
    """Writes the parts, with a pause before each but the first."""

    def talk(connection: socket.socket) -> None:
        for place, part in enumerate(parts):
            if place:
                time.sleep(pause)
            connection.sendall(part)

    return talk


def test_a_post_is_one_request_with_the_body_and_without_surprises():
    with serve(lambda _: Made(completion("hi"))) as server:
        reply = client(server.url).post(ROUTE, {"prompt": "\u00e9"})
    assert reply.is_good
    (seen,) = server.seen
    assert (seen.method, seen.path) == ("POST", "/v1/completions")
    assert seen.body == {"prompt": "\u00e9"}
    assert "Authorization" not in seen.headers
    assert seen.headers["Accept-Encoding"] == "identity"


def test_the_key_is_sent_and_never_shown():
    def echo(seen):
        return Made({"error": {"message": f"bad key {KEY}", KEY: [KEY]}}, 400)

    with serve(echo) as server:
        asking = client(server.url, key=KEY)
        reply = asking.post(ROUTE, {})
    assert server.seen[0].headers["Authorization"] == f"Bearer {KEY}"
    for shown in (reply.complaint(), str(reply), repr(reply), repr(asking), str(asking)):
        assert KEY not in shown
    assert "bad key (key)" in reply.complaint()


def test_proxies_of_the_environment_are_not_used(monkeypatch):
    with serve(lambda _: Made({})) as proxy, serve(lambda _: Made(completion("hi"))) as server:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        monkeypatch.delenv("no_proxy", raising=False)
        assert client(server.url, key=KEY).post(ROUTE, {}).is_good
    assert proxy.seen == []


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_refused_and_the_key_stays(status):
    with serve(lambda _: Made(completion("hi"))) as other:

        def away(_):
            return Made({}, status, {"Location": f"{other.url}/v1/completions"})

        with serve(away) as server, pytest.raises(ServerError, match="redirect"):
            client(server.url, key=KEY).post(ROUTE, {})
    assert other.seen == []


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_server_that_loads_is_asked_again(status):
    answers = iter([status, status, 200])

    def loading(_):
        code = next(answers)
        return Made(completion("hi") if code == 200 else {"error": "Loading model"}, code)

    told: list[str] = []
    with serve(loading) as server:
        assert client(server.url, wait=10, progress=told.append).post(ROUTE, {}).is_good
    assert len(server.seen) == 3
    assert "Loading model" in told[0]


def test_a_server_that_loads_forever_is_an_error_that_says_so():
    with serve(lambda _: Made({"error": "Loading model"}, 503)) as server:
        began = time.monotonic()
        with pytest.raises(ServerError, match=r"not ready after 1 s .*Loading model.*--wait"):
            client(server.url, wait=1).post(ROUTE, {})
    assert 0.9 < time.monotonic() - began < 4
    assert len(server.seen) < 10


def test_nobody_listens():
    port = unused_port()
    with pytest.raises(ServerError, match=f"127.0.0.1:{port}.*cannot connect"):
        client(f"http://127.0.0.1:{port}").post(ROUTE, {})


def test_a_server_that_starts_late_is_waited_for():
    with serve(lambda _: Made(completion("hi"))) as server:
        port = server.url.rpartition(":")[2]
        late = client(f"http://127.0.0.1:{unused_port()}", wait=10)
        # Somebody begins to listen while the client waits: here, another address.
        object.__setattr__(
            late,
            "progress",
            lambda _: object.__setattr__(
                late, "address", parse_address(f"http://127.0.0.1:{port}")
            ),
        )
        assert late.post(ROUTE, {}).is_good


def test_no_such_host_is_not_waited_for():
    began = time.monotonic()
    with pytest.raises(ServerError, match="no such host"):
        client("http://no-such-host.invalid", wait=60).post(ROUTE, {})
    assert time.monotonic() - began < 30


@pytest.fixture
def certificate(tmp_path, require_system) -> Path:
    """A key and a certificate of 127.0.0.1, signed by itself, in one file."""
    openssl = require_system("openssl")
    made = tmp_path / "both.pem"
    command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem")]
    subprocess.run(command, check=True, capture_output=True)
    made.write_text((tmp_path / "key.pem").read_text() + (tmp_path / "cert.pem").read_text())
    return made


def test_https_with_a_certificate_that_is_trusted(certificate, monkeypatch):
    with serve(lambda _: Made(completion("hi")), certificate) as server:
        with pytest.raises(ServerError, match=r"TLS failed \(CERTIFICATE_VERIFY_FAILED\)"):
            client(server.url).post(ROUTE, {})
        assert server.seen == []
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert client(server.url, key=KEY).post(ROUTE, {}).is_good
    assert server.seen[0].headers["Authorization"] == f"Bearer {KEY}"


def test_https_that_drips_is_cut(certificate, monkeypatch):
    def slow(_):
        time.sleep(3)
        return Made(completion("hi"))

    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with serve(slow, certificate) as server:
        began = time.monotonic()
        with pytest.raises(ServerError, match="did not answer within"):
            client(server.url, timeout=0.4).post(ROUTE, {})
        assert time.monotonic() - began < 2.5


def test_tls_asked_of_a_server_that_has_none():
    with serve(lambda _: Made({})) as server, pytest.raises(ServerError, match=r"TLS|broke"):
        client(server.url.replace("http:", "https:")).post(ROUTE, {})


@pytest.mark.parametrize(
    "talk",
    [
        lambda _: time.sleep(1),
        raw(b"HTTP/1.1 200 OK\r\nContent-Length: 29\r\n\r\n", *[b"{"] * 40, pause=0.1),
        raw(b"HTTP/1.1 200 OK\r\n", *[b"X-A: b\r\n"] * 40, pause=0.1),
        raw(b"HTTP/1.1 200 OK\r\n\r\n", *[b"{"] * 40, pause=0.1),
        raw(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
            *[b"1\r\n{\r\n"] * 40,
            pause=0.1,
        ),
    ],
    ids=["silent", "drips a body", "drips headers", "drips without a length", "drips chunks"],
)
def test_the_time_out_is_for_the_whole_answer(talk):
    with serve_raw(talk) as url:
        began = time.monotonic()
        with pytest.raises(ServerError, match=r"did not answer within 0.5 s \(--timeout\)"):
            client(url, timeout=0.5).post(ROUTE, {})
        assert time.monotonic() - began < 2.5


@pytest.mark.parametrize(
    "parts",
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"a\r\n" + OK[:10] + b"\r\n",
         f"{len(OK) - 10:x}\r\n".encode() + OK[10:] + b"\r\n0\r\n\r\n"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + OK,),
        (b"HTTP/1.0 200 OK\r\n\r\n" + OK,),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 29\r\n\r\n" + OK,),
    ],
    ids=["chunked", "until the end", "HTTP/1.0", "with a length"],
)  # fmt: skip
def test_bodies_in_every_framing(parts):
    with serve_raw(raw(*parts)) as url:
        reply = client(url).post(ROUTE, {})
    assert reply.is_good
    assert reply.document["choices"][0]["text"] == "hi"


@pytest.mark.parametrize(
    "parts",
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n",),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",),
        (b"HTTP/1.1 abc\r\n\r\n",),
        (b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000 + b"\r\n\r\n",),
        (b"HTTP/1.1 200 OK\r\n" + b"X: a\r\n" * 200 + b"\r\n",),
        (b"\x16\x03\x01\x00\x01",),
    ],
    ids=["ssh", "bad chunk", "bad status", "long header", "many headers", "tls"],
)
def test_what_is_not_http_is_named(parts):
    with serve_raw(raw(*parts)) as url, pytest.raises(ServerError, match=r"HTTP|broke"):
        client(url).post(ROUTE, {})


def test_a_server_that_hangs_up_is_away():
    with serve_raw(lambda _: None) as url, pytest.raises(ServerError, match="connection broke"):
        client(url).post(ROUTE, {})


@pytest.mark.parametrize(
    "body",
    [
        b"<html><script>alert(1)</script>\x1b[31m</html>",
        b"",
        b"\xff\xfe\x00",
        b"data: {}\n\ndata: [DONE]\n\n",
        b'{"choices": [',
        b"[" * 100_000,
        b"null",
        b"[]",
    ],
    ids=["html", "empty", "bytes", "events", "cut off", "deep", "null", "list"],
)
def test_a_body_that_is_no_json_object_is_not_good(body):
    with serve(lambda _: Made(body)) as server:
        reply = client(server.url).post(ROUTE, {})
    assert not reply.is_good
    assert reply.complaint().startswith("HTTP 200")
    assert len(reply.complaint()) < 400


def test_a_huge_answer_is_not_read_to_its_end(monkeypatch):
    monkeypatch.setattr(client_module, "LARGEST_ANSWER", 10_000)
    with (
        serve(lambda _: Made(b" " * 1_000_000)) as server,
        pytest.raises(ServerError, match="more than"),
    ):
        client(server.url).post(ROUTE, {})


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"error": {"message": "The model `x` does not exist.", "code": 404}}, "The model `x`"),
        ({"object": "error", "message": "no such thing"}, "no such thing"),
        ({"detail": "Not Found"}, "Not Found"),
        ({"error": "Loading"}, "Loading"),
        ({"detail": [{"loc": ["body"], "msg": "bad"}]}, "bad"),
    ],
)
def test_the_servers_own_words_are_told(document, words):
    with serve(lambda _: Made(document, 404)) as server:
        complaint = client(server.url).get("/models").complaint()
    assert complaint.startswith("HTTP 404: ")
    assert words in complaint


def test_the_key_comes_from_the_named_variable_alone(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    assert read_key(None) is None
    monkeypatch.setenv("MINE", f" {KEY}\n")
    assert read_key("MINE") == KEY


@pytest.mark.parametrize("value", [None, "", "  ", "a b", "a\nb", "s\u00e9cret", "a\x7fb"])
def test_a_key_that_cannot_be_sent_is_refused_unseen(monkeypatch, value):
    monkeypatch.delenv("MINE", raising=False)
    if value is not None:
        monkeypatch.setenv("MINE", value)
    with pytest.raises(InputError, match="MINE") as caught:
        read_key("MINE")
    assert not (value or "").strip() or value not in str(caught.value)
