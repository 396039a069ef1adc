"""One connection of asyncio to an engine, for one request at a time, and the answer to it as it comes.

httptools finds where an answer begins and ends. Nothing is copied on the way but what the reader has not taken yet.
`engine_pool` opens connections, verifies the engine by TLS, and looks after connections that wait.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import time
from collections import deque
from contextlib import suppress
from typing import Any, Protocol

import httptools

from hpc_serve.client.connections.answer_wait import AnswerWait, Judge, ReplicaLostError
from hpc_serve.client.connections.message import Header, Message
from hpc_serve.client.replicas.event_loops import has_ended
from hpc_serve.client.replicas.pool import ReplicaAddress
from hpc_serve.client.replicas.sdk import http
from hpc_serve.rendezvous.gate_headers import PROCESSING

# The engine waits when more has come than this and was not read.
_MOST_UNREAD_BYTES = 256 * 1024
_JOINED_BYTES = 64 * 1024


class Owner(Protocol):
    """The pool of a connection."""

    def release(self, connection: EngineConnection) -> None: ...
    def forget(self, connection: EngineConnection) -> None: ...
    def note_end(self) -> None: ...


class EngineConnection(asyncio.Protocol):
    """A connection. Its engine is asked one question at a time by `ask`."""

    transport: Any = None

    def __init__(self, owner: Owner, replica: ReplicaAddress, judge: Judge, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.replica = replica
        self.wait = AnswerWait(replica, judge)
        self.check_at_s = math.inf
        self.idle_since_s = 0.0
        self.is_lost = False
        self._owner = owner
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[Header] = []
        self._answer: EngineAnswer | None = None
        self._is_full = self._is_paused = False
        self._room: asyncio.Future[None] | None = None

    # -- asking

    def ask(self, message: Message) -> EngineAnswer:
        """Send a request but for what is left of an upload; return its answer, of which nothing has come."""
        answer = self._answer = EngineAnswer(self, message)
        self.wait.begin_write(None)
        head, content = message.head(), message.content or b""
        pieces = (head + content,) if len(content) <= _JOINED_BYTES else (head, content)
        for piece in pieces:
            self.transport.write(piece)
        return answer

    async def upload(self, message: Message) -> None:
        """Send the pieces of a body as the engine takes them."""
        is_chunked = any(name.lower() == b"transfer-encoding" for name, _ in message.headers)
        async for piece in message.upload:
            if piece and not self.is_lost:
                self.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece) if is_chunked else piece)
            while self._is_full and not self.is_lost:
                self._room = self.loop.create_future()
                await self._room
        if is_chunked and not self.is_lost:
            self.transport.write(b"0\r\n\r\n")

    def begin_wait(self, timeout_s: float | None) -> None:
        """Begin to wait for bytes of the answer."""
        wait_s = self.wait.begin_write(timeout_s) if self._is_full else self.wait.begin(timeout_s)
        self.check_at_s = time.monotonic() + wait_s

    def check(self, now_s: float) -> None:
        """Give the answer up if it has been waited for too long."""
        try:
            wait_s = self.wait.again()
        except ReplicaLostError as error:
            failure = http.ReadError(str(error))
            failure.__cause__ = error
            self.fail(failure)
        else:
            if wait_s is not None:
                self.check_at_s = now_s + wait_s
            elif self._is_full:
                self.fail(http.WriteTimeout("the engine does not take the request"))
            else:
                self.fail(http.ReadTimeout("the engine does not answer in time"))

    def fail(self, error: http.TransportError) -> None:
        """End the connection and the answer that is under way."""
        if not self.is_lost:
            self.transport.abort()
        self._end(error)

    def _end(self, error: http.TransportError | None = None) -> bool:
        """End the answer that is under way; return whether one was."""
        answer, self._answer = self._answer, None
        self.check_at_s = math.inf
        if answer is not None:
            answer.end(error)
            self._owner.note_end()
        return answer is not None

    def take_more(self) -> None:
        """Let more come, after `data_received` had too much."""
        if self._is_paused:
            self._is_paused = False
            self.transport.resume_reading()

    # -- what the event loop tells

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.socket = transport.get_extra_info("socket")

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:  # nothing was asked
            self.transport.abort()
            return
        if answer.woken is not None:
            self.wait.end(data)
            if not answer.status_code and not data.replace(PROCESSING, b""):  # signs: nobody need be woken
                self.begin_wait(answer.timeout_s)
                return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.fail(http.RemoteProtocolError(f"the engine sent what is no HTTP: {error}"))
            return
        if answer.unread_bytes > _MOST_UNREAD_BYTES and self._answer is answer and not self._is_paused:
            self._is_paused = True
            self.transport.pause_reading()
        answer.wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost, self._is_full = True, False
        self._owner.forget(self)
        self.resume_writing()
        if exc is not None:
            self._end(http.ReadError(str(exc)))
        elif self._answer is not None and not self._answer.ends_with_connection:
            self._end(http.RemoteProtocolError("the engine closed the connection before the end of its answer"))
        else:
            self._end()

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    # -- what the parser tells

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status, headers, self._headers = self._parser.get_status_code(), self._headers, []
        if status >= 200 and self._answer is not None:
            self._answer.begin(status, headers)
            self.wait.expects_signs = self.replica.signs and self._answer.is_event_stream
            if self._answer.is_head:
                self._finish(may_serve=False)

    def on_body(self, body: bytes) -> None:
        if self._answer is not None:
            self._answer.add(body)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() >= 200:
            self._finish(may_serve=self._parser.should_keep_alive())

    def _finish(self, *, may_serve: bool) -> None:
        if not self._end():
            return
        self.take_more()
        if may_serve and not self._is_full and not self.transport.get_write_buffer_size():
            self._owner.release(self)
        else:
            self.transport.abort()

    # -- processes and loops that end

    def leave(self) -> None:
        """Give this process's hold of the connection up; the process that it was forked from keeps its own."""
        self.is_lost = True
        with suppress(OSError, ValueError):
            if (number := self.socket.fileno()) >= 0:
                nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
                os.dup2(nothing, number, inheritable=False)
                os.close(nothing)

    def end_with_loop(self) -> None:
        """Break the connection if its event loop has ended."""
        if not has_ended(self.loop):
            return
        # Event loops give out no socket of the standard library: a second number of the same connection is one.
        with suppress(OSError, ValueError), socket.socket(fileno=os.dup(self.socket.fileno())) as same:
            same.shutdown(socket.SHUT_RDWR)


class EngineAnswer(http.AsyncByteStream):
    """The answer to one request, for one reader: its head once it has `begun`, and the pieces of its body."""

    status_code = 0
    is_event_stream = False

    def __init__(self, connection: EngineConnection, message: Message) -> None:
        self.headers: list[Header] = []
        self.is_head = message.method == "HEAD"
        self.ends_with_connection = False
        self.unread_bytes = 0
        self._connection = connection
        self.timeout_s = message.timeout_s("read")
        self._pieces: deque[bytes] = deque()
        self._is_over = False
        self._error: http.TransportError | None = None
        self.woken: asyncio.Future[None] | None = None

    async def begun(self) -> None:
        """Return once the head has come."""
        while not self.status_code:
            if self._error is not None:
                raise self._error
            await self._more()

    def __aiter__(self) -> EngineAnswer:
        return self

    async def __anext__(self) -> bytes:
        while not self._pieces:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if self._is_over:
                raise StopAsyncIteration
            await self._more()
        piece = self._pieces.popleft()
        self.unread_bytes -= len(piece)
        if not self.unread_bytes and not self._is_over:
            self._connection.take_more()
        return piece

    async def _more(self) -> None:
        woken = self.woken = self._connection.loop.create_future()
        self._connection.begin_wait(self.timeout_s)
        try:
            await woken
        finally:
            self.woken = None
            if not self._is_over:
                self._connection.check_at_s = math.inf

    def close(self) -> None:
        """End the request, if its answer has not come whole."""
        if not self._is_over:
            self._connection.fail(http.ReadError("the answer was closed"))

    async def aclose(self) -> None:
        self.close()

    # -- what the connection tells

    def begin(self, status: int, headers: list[Header]) -> None:
        self.status_code, self.headers = status, headers
        named = dict(headers)
        self.is_event_stream = named.get(b"content-type", b"").startswith(b"text/event-stream")
        self.ends_with_connection = b"content-length" not in named and b"transfer-encoding" not in named

    def add(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self.unread_bytes += len(piece)

    def end(self, error: http.TransportError | None = None) -> None:
        self._is_over, self._error = True, error
        self.wake()

    def wake(self) -> None:
        """Let the reader look, and begin another wait if there is nothing for it."""
        if self.woken is not None and not self.woken.done():
            self.woken.set_result(None)
