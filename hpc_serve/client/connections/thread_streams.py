"""Connections in threads for the HTTP library below the SDK: fewer calls of the kernel than the library's own.

The library sends the head and the body of a request apart, and sets the socket's time limit before each call. Each of
these gives the interpreter's lock away, for which all other threads with a request under way wait in line. Here a
request is sent as one piece, with the first read of its answer, and a time limit is set when it changes. Which engine
a connection leads to is verified in `verified_streams`.
"""

from __future__ import annotations

import socket

from hpc_serve.client.replicas.sdk import core

# A request that is longer is sent while it is written.
_MOST_UNSENT_BYTES = 64 * 1024


class SocketStream(core.NetworkStream):
    """A connection over a library's stream, whose socket it reads and writes. Raises the library's own errors."""

    def __init__(self, stream: core.NetworkStream) -> None:
        self._socket: socket.socket = stream.get_extra_info("socket")
        self._unsent = b""
        self._write_timeout_s: float | None = None
        self.close = stream.close  # type: ignore[method-assign]
        self.get_extra_info = stream.get_extra_info  # type: ignore[method-assign]

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
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

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
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
