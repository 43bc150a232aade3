"""Where a server is: a base URL, taken apart and checked once."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from trtllm_b12x_fix.errors import InputError

#: What people paste after the base URL.
_ROUTES = ("/chat/completions", "/completions", "/models")
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Address:
    """A server's API root.

    Attributes:
        scheme: ``http`` or ``https``.
        host: name or IP address, without brackets.
        path: with a leading and without a trailing slash, ending in a version: ``/v1``.
    """

    scheme: str
    host: str
    port: int
    path: str

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == _PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{host}{port}{self.path}"

    @property
    def is_loopback(self) -> bool:
        """Nothing sent there leaves this machine."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def parse_address(text: str) -> Address:
    """``http://host:8000`` or ``https://host/prefix/v1``, with or without a route after it.

    Raises:
        InputError: not http or https, no host, a port that is none, credentials, a query.
    """
    # A control character would let a URL write headers of its own.
    if not text.isprintable() or " " in text.strip():
        raise InputError("--base-url has a space or a control character in it")
    try:
        parts = urlsplit(text.strip())
        port = parts.port
    except ValueError as error:
        raise InputError(f"--base-url cannot be read as a URL: {error}") from error
    if parts.username is not None or parts.password is not None:
        # Not repeated: it may be a password.
        raise InputError(
            "--base-url holds credentials; put the key into an environment variable and name it "
            "with --api-key-env"
        )
    if parts.scheme not in _PORTS or not parts.hostname:
        raise InputError(f"--base-url {text!r}: write it as http://HOST:PORT or https://HOST")
    if parts.query or parts.fragment:
        raise InputError("--base-url has a query or a fragment: give the API's root alone")
    if port == 0:
        raise InputError(f"--base-url {text!r}: 0 is no port")
    return Address(
        parts.scheme,
        _ascii_host(parts.hostname),
        port or _PORTS[parts.scheme],
        _api_root(parts.path),
    )


def _ascii_host(host: str) -> str:
    try:
        return host if host.isascii() else host.encode("idna").decode("ascii")
    except UnicodeError as error:
        raise InputError(f"--base-url: {host!r} is no host name") from error


def _api_root(path: str) -> str:
    if not path.isascii():
        raise InputError("--base-url: write characters of the path that are not ASCII as %XX")
    path = path.rstrip("/")
    for route in _ROUTES:
        if path.endswith(route):
            path = path.removesuffix(route)
            break
    return path if re.search(r"/v[0-9]+[a-z0-9]*$", path) else f"{path}/v1"
