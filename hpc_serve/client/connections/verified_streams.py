"""One connection to an engine: it is verified before it carries a key or a prompt, and fails when its replica is lost.

Standard sockets and the HTTP library's own streams, in threads and in event loops. Which engine a URL stands for is
decided in `connections`.
"""

from __future__ import annotations

import os
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from hpc_serve.client.connections.answer_wait import AnswerWait, Judge
from hpc_serve.client.connections.origins import Origins
from hpc_serve.client.connections.thread_streams import connect_in_thread
from hpc_serve.client.replicas.event_loops import has_ended, run_blocking, running_loop
from hpc_serve.client.replicas.pool import ReplicaAddress
from hpc_serve.client.replicas.sdk import core
from hpc_serve.errors import RecordError
from hpc_serve.trust.connection import pinned_context, tls_refusal

_DEFAULT_CONNECT_S = 5.0

# A host without power answers nothing, not even that a connection is closed. The kernel asks an idle one after 10 s,
# and gives up 25 s after the last packet. That counts where no other replica is ready: else silence decides sooner.
KEEPALIVE = [
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


class _Connection:
    """A verified connection. Its reads and writes raise ReplicaLostError when its replica is lost."""

    def __init__(self, stream: Any, replica: ReplicaAddress, judge: Judge) -> None:
        self._stream = stream
        self.wait = AnswerWait(replica, judge)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)

    async def verify(self, context: ssl.SSLContext, timeout_s: float) -> None:
        """Begin TLS, with the engine that the context trusts."""
        self._stream = await self._stream.start_tls(context, timeout=timeout_s)

    async def _read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        wait_s = self.wait.begin(timeout)
        while True:
            try:
                data: bytes = await self._stream.read(max_bytes, wait_s)
            except (core.ReadTimeout, core.WriteTimeout):
                if (again_s := self.wait.again()) is None:
                    raise
                wait_s = again_s
            else:
                self.wait.end(data)
                return data

    async def _write(self, buffer: bytes, timeout: float | None = None) -> None:
        wait_s = self.wait.begin_write(timeout)
        if isinstance(self._stream, core.AsyncNetworkStream):  # the library's own forget what a timeout leaves unsent
            return await self._stream.write(buffer, timeout)
        while True:
            try:
                await self._stream.write(buffer, wait_s)
                return None
            except core.WriteTimeout:
                if (again_s := self.wait.again()) is None:
                    raise
                wait_s, buffer = again_s, b""  # the stream keeps what is unsent

    async def _close(self) -> None:
        await self._stream.aclose()

    @property
    def _number(self) -> int:
        """The number of the socket; negative if it was closed."""
        number: int = self.get_extra_info("socket").fileno()
        return number

    def end_with_loop(self) -> None:
        """Do nothing: a connection in threads has no event loop."""

    def leave(self) -> None:
        """Give this process's hold of the connection up; the process that it was forked from keeps its own.

        The socket's number stands for nothing then. To close it, or to tell a loop, would reach into the other process.
        """
        with suppress(OSError, ValueError):
            if (number := self._number) >= 0:
                nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
                os.dup2(nothing, number, inheritable=False)
                os.close(nothing)


class Connection(_Connection, core.NetworkStream):
    """A verified connection in threads."""

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return run_blocking(self._read(max_bytes, timeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        run_blocking(self._write(buffer, timeout))

    def close(self) -> None:
        run_blocking(self._close())


class AsyncConnection(_Connection, core.AsyncNetworkStream):
    """A verified connection in an event loop."""

    read, write, aclose = _Connection._read, _Connection._write, _Connection._close

    def __init__(self, stream: Any, replica: ReplicaAddress, judge: Judge) -> None:
        super().__init__(stream, replica, judge)
        self._loop = running_loop()

    def end_with_loop(self) -> None:
        """Break the connection if its event loop has ended."""
        if not has_ended(self._loop):
            return
        # Event loops give out no socket of the standard library: a second number of the same connection is one.
        with suppress(OSError, ValueError), socket.socket(fileno=os.dup(self._number)) as same:
            same.shutdown(socket.SHUT_RDWR)


def answer_begins(response: Any) -> None:
    """Note that an answer has begun: within one that is no stream of events no signs come."""
    connection = response.extensions.get("network_stream")
    if isinstance(connection, Connection | AsyncConnection) and not is_event_stream(response):
        connection.wait.expects_signs = False


def is_event_stream(response: Any) -> bool:
    return bool(response.headers.get("content-type", "").startswith("text/event-stream"))


Verified = TypeVar("Verified", Connection, AsyncConnection)


class VerifyingBackend(core.NetworkBackend):
    """Connects threads."""

    def __init__(self, origins: Origins) -> None:
        self._origins = origins

    def connect_tcp(self, host: str, port: int, timeout: float | None = None, *_: Any, **__: Any) -> core.NetworkStream:
        return run_blocking(_connect(self._origins, host, timeout, connect_in_thread, Connection))


class AsyncVerifyingBackend(core.AsyncNetworkBackend):
    """Connects event loops by the library's own streams: those of trio, and of asyncio without httptools."""

    def __init__(self, origins: Origins) -> None:
        self._origins = origins

    async def connect_tcp(
        self, host: str, port: int, timeout: float | None = None, *_: Any, **__: Any
    ) -> core.AsyncNetworkStream:
        return await _connect(self._origins, host, timeout, core.AnyIOBackend().connect_tcp, AsyncConnection)


async def _connect(
    origins: Origins, origin: str, timeout_s: float | None, connect: Callable[..., Awaitable[Any]], kind: type[Verified]
) -> Verified:
    """Return a verified connection to the engine that an origin stands for."""
    replica = origins.replica_of(origin)
    ends_at_s = time.monotonic() + (_DEFAULT_CONNECT_S if timeout_s is None else timeout_s)

    def left_s() -> float:
        return max(ends_at_s - time.monotonic(), 0.001)

    stream = await connect(replica.host, replica.port, timeout=left_s(), socket_options=KEEPALIVE)
    connection = kind(stream, replica, origins.judge)
    origins.add_connection(connection)
    try:
        with _as_failed_connect(replica):
            await connection.verify(pinned_context(replica.identity.certificate), left_s())
    except BaseException:
        await stream.aclose()
        raise
    return connection


@contextmanager
def _as_failed_connect(replica: ReplicaAddress) -> Iterator[None]:
    """Until it is verified, whatever goes wrong with a connection is a failure to connect: nothing was asked yet."""
    place = f"{replica.host}:{replica.port}"
    try:
        yield
    except (core.ReadTimeout, core.WriteTimeout, core.ConnectTimeout) as error:
        raise core.ConnectTimeout(f"{place} did not show in time that it is the engine") from error
    except (core.NetworkError, OSError, RecordError) as error:
        cause = error.__cause__
        why = tls_refusal(cause) if isinstance(cause, ssl.SSLError) else str(error)
        raise core.ConnectError(f"{place} is not known to be the engine of {replica.name}: {why}") from error
