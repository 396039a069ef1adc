"""Runs a gateway until it is told to end: an event loop that listens, with our limits on strangers' connections.

At SIGTERM, SIGINT or SIGHUP it takes no new requests, finishes those under way within a bound, and returns.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hpc_serve.errors import InvalidRequestError
from hpc_serve.gateway.listening import MOST_WAITING, ListenAddress
from hpc_serve.gateway.settings import Settings
from hpc_serve.gateway.workers import CONNECTION, SIGNALS, receive
from hpc_serve.rendezvous.store import ServiceStore

try:
    from hpc_serve.gateway.app import Gateway
    from hpc_serve.gateway.client_connection import ClientConnection
except ImportError as error:
    raise InvalidRequestError(
        f"the gateway needs packages that are not here ({error}): pip install 'hpc-serve[gateway]', or use the"
        " environment of vLLM, which has them."
    ) from error

from hpc_serve.gate.connection_limits import MAX_CONNECTIONS_WITHOUT_KEY, TLS_HANDSHAKE_TIMEOUT_S

_LOOK_S = 1.0

Begin = Callable[[socket.socket], Awaitable[Any]]
"""Begins to answer an accepted connection."""


class Server:
    """All connections of clients. `stop` ends it, within `grace_s` for the requests that are under way."""

    def __init__(self, app: Gateway, *, grace_s: float) -> None:
        self.app = app
        self.is_ending = False
        self._grace_s = grace_s
        self._connections: set[ClientConnection] = set()
        self._without_key: dict[ClientConnection, None] = {}  # the oldest first
        self._stops = 0
        self._told = asyncio.Event()
        self._taking: set[asyncio.Task[None]] = set()

    async def run(
        self,
        listener: socket.socket,
        context: ssl.SSLContext | None,
        on_start: Callable[[], None],
        *,
        channel: socket.socket | None = None,
    ) -> None:
        """Serve until `stop`. `on_start` is called when requests are answered. A worker has a `channel`."""
        loop = asyncio.get_running_loop()
        handshake_s = TLS_HANDSHAKE_TIMEOUT_S if context is not None else None
        make = partial(ClientConnection, self, loop)
        self.app.start()
        listening = None
        if channel is not None:
            begin = partial(loop.connect_accepted_socket, make, ssl=context, ssl_handshake_timeout=handshake_s)
            loop.add_reader(channel, self._receive, channel, begin)
        else:
            listening = await loop.create_server(
                make, sock=listener, ssl=context, ssl_handshake_timeout=handshake_s, backlog=MOST_WAITING
            )
        on_start()
        while not self._stops:
            await self._wait(_LOOK_S)
            for connection in list(self._connections):
                connection.check_time(loop.time())
        self.is_ending = True
        if listening is not None:
            listening.close()
        until_s = loop.time() + self._grace_s
        while self._stops < 2 and self._connections and loop.time() < until_s:
            for connection in list(self._connections):
                connection.end_when_answered()
            await self._wait(min(_LOOK_S, max(until_s - loop.time(), 0.0)))
        for connection in list(self._connections):
            connection.transport.abort()
        await self.app.close()

    def stop(self) -> None:
        """End; the second call ends at once."""
        self._stops += 1
        self._told.set()

    async def _wait(self, seconds: float) -> None:
        """Wait until something is told."""
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._told.wait(), seconds)
        self._told.clear()

    # -- what comes through the channel of a worker

    def _receive(self, channel: socket.socket, begin: Begin) -> None:
        """Take the connection that has come, or stop at a signal."""
        loop = asyncio.get_running_loop()
        told, connection = receive(channel)
        if not told:
            loop.remove_reader(channel)
        if told != CONNECTION:
            self.stop()
        elif connection is not None:  # else this process has too many files
            task = loop.create_task(_take(begin, connection))
            self._taking.add(task)
            task.add_done_callback(self._taking.discard)

    # -- what connections tell

    def add(self, connection: ClientConnection) -> None:
        self._connections.add(connection)
        if not self.app.asks_for_key:  # who can connect may ask
            connection.has_key = True
            return
        self._without_key[connection] = None
        if len(self._without_key) > MAX_CONNECTIONS_WITHOUT_KEY:  # a flood must not keep out who has the key
            oldest = next(iter(self._without_key))
            del self._without_key[oldest]
            oldest.transport.abort()

    def remove(self, connection: ClientConnection) -> None:
        self._connections.discard(connection)
        self._without_key.pop(connection, None)
        if self.is_ending:
            self._told.set()

    def note_key(self, connection: ClientConnection) -> None:
        connection.has_key = True
        self._without_key.pop(connection, None)


async def _take(begin: Begin, connection: socket.socket) -> None:
    with suppress(OSError):  # it has left, or shows no TLS
        await begin(connection)


def serve(
    place: ListenAddress,
    store: ServiceStore,
    settings: Settings,
    *,
    certificate: Path | None,
    grace_s: float,
    on_start: Callable[[], None],
    channel: socket.socket | None = None,
) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP, by TLS where there is a file with a key and its `certificate`.

    `on_start` is called when requests are answered. A worker's connections and signals come from its
    `channel`. Raises HpcServeError.
    """
    if channel is not None and place.lock is not None:
        os.close(place.lock)  # the first process alone holds it: if that is killed, another gateway may begin
    context = None
    if certificate is not None:
        settings = replace(settings, hosts=None)  # a foreign name is not in the certificate
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)  # which has the key, too

    async def run() -> None:
        server = Server(Gateway(store, settings), grace_s=grace_s)
        for number in SIGNALS if channel is None else ():
            loop.add_signal_handler(number, server.stop)
        await server.run(place.listener, context, on_start, channel=channel)
        await end_tasks()

    loop = new_event_loop()
    try:
        loop.run_until_complete(run())
    finally:
        loop.close()


async def end_tasks() -> None:
    """Cancel all other tasks of the event loop, which is to end."""
    if left := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=_LOOK_S)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Make uvloop's, which costs a third, where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
