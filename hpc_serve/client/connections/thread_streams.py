"""Connections in threads for the HTTP library below the SDK: fewer calls of the kernel than the library's own.

The library sends the head and the body of a request apart, and sets the socket's time limit before each call. Each of
these gives the interpreter's lock away, for which all other threads with a request under way wait in line. Here a
request is sent as one piece, with the first read of its answer, and a time limit is set when it changes. The methods
are coroutines that block (`run_blocking`). Which engine a connection leads to is verified in `verified_streams`.
"""

from __future__ import annotations

import select
import socket
import ssl
from typing import Any

from hpc_serve.client.replicas.sdk import core

# A request that is longer is sent while it is written.
_MOST_UNSENT_BYTES = 64 * 1024


async def connect_in_thread(host: str, port: int, *, timeout: float, socket_options: Any) -> SocketStream:
    """Return a connection in the clear. Raises the library's own errors."""
    stream = core.SyncBackend().connect_tcp(host, port, timeout=timeout, socket_options=socket_options)
    return SocketStream(stream.get_extra_info("socket"))


class SocketStream:
    """A connection over a socket. Raises the library's own errors."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._unsent = b""
        self._write_timeout_s: float | None = None

    async def start_tls(self, context: ssl.SSLContext, *, timeout: float) -> SocketStream:
        """Begin TLS. If that fails, the caller closes the connection.

        The socket is known before the handshake, so that a forked process can leave it.
        """
        try:
            self._limit(timeout)
            self._socket = secured = context.wrap_socket(self._socket, do_handshake_on_connect=False)
            secured.do_handshake()
        except TimeoutError as error:
            raise core.ConnectTimeout(error) from error
        except OSError as error:  # ssl.SSLError is one
            raise core.ConnectError(error) from error
        return self

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Send what was written, and read: at most so many bytes, b"" at the end of what comes.

        What cannot be sent is no error here: the other end may have answered before it closed the connection.
        """
        if self._unsent:
            try:
                self._send()
            except core.WriteError:
                self._unsent = b""
        try:
            self._limit(timeout)
            return self._socket.recv(max_bytes)
        except TimeoutError as error:
            raise core.ReadTimeout(error) from error
        except OSError as error:
            raise core.ReadError(error) from error

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Send, at the latest with the next `read`. What WriteTimeout leaves unsent is sent by the next call."""
        self._write_timeout_s = timeout
        self._unsent += buffer
        if len(self._unsent) > _MOST_UNSENT_BYTES:
            self._send()

    def _send(self) -> None:
        unsent = memoryview(self._unsent)
        try:
            self._limit(self._write_timeout_s)
            while unsent:
                unsent = unsent[self._socket.send(unsent) :]
        except TimeoutError as error:
            self._unsent = bytes(unsent)
            raise core.WriteTimeout(error) from error
        except OSError as error:
            raise core.WriteError(error) from error
        self._unsent = b""

    def _limit(self, timeout_s: float | None) -> None:
        if self._socket.gettimeout() != timeout_s:
            self._socket.settimeout(timeout_s)

    async def aclose(self) -> None:
        self._socket.close()

    def get_extra_info(self, info: str) -> Any:
        if info == "is_readable":
            return is_readable(self._socket)
        if info == "client_addr":
            return self._socket.getsockname()
        if info == "server_addr":
            return self._socket.getpeername()
        return self._socket if info == "socket" else None


def is_readable(connected: Any) -> bool:
    """Return whether bytes, or the end of a connection, have come; True for a socket that is closed."""
    if (number := connected.fileno()) < 0:
        return True
    asked = select.poll()
    asked.register(number, select.POLLIN)
    return bool(asked.poll(0))
