"""The engines that URLs of a transport stand for, and the connections that there are to each of them."""

from __future__ import annotations

import contextvars
import secrets
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Protocol

from hpc_serve.client.replicas.pool import ReplicaAddress


class OpenConnection(Protocol):
    """A connection to one engine. `cut` breaks it, from any thread, if `is_due` says so when it comes to it; `leave`
    lets go of it in a process that was forked.
    """

    def cut(self, is_due: Callable[[], bool] = ...) -> None: ...
    def leave(self) -> None: ...


class Sender(Protocol):
    """A request that is being sent. It is told which connection it has."""

    def sends_on(self, connection: OpenConnection) -> None: ...


sender: contextvars.ContextVar[Sender | None] = contextvars.ContextVar("hpc_serve_sender", default=None)
"""The request that this thread or task is sending."""


def always() -> bool:
    return True


class Origins:
    """The engines that URLs of a transport stand for, and its connections to them."""

    def __init__(self) -> None:
        self._origins: dict[ReplicaAddress, str] = {}
        self._replicas: dict[str, ReplicaAddress] = {}
        self._lock = threading.RLock()
        self._connections: dict[ReplicaAddress, weakref.WeakSet[OpenConnection]] = {}
        self._is_ended = False

    def origin_of(self, replica: ReplicaAddress) -> str:
        """The host name that stands for this engine at this address; equal addresses have the same."""
        if (origin := self._origins.get(replica)) is None:
            origin = f"replica-{secrets.token_hex(8)}"  # two threads may both name it: both names stand for it
            self._replicas[origin] = replica
            self._origins[replica] = origin
        return origin

    def replica_of(self, origin: str) -> ReplicaAddress:
        return self._replicas[origin]

    def add_connection(self, replica: ReplicaAddress, connection: OpenConnection) -> None:
        with self._lock:
            self._connections.setdefault(replica, weakref.WeakSet()).add(connection)
            is_ended = self._is_ended
        if is_ended:
            connection.cut()

    def end(self) -> None:
        """Break all connections, and each that is made from now on. May be called from any thread."""
        with self._lock:
            self._is_ended = True
        for connection in self.connections():
            connection.cut()

    def cut(self, replica: ReplicaAddress) -> None:
        """Break all connections to that engine. May be called from any thread."""
        with self._lock:
            connections = list(self._connections.get(replica, ()))
        for connection in connections:
            connection.cut()

    def connections(self) -> Iterable[OpenConnection]:
        """All connections, to all engines."""
        with self._lock:
            return [connection for connections in self._connections.values() for connection in connections]

    def leave_all(self) -> None:
        """In a process that was forked: let go of the connections of the process that it came from."""
        self._lock = threading.RLock()
        for connection in self.connections():
            connection.leave()
        self._connections = {}
