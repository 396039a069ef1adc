"""What the gate in an engine and its clients tell each other in headers. Pure, with the standard library alone.

The gate decides what it answers, the client what it believes.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

DRAINING_HEADER = (b"x-hpc-serve", b"draining")
"""In answers of an engine that accepts no new requests."""
CHALLENGE_HEADER = b"x-hpc-serve-challenge"
"""In a client's first request on a connection without TLS; PROOF_HEADER is in the answer."""
PROOF_HEADER = b"x-hpc-serve-proof"
CANARY_HEADER = (b"x-hpc-serve", b"canary")
"""In requests of the engine's own launcher, which only wants to know whether it answers."""
REQUESTS_HEADER = b"x-hpc-serve-requests"
"""In answers of /metrics: the RequestCount of the gate that passed the question on."""


@dataclass(frozen=True, kw_only=True)
class RequestCount:
    """How many requests one gate has let through, without GET, HEAD and canaries, and how many are `under_way`.

    An engine with several server processes has as many gates; `gate` tells them apart.
    """

    gate: str
    count: int
    under_way: int

    @property
    def text(self) -> str:
        return f"{self.gate} {self.count} {self.under_way}"


_REQUESTS = re.compile(r"(\w{1,32}) (\d{1,15}) (\d{1,15})")


class Headers(Protocol):
    """The headers of an answer, whichever HTTP library has read it."""

    def get(self, key: str, /) -> str | None: ...


def is_draining(headers: Headers) -> bool:
    """Whether an answer says that its engine accepts no new requests."""
    return headers.get(DRAINING_HEADER[0].decode()) == DRAINING_HEADER[1].decode()


def read_request_count(headers: Headers) -> RequestCount | None:
    """What an answer of /metrics says of requests; None if it does not.

    >>> read_request_count({"x-hpc-serve-requests": "5f3a 17 2"})
    RequestCount(gate='5f3a', count=17, under_way=2)
    """
    found = _REQUESTS.fullmatch(headers.get(REQUESTS_HEADER.decode()) or "")
    if found is None:
        return None
    return RequestCount(gate=found[1], count=int(found[2]), under_way=int(found[3]))


def prove_connection(
    key: bytes, challenge: bytes, record: str, *, host: str | None, client: Sequence[Any], server: Sequence[Any]
) -> bytes:
    """The answer to `challenge` on one connection: only a holder of the key who is an end of it can compute it.

    `host` is the engine's `host_id`. `client` and `server` are the addresses and ports of the two ends. A program that
    passes the challenge on to the engine has other ends on its connection, so the answer that it gets is a wrong one.
    It does not reveal the key.
    """
    ends = (_end(client), _end(server))
    told = "\n".join(("hpc-serve-connection", challenge.decode("latin-1"), record, host or "", *ends))
    return hmac.new(key, told.encode(), "sha256").hexdigest().encode()


def is_within_one_host(client: Sequence[Any], server: Sequence[Any]) -> bool:
    """Whether a connection stays on one host, by its addresses: other hosts may have the same ones."""
    return _address(client) == _address(server) or _address(server).is_loopback


def _end(address: Sequence[Any]) -> str:
    return f"{_address(address)} {int(address[1])}"


def _address(address: Sequence[Any]) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An end's address in one spelling: a socket for both families says ::ffff:10.0.0.1 for 10.0.0.1."""
    host = ipaddress.ip_address(str(address[0]).partition("%")[0])
    if isinstance(host, ipaddress.IPv6Address) and host.ipv4_mapped is not None:
        return host.ipv4_mapped
    return host
