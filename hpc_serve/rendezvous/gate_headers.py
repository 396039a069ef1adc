"""What the gate in an engine and its clients tell each other in headers. Pure, with the standard library alone.

The gate decides what it answers, the client what it believes.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Sequence
from typing import Any

DRAINING_HEADER = (b"x-hpc-serve", b"draining")
"""In answers of an engine that accepts no new requests."""
CHALLENGE_HEADER = b"x-hpc-serve-challenge"
"""In a client's first request on a connection without TLS; PROOF_HEADER is in the answer."""
PROOF_HEADER = b"x-hpc-serve-proof"


def prove_connection(
    key: bytes, challenge: bytes, record: str, *, client: Sequence[Any], server: Sequence[Any]
) -> bytes:
    """The answer to `challenge` on one connection: only a holder of the key who is an end of it can compute it.

    `client` and `server` are the addresses and ports of the two ends. A program that passes the challenge on to the
    engine has other ends on its connection, so the answer that it gets is a wrong one. It does not reveal the key.
    """
    told = "\n".join(("hpc-serve-connection", challenge.decode("latin-1"), record, _end(client), _end(server)))
    return hmac.new(key, told.encode(), "sha256").hexdigest().encode()


def _end(address: Sequence[Any]) -> str:
    """An end of a connection in one spelling: a socket for both families says ::ffff:10.0.0.1 for 10.0.0.1."""
    host = ipaddress.ip_address(str(address[0]).partition("%")[0])
    if isinstance(host, ipaddress.IPv6Address) and host.ipv4_mapped is not None:
        host = host.ipv4_mapped
    return f"{host} {int(address[1])}"
