"""The connections below an OpenAI client: of one process for its threads, and of each event loop of asyncio.

A connection is kept for one engine, at one address, with one way to verify it, so that no request meets a connection
that was verified for another.

Threads have blocking sockets, and their methods are coroutines that block (`run_blocking`). Each call of the kernel
gives the interpreter's lock away, for which all other threads with a request under way wait in line. So a request is
sent as one piece, and a socket's time limit is set when it changes. In an event loop one timer looks after all
connections.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import anyio

from hpc_serve.client.connections.answer_wait import ReplicaJudge
from hpc_serve.client.connections.engine_connection import EngineAnswer, EngineConnection, Owner
from hpc_serve.client.connections.engine_pool import EnginePool
from hpc_serve.client.connections.message import Message
from hpc_serve.client.replicas.event_loops import InLoop, InThread, leave_behind, renew_after_fork
from hpc_serve.client.replicas.pool import ReplicaAddress
from hpc_serve.rendezvous.gate_headers import PROCESSING

_READ_BYTES = 64 * 1024
_LOOK_S = 0.1
_MOST_UNREAD_BYTES = 256 * 1024
"""The engine waits when more has come than this and was not read."""


class ThreadConnection(EngineConnection):
    """A connection for one thread at a time. Another thread may close its answer."""

    _is_used = False

    async def secure(self, context: ssl.SSLContext, timeout_s: float) -> None:
        # The socket is known before the handshake, so that a forked process can leave it.
        self.socket = context.wrap_socket(self.socket, do_handshake_on_connect=False)
        self._limit(timeout_s)
        self.socket.do_handshake()

    async def write(self, data: bytes, timeout_s: float | None) -> None:
        unsent = memoryview(data)
        wait_s: float | None = self.wait.begin_write(timeout_s)
        self.is_full = True
        with self._using():
            while unsent and wait_s is not None:
                try:
                    self._limit(wait_s)
                    unsent = unsent[self.socket.send(unsent) :]
                except TimeoutError:
                    wait_s = self.check()
                except OSError:
                    return  # the engine may have answered before it closed the connection: the next read tells
        self.is_full = False

    async def more(self, answer: EngineAnswer) -> None:
        data, failure = b"", None
        wait_s: float | None = self.wait.begin(answer.timeout_s)
        with self._using():
            while wait_s is not None:
                try:
                    self._limit(wait_s)
                    data = self.socket.recv(_READ_BYTES)
                    break
                except TimeoutError:
                    wait_s = self.check()
                except OSError as error:
                    failure = error
                    break
        if wait_s is None:
            return  # the answer was given up
        if failure is None:
            self.wait.end(data)
        if data:
            return self.feed(data)
        self.abort()
        self.ended(failure)

    @contextmanager
    def _using(self) -> Iterator[None]:
        """Let no other thread close the socket: its number could be that of another connection at once."""
        self._is_used = True
        try:
            yield
        finally:
            self._is_used = False
            if self.is_lost:
                self.socket.close()

    def _limit(self, timeout_s: float | None) -> None:
        if self.socket.gettimeout() != timeout_s:
            self.socket.settimeout(timeout_s)

    def abort(self) -> None:
        was_lost, self.is_lost = self.is_lost, True
        with suppress(OSError):
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)  # wakes a thread that reads, and leaves TLS as it is
        if not self._is_used:
            self.socket.close()
        if not was_lost:
            self._owner.forget(self)


class ThreadPool(EnginePool):
    """The connections of a process. One that another program closed is found when it is to be used."""

    def _make_room(self, number: int) -> threading.Semaphore:
        return threading.Semaphore(number)

    def _enter_now(self) -> bool:
        self._end_idle()
        return bool(self._room.acquire(blocking=False))

    async def _enter(self, room: Any, timeout_s: float | None) -> None:
        if not room.acquire(timeout=timeout_s):
            raise TimeoutError

    async def _open(self, replica: ReplicaAddress, timeout_s: float) -> ThreadConnection:
        connected = socket.create_connection((replica.host, replica.port), timeout_s)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return ThreadConnection(self, replica, self._judge, connected)

    async def _upload(self, upload: Any) -> Any:
        for piece in upload:
            yield piece


class LoopConnection(EngineConnection, asyncio.Protocol):
    """A connection in an event loop."""

    def __init__(self, owner: Owner, replica: ReplicaAddress, judge: ReplicaJudge, transport: Any) -> None:
        super().__init__(owner, replica, judge, transport.get_extra_info("socket"))
        self.loop = asyncio.get_running_loop()
        self.transport = transport
        self._is_paused = False
        self._has_room = asyncio.Event()

    async def secure(self, context: ssl.SSLContext, timeout_s: float) -> None:
        with anyio.fail_after(timeout_s):
            secured = await self.loop.start_tls(self.transport, self, context)
        if secured is None:
            raise ConnectionResetError("the connection was lost")
        self.transport = secured

    async def write(self, data: bytes, timeout_s: float | None) -> None:
        if not self.is_lost:
            self.transport.write(data)

    async def room(self, timeout_s: float | None) -> None:
        while self.is_full and not self.is_lost:
            self.wait.begin_write(timeout_s)
            await self._has_room.wait()
            self.wait.stop()

    async def more(self, answer: EngineAnswer) -> None:
        woken = answer.woken = self.loop.create_future()
        self._begin_wait(answer)
        try:
            await woken
        finally:
            answer.woken = None
            if not answer.is_over:  # else it may be the connection of another answer
                self.wait.stop()

    def _begin_wait(self, answer: EngineAnswer) -> None:
        begin = self.wait.begin_write if self.is_full else self.wait.begin
        begin(answer.timeout_s)

    def abort(self) -> None:
        self.transport.abort()

    @property
    def _sent_all(self) -> bool:
        return super()._sent_all and not self.transport.get_write_buffer_size()

    # -- what the event loop tells

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:  # nothing was asked
            self.transport.abort()
            return
        if answer.woken is not None:
            self.wait.end(data)
            if not answer.status_code and not data.replace(PROCESSING, b""):  # signs: nobody need be woken
                self._begin_wait(answer)
                return
        self.feed(data)
        if answer.unread_bytes > _MOST_UNREAD_BYTES and not answer.is_over and not self._is_paused:
            self._is_paused = True
            self.transport.pause_reading()
        answer.wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended(exc)
        self.resume_writing()

    def pause_writing(self) -> None:
        self.is_full = True
        self._has_room.clear()

    def resume_writing(self) -> None:
        self.is_full = False
        self._has_room.set()

    def all_was_read(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self.transport.resume_reading()


class LoopPool(EnginePool):
    """The connections of the loop that runs."""

    trusts_idle_s = 0.5  # the loop may not have run since the engine closed a connection that was idle for longer

    def __init__(self, judge: ReplicaJudge) -> None:
        super().__init__(judge)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def _make_room(self, number: int) -> anyio.Semaphore:
        return anyio.Semaphore(number)

    def _enter_now(self) -> bool:
        if not self._room.value:
            return False
        self._room.acquire_nowait()
        return True

    async def _enter(self, room: Any, timeout_s: float | None) -> None:
        with anyio.fail_after(timeout_s):
            await room.acquire()

    async def _open(self, replica: ReplicaAddress, timeout_s: float) -> LoopConnection:
        with anyio.fail_after(timeout_s):
            transport, _ = await self._loop.create_connection(asyncio.Protocol, replica.host, replica.port)
        if self._timer is None:
            self._timer = self._loop.call_later(_LOOK_S, self._look)
        return LoopConnection(self, replica, self._judge, transport)

    def _upload(self, upload: Any) -> Any:
        return upload

    def _look(self) -> None:
        now_s = time.monotonic()
        for connection in list(self.connections):
            if connection.wait.look_at_s <= now_s:
                connection.check()
        self._end_idle()
        self._timer = self._loop.call_later(_LOOK_S, self._look) if self.connections else None

    def end_with_loop(self) -> None:
        """Break the connections, as their event loop has ended."""
        for connection in self.connections:
            # Event loops give out no socket of the standard library: a second number of the same connection is one.
            with suppress(OSError, ValueError), socket.socket(fileno=os.dup(connection.socket.fileno())) as same:
                same.shutdown(socket.SHUT_RDWR)


class ThreadConnections(InThread):
    """The connections of this process, for the requests of its threads."""

    def __init__(self, judge: ReplicaJudge) -> None:
        self._judge = judge
        self._begin()
        renew_after_fork(self)

    def _begin(self) -> None:
        self._pool = ThreadPool(self._judge)
        # Before the garbage collector frees the sockets of a client that was not closed, which would warn of each.
        weakref.finalize(self, self._pool.close).atexit = False

    def send(self, message: Message, replica: ReplicaAddress, connect_s: float) -> Awaitable[EngineAnswer]:
        """Return a replica's answer to a request; its body was not read."""
        return self._pool.send(message, replica, connect_s)

    async def close_all(self) -> None:
        self._pool.close()

    def after_fork(self) -> None:
        leave_behind(self._pool)
        self._pool.leave()
        self._begin()


class LoopConnections(InLoop):
    """The connections of each event loop that runs, as a connection is of use in its own loop alone."""

    def __init__(self, judge: ReplicaJudge) -> None:
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
