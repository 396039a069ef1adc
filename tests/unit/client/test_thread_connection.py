"""The connection of a client in threads: a request in one piece, what came before a close, errors as httpx has them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hpc_serve.client.connections.connections import ThreadConnection, ThreadPool
from hpc_serve.client.connections.message import Message, lines_for
from hpc_serve.client.replicas.event_loops import run_blocking
from hpc_serve.client.replicas.pool import ReplicaAddress
from hpc_serve.client.replicas.sdk import http
from hpc_serve.trust.connection import Identity
from tests.unit.client.test_engine_pool import OK, HarshJudge, NoJudge

ADDRESS = ReplicaAddress(name="1.json", host="x", port=1, identity=Identity(certificate="", api_key="k"))


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


def ask(ours: socket.socket, content: bytes = b"{}", *, judge: NoJudge | None = None, **timeouts: float) -> bytes:
    """The body of an answer over a connection in the clear."""
    connection = ThreadConnection(ThreadPool(NoJudge()), ADDRESS, judge or NoJudge(), ours)
    extensions = {"timeout": {"read": 30.0, "write": 30.0, **timeouts}}
    message = Message(method="POST", target=b"/", headers=[], content=content, extensions=extensions)

    async def whole() -> bytes:
        return await (await connection.ask(message, None)).read_all()

    return run_blocking(whole())


def test_a_thread_that_was_held_up_reads_what_has_come_before_it_calls_an_engine_lost(
    ends: tuple[CountingSocket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, other = ends

    def recv(connected: socket.socket, size: int) -> bytes:
        monkeypatch.undo()
        other.sendall(OK)
        raise TimeoutError  # nothing came in time, and then the thread did not run until something had

    monkeypatch.setattr(CountingSocket, "recv", recv, raising=False)
    assert ask(ours, judge=HarshJudge()) == b"ok"


def test_a_request_is_sent_in_one_piece(ends: tuple[CountingSocket, socket.socket]) -> None:
    ours, other = ends
    for _ in range(3):
        other.sendall(OK)
        assert ask(ours) == b"ok"
        assert other.recv(1000) == b"POST / HTTP/1.1\r\n%bcontent-length: 2\r\n\r\n{}" % lines_for(ADDRESS)
    assert ours.sends == 3
    assert ours.limits <= 2, "that of a write and that of a read"


def test_what_was_answered_before_the_close_is_read(ends: tuple[CountingSocket, socket.socket]) -> None:
    ours, other = ends
    other.sendall(b"HTTP/1.1 413 x\r\ncontent-length: 3\r\n\r\nbig")
    other.close()
    assert ask(ours, b"a" * 10_000_000) == b"big"


def test_an_engine_that_takes_nothing_is_a_timeout_of_writing(ends: tuple[CountingSocket, socket.socket]) -> None:
    ours, _ = ends
    with pytest.raises(http.WriteTimeout):
        ask(ours, b"a" * 10_000_000, write=0.05)


def test_a_close_by_another_thread_ends_a_read(ends: tuple[CountingSocket, socket.socket]) -> None:
    ours, other = ends
    other.close()
    with pytest.raises((http.ReadError, http.RemoteProtocolError)):
        ask(ours)


def test_an_interrupt_while_an_answer_is_read_is_no_error_of_the_engine(
    ends: tuple[CountingSocket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ThreadConnection, "on_body", interrupted)
    ours, other = ends
    other.sendall(OK)
    with pytest.raises(KeyboardInterrupt):
        ask(ours)
    assert ours.fileno() == -1, "the connection has ended"


def test_a_socket_is_not_closed_while_another_thread_reads(ends: tuple[CountingSocket, socket.socket]) -> None:
    ours, _other = ends
    begun, goes_on, reads = threading.Event(), threading.Event(), ours.recv

    def recv(size: int) -> bytes:
        begun.set()
        data = reads(size)
        goes_on.wait(60)
        return data

    ours.recv = recv  # type: ignore[method-assign,assignment]
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
