"""The connections below an OpenAI client. Each new one is verified before it carries a key or a prompt.

A transport of the HTTP library keeps connections by the host of their URL. Here that host stands for one engine, at one
address, with one way to verify it (`origin_of`), so that no request meets a connection that was verified for another.
The connections to an engine can be cut from any thread (`cut`): whoever waits there gets an error at once.
Which replica a request goes to is decided in `transport`.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, Protocol

from hpc_serve.client.pool import ReplicaAddress
from hpc_serve.client.sdk import core, http
from hpc_serve.errors import RecordError
from hpc_serve.trust.connection import Challenge, make_challenge, tls_refusal
from hpc_serve.trust.pinned import pinned_context

_READ_BYTES = 4_096
_DEFAULT_CONNECT_S = 5.0

# As many connections as the SDK allows. vLLM closes idle ones after 5 s: close them here before, or a request fails.
_LIMITS = http.Limits(max_connections=1000, max_keepalive_connections=100, keepalive_expiry=4.0)

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


class _Cuttable(Protocol):
    def cut(self) -> None: ...


class Origins:
    """The engines that URLs of a transport stand for, and its connections to them."""

    def __init__(self) -> None:
        self._origins: dict[ReplicaAddress, str] = {}
        self._replicas: dict[str, ReplicaAddress] = {}
        self._lock = threading.RLock()
        self._connections: dict[ReplicaAddress, weakref.WeakSet[_Cuttable]] = {}

    def origin_of(self, replica: ReplicaAddress) -> str:
        """The host name that stands for this engine at this address; equal addresses have the same."""
        if (origin := self._origins.get(replica)) is None:
            origin = f"replica-{secrets.token_hex(8)}"  # two threads may both name it: both names stand for it
            self._replicas[origin] = replica
            self._origins[replica] = origin
        return origin

    def replica_of(self, origin: str) -> ReplicaAddress:
        return self._replicas[origin]

    def add_connection(self, replica: ReplicaAddress, connection: _Cuttable) -> None:
        with self._lock:
            self._connections.setdefault(replica, weakref.WeakSet()).add(connection)

    def cut(self, replica: ReplicaAddress) -> None:
        """Break all connections to that engine. May be called from any thread."""
        with self._lock:
            connections = list(self._connections.get(replica, ()))
        for connection in connections:
            connection.cut()


def make_transport(origins: Origins) -> http.HTTPTransport:
    """A transport whose URLs are `http://ORIGIN`, whatever the engine speaks."""
    transport = http.HTTPTransport(verify=_unused_context(), trust_env=False)
    # The library has no public way to hand its pool a network backend; tests hold this one.
    transport._pool = core.ConnectionPool(network_backend=_VerifyingBackend(origins), **_pool_options())
    return transport


def make_async_transport(origins: Origins) -> http.AsyncHTTPTransport:
    """The same for asyncio and trio."""
    transport = http.AsyncHTTPTransport(verify=_unused_context(), trust_env=False)
    transport._pool = core.AsyncConnectionPool(network_backend=_AsyncVerifyingBackend(origins), **_pool_options())
    return transport


def _pool_options() -> dict[str, Any]:
    return {
        "max_connections": _LIMITS.max_connections,
        "max_keepalive_connections": _LIMITS.max_keepalive_connections,
        "keepalive_expiry": _LIMITS.keepalive_expiry,
    }


def _unused_context() -> ssl.SSLContext:
    """It trusts nobody. The library's own would read all of the system's authorities first."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


class _Deadline:
    def __init__(self, timeout_s: float | None) -> None:
        self._ends_at_s = time.monotonic() + (_DEFAULT_CONNECT_S if timeout_s is None else timeout_s)

    @property
    def left_s(self) -> float:
        return max(self._ends_at_s - time.monotonic(), 0.001)


class _Connection(core.NetworkStream):
    """A verified connection that another thread can cut."""

    def __init__(self, stream: core.NetworkStream) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        # Called once for each piece of an answer: nothing is to stand in between.
        self.read = stream.read  # type: ignore[method-assign]
        self.write = stream.write  # type: ignore[method-assign]
        self.get_extra_info = stream.get_extra_info  # type: ignore[method-assign]

    def close(self) -> None:
        with self._lock:
            self._stream.close()

    def cut(self) -> None:
        # Below TLS, which another thread may be reading; under the lock, so that the number is still this socket's.
        with self._lock, suppress(OSError):
            socket.socket.shutdown(self.get_extra_info("socket"), socket.SHUT_RDWR)


class _AsyncConnection(core.AsyncNetworkStream):
    """The same. Its socket belongs to the event loop, which cuts it."""

    def __init__(self, stream: core.AsyncNetworkStream) -> None:
        self._stream = stream
        self._call_in_loop = _caller_in_loop()
        self.read = stream.read  # type: ignore[method-assign]
        self.write = stream.write  # type: ignore[method-assign]
        self.aclose = stream.aclose  # type: ignore[method-assign]
        self.get_extra_info = stream.get_extra_info  # type: ignore[method-assign]

    def cut(self) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._call_in_loop(self._cut)

    def _cut(self) -> None:
        with suppress(OSError):  # it was closed
            # Event loops give out no socket of the standard library: a second number of the same connection is one.
            same = socket.socket(fileno=os.dup(self.get_extra_info("socket").fileno()))
            with same:
                same.shutdown(socket.SHUT_RDWR)


def _caller_in_loop() -> Callable[[Callable[[], None]], object]:
    """What calls a function in the event loop that runs here, from any thread."""
    try:
        return asyncio.get_running_loop().call_soon_threadsafe
    except RuntimeError:
        import trio  # type: ignore[import-not-found]

        call: Callable[[Callable[[], None]], object] = trio.lowlevel.current_trio_token().run_sync_soon
        return call


class _VerifyingBackend(core.NetworkBackend):
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
            with _as_failed_connect(replica):
                if (certificate := replica.identity.certificate) is not None:
                    stream = stream.start_tls(pinned_context(certificate), timeout=deadline.left_s)
                else:
                    challenge = _challenge(replica, stream)
                    stream.write(challenge.request, timeout=deadline.left_s)
                    while not challenge.is_answered:
                        challenge.read(stream.read(_READ_BYTES, timeout=deadline.left_s))
            connection = _Connection(stream)
            self._origins.add_connection(replica, connection)
            return connection
        except BaseException:
            stream.close()
            raise


class _AsyncVerifyingBackend(core.AsyncNetworkBackend):
    def __init__(self, origins: Origins) -> None:
        self._origins = origins
        self._network = core.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Any = None,
    ) -> core.AsyncNetworkStream:
        replica, deadline = self._origins.replica_of(host), _Deadline(timeout)
        stream = await self._network.connect_tcp(
            replica.host, replica.port, timeout=deadline.left_s, socket_options=_KEEPALIVE
        )
        try:
            with _as_failed_connect(replica):
                if (certificate := replica.identity.certificate) is not None:
                    stream = await stream.start_tls(pinned_context(certificate), timeout=deadline.left_s)
                else:
                    challenge = _challenge(replica, stream)
                    await stream.write(challenge.request, timeout=deadline.left_s)
                    while not challenge.is_answered:
                        challenge.read(await stream.read(_READ_BYTES, timeout=deadline.left_s))
            connection = _AsyncConnection(stream)
            self._origins.add_connection(replica, connection)
            return connection
        except BaseException:
            await stream.aclose()
            raise

    async def sleep(self, seconds: float) -> None:
        await self._network.sleep(seconds)


def _challenge(replica: ReplicaAddress, stream: Any) -> Challenge:
    client, server = stream.get_extra_info("client_addr"), stream.get_extra_info("server_addr")
    return make_challenge(replica.identity, client=client, server=server)


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
