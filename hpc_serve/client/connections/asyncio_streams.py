"""Connections of asyncio for the HTTP library below the SDK: one protocol over the event loop's own transports.

The library's own streams for asyncio cost several times as much of a request's CPU time (`benchmarks.client_throughput`
counts it). They stay in use under trio. Which engine a connection leads to is verified in `verified_streams`.
"""

from __future__ import annotations

import asyncio
import select
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anyio

from hpc_serve.client.replicas.sdk import core

# What has come and was not read yet: the engine waits when it is more.
_MOST_UNREAD_BYTES = 256 * 1024


class AsyncioBackend(core.AsyncNetworkBackend):
    """Connects in the event loop of asyncio that runs."""

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Any = None,
    ) -> core.AsyncNetworkStream:
        loop = asyncio.get_running_loop()
        stream = AsyncioStream(loop)
        local = (local_address, 0) if local_address else None
        with _within(timeout, core.ConnectTimeout), _failures(core.ConnectError):
            await loop.create_connection(lambda: stream.ends, host, port, local_addr=local)
        for option in socket_options or ():
            stream.ends.socket.setsockopt(*option)
        return stream

    async def sleep(self, seconds: float) -> None:
        await anyio.sleep(seconds)


class AsyncioStream(core.AsyncNetworkStream):
    """One connection. Raises the library's own errors."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.ends = _Ends(loop)

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """What has come, at most so many bytes; b"" at the end of what comes."""
        ends = self.ends
        while not ends.unread:
            if ends.error is not None:
                raise core.ReadError(str(ends.error)) from ends.error
            if ends.is_closed_here:
                raise core.ReadError("the connection was closed")
            if ends.is_over:
                return b""
            await ends.reader.wait(timeout)
        return ends.take(max_bytes)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Send. What WriteTimeout leaves unsent is sent by the event loop; a call without bytes waits for it again."""
        ends = self.ends
        if buffer:
            _check_writable(ends)
            ends.transport.write(buffer)
        while ends.is_full:
            await ends.writer.wait(timeout)
            _check_writable(ends)

    async def aclose(self) -> None:
        # What is unsent is of no use any more, and a peer that does not read it must not keep the socket open.
        self.ends.is_closed_here = True
        self.ends.transport.abort()
        self.ends.wake()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> core.AsyncNetworkStream:
        ends = self.ends
        try:
            with _within(timeout, core.ConnectTimeout), _failures(core.ConnectError):
                transport = await self._loop.start_tls(
                    ends.transport, ends, ssl_context, server_hostname=server_hostname
                )
        except BaseException:
            await self.aclose()
            raise
        if transport is None:  # it was lost between the handshake and this line
            raise core.ConnectError("the connection was lost")
        ends.transport = transport
        return self

    def get_extra_info(self, info: str) -> Any:
        ends = self.ends
        if info == "socket":
            return ends.socket
        if info == "is_readable":
            return bool(ends.unread) or ends.is_over or _is_readable(ends.socket)
        name = {"client_addr": "sockname", "server_addr": "peername"}.get(info, info)
        return ends.transport.get_extra_info(name)


class _Ends(asyncio.Protocol):
    """What the event loop tells of a connection, and whoever waits for it. One reader and one writer at a time."""

    transport: Any
    socket: Any

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.unread = bytearray()
        self.is_over = False
        self.is_full = False
        self.is_closed_here = False
        self.error: Exception | None = None
        self._is_paused = False
        self.reader, self.writer = _Turn(loop, core.ReadTimeout), _Turn(loop, core.WriteTimeout)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.socket = transport.get_extra_info("socket")  # a transport that was lost has none to give

    def data_received(self, data: bytes) -> None:
        self.unread += data
        if len(self.unread) > _MOST_UNREAD_BYTES and not self._is_paused:
            self._is_paused = True
            self.transport.pause_reading()
        self.reader.wake()

    def eof_received(self) -> bool:
        self.is_over = True
        self.reader.wake()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_over, self.is_full, self.error = True, False, exc
        self.wake()

    def pause_writing(self) -> None:
        self.is_full = True

    def resume_writing(self) -> None:
        self.is_full = False
        self.writer.wake()

    def wake(self) -> None:
        self.reader.wake()
        self.writer.wake()

    def take(self, most_bytes: int) -> bytes:
        taken = bytes(self.unread[:most_bytes])
        del self.unread[:most_bytes]
        if self._is_paused and not self.unread:
            self._is_paused = False
            self.transport.resume_reading()
        return taken


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


def _check_writable(ends: _Ends) -> None:
    if ends.error is not None:
        raise core.WriteError(str(ends.error)) from ends.error
    if ends.is_closed_here or ends.is_over:
        raise core.WriteError("the connection was closed")


@contextmanager
def _within(timeout_s: float | None, late: type[Exception]) -> Iterator[None]:
    try:
        with anyio.fail_after(timeout_s):
            yield
    except TimeoutError as error:
        raise late(str(error)) from error


@contextmanager
def _failures(kind: type[Exception]) -> Iterator[None]:
    try:
        yield
    except OSError as error:  # ssl.SSLError is one
        raise kind(str(error)) from error


def _is_readable(connected: Any) -> bool:
    # The loop may not have run since the engine closed the connection.
    if (number := connected.fileno()) < 0:
        return True
    asked = select.poll()
    asked.register(number, select.POLLIN)
    return bool(asked.poll(0))
