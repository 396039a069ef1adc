"""One connection of a client to the gateway: its requests, one after the other, and their answers.

This is HTTP/1.1 below the gateway: httptools reads requests, and the bytes of answers are written as they are given. A
connection is bounded in bytes, time and places until it has shown the key, by the limits of `gate/connection_limits`.
`app` decides what is answered.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from typing import Any, Protocol

import httptools

from hpc_serve.client.connections.message import Header
from hpc_serve.gate.connection_limits import (
    CONNECTION_WITHOUT_KEY_S,
    HEADERS_TIMEOUT_S,
    MAX_HEADER_BYTES,
    MAX_PIPELINED,
)
from hpc_serve.gateway.answers import Refusal
from hpc_serve.gateway.app import Gateway
from hpc_serve.gateway.request import Request

KEEP_ALIVE_S = 65.0
_MOST_DISCARDED_BYTES = 64 << 20
_DISCARD_S = 10.0
_MOST_UNSENT_BYTES = 64 << 10
_ANSWER_S = 0.2  # for an answer to what cannot be read to leave

_log = logging.getLogger(__name__)


class Connections(Protocol):
    app: Gateway

    def add(self, connection: ClientConnection) -> None: ...
    def remove(self, connection: ClientConnection) -> None: ...
    def note_key(self, connection: ClientConnection) -> None: ...


class ClientConnection(asyncio.Protocol):
    """A connection. `server` has the application that answers."""

    transport: Any

    def __init__(self, server: Connections, loop: asyncio.AbstractEventLoop) -> None:
        self.server = server
        self.loop = loop
        self.made_at_s = self.idle_since_s = loop.time()
        self.has_room = asyncio.Event()
        self.has_room.set()
        self.has_key = False
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._headers: list[Header] = []
        self._length = b""
        self._head_bytes = self._discarded_bytes = self._out_bytes = 0
        self._begun_at_s: float | None = None
        self._reading: Request | None = None
        self._current: Request | None = None
        self._task: asyncio.Task[None] | None = None
        self._waiting: deque[Request] = deque()
        self._out: list[bytes] = []
        self._is_refusing = self._is_ending = False

    @property
    def ends_now(self) -> bool:
        return self._is_ending and not self._waiting

    def show_key(self) -> None:
        """Let the connection stay: who has the key may ask."""
        self.server.note_key(self)

    # -- what the event loop tells

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.server.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.remove(self)
        self._is_ending = True
        for request in (self._reading, *self._waiting):
            if request is not None:
                self.server.app.release(request)
        self._waiting.clear()
        self.resume_writing()
        if self._current is not None and self._task is not None:
            self._current.has_left = True
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        if self._is_ending:
            return
        if self._begun_at_s is None and self._reading is None:
            self._begun_at_s = self.loop.time()
        self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:  # what follows would be no HTTP: there is no answer but the one under way
            self._end_after_answers()
        except httptools.HttpParserError:
            self._refuse_all(400, "bad_request", "This is no HTTP request.")
        if self._head_bytes > MAX_HEADER_BYTES and not self._is_ending:
            self._refuse_all(431, "headers_too_large", "The headers are too large.")
        reading = self._reading
        if reading is not None and reading.refusal is not None and self._current is None and not self._is_refusing:
            self._is_refusing = reading.is_last = True  # before the body: what comes of it is discarded
            self.idle_since_s = self.loop.time()
            reading.refuse(reading.refusal)

    def pause_writing(self) -> None:
        self.has_room.clear()

    def resume_writing(self) -> None:
        self.has_room.set()

    # -- what the parser tells

    def on_message_begin(self) -> None:
        self._url, self._headers, self._length = b"", [], b""

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if (name := name.lower()) == b"content-length":
            self._length = value
        else:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        may_be_large, self._head_bytes, self._begun_at_s = self._head_bytes > MAX_HEADER_BYTES, 0, None
        parser = self._parser
        request = Request(self, parser.get_method().decode("latin-1"), self._url, self._headers)
        request.length = int(self._length[:19]) if self._length.isdigit() else 0
        request.is_old = parser.get_http_version() != "1.1"
        request.is_last = not parser.should_keep_alive()
        self._reading = request
        try:
            if may_be_large and len(self._url) + sum(map(len, itertools.chain(*self._headers))) > MAX_HEADER_BYTES:
                raise Refusal(status=431, code="headers_too_large", message="The headers are too large.")
            self.server.app.let_in(request)
        except Refusal as refusal:
            request.refusal = refusal
        else:
            if self._current is None and request.value_of(b"expect").lower() == b"100-continue":
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        request = self._reading
        if request is None:
            return
        if request.refusal is None:
            try:
                self.server.app.hold(request, len(body))
                request.parts.append(body)
            except Refusal as refusal:
                request.refusal = refusal
                request.parts.clear()
        elif (discarded := self._discarded_bytes + len(body)) > _MOST_DISCARDED_BYTES:
            self.transport.abort()
        else:
            self._discarded_bytes = discarded

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        request, self._reading = self._reading, None
        if request is None or self._is_ending:
            return
        if self._is_refusing:
            self._close()
        elif self._current is None:
            self._start(request)
        elif len(self._waiting) < MAX_PIPELINED:
            self._waiting.append(request)
        else:
            self._end_after_answers()

    # -- answers

    def _start(self, request: Request) -> None:
        self._current = request
        if request.refusal is not None:
            request.refuse(request.refusal)
            self._finish(request)
            return
        request.body = request.parts[0] if len(request.parts) == 1 else b"".join(request.parts)
        request.parts = []
        self._task = self.loop.create_task(self._answer(request))

    async def _answer(self, request: Request) -> None:
        try:
            await self.server.app.answer(request)
        except asyncio.CancelledError:
            request.break_off()
        except Exception:
            _log.exception("a request failed")
            request.break_off()
        finally:
            self._task = None
            self._finish(request)

    def _finish(self, request: Request) -> None:
        self._current = None
        self.server.app.release(request)
        self.idle_since_s = self.loop.time()
        if request.is_last or self.ends_now:
            self._close()
        elif self._waiting:
            self._start(self._waiting.popleft())
        else:
            self._flush()

    def write(self, data: bytes) -> None:
        """Write bytes of an answer: together with what is written before the loop runs again."""
        if not self._out:
            self.loop.call_soon(self._flush)
        self._out.append(data)
        self._out_bytes += len(data)
        if self._out_bytes > _MOST_UNSENT_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._out:
            data = b"".join(self._out)
            self._out.clear()
            self._out_bytes = 0
            if not self.transport.is_closing():
                self.transport.write(data)

    def _refuse_all(self, status: int, code: str, message: str) -> None:
        """Answer what cannot be read, if nothing else is being answered, and close."""
        if self._current is None:
            request = Request(self, "GET", b"", [])
            request.is_last = True
            request.refuse(Refusal(status=status, code=code, message=message))
            self._is_ending = True
            self.loop.call_later(_ANSWER_S, self._close)  # what comes until then is read: else the answer is lost
        else:
            self._end_after_answers()

    def _end_after_answers(self) -> None:
        self._is_ending = True
        if self._current is None:
            self._close()

    def _close(self) -> None:
        self._is_ending = True
        self._flush()
        self.transport.close()
        self.loop.call_later(_DISCARD_S, self.transport.abort)  # a client that does not read, or goes on over TLS

    # -- what the server asks, about once a second

    def end_when_answered(self) -> None:
        """Close once what has come is answered."""
        if self._reading is None:
            self._end_after_answers()

    def check_time(self, now_s: float) -> None:
        """End the connection if it takes too long for what it has shown."""
        begun_at_s, is_idle = self._begun_at_s, self._current is None and self._reading is None
        if (
            (begun_at_s is not None and self._current is None and now_s - begun_at_s >= HEADERS_TIMEOUT_S)
            or (not self.has_key and now_s - self.made_at_s >= CONNECTION_WITHOUT_KEY_S)
            or (self._is_refusing and now_s - self.idle_since_s >= _DISCARD_S)
            or (is_idle and begun_at_s is None and now_s - self.idle_since_s >= KEEP_ALIVE_S)
        ):
            self.transport.abort()
