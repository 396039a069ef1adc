"""One connection to an engine: it is verified before it carries a key or a prompt, and fails when its replica is lost.

Standard sockets and the HTTP library's own streams, in threads and in event loops. Which engine a URL stands for is
decided in `connections`.
"""

from __future__ import annotations

import os
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from hpc_serve.client.connections.answer_wait import AnswerWait, Judge
from hpc_serve.client.connections.asyncio_streams import AsyncioBackend, AsyncioStream
from hpc_serve.client.connections.origins import Origins
from hpc_serve.client.connections.thread_streams import SocketStream
from hpc_serve.client.replicas.event_loops import has_ended, is_asyncio, running_loop
from hpc_serve.client.replicas.pool import ReplicaAddress
from hpc_serve.client.replicas.sdk import core, http
from hpc_serve.errors import RecordError
from hpc_serve.trust.connection import tls_refusal
from hpc_serve.trust.pinned import pinned_context

_DEFAULT_CONNECT_S = 5.0

# A host without power answers nothing, not even that a connection is closed. The kernel asks an idle one after 10 s,
# and gives up 25 s after the last packet. That counts where no other replica is ready: else silence decides sooner.
_KEEPALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in (
            ("TCP_KEEPIDLE", 10),
            ("TCP_KEEPINTVL", 5),
            ("TCP_KEEPCNT", 3),
            ("TCP_USER_TIMEOUT", 25_000),
        )
        if hasattr(socket, name)
    ),
]


class _Deadline:
    def __init__(self, timeout_s: float | None) -> None:
        self._ends_at_s = time.monotonic() + (_DEFAULT_CONNECT_S if timeout_s is None else timeout_s)

    @property
    def left_s(self) -> float:
        return max(self._ends_at_s - time.monotonic(), 0.001)


class Connection(core.NetworkStream):
    """A verified connection in threads. Its reads and writes raise ReplicaLostError when its replica is lost."""

    def __init__(self, stream: core.NetworkStream, replica: ReplicaAddress, judge: Judge) -> None:
        self._stream = stream
        self.wait = AnswerWait(replica, judge)
        self.close = stream.close  # type: ignore[method-assign]
        self.get_extra_info = stream.get_extra_info  # type: ignore[method-assign]

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        wait_s = self.wait.begin(timeout)
        while True:
            try:
                data = self._stream.read(max_bytes, wait_s)
            except (core.ReadTimeout, core.WriteTimeout):
                if (again_s := self.wait.again()) is None:
                    raise
                wait_s = again_s
            else:
                self.wait.end(data)
                return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        wait_s = self.wait.begin_write(timeout)
        while True:
            try:
                return self._stream.write(buffer, wait_s)
            except core.WriteTimeout:
                if (again_s := self.wait.again()) is None:
                    raise
                wait_s, buffer = again_s, b""  # the stream keeps what is unsent

    def leave(self) -> None:
        """Give this process's hold of the connection up; the process that it was forked from keeps its own."""
        _leave(self.get_extra_info("socket"))


class AsyncConnection(core.AsyncNetworkStream):
    """The same in an event loop."""

    def __init__(self, stream: core.AsyncNetworkStream, replica: ReplicaAddress, judge: Judge) -> None:
        self._loop = running_loop()
        self._stream = stream
        self.wait = AnswerWait(replica, judge)
        self.aclose = stream.aclose  # type: ignore[method-assign]
        self.get_extra_info = stream.get_extra_info  # type: ignore[method-assign]

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        wait_s = self.wait.begin(timeout)
        while True:
            try:
                data = await self._stream.read(max_bytes, wait_s)
            except core.ReadTimeout:
                if (again_s := self.wait.again()) is None:
                    raise
                wait_s = again_s
            else:
                self.wait.end(data)
                return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        wait_s = self.wait.begin_write(timeout)
        if not isinstance(self._stream, AsyncioStream):  # the library's own forget what is unsent after a timeout
            return await self._stream.write(buffer, timeout)
        while True:
            try:
                return await self._stream.write(buffer, wait_s)
            except core.WriteTimeout:
                if (again_s := self.wait.again()) is None:
                    raise
                wait_s, buffer = again_s, b""

    def end_with_loop(self) -> None:
        """Break the connection if its event loop has ended."""
        if has_ended(self._loop):
            _shut_down(self.get_extra_info("socket"))

    def leave(self) -> None:
        _leave(self.get_extra_info("socket"))


def answer_begins(response: http.Response) -> None:
    """Note that an answer has begun: within one that is no stream of events no signs come."""
    connection = response.extensions.get("network_stream")
    if isinstance(connection, Connection | AsyncConnection) and not is_event_stream(response):
        connection.wait.expects_signs = False


@contextmanager
def reads_within(connection: Any, seconds: float) -> Iterator[None]:
    """Let all reads of a response's connection together take so many seconds at most."""
    with connection.wait.within(seconds):
        yield


def is_event_stream(response: http.Response) -> bool:
    return response.headers.get("content-type", "").startswith("text/event-stream")


class _Handshake:
    """A connection that is being verified."""

    def __init__(self, stream: Any) -> None:
        # A second number of the same connection: TLS takes the first one away from the stream.
        self._socket = socket.socket(fileno=os.dup(stream.get_extra_info("socket").fileno()))

    def leave(self) -> None:
        _leave(self._socket)

    def __enter__(self) -> _Handshake:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def _shut_down(found: Any) -> None:
    with suppress(OSError, ValueError):  # it was closed
        if isinstance(found, socket.socket):
            socket.socket.shutdown(found, socket.SHUT_RDWR)  # below TLS, and without a file descriptor more
            return
        # Event loops give out no socket of the standard library: a second number of the same connection is one.
        same = socket.socket(fileno=os.dup(found.fileno()))
        with same:
            same.shutdown(socket.SHUT_RDWR)


def _leave(found: Any) -> None:
    """Let the socket's number stand for nothing. To close it, or to tell a loop, would reach into the other process."""
    with suppress(OSError, ValueError):
        if (number := found.fileno()) >= 0:
            nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            os.dup2(nothing, number, inheritable=False)
            os.close(nothing)


class VerifyingBackend(core.NetworkBackend):
    def __init__(self, origins: Origins) -> None:
        self._origins = origins
        self._network = core.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Any = None,
    ) -> core.NetworkStream:
        replica, deadline = self._origins.replica_of(host), _Deadline(timeout)
        stream = self._network.connect_tcp(
            replica.host, replica.port, timeout=deadline.left_s, socket_options=_KEEPALIVE
        )
        try:
            with _as_failed_connect(replica), _Handshake(stream) as handshake:
                self._origins.add_connection(handshake)
                stream = stream.start_tls(pinned_context(replica.identity.certificate), timeout=deadline.left_s)
            connection = Connection(SocketStream(stream), replica, self._origins.judge)
            self._origins.add_connection(connection)
            return connection
        except BaseException:
            stream.close()
            raise


class AsyncVerifyingBackend(core.AsyncNetworkBackend):
    def __init__(self, origins: Origins) -> None:
        self._origins = origins

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Any = None,
    ) -> core.AsyncNetworkStream:
        replica, deadline = self._origins.replica_of(host), _Deadline(timeout)
        stream = await _network().connect_tcp(
            replica.host, replica.port, timeout=deadline.left_s, socket_options=_KEEPALIVE
        )
        try:
            with _as_failed_connect(replica), _Handshake(stream) as handshake:
                self._origins.add_connection(handshake)
                context = pinned_context(replica.identity.certificate)
                stream = await stream.start_tls(context, timeout=deadline.left_s)
            connection = AsyncConnection(stream, replica, self._origins.judge)
            self._origins.add_connection(connection)
            return connection
        except BaseException:
            await stream.aclose()
            raise

    async def sleep(self, seconds: float) -> None:
        await _network().sleep(seconds)


def _network() -> core.AsyncNetworkBackend:
    return AsyncioBackend() if is_asyncio(running_loop()) else core.AnyIOBackend()


@contextmanager
def _as_failed_connect(replica: ReplicaAddress) -> Iterator[None]:
    """Until it is verified, whatever goes wrong with a connection is a failure to connect: nothing was asked yet."""
    try:
        yield
    except (core.ReadTimeout, core.WriteTimeout, core.ConnectTimeout) as error:
        raise core.ConnectTimeout(f"{_place(replica)} did not show in time that it is the engine") from error
    except (core.NetworkError, OSError, RecordError) as error:
        _raise_not_ours(replica, error)


def _raise_not_ours(replica: ReplicaAddress, error: Exception) -> NoReturn:
    cause = error.__cause__
    why = tls_refusal(cause) if isinstance(cause, ssl.SSLError) else str(error)
    raise core.ConnectError(f"{_place(replica)} is not known to be the engine of {replica.name}: {why}") from error


def _place(replica: ReplicaAddress) -> str:
    return f"{replica.host}:{replica.port}"
