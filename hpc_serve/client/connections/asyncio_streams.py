"""Connections of asyncio for the HTTP library below the SDK: one protocol over the event loop's own transports.

The library's own streams for asyncio cost several times as much of a request's CPU time (`benchmarks.client_throughput`
counts it). They stay in use under trio. Which engine a connection leads to is verified in `verified_streams`.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anyio

from hpc_serve.client.connections.thread_streams import is_readable
from hpc_serve.client.replicas.sdk import core

# What has come and was not read yet: the engine waits when it is more.
_MOST_UNREAD_BYTES = 256 * 1024


async def connect_in_asyncio(host: str, port: int, *, timeout: float, socket_options: Any) -> AsyncioStream:
    """Return a connection in the clear, of the event loop that runs. Raises the library's own errors."""
    loop = asyncio.get_running_loop()
    stream = AsyncioStream(loop)
    with _connecting(timeout):
        await loop.create_connection(lambda: stream, host, port)
    for option in socket_options:
        stream.socket.setsockopt(*option)
    return stream


class AsyncioStream(asyncio.Protocol):
    """One connection, for one reader and one writer at a time. Raises the library's own errors."""

    transport: Any
    socket: Any

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.unread = bytearray()
        self._is_over = False
        self._is_full = False
        self._is_closed_here = False
        self._is_paused = False
        self._error: Exception | None = None
        self._reader, self._writer = _Turn(loop, core.ReadTimeout), _Turn(loop, core.WriteTimeout)

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """What has come, at most so many bytes; b"" at the end of what comes."""
        while not self.unread:
            if self._error is not None:
                raise core.ReadError(str(self._error)) from self._error
            if self._is_closed_here:
                raise core.ReadError("the connection was closed")
            if self._is_over:
                return b""
            await self._reader.wait(timeout)
        taken = bytes(self.unread[:max_bytes])
        del self.unread[:max_bytes]
        if self._is_paused and not self.unread:
            self._is_paused = False
            self.transport.resume_reading()
        return taken

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Send. What WriteTimeout leaves unsent is sent by the event loop; a call without bytes waits for it again."""
        if buffer:
            self._check_writable()
            self.transport.write(buffer)
        while self._is_full:
            await self._writer.wait(timeout)
            self._check_writable()

    def _check_writable(self) -> None:
        if self._error is not None:
            raise core.WriteError(str(self._error)) from self._error
        if self._is_closed_here or self._is_over:
            raise core.WriteError("the connection was closed")

    async def aclose(self) -> None:
        # What is unsent is of no use any more, and a peer that does not read it must not keep the socket open.
        self._is_closed_here = True
        self.transport.abort()
        self._wake()

    async def start_tls(self, context: ssl.SSLContext, *, timeout: float) -> AsyncioStream:
        """Begin TLS. If that fails, the caller closes the connection."""
        with _connecting(timeout):
            transport = await self._loop.start_tls(self.transport, self, context)
        if transport is None:  # it was lost between the handshake and this line
            raise core.ConnectError("the connection was lost")
        self.transport = transport
        return self

    def get_extra_info(self, info: str) -> Any:
        if info == "socket":
            return self.socket
        if info == "is_readable":  # the loop may not have run since the engine closed the connection
            return bool(self.unread) or self._is_over or is_readable(self.socket)
        name = {"client_addr": "sockname", "server_addr": "peername"}.get(info, info)
        return self.transport.get_extra_info(name)

    # -- what the event loop tells

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.socket = transport.get_extra_info("socket")  # a transport that was lost has none to give

    def data_received(self, data: bytes) -> None:
        self.unread += data
        if len(self.unread) > _MOST_UNREAD_BYTES and not self._is_paused:
            self._is_paused = True
            self.transport.pause_reading()
        self._reader.wake()

    def eof_received(self) -> bool:
        self._is_over = True
        self._reader.wake()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_over, self._is_full, self._error = True, False, exc
        self._wake()

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self._writer.wake()

    def _wake(self) -> None:
        self._reader.wake()
        self._writer.wake()


class _Turn:
    """One who waits until it is woken, or raises `late`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, late: type[Exception]) -> None:
        self._loop, self._late = loop, late
        self._woken: asyncio.Future[None] | None = None

    async def wait(self, timeout_s: float | None) -> None:
        woken = self._woken = self._loop.create_future()
        timer = self._loop.call_later(timeout_s, self._fail) if timeout_s is not None else None
        try:
            await woken
        finally:
            self._woken = None
            if timer is not None:
                timer.cancel()

    def wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    def _fail(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_exception(self._late())


@contextmanager
def _connecting(timeout_s: float) -> Iterator[None]:
    try:
        with anyio.fail_after(timeout_s):
            yield
    except TimeoutError as error:
        raise core.ConnectTimeout(str(error)) from error
    except OSError as error:  # ssl.SSLError is one
        raise core.ConnectError(str(error)) from error
