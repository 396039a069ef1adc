"""Connections to engines, in threads and in event loops, against servers whose answers are written byte for byte."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from hpc_serve.client.connections.connections import LoopPool, ThreadConnection, ThreadPool
from hpc_serve.client.connections.engine_pool import LIMITS, MOST_HANDSHAKES
from hpc_serve.client.connections.message import Message
from hpc_serve.client.replicas.event_loops import run_blocking
from hpc_serve.client.replicas.pool import LastReplica, ReplicaAddress, ReplicaPool
from hpc_serve.client.replicas.sdk import http
from hpc_serve.client.replicas.silence import SilenceLimit
from hpc_serve.client.requests import attempt
from hpc_serve.client.resume.stream import DONE_EVENT
from hpc_serve.rendezvous.gate_headers import SIGNS
from hpc_serve.trust.connection import Identity
from tests.support.patience import wait_until
from tests.support.tls_servers import server_context

pytestmark = pytest.mark.anyio  # the tests that are coroutines

LATE_S = 60.0
MUCH = b"x" * 20_000_000
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
CHUNKS = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class NoJudge:
    """It never knows that a replica is lost."""

    clock = staticmethod(time.monotonic)

    def limit_of(self, name: str) -> SilenceLimit:
        return SilenceLimit()

    def why_lost(self, replica: ReplicaAddress, since_s: float, *, is_silent: bool) -> str | None:
        return None


class HarshJudge(NoJudge):
    """Whatever it is asked about is lost."""

    def why_lost(self, replica: ReplicaAddress, since_s: float, *, is_silent: bool) -> str | None:
        return "it was asked about"


class Trial:
    """A pool, and an engine that answers each connection by `serve(reader, writer)`."""

    def __init__(self, kind: Any, certificate: Any, serve: Any, limits: dict[str, Any]) -> None:
        self.connections = 0
        self._kind = kind
        self._certificate = certificate
        self._serve = serve
        self._judge = limits.pop("judge", NoJudge())
        self._limits = {"max_connections": 100, "keepalive_expiry": LATE_S, **limits}

    async def start(self) -> None:
        shown = self._certificate
        context = server_context(shown.certificate_file, shown.key_file)
        self._server = await asyncio.start_server(self._count, "127.0.0.1", 0, ssl=context)
        identity = Identity(certificate=shown.certificate, api_key="k")
        port = self._server.sockets[0].getsockname()[1]
        self.replica = ReplicaAddress(name="1.json", host="127.0.0.1", port=port, identity=identity)
        with mock.patch.dict(LIMITS, self._limits):
            self.pool = self._kind(self._judge)

    async def _count(self, reader: Any, writer: Any) -> None:
        self.connections += 1
        with suppress(asyncio.IncompleteReadError, OSError):  # the client may leave
            await self._serve(reader, writer)

    async def ask(self, method="POST", *, connect_s=LATE_S, read_s=LATE_S, pool_s=LATE_S, **fields) -> Any:
        timeout = {"connect": connect_s, "read": read_s, "pool": pool_s}
        given = {"headers": [], "content": b"", "extensions": {"timeout": timeout}, **fields}
        message = Message(method=method, target=b"/", **given)
        return await self._wait(self.pool.send(message, self.replica, LATE_S))

    async def read(self, answer: Any) -> bytes:
        body: bytes = await self._wait(answer.read_all())
        return body

    async def _wait(self, coroutine: Any) -> Any:
        if self._kind is LoopPool:
            return await coroutine
        return await asyncio.to_thread(run_blocking, coroutine)

    async def close(self) -> None:
        self.pool.close()
        self._server.close()  # what still serves ends with the loop


@pytest.fixture(params=[ThreadPool, LoopPool])
def kind(request):
    return request.param


@pytest.fixture
async def engine(service, kind):
    """Makes trials against an engine."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(3 * MOST_HANDSHAKES))
    made: list[Trial] = []

    async def start(serve: Callable[..., Awaitable[None]], **limits: Any) -> Trial:
        made.append(Trial(kind, service.certificate(), serve, limits))
        await made[-1].start()
        return made[-1]

    yield start
    for trial in made:
        await trial.close()


async def until(condition: Callable[[], object]) -> None:
    """Return once the condition is true."""
    await asyncio.to_thread(wait_until, condition)


def says(*answers: bytes, closes: bool = False) -> Callable[..., Awaitable[None]]:
    """An engine that gives these answers on each of its connections, and then waits or `closes`."""

    async def serve(reader: Any, writer: Any) -> None:
        for answer in answers:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
        if not closes:
            await reader.read()
        writer.close()

    return serve


@pytest.mark.parametrize(
    ("answer", "closes", "body"),
    [
        (OK, False, b"ok"),
        (b"HTTP/1.1 102 Processing\r\n\r\n" * 2 + OK, False, b"ok"),
        (CHUNKS + b"2\r\nab\r\n3;x=y\r\ncde\r\n0\r\n\r\n", False, b"abcde"),
        (b"HTTP/1.1 200 OK\r\n\r\nuntil the end", True, b"until the end"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", False, b""),
    ],
)
async def test_an_answer_ends_where_it_says(engine, answer, closes, body):
    tried = await engine(says(answer, closes=closes))
    assert await tried.read(await tried.ask()) == body


async def test_an_answer_to_head_has_no_body_whatever_length_it_names(engine):
    tried = await engine(says(OK.removesuffix(b"ok")))
    answer = await tried.ask("HEAD")
    assert (answer.headers["content-length"], await tried.read(answer)) == ("2", b"")


@pytest.mark.parametrize("closes", [False, True])
async def test_a_connection_serves_until_the_engine_ends_it(engine, closes):
    answer = OK.replace(b"200 OK\r\n", b"200 OK\r\nconnection: close\r\n") if closes else OK
    tried = await engine(says(answer, answer, answer))
    for _ in range(3):
        assert await tried.read(await tried.ask()) == b"ok"
    assert tried.connections == (3 if closes else 1)


@pytest.mark.parametrize(
    "answer",
    [
        OK[:-1],
        CHUNKS + b"2\r\nab\r\n",
        CHUNKS + b"no number\r\n",
        b"",
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/1.1 101 x\r\nconnection: upgrade\r\nupgrade: x\r\n\r\nhello",
    ],
)
async def test_an_answer_that_breaks_off_is_an_error_once(engine, answer):
    tried = await engine(says(answer, closes=True))
    with pytest.raises(http.RemoteProtocolError):
        await tried.read(await tried.ask())
    assert tried.pool._idle == {}


async def test_a_reset_is_an_error_of_reading(engine):
    async def reset(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    tried = await engine(reset)
    with pytest.raises((http.ReadError, http.RemoteProtocolError)):
        await tried.ask()


async def test_much_waits_at_the_engine_until_it_is_read(engine):
    sent: list[int] = []

    async def much(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(MUCH))
        for begin in range(0, len(MUCH), 100_000):
            writer.write(MUCH[begin : begin + 100_000])
            await writer.drain()
            sent.append(100_000)
        await reader.read()

    tried = await engine(much)
    answer = await tried.ask()
    await asyncio.sleep(0.2)
    assert answer.unread_bytes < len(MUCH) / 2
    assert sum(sent) < len(MUCH)
    assert len(await tried.read(answer)) == len(MUCH)
    assert sum(sent) == len(MUCH)


@pytest.mark.parametrize("chunked", [True, False])
async def test_an_upload_is_sent_as_its_headers_say(engine, kind, chunked):
    async def pieces():
        yield b"ab"
        yield b"cde"

    upload = pieces() if kind is LoopPool else iter([b"ab", b"cde"])

    got: list[bytes] = []

    async def take(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        got.append(await reader.readuntil(b"0\r\n\r\n") if chunked else await reader.readexactly(5))
        writer.write(OK)
        await reader.read()

    tried = await engine(take)
    length = (b"transfer-encoding", b"chunked") if chunked else (b"content-length", b"5")
    answer = await tried.ask(headers=[length], content=None, upload=upload)
    assert await tried.read(answer) == b"ok"
    assert got == [b"2\r\nab\r\n3\r\ncde\r\n0\r\n\r\n" if chunked else b"abcde"]


async def test_an_engine_that_says_nothing_is_late(engine):
    tried = await engine(says())
    with pytest.raises(http.ReadTimeout):
        await tried.ask(read_s=0.2)


@pytest.mark.parametrize("kind", [LoopPool])  # a thread is held up in another way
async def test_a_loop_that_was_held_up_reads_what_has_come_before_it_calls_an_engine_lost(engine):
    """The event loop of the gateway runs timers before it looks for what came while it was held up."""
    engines: list[Any] = []

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK[:-2])
        engines.append(writer)
        await reader.read()

    tried = await engine(serve, judge=HarshJudge())
    answer = await tried.ask()
    reading = asyncio.create_task(tried.read(answer))
    await asyncio.sleep(0)  # it waits by now
    engines[0].write(OK[-2:])
    answer.connection.check()  # as the timer does, before the loop has read
    assert await reading == b"ok"


@pytest.mark.parametrize("kind", [LoopPool])  # a thread that waits is not cancelled
async def test_a_request_that_is_given_up_ends_its_connection(engine):
    left = []

    async def wait(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        assert await reader.read() == b""
        left.append(True)
        writer.close()

    tried = await engine(wait)
    asking = asyncio.create_task(tried.ask())
    await until(lambda: tried.connections)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await until(lambda: left)


async def test_requests_over_the_bound_wait_for_an_answer_to_end(engine):
    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(CHUNKS + b"2\r\nok\r\n")
        await asyncio.sleep(0.2)
        writer.write(b"0\r\n\r\n")
        await says(OK)(reader, writer)

    tried = await engine(serve, max_connections=1)
    first = await tried.ask()
    with pytest.raises(http.PoolTimeout):
        await tried.ask(pool_s=0.05)
    second = asyncio.create_task(tried.ask())
    assert await tried.read(first) == b"ok"
    await first.aclose()
    await (await second).aclose()


async def test_few_connections_are_made_at_once_and_when_one_fails_all_that_wait_fail(engine):
    """A thousand handshakes at once take an engine longer than the time after which it counts as lost."""
    tried = await engine(says())
    with socket.create_server(("127.0.0.1", 0), backlog=200) as silent:  # no handshake ends
        tried.replica = replace(tried.replica, port=silent.getsockname()[1])
        asked = [asyncio.create_task(tried.ask()) for _ in range(2 * MOST_HANDSHAKES)]
        begun = [await asyncio.to_thread(silent.accept) for _ in range(MOST_HANDSHAKES)]
        silent.settimeout(0.2)
        with pytest.raises(TimeoutError):
            await asyncio.to_thread(silent.accept)
        begun[0][0].close()
        failed = await asyncio.gather(*asked[MOST_HANDSHAKES:], return_exceptions=True)
        assert {type(error) for error in failed} == {http.ConnectError}
        for connection, _ in begun:
            connection.close()
        assert all(await asyncio.gather(*asked, return_exceptions=True))


@pytest.mark.parametrize("fault", ["it had too little time", "it was before the wait"])
async def test_who_waits_does_not_fail_by_a_failure_that_tells_nothing_of_its_own_attempt(engine, fault):
    tried = await engine(says())

    async def ask() -> None:
        if fault == "it had too little time":
            return await tried.ask(connect_s=1.0)
        with suppress(http.ConnectError):
            await tried.ask()
        await tried.ask()  # while the failure goes through those that waited

    with socket.create_server(("127.0.0.1", 0), backlog=200) as silent:  # no handshake ends
        tried.replica = replace(tried.replica, port=silent.getsockname()[1])
        asked = [asyncio.create_task(ask()) for _ in range(MOST_HANDSHAKES)]
        begun = [await asyncio.to_thread(silent.accept) for _ in range(MOST_HANDSHAKES)]
        asked.append(asyncio.create_task(tried.ask()))
        if fault == "it was before the wait":
            await asyncio.sleep(0.2)  # the last one waits by now
            begun[0][0].close()
        silent.settimeout(LATE_S)
        begun.append(await asyncio.to_thread(silent.accept))
    for connection, _ in begun:
        connection.close()
    failed = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(error, http.TransportError) for error in failed)


async def test_who_waits_to_connect_takes_a_connection_that_becomes_idle(engine):
    tried = await engine(says(*[OK] * 3 * MOST_HANDSHAKES))

    async def ask() -> bytes:
        return await tried.read(await tried.ask())

    assert set(await asyncio.gather(*(ask() for _ in range(3 * MOST_HANDSHAKES)))) == {b"ok"}
    assert tried.connections < 3 * MOST_HANDSHAKES


async def test_an_idle_connection_is_closed_in_time(engine, kind):
    tried = await engine(says(OK, OK), keepalive_expiry=0.05)
    assert await tried.read(await tried.ask()) == b"ok"
    await asyncio.sleep(0.3)
    assert not tried.pool.connections or kind is ThreadPool, "in threads the next request ends it"
    assert await tried.read(await tried.ask()) == b"ok"
    assert tried.connections == 2


@pytest.mark.parametrize("kind", [LoopPool])  # a thread reads when all is sent
async def test_a_refusal_before_the_end_of_an_upload_ends_it(engine):
    refused = asyncio.Event()

    async def pieces():
        yield b"ab"
        await asyncio.sleep(0.3)  # the refusal comes
        for _ in range(1000):
            yield b"cd"

    async def refuse(reader, writer):
        await reader.readuntil(b"2\r\nab\r\n")
        writer.write(b"HTTP/1.1 413 x\r\ncontent-length: 3\r\n\r\nbig")
        await reader.read()
        refused.set()

    tried = await engine(refuse)
    length = (b"transfer-encoding", b"chunked")
    answer = await tried.ask(headers=[length], content=None, upload=pieces())
    assert (answer.status_code, await tried.read(answer)) == (413, b"big")
    assert tried.pool._idle == {}
    await asyncio.wait_for(refused.wait(), LATE_S)


@pytest.mark.parametrize("further", [OK, OK[:-1], b"no HTTP"])
async def test_a_connection_with_more_than_the_answer_is_not_kept(engine, further):
    tried = await engine(says(OK + further, OK))
    for _ in range(2):
        assert await tried.read(await tried.ask()) == b"ok"
    assert tried.connections == 2


async def test_trailers_are_no_headers_of_the_next_answer(engine):
    tried = await engine(says(CHUNKS + b"2\r\nab\r\n0\r\ncontent-encoding: gzip\r\n\r\n", OK))
    assert await tried.read(await tried.ask()) == b"ab"
    answer = await tried.ask()
    assert await tried.read(answer) == b"ok"
    assert dict(answer.headers) == {"content-length": "2"}


@pytest.mark.parametrize("value", ["a\r\nx: y", "a\nb", "a\0"])
def test_a_header_that_would_be_several_is_refused(value):
    with pytest.raises(http.LocalProtocolError, match="x-mine"):
        Message.of(http.Request("GET", "https://engine/", headers={"x-mine": value}))


def test_the_time_for_the_end_of_a_stream_is_not_that_of_the_next_request(service, monkeypatch):
    """The next one takes the connection before the reader of the stream goes on, and its answer is slow."""
    asked = threading.Event()

    async def serve(reader: Any, writer: Any) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = CHUNKS.replace(b"\r\n\r\n", b"\r\ncontent-type: text/event-stream\r\n\r\n")
        writer.write(head + b"%x\r\n%b\r\n" % (len(DONE_EVENT), DONE_EVENT))
        await asyncio.sleep(attempt.END_S / 4)
        writer.write(b"0\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        await asyncio.sleep(5 * attempt.END_S)
        writer.write(OK)

    async def whole() -> None:
        tried, loop = Trial(ThreadPool, service.certificate(), serve, {}), asyncio.get_running_loop()
        await tried.start()
        watch: Any = SimpleNamespace(pool=ReplicaPool(), last_replica=LastReplica())
        watch.pool.fill([tried.replica])
        body = attempt.Attempt(watch, watch.pool.take())
        body.answered(await tried.ask())
        others: list[Any] = []
        release = tried.pool.release

        def release_late(connection: Any) -> None:
            release(connection)
            if not others:
                others.append(asyncio.run_coroutine_threadsafe(tried.ask(), loop))
                assert asked.wait(LATE_S)
                time.sleep(0.01)  # it waits by now

        monkeypatch.setattr(tried.pool, "release", release_late)
        assert await asyncio.to_thread(next, body) == DONE_EVENT
        answer = await asyncio.wrap_future(others[0])
        assert await tried.read(answer) == b"ok"
        assert tried.connections == 1
        await tried.close()

    asyncio.run(whole())


# A connection in a thread: a request in one piece, what came before a close, errors as httpx has them


ADDRESS = ReplicaAddress(name="1.json", host="::1", port=8000, identity=Identity(certificate="", api_key="k"))


class CountingSocket(socket.socket):
    """Counts what gives the interpreter's lock away."""

    limits = sends = 0

    def settimeout(self, value: float | None) -> None:
        self.limits += 1
        super().settimeout(value)

    def send(self, *arguments: Any) -> int:
        self.sends += 1
        return super().send(*arguments)


@pytest.fixture
def ends() -> Iterator[tuple[CountingSocket, socket.socket]]:
    one, other = socket.socketpair()
    with CountingSocket(fileno=one.detach()) as ours, other:
        other.settimeout(30)
        yield ours, other


def ask_over(ours: socket.socket, content: bytes = b"{}", *, judge: NoJudge | None = None, **timeouts: float) -> bytes:
    """The body of an answer over a connection in the clear."""
    connection = ThreadConnection(ThreadPool(NoJudge()), ADDRESS, judge or NoJudge(), ours)
    extensions = {"timeout": {"read": 30.0, "write": 30.0, **timeouts}}
    message = Message(method="POST", target=b"/", headers=[], content=content, extensions=extensions)

    async def whole() -> bytes:
        return await (await connection.ask(message, None)).read_all()

    return run_blocking(whole())


def test_a_thread_that_was_held_up_reads_what_has_come_before_it_calls_an_engine_lost(ends, monkeypatch):
    ours, other = ends

    def recv(connected: socket.socket, size: int) -> bytes:
        monkeypatch.undo()
        other.sendall(OK)
        raise TimeoutError  # nothing came in time, and then the thread did not run until something had

    monkeypatch.setattr(CountingSocket, "recv", recv, raising=False)
    assert ask_over(ours, judge=HarshJudge()) == b"ok"


def test_a_request_is_sent_in_one_piece(ends):
    ours, other = ends
    for _ in range(3):
        other.sendall(OK)
        assert ask_over(ours) == b"ok"
        head = b"POST / HTTP/1.1\r\nhost: [::1]:8000\r\nauthorization: Bearer k\r\n%b: %b\r\n" % SIGNS
        assert other.recv(1000) == head + b"content-length: 2\r\n\r\n{}"
    assert ours.sends == 3
    assert ours.limits <= 2, "that of a write and that of a read"


def test_what_was_answered_before_the_close_is_read(ends):
    ours, other = ends
    other.sendall(b"HTTP/1.1 413 x\r\ncontent-length: 3\r\n\r\nbig")
    other.close()
    assert ask_over(ours, b"a" * 10_000_000) == b"big"


def test_an_engine_that_takes_nothing_is_a_timeout_of_writing(ends):
    ours, _ = ends
    with pytest.raises(http.WriteTimeout):
        ask_over(ours, b"a" * 10_000_000, write=0.05)


def test_an_interrupt_while_an_answer_is_read_is_no_error_of_the_engine(ends, monkeypatch):
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ThreadConnection, "on_body", interrupted)
    ours, other = ends
    other.sendall(OK)
    with pytest.raises(KeyboardInterrupt):
        ask_over(ours)
    assert ours.fileno() == -1, "the connection has ended"


def test_a_socket_is_not_closed_while_another_thread_reads(ends):
    ours, _other = ends
    begun, goes_on, reads = threading.Event(), threading.Event(), ours.recv

    def recv(size: int) -> bytes:
        begun.set()
        data = reads(size)
        goes_on.wait(60)
        return data

    ours.recv = recv
    connection = ThreadConnection(ThreadPool(NoJudge()), ADDRESS, NoJudge(), ours)
    asked = Message(method="POST", target=b"/", headers=[], content=b"{}")
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(run_blocking, connection.ask(asked, None))
        assert begun.wait(60)
        connection.fail(http.ReadError("closed"))
        assert ours.fileno() >= 0
        goes_on.set()
        with pytest.raises(http.ReadError, match="closed"):
            answer.result(60)
    assert ours.fileno() < 0
