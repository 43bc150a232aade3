"""A handful of requests to a server that may be loading, slow, broken or something else.

Standard library, because the tool runs in containers whose packages must not change. Bounded in
every direction: a request takes at most its time-out, whoever drips bytes, and an answer at most
:data:`LARGEST_ANSWER`. Redirects are not followed and proxies not used, so the key goes to the
named host and nowhere else; it is never part of a message.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from trtllm_b12x_fix import __version__
from trtllm_b12x_fix.canary.address import Address
from trtllm_b12x_fix.errors import InputError

LARGEST_ANSWER = 8 * 2**20
#: Not ready, or too busy: worth asking again.
_BUSY = {429, 502, 503, 504}
_SHOWN = 300
#: Shorter ones ("EMPTY", "x") are no secrets, and words of answers.
_SECRET_FROM = 8
_LONGEST_PAUSE = 10.0


class ServerError(InputError):
    """The server cannot be asked: unreachable, refusing, or answering with something else."""


class Method(Enum):
    """The two that are used."""

    GET = "GET"
    POST = "POST"


@dataclass(frozen=True)
class Reply:
    """What came back.

    Attributes:
        status: HTTP status.
        document: the JSON, or None if it was none.
        text: the body's first characters, without the key.
    """

    status: int
    document: Any
    text: str

    @property
    def is_good(self) -> bool:
        """A JSON object with status 200."""
        return self.status == 200 and isinstance(self.document, dict)

    def complaint(self) -> str:
        """Status and the server's own words, for a message."""
        words = _error_words(self.document) or self.text.strip() or "an empty body"
        what = f"HTTP {self.status}"
        if self.document is None:
            what += ", not JSON"
        return f"{what}: {words[:_SHOWN]}"


@dataclass(frozen=True)
class Client:
    """One server.

    Attributes:
        timeout_s: for one request, from the connection to the last byte.
        wait_s: how long in all a server may be away or busy before it counts as dead.
        key: sent as a bearer token; shown nowhere.
    """

    address: Address
    timeout_s: float
    wait_s: float
    key: str | None = field(default=None, repr=False)
    progress: Callable[[str], None] = lambda _: None

    def get(self, route: str) -> Reply:
        """GET ``route``, which starts with a slash."""
        return self._ask(Method.GET, route, None)

    def post(self, route: str, body: dict[str, Any]) -> Reply:
        """POST a JSON object to ``route``."""
        return self._ask(Method.POST, route, json.dumps(body).encode())

    def _ask(self, method: Method, route: str, body: bytes | None) -> Reply:
        """Ask until there is an answer, or the server has been away for ``wait_s``.

        Raises:
            ServerError: unreachable, too slow, a redirect, or an answer too large.
        """
        began, pause = time.monotonic(), 0.25
        while True:
            try:
                reply = self._once(method, route, body)
                if reply.status not in _BUSY:
                    return reply
                reason = reply.complaint()
            except _NotThere as error:
                reason = str(error)
            left = self.wait_s - (time.monotonic() - began)
            if left <= 0:
                raise ServerError(
                    f"{self.address} is not ready after {self.wait_s:g} s ({reason}); --wait "
                    "SECONDS gives it longer"
                )
            self.progress(f"waiting for the server ({reason[:60]})")
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _once(self, method: Method, route: str, body: bytes | None) -> Reply:
        connection = self._connection()
        watch = _Watch(connection, self.timeout_s)
        try:
            with watch:
                self._connect(connection)
                watch.hold()
                connection.request(
                    method.value, self.address.path + route, body=body, headers=self._headers(body)
                )
                response = connection.getresponse()
                raw = response.read(LARGEST_ANSWER + 1)
        except _FAILURES as error:
            raise self._failure(error, watch) from error
        finally:
            connection.close()
        if watch.fired:  # cut off while reading a body of unknown length: not an answer
            raise self._failure(TimeoutError(), watch)
        if 300 <= response.status < 400:
            raise ServerError(
                f"{self.address} answers with a redirect (HTTP {response.status}), which is not "
                "followed: give the address that it leads to"
            )
        if len(raw) > LARGEST_ANSWER:
            raise ServerError(
                f"{self.address}{route} sent more than {LARGEST_ANSWER // 2**20} MiB for a short "
                "answer: not a model server?"
            )
        return self._reply(response.status, raw)

    def _connection(self) -> http.client.HTTPConnection:
        host, port = self.address.host, self.address.port
        if self.address.scheme == "https":
            return http.client.HTTPSConnection(
                host, port, timeout=self.timeout_s, context=ssl.create_default_context()
            )
        return http.client.HTTPConnection(host, port, timeout=self.timeout_s)

    def _connect(self, connection: http.client.HTTPConnection) -> None:
        try:
            connection.connect()
        except socket.gaierror as error:
            raise ServerError(f"{self.address}: no such host ({error.strerror})") from error
        except ssl.SSLError as error:
            raise ServerError(f"{self.address}: TLS failed ({error.reason or error})") from error
        except (ConnectionError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise
            raise _NotThere(f"cannot connect: {error.strerror or error}") from error

    def _headers(self, body: bytes | None) -> dict[str, str]:
        headers = {
            "Accept": "application/json",
            "Accept-Encoding": "identity",
            "Connection": "close",
            "User-Agent": f"trtllm-b12x-fix/{__version__}",
        }
        if body is not None:
            headers["Content-Type"] = "application/json"
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        return headers

    def _failure(self, error: Exception, watch: _Watch) -> Exception:
        if isinstance(error, ServerError | _NotThere):
            return error
        if watch.fired or isinstance(error, TimeoutError):
            return ServerError(
                f"{self.address} did not answer within {self.timeout_s:g} s (--timeout)"
            )
        if isinstance(error, ConnectionError | http.client.RemoteDisconnected):
            return _NotThere("the connection broke before the answer")
        kind = type(error).__name__
        return ServerError(f"{self.address} does not speak HTTP as expected ({kind})")

    def _reply(self, status: int, raw: bytes) -> Reply:
        text = raw.decode("utf-8", "replace")
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):
            document = None
        if self.key is not None and len(self.key) >= _SECRET_FROM:
            # Some servers repeat a key that they refuse.
            text = text.replace(self.key, "(key)")
            document = _without(self.key, document)
        return Reply(status, document, text[:_SHOWN])


class _NotThere(Exception):
    """Nobody listens, or hangs up: a server that starts does that."""


_FAILURES = (OSError, http.client.HTTPException, ServerError, _NotThere, ValueError)


class _Watch:
    """Cuts a connection after its time. A socket's own time-out starts anew with every byte."""

    def __init__(self, connection: http.client.HTTPConnection, seconds: float) -> None:
        self._connection = connection
        self._timer = threading.Timer(seconds, self._cut)
        self._timer.daemon = True
        self._held: socket.socket | None = None
        self.fired = False

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def hold(self) -> None:
        """Once connected: the connection forgets its socket while a body is read from it."""
        self._held = self._connection.sock

    def _cut(self) -> None:
        self.fired = True
        held = self._held or self._connection.sock
        if held is not None:
            with contextlib.suppress(OSError):  # closed in the meantime
                held.shutdown(socket.SHUT_RDWR)


def read_key(variable: str | None) -> str | None:
    """The API key that an environment variable holds; None if no variable was named.

    Raises:
        InputError: unset, empty, or with characters that no header may have. Its value is not
            repeated.
    """
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise InputError(f"--api-key-env {variable}: that variable is not set, or empty")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise InputError(f"--api-key-env {variable}: its value cannot be sent as a key")
    return key


def _error_words(document: Any) -> str:
    """The message in an error as vLLM, TensorRT-LLM, FastAPI and OpenAI write it."""
    if not isinstance(document, dict):
        return ""
    for name in ("error", "message", "detail"):
        value = document.get(name)
        if isinstance(value, dict):
            value = value.get("message")
        if isinstance(value, str) and value.strip():
            return value.strip()
    return json.dumps(document)[:_SHOWN]


def _without(key: str, value: Any) -> Any:
    if isinstance(value, str):
        return value.replace(key, "(key)")
    if isinstance(value, list):
        return [_without(key, one) for one in value]
    if isinstance(value, dict):
        return {_without(key, str(name)): _without(key, one) for name, one in value.items()}
    return value
