"""Tests whether nodes reach each other. Each listens on a port of the kernel's choice, at its engine's address.

Both nodes prove that they hold the run's token (`admission`). So a stranger's program that answers at an address does
not pass for a node.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from hpc_serve.job.links.admission import Admission, greeting, open_with_ticket

_BACKLOG = 1_024
_AT_ONCE = 64
_TRY_AGAIN_S = 0.5
_LONGEST_ERROR = 120


@dataclass(frozen=True, kw_only=True)
class Peer:
    """The address where a node listens for the others."""

    name: str
    address: str
    port: int


class PeerListener:
    """Listens at `address` until it is closed. Raises OSError."""

    def __init__(self, name: str, address: str, token: str) -> None:
        self._name, self._token = name, token
        listener = socket.create_server((address, 0), backlog=_BACKLOG)
        self.peer = Peer(name=name, address=address, port=int(listener.getsockname()[1]))
        self._admission = Admission(listener, token, self._answer)

    def close(self) -> None:
        self._admission.close()

    def _answer(self, connection: socket.socket, nonce: str) -> None:
        with connection, contextlib.suppress(OSError):
            connection.sendall(greeting(self._token, _role(self._name), nonce))


async def find_unreached(peers: Sequence[Peer], token: str, *, within_s: float) -> dict[str, str]:
    """Return the unreachable peers by name, each with its last error. Each is tried again for `within_s` seconds."""
    turns = asyncio.Semaphore(_AT_ONCE)
    deadline = time.monotonic() + within_s

    async def try_peer(peer: Peer) -> str:
        async with turns:
            while True:
                left_s = max(_TRY_AGAIN_S, deadline - time.monotonic())
                try:
                    return await asyncio.wait_for(_reach(peer, token, left_s), left_s)
                except asyncio.TimeoutError:
                    error = f"no answer from {peer.address} within {within_s:.0f} s"
                except (OSError, ValueError, EOFError) as found:
                    error = str(found)[:_LONGEST_ERROR] or type(found).__name__
                if time.monotonic() + _TRY_AGAIN_S > deadline:
                    return error
                await asyncio.sleep(_TRY_AGAIN_S)

    errors = await asyncio.gather(*map(try_peer, peers))
    return {peer.name: error for peer, error in zip(peers, errors) if error}


async def _reach(peer: Peer, token: str, within_s: float) -> str:
    """Returns "" if it is the node. Raises OSError, asyncio.TimeoutError, EOFError, ValueError."""
    _, writer, _ = await open_with_ticket((peer.address, peer.port), token, _role(peer.name), within_s=within_s)
    writer.transport.abort()
    return ""


def _role(name: str) -> str:
    return f"reached:{name}"
