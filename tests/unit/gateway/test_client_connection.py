"""Connections of clients to a gateway, byte for byte, with an application that answers what it is asked."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from hpc_serve.gate.connection_limits import MAX_PIPELINED

pytest.importorskip("prometheus_client", reason="the gateway needs it")

from hpc_serve.gateway import client_connection, server
from hpc_serve.gateway.answers import Refusal
from hpc_serve.gateway.server import Server

LATE_S = 60.0

pytestmark = pytest.mark.anyio


class Application:
    """Answers by the path of a request."""

    def __init__(self, *, asks_for_key: bool = False) -> None:
        self.asks_for_key = asks_for_key
        self.held_bytes = self.written_bytes = 0
        self.go_on = asyncio.Event()
        self.left: list[bytes] = []

    def start(self) -> None: ...

    async def close(self) -> None: ...

    def let_in(self, request: Any) -> None:
        if request.path == b"/refused":
            raise Refusal(status=401, code="no", message="No.")
        request.connection.show_key()

    def hold(self, request: Any, size: int) -> None:
        self.held_bytes += size
        request.held_bytes += size

    def release(self, request: Any) -> None:
        self.held_bytes -= request.held_bytes
        request.held_bytes = 0

    async def answer(self, request: Any) -> None:
        try:
            await self._answer(request)
        except asyncio.CancelledError:
            self.left.append(request.path)
            raise

    async def _answer(self, request: Any) -> None:
        if request.path == b"/wait":
            await self.go_on.wait()
        if request.path == b"/stream":
            request.begin(200, [(b"content-type", b"text/event-stream")])
            for word in (b"one", b"two"):
                request.write(word)
                await asyncio.sleep(0)
            request.end()
        elif request.path == b"/much":
            request.begin(200, [])
            for _ in range(500):
                request.write(b"x" * 100_000)
                self.written_bytes += 100_000
                await request.connection.has_room.wait()
            request.end()
        else:
            request.respond(200, request.path + b" " + request.body, [])


@dataclass
class World:
    """A server on a port with that application."""

    application: Application
    server: Server
    port: int

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def say(self, *data: bytes) -> bytes:
        """Return all that is answered until the connection ends."""
        reader, writer = await self.connect()
        for part in data:
            writer.write(part)
            await writer.drain()
        answer: bytes = await reader.read()
        writer.close()
        return answer


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def world(request) -> AsyncIterator[World]:
    """By its parameter the server asks for a key."""
    application: Any = Application(asks_for_key=getattr(request, "param", False))
    serving, started = Server(application, grace_s=LATE_S), asyncio.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        running = asyncio.create_task(serving.run(listener, None, started.set))
        await started.wait()
        yield World(application, serving, listener.getsockname()[1])
        serving.stop()
        serving.stop()
        await running


def request(path: str, *headers: str, method: str = "POST", body: str = "", version: str = "1.1") -> bytes:
    given = [f"{method} {path} HTTP/{version}", "Host: x", *headers, f"Content-Length: {len(body)}", "", body]
    return "\r\n".join(given).encode()


CLOSE = "Connection: close"


async def test_requests_at_once_are_answered_in_their_order_and_their_bodies_let_go(world):
    got = await world.say(*(request(f"/{number}", body="b" * number) for number in range(5)), request("/", CLOSE))
    assert [got.find(b"/%d %b" % (number, b"b" * number)) > 0 for number in range(5)] == [True] * 5
    assert got.count(b"HTTP/1.1 200 OK\r\n") == 6
    assert world.application.held_bytes == 0


async def test_too_many_requests_at_once_end_the_connection(world):
    asking = asyncio.create_task(world.say(request("/wait") * 20))
    await asyncio.sleep(0.1)
    world.application.go_on.set()
    assert (await asking).count(b"HTTP/1.1 200") == 1 + MAX_PIPELINED


@pytest.mark.parametrize(
    ("version", "body"), [("1.1", b"\r\n\r\n3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"), ("1.0", b"\r\n\r\nonetwo")]
)
async def test_a_stream_is_in_chunks_where_the_client_knows_them(world, version, body):
    assert (await world.say(request("/stream", CLOSE, version=version))).endswith(body)


async def test_the_answer_to_head_has_no_body(world):
    got = await world.say(request("/page", CLOSE, method="HEAD"))
    assert b"content-length: 6" in got
    assert got.endswith(b"\r\n\r\n")


async def test_a_client_that_waits_to_be_told_so_is_told_to_send_its_body(world):
    reader, writer = await world.connect()
    head, body = request("/x", "Expect: 100-continue", body="hello")[:-5], b"hello"
    writer.write(head)
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body)
    assert b"200 OK" in await reader.readuntil(b"/x hello")
    writer.close()


async def test_a_refusal_comes_before_the_body_and_the_body_is_discarded(world):
    reader, writer = await world.connect()
    writer.write(b"POST /refused HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
    assert b" 401 " in await reader.readuntil(b"\r\n\r\n")
    writer.write(b"x" * 1_000_000)
    await reader.read()
    assert world.application.held_bytes == 0
    writer.close()


@pytest.mark.parametrize("data", [b"no http\r\n\r\n", b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 200_000])
async def test_what_is_no_request_is_refused(world, data):
    assert (await world.say(data))[:13] in (b"HTTP/1.1 400 ", b"HTTP/1.1 431 ")


async def test_a_client_that_does_not_read_makes_the_answer_wait(world):
    reader, writer = await world.connect()
    writer.write(request("/much", CLOSE))
    before = -1
    while world.application.written_bytes != before or not before:
        before = world.application.written_bytes
        await asyncio.sleep(0.05)
    assert before < 50_000_000
    assert (await reader.read()).count(b"x") == 50_000_000
    writer.close()


async def test_a_client_that_leaves_cancels_its_request(world):
    _reader, writer = await world.connect()
    writer.write(request("/wait"))
    await writer.drain()
    await asyncio.sleep(0.1)
    writer.close()
    while not world.application.left:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert world.application.left == [b"/wait"]


@pytest.mark.parametrize(
    ("world", "limit"),
    [(True, "HEADERS_TIMEOUT_S"), (True, "CONNECTION_WITHOUT_KEY_S"), (False, "KEEP_ALIVE_S")],
    indirect=["world"],
)
async def test_a_connection_that_takes_too_long_is_ended(world, monkeypatch, limit):
    monkeypatch.setattr(client_connection, limit, 0.0)
    await world.say(b"GET / HTTP/1.1\r\n" if limit == "HEADERS_TIMEOUT_S" else b"")


@pytest.mark.parametrize("world", [True, False], indirect=True)
async def test_connections_without_the_key_have_few_places(world, monkeypatch):
    monkeypatch.setattr(server, "MAX_CONNECTIONS_WITHOUT_KEY", 3)
    opened = [await world.connect() for _ in range(5)]
    await asyncio.sleep(0.1)
    assert len(world.server._connections) == (3 if world.application.asks_for_key else 5)
    for _reader, writer in opened:
        writer.close()


async def test_at_the_end_what_is_under_way_is_answered(world):
    idle = await world.connect()
    asking = asyncio.create_task(world.say(request("/wait")))
    while len(world.server._connections) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    world.server.stop()
    assert await idle[0].read() == b""
    world.application.go_on.set()
    answer = await asking
    assert b"connection: close" in answer
    assert answer.endswith(b"/wait ")
