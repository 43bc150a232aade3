"""Servers in this process: one that answers as told, one that writes raw bytes.

Both listen on a free port of 127.0.0.1 and end with their ``with`` block.
"""

from __future__ import annotations

import json
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from trtllm_b12x_fix.canary.prompts import CONTINUATIONS, QUESTIONS, STORY, STORY_QUESTION

STORY_TEXT = " in the ancient Near East, where grain was ground between stones and baked in ashes."


@dataclass(frozen=True)
class Seen:
    """A request as it came."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: Any

    @property
    def prompt(self) -> str:
        if "prompt" in self.body:
            return self.body["prompt"]
        return self.body["messages"][-1]["content"]

    @property
    def is_chat(self) -> bool:
        return self.path.endswith("/chat/completions")

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.body.get("logprobs"))


@dataclass(frozen=True)
class Made:
    """What goes back: JSON, or bytes as they are."""

    body: Any
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


Behaviour = Callable[[Seen], Made]


@dataclass
class FakeServer:
    """Where it is, and what it was asked."""

    url: str
    seen: list[Seen]

    @property
    def posts(self) -> list[Seen]:
        return [one for one in self.seen if one.method == "POST"]


@contextmanager
def serve(behaviour: Behaviour, certificate: Path | None = None) -> Iterator[FakeServer]:
    """An HTTP server that answers what ``behaviour`` makes of each request; HTTPS with a file of
    key and certificate."""
    seen: list[Seen] = []

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            raw = self.rfile.read(length)
            request = Seen(
                self.command, self.path, dict(self.headers), json.loads(raw) if raw else None
            )
            seen.append(request)
            made = behaviour(request)
            body = made.body if isinstance(made.body, bytes) else json.dumps(made.body).encode()
            self.send_response(made.status)
            for name, value in {"Content-Type": "application/json", **made.headers}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with suppress(OSError):  # the client may have had enough
                self.wfile.write(body)

        do_GET = do_POST = _answer

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    scheme = "http"
    if certificate is not None:
        scheme = "https"
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield FakeServer(f"{scheme}://127.0.0.1:{server.server_port}", seen)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def serve_raw(talk: Callable[[socket.socket], None]) -> Iterator[str]:
    """A TCP server; ``talk`` gets each connection after the request's bytes were read."""
    listener = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def accept() -> None:
        while not stop.is_set():
            with suppress(OSError):
                connection, _ = listener.accept()
                with connection, suppress(OSError):
                    connection.settimeout(5)
                    _read_request(connection)
                    talk(connection)

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        stop.set()
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(timeout=5)


def _read_request(connection: socket.socket) -> None:
    """All of it: closing with bytes unread would reset the connection under the answer."""
    got = b""
    while b"\r\n\r\n" not in got:
        part = connection.recv(65536)
        if not part:
            return
        got += part
    head, _, body = got.partition(b"\r\n\r\n")
    length = re.search(rb"Content-Length: (\d+)", head)
    while length and len(body) < int(length[1]):
        body += connection.recv(65536)


def unused_port() -> int:
    """A port on which nobody listens, as of now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


# ---- what a server says


def knows(prompt: str) -> str:
    """A healthy model's text for one of the prompts."""
    if prompt in (STORY.prompt, STORY_QUESTION.prompt):
        return STORY_TEXT
    for probe in (*CONTINUATIONS, *QUESTIONS):
        if probe.prompt == prompt:
            return f" {probe.expected[0]}."
    return " Hi."


def completion(text: str, logprobs: Any = None, model: str = "m", **choice: Any) -> dict[str, Any]:
    """The completions route's answer."""
    made = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": "stop", **choice}
    return {"object": "text_completion", "model": model, "choices": [made]}


def message(content: Any, logprobs: Any = None, model: str = "m", **parts: Any) -> dict[str, Any]:
    """The chat route's answer."""
    finish = parts.pop("finish_reason", "stop")
    said = {"role": "assistant", "content": content, **parts}
    choice = {"index": 0, "message": said, "logprobs": logprobs, "finish_reason": finish}
    return {"object": "chat.completion", "model": model, "choices": [choice]}


def figures(*positions: tuple[str, dict[str, float]]) -> dict[str, Any]:
    """The completions route's log-probabilities: (token that came, candidates) each."""
    return {
        "tokens": [token for token, _ in positions],
        "token_logprobs": [top.get(token) for token, top in positions],
        "top_logprobs": [top for _, top in positions],
        "text_offset": [0 for _ in positions],
    }


def chat_figures(*positions: tuple[str, dict[str, float]]) -> dict[str, Any]:
    """The chat route's."""
    return {
        "content": [
            {
                "token": token,
                "logprob": top.get(token),
                "bytes": None,
                "top_logprobs": [
                    {"token": other, "logprob": value, "bytes": None}
                    for other, value in top.items()
                ],
            }
            for token, top in positions
        ]
    }


def says(text_of: Callable[[str], str]) -> Behaviour:
    """Both routes, no log-probabilities."""

    def behaviour(seen: Seen) -> Made:
        text = text_of(seen.prompt)
        return Made(message(text) if seen.is_chat else completion(text))

    return behaviour
