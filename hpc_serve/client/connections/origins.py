"""The engines that URLs of a transport stand for, and the connections that there are to them."""

from __future__ import annotations

import secrets
import threading
import weakref
from collections.abc import Iterable
from typing import Protocol

from hpc_serve.client.connections.answer_wait import Judge
from hpc_serve.client.replicas.pool import ReplicaAddress


class OpenConnection(Protocol):
    """A connection to one engine. `leave` lets go of it in a process that was forked."""

    def leave(self) -> None: ...

    def end_with_loop(self) -> None: ...


class Origins:
    """The engines that URLs of a transport stand for, and its connections to them. `judge` says which are lost."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self._origins: dict[ReplicaAddress, str] = {}
        self._replicas: dict[str, ReplicaAddress] = {}
        self._lock = threading.RLock()
        self._connections: weakref.WeakSet[OpenConnection] = weakref.WeakSet()

    def origin_of(self, replica: ReplicaAddress) -> str:
        """The host name that stands for this engine at this address; equal addresses have the same."""
        if (origin := self._origins.get(replica)) is None:
            origin = f"replica-{secrets.token_hex(8)}"  # two threads may both name it: both names stand for it
            self._replicas[origin] = replica
            self._origins[replica] = origin
        return origin

    def replica_of(self, origin: str) -> ReplicaAddress:
        return self._replicas[origin]

    def add_connection(self, connection: OpenConnection) -> None:
        with self._lock:
            self._connections.add(connection)

    def connections(self) -> Iterable[OpenConnection]:
        """All connections, to all engines."""
        with self._lock:
            return list(self._connections)

    def leave_all(self) -> None:
        """In a process that was forked: let go of the connections of the process that it came from."""
        self._lock = threading.RLock()
        for connection in self.connections():
            connection.leave()
        self._connections = weakref.WeakSet()
