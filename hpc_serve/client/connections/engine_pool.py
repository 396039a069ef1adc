"""The connections of one event loop of asyncio to the engines: opened, verified, kept for the next request, ended.

The connection that was used last is taken first. One timer looks after all connections: those whose answer is waited
for (`answer_wait` says how long), and idle ones.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import anyio

from hpc_serve.client.connections.engine_connection import EngineConnection
from hpc_serve.client.connections.message import Answer, Message
from hpc_serve.client.connections.origins import Origins
from hpc_serve.client.connections.thread_streams import is_readable
from hpc_serve.client.connections.verified_streams import KEEPALIVE
from hpc_serve.client.replicas.pool import ReplicaAddress
from hpc_serve.client.replicas.sdk import http
from hpc_serve.errors import RecordError
from hpc_serve.trust.connection import pinned_context, tls_refusal

_LOOK_S = 0.1
_TRUST_IDLE_S = 0.5  # the loop may not have run since the engine closed a connection that was idle for longer


class EnginePool:
    """The connections of the loop that runs. `limits` are those of the HTTP library's pools."""

    def __init__(self, origins: Origins, limits: Mapping[str, Any]) -> None:
        self._origins = origins
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._connections: set[EngineConnection] = set()
        self._idle: dict[ReplicaAddress, list[EngineConnection]] = {}
        self._room = asyncio.Semaphore(limits["max_connections"])
        self._timer: asyncio.TimerHandle | None = None

    async def send(self, message: Message) -> Answer:
        """Return the answer to a request, of which the head has come. Raises the HTTP library's errors."""
        try:
            with anyio.fail_after(message.timeout_s("pool")) if self._room.locked() else nullcontext():
                await self._room.acquire()
        except TimeoutError as error:
            raise http.PoolTimeout("all connections are in use") from error
        try:
            connection = self._take(message.replica) or await self.connect(message)
        except BaseException:
            self._room.release()
            raise
        answer = connection.ask(message)
        try:
            if message.upload is not None:
                await connection.upload(message)
            await answer.begun()
        except BaseException:
            answer.close()
            raise
        extensions = {"http_version": b"HTTP/1.1", "network_stream": connection}
        return Answer(answer.status_code, answer.headers, answer, extensions)

    def _take(self, replica: ReplicaAddress) -> EngineConnection | None:
        """Take the connection that was used last."""
        idle = self._idle.get(replica)
        while idle:
            connection = idle.pop()
            is_fresh = time.monotonic() - connection.idle_since_s < _TRUST_IDLE_S
            if not connection.is_lost and (is_fresh or not is_readable(connection.socket)):
                return connection
            connection.transport.abort()
        return None

    async def connect(self, message: Message) -> EngineConnection:
        """Return a connection that is verified. Until then, what goes wrong is a failure to connect."""
        replica = message.replica
        place = f"{replica.host}:{replica.port}"
        connection: EngineConnection | None = None
        try:
            with anyio.fail_after(message.connect_timeout_s):
                raw, _ = await self._loop.create_connection(asyncio.Protocol, replica.host, replica.port)
                try:
                    for option in KEEPALIVE:
                        raw.get_extra_info("socket").setsockopt(*option)
                    connection = EngineConnection(self, replica, self._origins.judge, self._loop)
                    connection.connection_made(raw)
                    self._origins.add_connection(connection)
                    context = pinned_context(replica.identity.certificate)
                    secured = await self._loop.start_tls(raw, connection, context)
                    if secured is None:
                        raise ConnectionResetError("the connection was lost")
                    connection.transport = secured
                except BaseException:
                    raw.abort()
                    raise
        except TimeoutError as error:
            raise http.ConnectTimeout(f"{place} did not show in time that it is the engine") from error
        except (OSError, RecordError) as error:
            why = tls_refusal(error) if isinstance(error, ssl.SSLError) else str(error)
            if connection is not None:
                why = f"{place} is not known to be the engine of {replica.name}: {why}"
            raise http.ConnectError(why) from error
        self._connections.add(connection)
        if self._timer is None:
            self._timer = self._loop.call_later(_LOOK_S, self._look)
        return connection

    # -- what connections tell

    def release(self, connection: EngineConnection) -> None:
        """Keep a connection whose answer has come whole."""
        connection.idle_since_s = time.monotonic()
        self._idle.setdefault(connection.replica, []).append(connection)

    def forget(self, connection: EngineConnection) -> None:
        """Know a connection no more."""
        self._connections.discard(connection)
        if connection in (idle := self._idle.get(connection.replica, [])):
            idle.remove(connection)

    def note_end(self) -> None:
        """Let another request have a connection."""
        self._room.release()

    # -- looking after them

    def _look(self) -> None:
        now_s = time.monotonic()
        for connection in list(self._connections):
            if connection.check_at_s <= now_s:
                connection.check(now_s)
        expired_s = now_s - self._limits["keepalive_expiry"]
        for replica, idle in list(self._idle.items()):
            while idle and idle[0].idle_since_s < expired_s:
                idle.pop(0).transport.abort()
            if not idle:
                del self._idle[replica]
        self._timer = self._loop.call_later(_LOOK_S, self._look) if self._connections else None

    async def aclose(self) -> None:
        """End all connections."""
        if self._timer is not None:
            self._timer.cancel()
        for connection in list(self._connections):
            connection.fail(http.ReadError("the client was closed"))
