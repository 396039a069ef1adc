"""The connections below an OpenAI client: of one process, and of one event loop where there are several.

A connection is kept for one engine, at one address, with one way to verify it, so that no request meets a connection
that was verified for another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from hpc_serve.client.connections.answer_wait import Judge
from hpc_serve.client.connections.engine_connection import EngineAnswer
from hpc_serve.client.connections.loop_pool import LoopPool
from hpc_serve.client.connections.message import Message
from hpc_serve.client.connections.thread_pool import ThreadPool
from hpc_serve.client.replicas.event_loops import InLoop, InThread
from hpc_serve.client.replicas.fork import leave_behind, renew_after_fork
from hpc_serve.client.replicas.pool import ReplicaAddress


class ThreadConnections(InThread):
    """The connections of this process, for the requests of its threads."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._pool = ThreadPool(judge)
        renew_after_fork(self)

    def send(self, message: Message, replica: ReplicaAddress, connect_s: float) -> Awaitable[EngineAnswer]:
        """Return a replica's answer to a request; its body was not read."""
        return self._pool.send(message, replica, connect_s)

    async def close_all(self) -> None:
        self._pool.close()

    def after_fork(self) -> None:
        leave_behind(self._pool)
        self._pool.leave()
        self._pool = ThreadPool(self._judge)


class LoopConnections(InLoop):
    """The connections of each event loop that runs, as a connection is of use in its own loop alone."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._pools: dict[asyncio.AbstractEventLoop, LoopPool] = {}
        renew_after_fork(self)

    def send(self, message: Message, replica: ReplicaAddress, connect_s: float) -> Awaitable[EngineAnswer]:
        """Return a replica's answer to a request; its body was not read."""
        loop = asyncio.get_running_loop()
        if (pool := self._pools.get(loop)) is None:
            self._forget_ended_loops()
            pool = self._pools[loop] = LoopPool(self._judge)
        return pool.send(message, replica, connect_s)

    async def close_all(self) -> None:
        """Close the connections of the event loop that runs."""
        self._forget_ended_loops()
        if (pool := self._pools.pop(asyncio.get_running_loop(), None)) is not None:
            pool.close()

    def _forget_ended_loops(self) -> None:
        for loop in [loop for loop in list(self._pools) if loop.is_closed()]:
            if (pool := self._pools.pop(loop, None)) is not None:
                pool.end_with_loop()

    def after_fork(self) -> None:
        leave_behind(self._pools)
        for pool in self._pools.values():
            pool.leave()
        self._pools = {}


Connections = ThreadConnections | LoopConnections
