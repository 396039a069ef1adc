"""What one connection to an engine may cost before it has shown the key, and the signs within its answers.

The limits are of bytes, time, places, and lines in the log. vLLM serves by uvicorn, which bounds none of these for its
usual parser (httptools): headers are collected without end, and half a request stays open for ever. `install` puts a
protocol class with limits where uvicorn looks for one. `gate` decides who has the key.

A sign tells a client that asks for it that the engine works: `102 Processing` until the answer begins, and a comment
within a stream of events. A request that was silent for half a second gets one, as long as the engine works. One timer
serves all requests; there is none while none asks. The protocol class writes the signs, since it alone knows where in
an answer the connection is. Standard library only; uvicorn is imported when the limits are installed.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from typing import Any, ClassVar

from hpc_serve.rendezvous.gate_headers import COMMENT_CHUNK, PROCESSING, SIGNS

# -- signs

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]

WRITE_SIGN = "hpc_serve.write_sign"
"""In the scope of a request that asks: the protocol's function that writes a sign. The gate takes it out."""
_SIGN_S = 0.5
_TICK_S = 0.1


class Asked:
    """A request that asks for signs. `write` is told whether a comment may stand in the answer here."""

    __slots__ = ("_loop", "_send", "is_at_comment", "is_events", "sent_at_s", "write")

    def __init__(self, write: Callable[[bool], None], send: Send, loop: asyncio.AbstractEventLoop) -> None:
        self.write, self._send, self._loop = write, send, loop
        self.sent_at_s = loop.time()
        self.is_events = self.is_at_comment = False

    def send(self, message: Message) -> Awaitable[None]:
        """Send a part of the answer, and note where in the answer it ends."""
        self.sent_at_s = self._loop.time()
        if message["type"] == "http.response.start":
            headers = dict(message.get("headers", ()))
            kind = headers.get(b"content-type", b"")
            self.is_events = kind.startswith(b"text/event-stream") and b"content-encoding" not in headers
            self.is_at_comment = self.is_events
        elif self.is_events and (body := message.get("body")):
            self.is_at_comment = body.endswith((b"\n\n", b"\r\n\r\n"))
        return self._send(message)


class Signs:
    """Sends signs to all requests that ask, while `has_fault` is false."""

    def __init__(self, has_fault: Callable[[], bool]) -> None:
        self._has_fault = has_fault
        self._asked: dict[Asked, None] = {}
        self.timer: asyncio.TimerHandle | None = None
        """The timer of the next look at all requests; None while none asks."""

    def add(self, asked: Asked) -> None:
        self._asked[asked] = None
        if self.timer is None:
            self.timer = asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    def remove(self, asked: Asked) -> None:
        del self._asked[asked]

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        self.timer = loop.call_later(_TICK_S, self._tick) if self._asked else None
        now_s = loop.time()
        silent = [asked for asked in self._asked if now_s - asked.sent_at_s >= _SIGN_S - _TICK_S]
        if silent and not self._has_fault():
            for asked in silent:
                asked.sent_at_s = now_s
                asked.write(asked.is_at_comment)


# -- limits

HAS_KEY = "hpc_serve.has_key"
"""In the scope of a request: the gate calls it once the connection has shown the key."""

MAX_HEADER_BYTES = 64 * 1024  # of one request, and of what follows its body
HEADERS_TIMEOUT_S = 10.0
MAX_CONNECTIONS_WITHOUT_KEY = 512
CONNECTION_WITHOUT_KEY_S = 30.0
MAX_PIPELINED = 8
TLS_HANDSHAKE_TIMEOUT_S = 10.0
_FEED_BYTES = 16 * 1024
_ANSWER_S = 0.2  # how long an answer may take to leave before the connection is cut
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"  # RFC 6585
)

_MAX_LOGGED_PATH = 200
_LOGGED_PER_INTERVAL = 20
_LOG_INTERVAL_S = 10.0
# The module of uvicorn's own class, and its members that are used here. A later uvicorn may have moved any of them.
_USED_METHODS = (
    *("connection_made", "connection_lost", "data_received", "handle_websocket_upgrade"),
    *("on_message_begin", "on_headers_complete", "on_body", "on_message_complete", "on_response_complete"),
)


class LimitsNotInForceError(RuntimeError):
    """The installed uvicorn is not one that the limits fit; the engine does not start without them."""


def install() -> None:
    """Make uvicorn use the limits for every server that this process starts. Raises LimitsNotInForceError."""
    auto: Any = importlib.import_module("uvicorn.protocols.http.auto")
    try:
        protocols = importlib.import_module("uvicorn.config").HTTP_PROTOCOLS
        base = importlib.import_module("uvicorn.protocols.http.httptools_impl").HttpToolsProtocol
    except (ImportError, AttributeError) as error:
        raise _does_not_fit(str(error)) from error
    if protocols.get("auto") != "uvicorn.protocols.http.auto:AutoHTTPProtocol":
        raise _does_not_fit(f"its protocol for HTTP is {protocols.get('auto')}")
    if missing := [name for name in _USED_METHODS if not callable(getattr(base, name, None))]:
        raise _does_not_fit(f"{base.__name__} has no {', '.join(missing)}")
    auto.AutoHTTPProtocol = limited(base)
    for name in ("uvicorn.access", "uvicorn.error"):
        logger = logging.getLogger(name)
        if not any(isinstance(present, LogLimit) for present in logger.filters):
            logger.addFilter(LogLimit())


def bound_tls_handshakes(loop: asyncio.AbstractEventLoop) -> None:
    """Let no TLS handshake of this loop's servers take longer than TLS_HANDSHAKE_TIMEOUT_S; the default is 60 s.

    Before its handshake a connection has no protocol object, so this is the only limit that reaches it.
    """
    create_server = loop.create_server

    def create_bounded_server(*args: Any, **options: Any) -> Any:
        if options.get("ssl") is not None:
            options.setdefault("ssl_handshake_timeout", TLS_HANDSHAKE_TIMEOUT_S)
        return create_server(*args, **options)

    loop.create_server = create_bounded_server  # type: ignore[method-assign]


def limited(base: Any) -> Any:
    """uvicorn's protocol class `base` with limits."""

    class LimitedProtocol(base):  # type: ignore[misc]
        """One connection. It counts bytes that are not of a body, and knows whether the key has been shown."""

        _without_key: ClassVar[dict[Any, None]] = {}  # the oldest first

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._header_bytes = 0
            self._request_began_at: float | None = None
            self._is_upgraded = False
            self._timer: asyncio.TimerHandle | None = None
            self.app: Any = _marked(self.app, self._show_key)

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._made_at = self.loop.time()
            self._without_key[self] = None
            if len(self._without_key) > MAX_CONNECTIONS_WITHOUT_KEY:
                next(iter(self._without_key))._end()  # the oldest: a flood must not keep out who has the key
            self._timer = self.loop.call_later(HEADERS_TIMEOUT_S, self._check_time)

        def connection_lost(self, exc: Exception | None) -> None:
            self._let_go()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            left = memoryview(data)
            while left:
                if self.transport.is_closing() or self._is_upgraded:
                    return
                end = min(_FEED_BYTES, MAX_HEADER_BYTES - self._header_bytes)  # headers that end there are whole
                part, left = bytes(left[:end]), left[end:]
                if self._request_began_at is None and not self._is_answering():
                    self._request_began_at = self.loop.time()
                self._header_bytes += len(part)
                super().data_received(part)
                if self._header_bytes >= MAX_HEADER_BYTES and not self.transport.is_closing():
                    if not self._is_answering():
                        self.transport.write(_TOO_LARGE)
                    self.transport.close()
                    # Over TLS that goes on reading for 30 s, until the other end agrees.
                    self.loop.call_later(_ANSWER_S, self.transport.abort)

        def on_message_begin(self) -> None:
            if len(self.pipeline) >= MAX_PIPELINED:
                raise LimitsNotInForceError("too many requests at once on one connection")  # the parser answers 400
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._header_bytes = 0
            self._request_began_at = None
            # A request that follows another in one packet may have passed the count of bytes.
            if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEADER_BYTES:
                raise LimitsNotInForceError("headers are too long")  # the parser answers 400
            super().on_headers_complete()
            asks = SIGNS in self.headers and self.scope["http_version"] == "1.1"
            if asks and self.cycle is not None and self.cycle.scope is self.scope:
                self.scope[WRITE_SIGN] = partial(self._write_sign, self.cycle)

        def on_body(self, body: bytes) -> None:
            self._header_bytes = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._header_bytes = 0
            super().on_message_complete()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self._header_bytes and self._request_began_at is None:
                self._request_began_at = self.loop.time()

        def handle_websocket_upgrade(self) -> None:
            # uvicorn's protocol for websockets takes over and the gate answers its handshake. The connection keeps its
            # place and its time: a handshake that announces a body is never answered.
            self._is_upgraded = True
            make_protocol = self.ws_protocol_class

            def make_marked(**options: Any) -> Any:
                protocol = make_protocol(**options)
                protocol.app = _marked(protocol.app, self._show_key)
                return protocol

            self.ws_protocol_class: Any = make_marked
            super().handle_websocket_upgrade()

        def _write_sign(self, cycle: Any, is_at_comment: bool) -> None:
            """Write a sign for a request, if one may stand here and the client reads."""
            if self.transport.is_closing() or self.flow.write_paused or cycle.response_complete:
                return
            if not cycle.response_started:
                if not cycle.waiting_for_100_continue:
                    self.transport.write(PROCESSING)
            elif is_at_comment and cycle.chunked_encoding and cycle.scope["method"] != "HEAD":
                self.transport.write(COMMENT_CHUNK)

        def _is_answering(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _show_key(self) -> None:
            self._without_key.pop(self, None)

        def _check_time(self) -> None:
            if self._is_upgraded and (self.transport.is_closing() or self not in self._without_key):
                self._let_go()
                return
            now = self.loop.time()
            began_at = self._request_began_at
            too_slow = began_at is not None and now - began_at >= HEADERS_TIMEOUT_S
            too_old = self in self._without_key and now - self._made_at >= CONNECTION_WITHOUT_KEY_S
            if too_slow or too_old:
                self._end()
            else:
                self._timer = self.loop.call_later(HEADERS_TIMEOUT_S / 4, self._check_time)

        def _end(self) -> None:
            self._let_go()
            self.transport.abort()

        def _let_go(self) -> None:
            self._without_key.pop(self, None)
            if self._timer is not None:
                self._timer.cancel()

    return LimitedProtocol


class LogLimit(logging.Filter):
    """Bounds what a stranger can write into uvicorn's log: refusals, probes and broken requests, by length and rate."""

    def __init__(self) -> None:
        super().__init__()
        self._interval_began_at = -_LOG_INTERVAL_S
        self._logged = self._left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name != "uvicorn.access" or not isinstance(record.args, tuple) or len(record.args) != 5:
            is_within_rate, note = self._count() if record.levelno == logging.WARNING else (True, "")
            record.msg = f"{record.msg}{note}"
            return is_within_rate
        client, method, path, version, status = record.args  # uvicorn formats these five, and no message
        path = str(path)
        if len(path) > _MAX_LOGGED_PATH:
            path = f"{path[:_MAX_LOGGED_PATH]}... ({len(path)} characters)"
        may_be_strangers = status in (400, 401, 404) or path.partition("?")[0] == "/health"
        is_within_rate, note = self._count() if may_be_strangers else (True, "")
        record.args = (client, method, f"{path}{note}", version, status)
        return is_within_rate

    def _count(self) -> tuple[bool, str]:
        """Count a line; returns whether it is within the rate, and a note on lines that were left out before."""
        now, note = time.monotonic(), ""
        if now - self._interval_began_at >= _LOG_INTERVAL_S:
            note = f" ({self._left_out} lines like this were left out before)" if self._left_out else ""
            self._interval_began_at, self._logged, self._left_out = now, 0, 0
        self._logged += 1
        self._left_out += self._logged > _LOGGED_PER_INTERVAL
        return self._logged <= _LOGGED_PER_INTERVAL, note


def _marked(app: Any, show_key: Callable[[], None]) -> Any:
    async def with_mark(scope: Any, receive: Any, send: Any) -> Any:
        scope[HAS_KEY] = show_key
        return await app(scope, receive, send)

    return with_mark


def _does_not_fit(why: str) -> LimitsNotInForceError:
    return LimitsNotInForceError(
        f"hpc-serve's limits for connections do not fit the installed uvicorn: {why}. The engine does not start: "
        "anybody could fill its memory without these limits. Install uvicorn[standard] 0.54, or the version of envs/."
    )
