"""One request to the gateway with its answer as it is given, and the persons who ask with keys of their own.

`client_connection` reads requests and sends answers. Of persons this module knows who they are, their limits, and what
they use. Every two seconds, in a thread, the file of keys is read, what persons have used is written, and what other
gateways have written is read. Requests of the owner count for no person.
"""

from __future__ import annotations

import asyncio
import http
import logging
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import httptools

from hpc_serve.client.connections.message import Header
from hpc_serve.errors import HpcServeError, RecordError, StoreError
from hpc_serve.gateway import personal_keys
from hpc_serve.gateway.answers import Refusal
from hpc_serve.gateway.personal_keys import AnswerCount, DamagedKeysError, Person, UnderWay, Use, hash_key, read_people
from hpc_serve.printable import printable

_STATUS_LINES = {status.value: b"HTTP/1.1 %d %b\r\n" % (status, status.phrase.encode()) for status in http.HTTPStatus}
_WITHOUT_BODY = (204, 304)
LOOK_S = 2.0

_log = logging.getLogger(__name__)


class Connection(Protocol):
    """The connection of a client. It `has_room` unless the client has much to read."""

    has_room: asyncio.Event

    @property
    def ends_now(self) -> bool:
        """Whether it ends with the answer that is under way."""

    def write(self, data: bytes) -> None: ...

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


# -- persons


class People:
    """The persons of one gateway. Raises RecordError for a file of keys that others can change, StoreError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._name = secrets.token_hex(6)
        self._by_hash: dict[str, Person] = {}
        self._under_way: defaultdict[str, UnderWay] = defaultdict(UnderWay)
        self._own: tuple[str, dict[str, Use]] = (personal_keys.today(), {})
        self._others = personal_keys.read_use(folder, self._own[0])
        self._saving = threading.Lock()
        self._saved: dict[str, Use] = {}
        self._problem = ""
        try:
            self._by_hash = _by_hash(folder)
        except DamagedKeysError:
            self.look()  # says so; the owner may ask
        personal_keys.remove_earlier(folder, self._own[0])

    def with_key(self, key: bytes) -> Person | None:
        """Return the person of a key. Only its hash is looked up, so the time that takes tells nothing of the keys."""
        return self._by_hash.get(hash_key(key))

    # -- limits

    def begin(self, request: Request) -> None:
        """Count a person's request until `end`, with the tokens that it may use. Raises Refusal over a limit.

        A person with nothing under way and a token left of the day may ask, however much.
        """
        person = request.person
        if person is None:
            return
        under_way = self._under_way[person.name]
        if person.max_in_flight is not None and under_way.requests >= person.max_in_flight:
            text = f"{person.name} has {under_way.requests} requests under way at this gateway, and may have no more."
            raise Refusal(status=429, code="person_in_flight", message=f"{text} Try again when one has ended.")
        if person.tokens_a_day is not None:
            used = sum(use.get(person.name, Use()).tokens for use in (self._use_today(), self._others))
            text = f"{person.name} has used {used:,} tokens today, and has {person.tokens_a_day:,} a day."
            if used >= person.tokens_a_day:
                text = f"{text} The next day begins at midnight."
                raise Refusal(status=429, code="person_tokens", message=text, retry_s=_seconds_to_midnight())
            if used + under_way.tokens >= person.tokens_a_day:
                text = f"{text} Requests under way may use the rest ({under_way.tokens:,} tokens)."
                raise Refusal(status=429, code="person_tokens", message=f"{text} Try again when one has ended.")
        expected = personal_keys.expected_use(request.route, request.content_type, request.body, request.fields)
        request.count = AnswerCount(under_way, expected)

    def end(self, request: Request) -> None:
        """Add what the answer has used."""
        if request.person is None or request.count is None:
            return
        name, use = request.person.name, request.count.use
        request.count.end()
        if use.requests:
            own = self._use_today()
            own[name] = own.get(name, Use()) + use

    def _use_today(self) -> dict[str, Use]:
        if (day := personal_keys.today()) != self._own[0]:
            self._own, self._others = (day, {}), {}
        return self._own[1]

    # -- files

    async def follow(self) -> None:
        """Read and write files again and again."""
        while True:
            await asyncio.sleep(LOOK_S)
            await asyncio.to_thread(self.look)
            await asyncio.to_thread(self.save)

    def look(self) -> None:
        """Read the file of keys. While it cannot be read, the last keys hold; if others can change it, none does."""
        problem = ""
        try:
            self._by_hash = _by_hash(self._folder)
        except DamagedKeysError as error:
            problem = str(error)
        except StoreError as error:
            problem = f"The personal keys cannot be read, and the last ones hold: {error}"
        except RecordError as error:
            self._by_hash, problem = {}, f"No personal key is taken: {error}"
        if problem != self._problem and problem:
            _log.warning("%s", printable(problem))
        self._problem = problem

    def save(self) -> None:
        """Write what was used through this gateway, and read the files of the others."""
        with self._saving:
            day, own = self._own[0], dict(self._own[1])
            name = personal_keys.file_name(day, self._name)
            try:
                if own != self._saved:
                    personal_keys.write_use(self._folder / name, own)
                    self._saved = own
                others = personal_keys.read_use(self._folder, day, but=name)
            except HpcServeError as error:
                _log.warning("%s", printable(f"What was used today is not written or read: {error}"))
            else:
                self._others = others if day == self._own[0] else {}


def _by_hash(folder: Path) -> dict[str, Person]:
    return {person.key_sha256: person for person in read_people(folder)}


def _seconds_to_midnight() -> int:
    now = time.localtime()
    return int(time.mktime((now.tm_year, now.tm_mon, now.tm_mday + 1, 0, 0, 0, 0, 0, -1)) - time.time()) + 1
