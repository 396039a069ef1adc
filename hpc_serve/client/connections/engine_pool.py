"""The connections to the engines: opened, verified, kept for the next request, ended.

The connection that was used last is taken first. Threads have one pool in a process, event loops one each; what the two
do in their own way is in connections.py.
"""

from __future__ import annotations

import math
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from typing import Any

from hpc_serve.client.connections.answer_wait import ReplicaJudge
from hpc_serve.client.connections.engine_connection import EngineAnswer, EngineConnection, is_readable
from hpc_serve.client.connections.message import Message
from hpc_serve.client.replicas.pool import ReplicaAddress
from hpc_serve.client.replicas.sdk import http
from hpc_serve.errors import RecordError
from hpc_serve.trust.connection import pinned_context, tls_refusal

# As many connections as the SDK allows. vLLM closes idle ones after 5 s: close them here before, or a request fails.
LIMITS: Mapping[str, Any] = {"max_connections": 1000, "keepalive_expiry": 4.0}

# So many connections to a replica are made at once. An engine that is to make a thousand answers the last ones as late
# as one that is lost.
MOST_HANDSHAKES = 32

# A host without power answers nothing, not even that a connection is closed. The kernel asks an idle one after 10 s,
# and gives up 25 s after the last packet. That counts where no other replica is ready: else silence decides sooner.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}


class _Making:
    """The `room` for connections to a replica that are being made. One that fails fails those that wait for room.

    One that had too little time fails none that has more.
    """

    def __init__(self, room: Any) -> None:
        self.room = room
        self._failure: http.TransportError | None = None
        self._failed_at_s = self._had_s = 0.0

    def note(self, failure: http.TransportError, timeout_s: float) -> None:
        """Note a failure to connect within a time."""
        self._failure, self._failed_at_s = failure, time.monotonic()
        self._had_s = timeout_s if isinstance(failure, http.ConnectTimeout) else math.inf

    def check(self, since_s: float, timeout_s: float) -> None:
        """Raise the failure since a time that tells what would come of another attempt within `timeout_s`."""
        if self._failure is not None and self._failed_at_s >= since_s and self._had_s >= timeout_s:
            raise type(self._failure)(str(self._failure))


class EnginePool:
    """The connections of one process or event loop. Its methods raise the HTTP library's errors."""

    # Seconds for which a connection that is idle counts as open, as whoever reads it would know otherwise.
    trusts_idle_s = 0.0

    def __init__(self, judge: ReplicaJudge) -> None:
        self._judge = judge
        self._keepalive_s: float = LIMITS["keepalive_expiry"]
        self._lock = threading.RLock()
        self._room = self._make_room(LIMITS["max_connections"])
        self._idle: dict[ReplicaAddress, list[EngineConnection]] = {}
        self._making: dict[ReplicaAddress, _Making] = {}
        self.connections: set[Any] = set()

    def _make_room(self, number: int) -> Any:
        """Return the room for so many requests at once."""
        raise NotImplementedError

    def _enter_now(self) -> bool:
        """Take room for a request, if there is some."""
        raise NotImplementedError

    async def _enter(self, room: Any, timeout_s: float | None) -> None:
        """Wait for room. Raises TimeoutError."""
        raise NotImplementedError

    async def _open(self, replica: ReplicaAddress, timeout_s: float) -> EngineConnection:
        """Return a connection in the clear. Raises OSError."""
        raise NotImplementedError

    def _upload(self, upload: Any) -> Any:
        """Return an async iterator of the pieces of an upload."""
        raise NotImplementedError

    async def send(self, message: Message, replica: ReplicaAddress, connect_s: float) -> EngineAnswer:
        """Return the answer of a replica, of which the head has come. A connection is made in that time."""
        if not self._enter_now():
            await self._wait_for(self._room, message, "all connections are in use")
        try:
            connection = self._take(replica) or await self._make(message, replica, connect_s)
        except BaseException:
            self.note_end()
            raise
        return await connection.ask(message, self._upload(message.upload) if message.upload is not None else None)

    async def _wait_for(self, room: Any, message: Message, why_late: str) -> None:
        """Wait for room as long as the user lets a request wait for a connection."""
        try:
            await self._enter(room, message.timeout_s("pool"))
        except TimeoutError as error:
            raise http.PoolTimeout(why_late) from error

    async def _make(self, message: Message, replica: ReplicaAddress, connect_s: float) -> EngineConnection:
        """Return a new connection, or one that has become idle before its turn."""
        with self._lock:
            making = self._making.setdefault(replica, _Making(self._make_room(MOST_HANDSHAKES)))
        waits_since_s = time.monotonic()
        await self._wait_for(making.room, message, "too many connections are being made")
        try:
            if (connection := self._take(replica)) is not None:
                return connection
            timeout_s = min(message.timeout_s("connect") or connect_s, connect_s)
            making.check(waits_since_s, timeout_s)
            try:
                return await self.connect(replica, timeout_s)
            except http.TransportError as error:
                making.note(error, timeout_s)
                raise
        finally:
            making.room.release()

    def _take(self, replica: ReplicaAddress) -> EngineConnection | None:
        """Take the connection that was used last."""
        with self._lock:
            idle = self._idle.get(replica)
            while idle:
                connection = idle.pop()
                idle_s = time.monotonic() - connection.idle_since_s
                is_young = not connection.is_lost and idle_s < self._keepalive_s
                if is_young and (idle_s < self.trusts_idle_s or not is_readable(connection.socket)):
                    return connection
                connection.abort()
        return None

    async def connect(self, replica: ReplicaAddress, timeout_s: float) -> EngineConnection:
        """Return a connection that is verified. Until then, what goes wrong is a failure to connect."""
        place = f"{replica.host}:{replica.port}"
        ends_at_s = time.monotonic() + timeout_s
        connection = None
        try:
            connection = await self._open(replica, timeout_s)
            with self._lock:
                self.connections.add(connection)
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE.items():
                if hasattr(socket, name):
                    connection.socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            context = pinned_context(replica.identity.certificate)
            await connection.secure(context, max(ends_at_s - time.monotonic(), 0.001))
            return connection
        except BaseException as error:
            if connection is not None:
                connection.abort()
                self.forget(connection)
            if isinstance(error, TimeoutError):
                raise http.ConnectTimeout(f"{place} did not show in time that it is the engine") from error
            if isinstance(error, OSError | RecordError):  # ssl.SSLError is one
                why = tls_refusal(error) if isinstance(error, ssl.SSLError) else str(error)
                if connection is not None:
                    why = f"{place} is not known to be the engine of {replica.name}: {why}"
                raise http.ConnectError(why) from error
            raise

    # -- what connections tell

    def release(self, connection: EngineConnection) -> None:
        """Keep a connection whose answer has come whole."""
        connection.idle_since_s = time.monotonic()
        with self._lock:
            self._idle.setdefault(connection.replica, []).append(connection)

    def forget(self, connection: EngineConnection) -> None:
        """Know a connection no more."""
        with self._lock:
            self.connections.discard(connection)
            if connection in (idle := self._idle.get(connection.replica, [])):
                idle.remove(connection)

    def note_end(self) -> None:
        """Let another request have a connection."""
        self._room.release()

    # -- looking after them

    def _end_idle(self) -> None:
        """End the connections that were idle for too long."""
        expired_s = time.monotonic() - self._keepalive_s
        with self._lock:
            for replica, idle in list(self._idle.items()):
                while idle and idle[0].idle_since_s < expired_s:
                    idle.pop(0).abort()
                if not idle:
                    del self._idle[replica]

    def close(self) -> None:
        """End all connections."""
        for connection in list(self.connections):
            connection.fail(http.ReadError("the client was closed"))

    def leave(self) -> None:
        """In a process that was forked: let go of the connections of the process that it came from.

        Whoever closes an answer that it inherited waits for no thread that is not there.
        """
        self._lock, self._room = threading.RLock(), self._make_room(1)
        for connection in self.connections:
            connection.leave()
