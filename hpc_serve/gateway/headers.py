"""Which headers go from a client to an engine, and from an engine to a client. Pure. Names are in small letters.

Headers of one connection stay there (RFC 9110, 7.6.1). The key and cookies of a client are for the gateway. The parser
of requests has refused headers with characters that none may have.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
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
_OF_ENGINE_BEGINNINGS = (b"x-hpc-serve", b"access-control-")
_NOT_FOR_THE_CLIENT_OF_A_STREAM = _NOT_FOR_THE_CLIENT | {b"content-length"}


def for_engine(given: Sequence[Header]) -> list[Header]:
    """Return the headers of a request as the engine gets them.

    A client that asks for signs gets them by its own header; the transport asks the engine in any case.
    """
    left_out = _with_those_named(given, _NOT_FOR_THE_ENGINE)
    passed = [
        header
        for header in given
        if header == SIGNS or (header[0] not in left_out and not header[0].startswith(_LEFT_OUT_BEGINNINGS))
    ]
    return [*passed, (b"accept-encoding", b"identity")]


def for_client(given: Sequence[Header], *, is_stream: bool) -> list[Header]:
    """Return the headers of an answer as the client gets them. The length of a stream is not known."""
    left_out = _with_those_named(given, _NOT_FOR_THE_CLIENT_OF_A_STREAM if is_stream else _NOT_FOR_THE_CLIENT)
    return [header for header in given if header[0] not in left_out and not header[0].startswith(_OF_ENGINE_BEGINNINGS)]


@functools.lru_cache(maxsize=64)
def is_own_host(host: bytes, named: tuple[str, ...]) -> bool:
    """Return whether a Host header means localhost, a loopback address or one of the names.

    >>> is_own_host(b"localhost:8000", ()), is_own_host(b"[::1]:8000", ()), is_own_host(b"evil.example:8000", ())
    (True, True, False)
    """
    try:
        name = urlsplit(f"//{host.decode('latin-1')}").hostname or ""
        return name == "localhost" or name in named or ip_address(name).is_loopback
    except ValueError:
        return False


def _with_those_named(headers: Sequence[Header], names: frozenset[bytes]) -> frozenset[bytes]:
    """Return the names, and those that a header `Connection` names."""
    for name, value in headers:
        if name == b"connection":
            names = names | {word.strip().lower() for word in value.split(b",")}
    return names
