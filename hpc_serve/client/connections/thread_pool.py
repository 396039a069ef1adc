"""The connections of a process for the requests of its threads, on blocking sockets.

Each call of the kernel gives the interpreter's lock away, for which all other threads with a request under way wait in
line. So a request is sent as one piece, and a socket's time limit is set when it changes. The methods are coroutines
that block (`run_blocking`).
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from hpc_serve.client.connections.engine_connection import EngineAnswer, EngineConnection
from hpc_serve.client.connections.engine_pool import EnginePool
from hpc_serve.client.replicas.pool import ReplicaAddress

_READ_BYTES = 64 * 1024


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
