"""The streams of asyncio below the client, against plain servers of the standard library."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from hpc_serve.client.connections.asyncio_streams import AsyncioStream, connect_in_asyncio
from hpc_serve.client.replicas.sdk import core

LATE_S = 60.0
MUCH = b"x" * 5_000_000


@asynccontextmanager
async def connected(serve) -> AsyncIterator[AsyncioStream]:
    """A stream to a server that gives each connection to `serve(reader, writer)`."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    try:
        host, port = server.sockets[0].getsockname()
        stream = await connect_in_asyncio(host, port, timeout=LATE_S, socket_options=options)
        try:
            yield stream
        finally:
            await stream.aclose()
    finally:
        server.close()  # what still serves ends with the loop


async def read_all(stream, most_bytes: int = 65536) -> bytes:
    pieces = []
    while piece := await stream.read(most_bytes, timeout=LATE_S):
        pieces.append(piece)
    return b"".join(pieces)


def run(trial, serve) -> None:
    async def whole() -> None:
        async with connected(serve) as stream:
            await trial(stream)

    asyncio.run(whole())


async def echo(reader, writer) -> None:
    writer.write(await reader.read(100))
    await writer.drain()
    writer.close()


async def silent(reader, writer) -> None:
    await reader.read()
    writer.close()


async def much(_, writer) -> None:
    writer.write(MUCH)
    await writer.drain()
    writer.close()


async def without_tls(reader, writer) -> None:
    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    await silent(reader, writer)


async def reset(reader, writer) -> None:
    await reader.read(1)
    raw = writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def test_what_is_written_arrives_and_the_end_is_no_bytes():
    async def trial(stream):
        await stream.write(b"", timeout=LATE_S)
        await stream.write(b"hello", timeout=LATE_S)
        assert await read_all(stream) == b"hello"
        assert stream.get_extra_info("is_readable")

    run(trial, echo)


def test_its_ends_and_its_options_are_known():
    async def trial(stream):
        raw = stream.get_extra_info("socket")
        assert stream.get_extra_info("client_addr") == raw.getsockname()
        assert stream.get_extra_info("server_addr") == raw.getpeername()
        assert raw.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert not stream.get_extra_info("is_readable")

    run(trial, silent)


def test_much_comes_in_the_pieces_that_are_asked_for_and_waits_until_it_is_read():
    async def trial(stream):
        while not stream.unread:
            assert await stream.read(1, timeout=LATE_S) == b"x"
        await asyncio.sleep(0)
        assert len(stream.unread) < len(MUCH)
        first = await stream.read(10, timeout=LATE_S)
        assert len(first) == 10
        rest = await read_all(stream)
        assert set(first + rest) == {ord("x")}
        assert len(rest) >= len(MUCH) - 1_000

    run(trial, much)


def test_much_is_sent_as_the_other_end_takes_it():
    async def count(reader, writer):
        data = await reader.readexactly(len(MUCH))
        writer.write(b"%d" % len(data))
        writer.close()

    async def trial(stream):
        await stream.write(MUCH, timeout=LATE_S)
        assert await read_all(stream) == b"%d" % len(MUCH)

    run(trial, count)


def test_an_end_that_takes_nothing_is_late():
    async def trial(stream):
        with pytest.raises(core.WriteTimeout):
            await go_on_writing(stream)

    async def go_on_writing(stream):
        while True:
            await stream.write(MUCH, timeout=0.05)

    async def deaf(_, writer):
        writer.transport.pause_reading()
        await asyncio.Event().wait()

    run(trial, deaf)


def test_an_end_that_says_nothing_is_late_and_can_be_asked_again():
    async def trial(stream):
        with pytest.raises(core.ReadTimeout):
            await stream.read(10, timeout=0.01)
        await stream.write(b"hello", timeout=LATE_S)
        assert await stream.read(10, timeout=LATE_S) == b"hello"

    run(trial, echo)


def test_a_reset_is_an_error_of_reading_and_of_writing():
    async def trial(stream):
        await stream.write(b"x", timeout=LATE_S)
        with pytest.raises(core.ReadError):
            await stream.read(10, timeout=LATE_S)
        with pytest.raises(core.WriteError):
            await stream.write(b"x", timeout=LATE_S)

    run(trial, reset)


def test_whoever_reads_when_it_is_closed_gets_an_error():
    async def trial(stream):
        reading = asyncio.create_task(stream.read(10, timeout=LATE_S))
        await asyncio.sleep(0)  # it waits
        await stream.aclose()
        with pytest.raises(core.ReadError):
            await reading
        with pytest.raises(core.WriteError):
            await stream.write(b"x", timeout=LATE_S)

    run(trial, silent)


def test_a_reader_that_is_cancelled_leaves_the_stream_whole():
    async def trial(stream):
        reading = asyncio.create_task(stream.read(10, timeout=LATE_S))
        await asyncio.sleep(0)  # it waits
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await stream.write(b"hello", timeout=LATE_S)
        assert await stream.read(10, timeout=LATE_S) == b"hello"

    run(trial, echo)


@pytest.fixture
def without_a_name() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    return context


def test_a_port_that_nobody_listens_on_and_an_end_that_speaks_no_tls_fail_to_connect(without_a_name):
    async def trial(stream):
        with pytest.raises(core.ConnectError) as raised:
            await stream.start_tls(without_a_name, timeout=LATE_S)
        assert isinstance(raised.value.__cause__, ssl.SSLError)

    run(trial, without_tls)

    async def refused():
        with socket.socket() as bound:  # bound, and not listening
            bound.bind(("127.0.0.1", 0))
            with pytest.raises(core.ConnectError):
                await connect_in_asyncio(*bound.getsockname(), timeout=LATE_S, socket_options=[])

    asyncio.run(refused())


def test_a_handshake_that_is_not_answered_is_late(without_a_name):
    async def trial(stream):
        with pytest.raises(core.ConnectTimeout):
            await stream.start_tls(without_a_name, timeout=0.05)

    run(trial, silent)
