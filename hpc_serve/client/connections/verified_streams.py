"""One connection to an engine: it is verified before it carries a key or a prompt, and other threads can cut it.

Standard sockets and the HTTP library's own streams, in threads and in event loops. Which engine a URL stands for is
decided in `connections`.
"""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from hpc_serve.client.connections.asyncio_streams import AsyncioBackend
from hpc_serve.client.connections.origins import OpenConnection, Origins, always, sender
from hpc_serve.client.connections.thread_streams import SocketStream
from hpc_serve.client.replicas.event_loops import has_ended, is_asyncio, running_loop
from hpc_serve.client.replicas.pool import ReplicaAddress
from hpc_serve.client.replicas.sdk import core
from hpc_serve.errors import RecordError
from hpc_serve.trust.connection import tls_refusal
from hpc_serve.trust.pinned import pinned_context

_DEFAULT_CONNECT_S = 5.0

# A host without power answers nothing, not even that a connection is closed. The kernel asks an idle one after 10 s,
# and gives up 25 s after the last sign of life.
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
    """A verified connection that another thread can cut."""

    def __init__(self, stream: core.NetworkStream) -> None:
        self._stream = stream
        # Reentrant: the garbage collector may close the connection of a dropped stream in the middle of any line.
        self._lock = threading.RLock()
        # Called once for each piece of an answer: nothing is to stand in between.
        self.read = stream.read  # type: ignore[method-assign]
        self.get_extra_info = stream.get_extra_info  # type: ignore[method-assign]

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        _tell_sender(self)
        self._stream.write(buffer, timeout)

    def close(self) -> None:
        with self._lock:
            self._stream.close()

    def cut(self, is_due: Callable[[], bool] = always) -> None:
        """Break the connection, from any thread: whoever reads or writes gets an error."""
        # Below TLS, which another thread may be reading; under the lock, so that the number is still this socket's. Who
        # has the lock already is closing the connection, or cuts it, and may wait for one that is held here.
        if is_due() and self._lock.acquire(blocking=False):
            try:
                if is_due():
                    _shut_down(self.get_extra_info("socket"))
            finally:
                self._lock.release()

    def leave(self) -> None:
        """Give this process's hold of the connection up; the process that it was forked from keeps its own."""
        _leave(self.get_extra_info("socket"))


class AsyncConnection(core.AsyncNetworkStream):
    """The same. Its socket belongs to an event loop, which cuts it."""

    def __init__(self, stream: core.AsyncNetworkStream) -> None:
        self._loop = running_loop()
        self._stream = stream
        self.read = stream.read  # type: ignore[method-assign]
        self.aclose = stream.aclose  # type: ignore[method-assign]
        self.get_extra_info = stream.get_extra_info  # type: ignore[method-assign]

    def write(self, buffer: bytes, timeout: float | None = None) -> Coroutine[Any, Any, None]:
        _tell_sender(self)
        return self._stream.write(buffer, timeout)

    def cut(self, is_due: Callable[[], bool] = always) -> None:
        """Break the connection, from any thread."""
        call = (
            self._loop.call_soon_threadsafe if hasattr(self._loop, "call_soon_threadsafe") else self._loop.run_sync_soon
        )
        with suppress(RuntimeError):  # the loop has ended
            call(self._cut_if, is_due)

    def end_with_loop(self) -> None:
        """Break the connection if its event loop has ended."""
        if has_ended(self._loop):
            self._cut_here()

    def leave(self) -> None:
        _leave(self.get_extra_info("socket"))

    def _cut_if(self, is_due: Callable[[], bool]) -> None:
        if is_due():
            self._cut_here()

    def _cut_here(self) -> None:
        _shut_down(self.get_extra_info("socket"))


def _tell_sender(connection: OpenConnection) -> None:
    if (request := sender.get()) is not None:
        request.sends_on(connection)


@contextmanager
def reads_within(connection: Any, seconds: float) -> Iterator[None]:
    """Reads of a connection take so many seconds at most, all together."""
    read, deadline = connection.read, _Deadline(seconds)
    connection.read = lambda most_bytes, timeout=None: read(most_bytes, deadline.left_s)
    try:
        yield
    finally:
        connection.read = read


class _Handshake:
    """A connection that is being verified: another thread can cut it."""

    def __init__(self, stream: Any) -> None:
        # A second number of the same connection: TLS takes the first one away from the stream.
        self._socket = socket.socket(fileno=os.dup(stream.get_extra_info("socket").fileno()))

    def cut(self, is_due: Callable[[], bool] = always) -> None:
        if is_due():
            _shut_down(self._socket)

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
                self._origins.add_connection(replica, handshake)
                _tell_sender(handshake)
                stream = stream.start_tls(pinned_context(replica.identity.certificate), timeout=deadline.left_s)
            connection = Connection(SocketStream(stream))
            self._origins.add_connection(replica, connection)
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
                self._origins.add_connection(replica, handshake)
                _tell_sender(handshake)
                context = pinned_context(replica.identity.certificate)
                stream = await stream.start_tls(context, timeout=deadline.left_s)
            connection = AsyncConnection(stream)
            self._origins.add_connection(replica, connection)
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
