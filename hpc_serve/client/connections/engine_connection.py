"""One connection to an engine, for one request at a time, and the answer to it as it comes.

httptools finds where an answer begins and ends. Nothing is copied on the way but what the reader has not taken yet. The
two kinds of connection in connections.py decide how bytes travel. `Body` is an answer's body as the HTTP library and
the gateway read it.
"""

from __future__ import annotations

import os
import select
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import suppress
from typing import Any, Protocol

import httptools

from hpc_serve.client.connections.answer_wait import AnswerWait, ReplicaJudge, ReplicaLostError
from hpc_serve.client.connections.message import Header, Message, lines_for
from hpc_serve.client.replicas.event_loops import run_blocking
from hpc_serve.client.replicas.pool import ReplicaAddress
from hpc_serve.client.replicas.sdk import http
from hpc_serve.rendezvous.gate_headers import COMMENT

_JOINED_BYTES = 64 * 1024
"""Head and body of a request are sent as one piece up to this size."""


def is_readable(connected: Any) -> bool:
    """Return whether bytes, or the end of a connection, have come; True for a socket that is closed."""
    if (number := connected.fileno()) < 0:
        return True
    asked = select.poll()
    asked.register(number, select.POLLIN)
    return bool(asked.poll(0))


class Body(http.SyncByteStream, http.AsyncByteStream):
    """An answer's body, for threads and event loops. A kind of body has `read` and `aclose`."""

    async def read(self) -> bytes | None:
        """Return what has come since the last read, once something has; None at the end."""
        raise NotImplementedError

    async def read_all(self) -> bytes:
        """Return all that comes, and close."""
        try:
            return b"".join([piece async for piece in self])
        finally:
            await self.aclose()

    # No generators: the SDK leaves one suspended at `[DONE]`, and the event loop makes a task to end each of them.
    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if (piece := await self.read()) is None:
            raise StopAsyncIteration
        return piece

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        if (piece := run_blocking(self.read())) is None:
            raise StopIteration
        return piece

    def close(self) -> None:
        run_blocking(self.aclose())


class Owner(Protocol):
    """The pool of a connection."""

    def release(self, connection: EngineConnection) -> None: ...
    def forget(self, connection: EngineConnection) -> None: ...
    def note_end(self) -> None: ...


class EngineConnection:
    """A connection. Its engine is asked one question at a time by `ask`, once it is `secure`."""

    def __init__(self, owner: Owner, replica: ReplicaAddress, judge: ReplicaJudge, connected: Any) -> None:
        self.replica = replica
        self.wait = AnswerWait(replica, judge)
        self.socket = connected
        self.idle_since_s = 0.0
        self.is_lost = False
        self.is_full = False
        """The engine does not take what is sent."""
        self._is_sent = False
        self._is_whole = False
        self._may_serve = False
        self._owner = owner
        self._lines = lines_for(replica)
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[Header] = []
        self._answer: EngineAnswer | None = None

    async def secure(self, context: ssl.SSLContext, timeout_s: float) -> None:
        """Begin TLS with the engine that the context trusts. Raises OSError."""
        raise NotImplementedError

    async def write(self, data: bytes, timeout_s: float | None) -> None:
        """Send a part of a request. What fails ends the answer, which says so."""
        raise NotImplementedError

    async def room(self, timeout_s: float | None) -> None:
        """Return once the engine takes more of an upload."""

    def all_was_read(self) -> None:
        """Let more of the answer come."""

    async def more(self, answer: EngineAnswer) -> None:
        """Return once more of an answer has come, or it has ended."""
        raise NotImplementedError

    def abort(self) -> None:
        """End the connection at once."""
        raise NotImplementedError

    # -- asking

    async def ask(self, message: Message, pieces: Any) -> EngineAnswer:
        """Send a request, and the `pieces` of an upload; return its answer, of which the head has come."""
        answer = self._answer = EngineAnswer(self, message)
        self._is_sent = self._is_whole = False
        self.wait.begin_request()
        timeout_s = message.timeout_s("write")
        try:
            await self._write_content(message, timeout_s)
            if pieces is not None:
                is_chunked = any(name.lower() == b"transfer-encoding" for name, _ in message.headers)
                async for piece in pieces:
                    if answer.is_over or self.is_lost:
                        break  # a refusal may come before the end of an upload
                    if piece:
                        await self.write(b"%x\r\n%b\r\n" % (len(piece), piece) if is_chunked else piece, timeout_s)
                        await self.room(timeout_s)
                if is_chunked and not answer.is_over:
                    await self.write(b"0\r\n\r\n", timeout_s)
            self._is_sent = True
            while not answer.status_code:
                answer.check()
                await self.more(answer)
        except BaseException:
            answer.close()
            raise
        return answer

    async def _write_content(self, message: Message, timeout_s: float | None) -> None:
        """Send all but an upload. The key is in no variable of a function that waits: a traceback may show those."""
        head, content = message.head(self._lines), message.content or b""
        for piece in (head + content,) if len(content) <= _JOINED_BYTES else (head, content):
            await self.write(piece, timeout_s)

    def check(self) -> float | None:
        """Return how long to wait on; None if the answer was waited for too long, and is given up.

        What has come is read first: a loop or thread that did not run may find an engine silent which is not.
        """
        if not self.is_full and is_readable(self.socket):
            return 0.001
        try:
            if (wait_s := self.wait.again()) is not None:
                return wait_s
        except ReplicaLostError as error:
            self.fail(error)
        else:
            if self.is_full:
                self.fail(http.WriteTimeout("the engine does not take the request"))
            else:
                self.fail(http.ReadTimeout("the engine does not answer in time"))
        return None

    def fail(self, error: http.TransportError) -> None:
        """End the connection and the answer that is under way."""
        if not self.is_lost:
            self.abort()
        self._end(error)

    def _end(self, error: http.TransportError | None = None) -> bool:
        """End the answer that is under way; return whether one was."""
        answer, self._answer = self._answer, None
        self.wait.stop()
        if answer is not None:
            answer.end(error)
            self._owner.note_end()
        return answer is not None

    # -- what comes

    def feed(self, data: bytes) -> None:
        """Take bytes of the answer that is under way."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:  # Ctrl-C in a thread, for one
            self.fail(http.ReadError("the answer was interrupted"))
            raise error.__context__ or error from None
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._may_serve = False
            if not self._is_whole:
                self.fail(http.RemoteProtocolError(f"the engine sent what is no HTTP: {error}"))
        if self._is_whole:  # not before the parser is done: another thread may take the connection at once
            self._finish(may_serve=self._may_serve)

    def ended(self, error: Exception | None = None) -> None:
        """Nothing more comes, because of an error, or as the engine has closed the connection."""
        self.is_lost, self.is_full = True, False
        self._owner.forget(self)
        if error is not None:
            self._end(http.ReadError(str(error)))
        elif self._answer is not None and not self._answer.ends_with_connection:
            self._end(http.RemoteProtocolError("the engine closed the connection before the end of its answer"))
        else:
            self._end()

    # -- what the parser tells

    def on_message_begin(self) -> None:
        self._headers = []  # without the trailers of the last answer
        if self._is_whole or self._answer is None:  # nothing was asked
            self._may_serve = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status, headers, self._headers = self._parser.get_status_code(), self._headers, []
        if status >= 200 and self._answer is not None and not self._is_whole:
            self._answer.begin(status, headers)
            self.wait.expects_signs = self.replica.signs and self._answer.is_event_stream
            if self._answer.is_head:
                self._finish(may_serve=False)

    def on_body(self, body: bytes) -> None:
        if self._answer is not None and not self._is_whole:
            self._answer.add(body)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() >= 200 and not self._is_whole:
            self._is_whole, self._may_serve = True, self._parser.should_keep_alive()

    def _finish(self, *, may_serve: bool) -> None:
        if not self._end():
            return
        self.all_was_read()
        if may_serve and self._sent_all:
            self._owner.release(self)
        else:
            self.abort()

    @property
    def _sent_all(self) -> bool:
        return self._is_sent and not self.is_full

    # -- processes that end

    def leave(self) -> None:
        """Give this process's hold of the connection up; the process that it was forked from keeps its own.

        The socket's number stands for nothing then. To close it, or to tell a loop, would reach into the other process.
        """
        self.is_lost = True
        with suppress(OSError, ValueError):
            if (number := self.socket.fileno()) >= 0:
                nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
                os.dup2(nothing, number, inheritable=False)
                os.close(nothing)


class EngineAnswer(Body):
    """The answer to one request, for one reader: its head, and its body as it comes.

    Signs that the engine lives are no part of a stream, unless the request asks for them.
    """

    status_code = 0
    is_event_stream = False
    woken: Any = None
    """What wakes the reader that waits in an event loop."""

    def __init__(self, connection: EngineConnection, message: Message) -> None:
        self.raw_headers: list[Header] = []
        self.is_head = message.method == "HEAD"
        self.ends_with_connection = False
        self.unread_bytes = 0
        self.connection = connection
        self.timeout_s = message.timeout_s("read")
        self.is_over = False
        self._shows_signs = message.wants_signs
        self._pieces: list[bytes] = []
        self._error: http.TransportError | None = None

    def check(self) -> None:
        """Raise the error that has ended the answer, once."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    @property
    def headers(self) -> Mapping[str, str]:
        return {name.decode("latin-1"): value.decode("latin-1") for name, value in self.raw_headers}

    async def read(self) -> bytes | None:
        while not self._pieces:
            self.check()
            if self.is_over:
                return None
            await self.connection.more(self)
        pieces, self._pieces, self.unread_bytes = self._pieces, [], 0
        if not self.is_over:
            self.connection.all_was_read()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        """End the request, if its answer has not come whole."""
        if not self.is_over:
            self.connection.fail(http.ReadError("the answer was closed"))

    async def aclose(self) -> None:
        self.close()

    # -- what the connection tells

    def begin(self, status: int, headers: list[Header]) -> None:
        self.status_code, self.raw_headers = status, headers
        named = dict(headers)
        self.is_event_stream = named.get(b"content-type", b"").startswith(b"text/event-stream")
        self.ends_with_connection = b"content-length" not in named and b"transfer-encoding" not in named

    def add(self, piece: bytes) -> None:
        if piece == COMMENT and self.is_event_stream and not self._shows_signs:
            return
        self._pieces.append(piece)
        self.unread_bytes += len(piece)

    def end(self, error: http.TransportError | None = None) -> None:
        self.is_over, self._error = True, error
        self.wake()

    def wake(self) -> None:
        """Let the reader look, and begin another wait if there is nothing for it."""
        if self.woken is not None and not self.woken.done():
            self.woken.set_result(None)
