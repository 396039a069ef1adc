"""One request to the gateway, and its answer as it is given. `client_connection` reads the one and sends the other."""

from __future__ import annotations

import http
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import httptools

from hpc_serve.gateway.answers import Refusal
from hpc_serve.gateway.headers import Header
from hpc_serve.gateway.personal_keys import Person
from hpc_serve.gateway.use import AnswerCount

_STATUS_LINES = {status.value: b"HTTP/1.1 %d %b\r\n" % (status, status.phrase.encode()) for status in http.HTTPStatus}
_WITHOUT_BODY = (204, 304)


class Connection(Protocol):
    """The connection of a client. `is_full`: the client has much to read, and `room` waits until it has read."""

    is_full: bool

    @property
    def ends_now(self) -> bool:
        """Whether it ends with the answer that is under way."""

    def write(self, data: bytes) -> None: ...

    async def room(self) -> None: ...

    def show_key(self) -> None: ...


class Request:
    """One request. Names of `headers` are in small letters; `length` is that of the body, if it was announced.

    `route`, `model` and the `fields` of a body of JSON are those of a request that is passed on.

    `is_old`: of HTTP/1.0. `is_last`: the connection ends with its answer. `has_left`: the client has closed it.
    `person`: who showed a personal key; the `count` of the answer is kept for them alone.
    """

    def __init__(self, connection: Connection, method: str, url: bytes, headers: list[Header]) -> None:
        self.connection = connection
        self.method = method
        self.headers = headers
        self.path, self.query = _split(url)
        self._named = dict(reversed(headers))
        self.body = b""
        self.route = "other"
        self.model: str | None = None
        self.fields: Mapping[str, Any] = {}
        self.parts: list[bytes] = []
        self.held_bytes = self.length = 0
        self.refusal: Refusal | None = None
        self.person: Person | None = None
        self.count: AnswerCount | None = None
        self.has_left = self.is_last = self.is_old = False
        self._is_chunked = self._is_silent = False

    def value_of(self, name: bytes) -> bytes:
        """Return the first header of that name; empty if there is none."""
        return self._named.get(name, b"")

    @property
    def content_type(self) -> str:
        return self.value_of(b"content-type").decode("latin-1")

    def respond(self, status: int, body: bytes, headers: Iterable[Header]) -> None:
        """Give the whole answer."""
        self.begin(status, (*headers, (b"content-length", b"%d" % len(body))))
        self.write(body)
        self.end()

    def refuse(self, refusal: Refusal, *headers: Header) -> None:
        """Give the answer to a request that gets none of an engine."""
        self.respond(refusal.status, refusal.body, (*refusal.raw_headers, *headers))

    def begin(self, status: int, headers: Iterable[Header]) -> None:
        """Begin an answer. Without its length among the headers it is sent in chunks."""
        lines = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status]
        self._is_silent = has_length = self.method == "HEAD" or status in _WITHOUT_BODY
        for name, value in headers:
            has_length = has_length or name == b"content-length"
            lines.append(b"%b: %b\r\n" % (name, value))
        self._is_chunked = not has_length and not self.is_old
        self.is_last = self.is_last or self.connection.ends_now or (self.is_old and not has_length)
        if self._is_chunked:
            lines.append(b"transfer-encoding: chunked\r\n")
        if self.is_last:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        self.connection.write(b"".join(lines))

    def write(self, data: bytes) -> None:
        """Send bytes of the answer's body."""
        if data and not self._is_silent:
            self.connection.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)

    def end(self) -> None:
        """End the answer."""
        if self._is_chunked:
            self.connection.write(b"0\r\n\r\n")

    def break_off(self) -> None:
        """End an answer before its end, so that the client does not take it for whole."""
        self.is_last = True


def _split(url: bytes) -> tuple[bytes, bytes]:
    """Return the path and the query of a request's URL, which may be an absolute one."""
    if not url.startswith(b"/") or b"#" in url:
        try:
            parsed: Any = httptools.parse_url(url)
        except httptools.HttpParserInvalidURLError:
            return url, b""
        return parsed.path or b"/", parsed.query or b""
    path, _, query = url.partition(b"?")
    return path, query
