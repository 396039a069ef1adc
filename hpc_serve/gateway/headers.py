"""Which headers go from a client to an engine, and from an engine to a client. Pure.

Headers of one connection stay there (RFC 9110, 7.6.1). The key and cookies of a client are for the gateway. A header
with characters that no header may have is an error of the client: the engine's connection would break by it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from ipaddress import ip_address
from urllib.parse import urlsplit

from hpc_serve.rendezvous.gate_headers import SIGNS

Header = tuple[bytes, bytes]

_OF_A_CONNECTION = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade")
)
_NOT_FOR_THE_ENGINE = _OF_A_CONNECTION | {
    *(b"host", b"content-length", b"expect", b"accept-encoding", b"authorization", b"x-api-key", b"api-key"),
    *(b"proxy-authorization", b"proxy-authenticate", b"cookie", b"origin", b"referer", b"forwarded", b"via"),
    *(b"x-real-ip", b"http2-settings"),
}
_LEFT_OUT_BEGINNINGS = (b"x-forwarded-", b"x-hpc-serve", b"sec-", b"access-control-")
_NOT_FOR_THE_CLIENT = _OF_A_CONNECTION | {b"server", b"proxy-authenticate", b"set-cookie"}

_NAME = re.compile(rb"[-!#$%&'*+.^_`|~0-9A-Za-z]{1,256}")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")


class BadHeaderError(ValueError):
    """A header of the client has characters that none may have."""


def for_engine(given: Iterable[Header]) -> list[Header]:
    """Return the headers of a request as the engine gets them. Raises BadHeaderError.

    A client that asks for signs gets them by its own header; the transport asks the engine in any case.
    """
    headers = [(name.lower(), value.strip(b" \t")) for name, value in given]
    left_out = _NOT_FOR_THE_ENGINE | _named_by_connection(headers)
    passed = []
    for name, value in headers:
        if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
            raise BadHeaderError(f"the header {name[:80]!r} has characters that no header may have")
        if (name, value) == SIGNS or (name not in left_out and not name.startswith(_LEFT_OUT_BEGINNINGS)):
            passed.append((name, value))
    return [*passed, (b"accept-encoding", b"identity")]


def for_client(given: Iterable[Header], *, is_stream: bool) -> list[Header]:
    """Return the headers of an answer as the client gets them. The length of a stream is not known."""
    headers = [(name.lower(), value) for name, value in given]
    left_out = _NOT_FOR_THE_CLIENT | _named_by_connection(headers) | ({b"content-length"} if is_stream else set())
    return [
        (name, value)
        for name, value in headers
        if name not in left_out and not name.startswith((b"x-hpc-serve", b"access-control-"))
    ]


def value_of(headers: Iterable[Header], name: bytes) -> bytes:
    """Return the first header of that name; empty if there is none."""
    return next((value for given, value in headers if given.lower() == name), b"")


def hosts_of(headers: Iterable[Header]) -> list[str]:
    """Return all values of the Host header."""
    return [value.decode("latin-1") for name, value in headers if name.lower() == b"host"]


@functools.lru_cache(maxsize=64)
def is_own_host(host: str, named: tuple[str, ...]) -> bool:
    """Return whether a Host header means localhost, a loopback address or one of the names.

    >>> is_own_host("localhost:8000", ()), is_own_host("[::1]:8000", ()), is_own_host("evil.example:8000", ())
    (True, True, False)
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or name in named or ip_address(name).is_loopback
    except ValueError:
        return False


def _named_by_connection(headers: Iterable[Header]) -> set[bytes]:
    values = [value for name, value in headers if name == b"connection"]
    return {word.strip().lower() for value in values for word in value.split(b",")}
