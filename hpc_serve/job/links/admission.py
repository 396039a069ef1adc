"""Admits connections to a port: the first line of a connection must be a ticket, made with the run's token.

Anybody can connect. A thread takes each connection, reads what has come with it, and closes it at once if that is no
ticket. So a connection without the token takes no place, no time and no memory, however many there are. The ticket's
nonce is the question that the answering side proves itself by: with its role and the token (`proof`). A ticket counts
once, so who has read one on the network gains nothing by it. `control` also asks who has connected for a proof.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import re
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator

from hpc_serve.job.links.link import MAX_MESSAGE_BYTES, Message, read_message, text

_TICKET = re.compile(rb"hpc-serve ([0-9a-f]{32}) ([0-9a-f]{64})\n")
_TICKET_BYTES = len("hpc-serve ") + 32 + 1 + 64 + 1
# The kernel keeps a connection from us until something was sent on it, and forgets it after about so many seconds.
_FIRST_BYTES_S = 5
_NO_RESOURCES_PAUSE_S = 0.1
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: a refused connection leaves nothing behind in the kernel
_CLOSE_USUALLY = struct.pack("ii", 0, 0)


def proof(token: str, role: str, nonce: str) -> str:
    """Return what only a holder of the token can say in this role to whoever has chosen the nonce."""
    return hmac.new(token.encode(), f"{role}:{nonce}".encode(), "sha256").hexdigest()


def is_proof(message: Message, token: str, role: str, nonce: str) -> bool:
    """Return whether a message holds that proof. Raises ValueError if it holds none."""
    return hmac.compare_digest(text(message, "proof").encode(), proof(token, role, nonce).encode())


def make_ticket(token: str, nonce: str) -> bytes:
    """Return the first line on a connection."""
    return f"hpc-serve {nonce} {proof(token, 'ticket', nonce)}\n".encode()


def greeting(token: str, role: str, nonce: str, /, **fields: object) -> bytes:
    """Return the first line of the side that was connected to, in answer to a ticket with this nonce."""
    return json.dumps({"proof": proof(token, role, nonce), **fields}).encode() + b"\n"


async def open_with_ticket(
    address: tuple[str, int], token: str, role: str, *, within_s: float
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Message]:
    """Connect to a port that `Admission` guards; returns the connection and the greeting of whoever has this role.

    Raises OSError or asyncio.TimeoutError if nobody is reached. Raises EOFError if whoever is reached does not greet,
    ValueError for a wrong greeting. Each of the two steps may take `within_s` seconds.
    """
    nonce = secrets.token_hex(16)
    reader, writer = await asyncio.wait_for(_connect(address, make_ticket(token, nonce)), within_s)
    with aborted_on_error(writer):
        greeted = await asyncio.wait_for(read_message(reader), within_s)
        if not is_proof(greeted, token, role, nonce):
            raise ValueError(f"another program answers at {address[0]}:{address[1]}")
    return reader, writer, greeted


@contextlib.contextmanager
def aborted_on_error(writer: asyncio.StreamWriter) -> Iterator[None]:
    """Abort a connection on any error. One of the network becomes EOFError: somebody was reached, and has gone."""
    try:
        yield
    except BaseException as error:
        writer.transport.abort()
        if isinstance(error, OSError | asyncio.TimeoutError):
            raise EOFError(str(error)) from error
        raise


async def _connect(address: tuple[str, int], ticket: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        # The ticket travels with the packet that opens the connection.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _FIRST_BYTES_S)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(connection, address)
        await loop.sock_sendall(connection, ticket)
        return await asyncio.open_connection(sock=connection, limit=MAX_MESSAGE_BYTES)
    except BaseException:
        connection.close()
        raise


class Admission:
    """Takes connections from `listener` until it is closed.

    It calls `on_admitted` in its thread with each that counts, and its nonce.
    """

    def __init__(self, listener: socket.socket, token: str, on_admitted: Callable[[socket.socket, str], None]) -> None:
        self._listener, self._token, self._on_admitted = listener, token, on_admitted
        self._used: set[str] = set()
        self._closed = threading.Event()
        listener.setblocking(True)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _FIRST_BYTES_S)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)  # inherited by each connection
        self._thread = threading.Thread(target=self._take_connections, name="control port", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no further connection. Admitted connections stay open."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends an accept() that waits
        self._thread.join()
        self._listener.close()

    def _take_connections(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except ConnectionError:  # it was reset while it waited
                continue
            except OSError:  # closed, or no file or memory is left for now
                self._closed.wait(_NO_RESOURCES_PAUSE_S)
                continue
            if nonce := self._ticket_nonce(connection):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _CLOSE_USUALLY)
                self._on_admitted(connection, nonce)
            else:
                connection.close()

    def _ticket_nonce(self, connection: socket.socket) -> str:
        """Return the nonce of the new ticket in the first bytes, "" if they are none.

        They are here by now, or never.
        """
        try:
            connection.setblocking(False)
            said = _TICKET.fullmatch(connection.recv(_TICKET_BYTES))
        except OSError:
            return ""
        nonce = said[1].decode() if said is not None else ""
        is_ticket = said is not None and hmac.compare_digest(said[2], proof(self._token, "ticket", nonce).encode())
        if not is_ticket or nonce in self._used:
            return ""
        self._used.add(nonce)
        return nonce
