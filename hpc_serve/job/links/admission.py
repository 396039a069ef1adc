"""Admits connections to the head's control port: the first line of a connection must show the run's token.

Anybody can connect. A thread takes each connection, reads what has come with it, and closes it at once if that is no
ticket. So a connection without the token takes no place, no time and no memory, however many there are. `control`
decides who has connected: it asks for a proof that cannot be sent twice.
"""

from __future__ import annotations

import contextlib
import hmac
import re
import secrets
import socket
import struct
import threading
from collections.abc import Callable

_TICKET = re.compile(rb"hpc-serve ([0-9a-f]{32}) ([0-9a-f]{64})\n")
_TICKET_BYTES = len("hpc-serve ") + 32 + 1 + 64 + 1
# The kernel keeps a connection from us until something was sent on it, and forgets it after about so many seconds.
_FIRST_BYTES_S = 5
_NO_RESOURCES_PAUSE_S = 0.1
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: a refused connection leaves nothing behind in the kernel
_CLOSE_USUALLY = struct.pack("ii", 0, 0)


def make_ticket(token: bytes) -> bytes:
    """Return the first line on a connection to the head."""
    nonce = secrets.token_hex(16).encode()
    return b"hpc-serve " + nonce + b" " + _code(token, nonce) + b"\n"


def send_first_bytes_with_handshake(connection: socket.socket) -> None:
    """Set before connecting: the ticket then travels with the packet that opens the connection."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _FIRST_BYTES_S)


class Admission:
    """Takes connections from `listener` until it is closed; calls `on_admitted` in its thread with each that counts."""

    def __init__(self, listener: socket.socket, token: bytes, on_admitted: Callable[[socket.socket], None]) -> None:
        self._listener, self._token, self._on_admitted = listener, token, on_admitted
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
            if self._has_ticket(connection):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _CLOSE_USUALLY)
                self._on_admitted(connection)
            else:
                connection.close()

    def _has_ticket(self, connection: socket.socket) -> bool:
        """Return whether the first bytes are a ticket. They are here by now, or the connection is not waited for."""
        try:
            connection.setblocking(False)
            said = _TICKET.fullmatch(connection.recv(_TICKET_BYTES))
        except OSError:
            return False
        return said is not None and hmac.compare_digest(said[2], _code(self._token, said[1]))


def _code(token: bytes, nonce: bytes) -> bytes:
    return hmac.new(token, b"ticket:" + nonce, "sha256").hexdigest().encode()
