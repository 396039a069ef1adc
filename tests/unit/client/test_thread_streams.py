"""The stream below a client in threads: a request in one piece, the library's own errors, what came before a close."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from hpc_serve.client.connections.thread_streams import SocketStream
from hpc_serve.client.replicas.event_loops import run_blocking
from hpc_serve.client.replicas.sdk import core


class CountingSocket(socket.socket):
    """Counts what gives the interpreter's lock away."""

    limits = sends = 0

    def settimeout(self, value: float | None) -> None:
        self.limits += 1
        super().settimeout(value)

    def send(self, *arguments: Any) -> int:
        self.sends += 1
        return super().send(*arguments)


class Stream:
    """A stream over a socket, used in a thread."""

    def __init__(self, own: socket.socket) -> None:
        self._stream = SocketStream(own)

    def read(self, max_bytes: int, timeout: float) -> bytes:
        return run_blocking(self._stream.read(max_bytes, timeout))

    def write(self, buffer: bytes, timeout: float) -> None:
        run_blocking(self._stream.write(buffer, timeout))


@pytest.fixture
def ends() -> Iterator[tuple[CountingSocket, socket.socket]]:
    one, other = socket.socketpair()
    with CountingSocket(fileno=one.detach()) as ours, other:
        other.settimeout(30)
        yield ours, other


def test_a_request_is_sent_in_one_piece_with_the_first_read(ends: tuple[CountingSocket, socket.socket]) -> None:
    ours, other = ends
    stream = Stream(ours)
    for number in range(3):
        stream.write(b"POST / HTTP/1.1\r\n\r\n", 30.0)
        stream.write(b"{}", 30.0)
        stream.write(b"", 30.0)
        assert ours.sends == number
        other.sendall(b"answer")
        assert stream.read(100, 30.0) == b"answer"
        assert other.recv(100) == b"POST / HTTP/1.1\r\n\r\n{}"
    assert (ours.sends, ours.limits) == (3, 1)


def test_a_long_request_is_sent_while_it_is_written(ends: tuple[CountingSocket, socket.socket]) -> None:
    ours, other = ends
    stream = Stream(ours)
    stream.write(b"a" * 65_536, 30.0)
    assert ours.sends == 0
    stream.write(b"b", 30.0)
    content = b""
    while len(content) < 65_537:
        content += other.recv(65_537)
    assert content == b"a" * 65_536 + b"b"


def test_what_was_answered_before_the_close_is_read(ends: tuple[CountingSocket, socket.socket]) -> None:
    ours, other = ends
    stream = Stream(ours)
    stream.write(b"a request that is too long for this server", 30.0)
    other.sendall(b"HTTP/1.1 413")
    other.close()
    assert stream.read(100, 30.0) == b"HTTP/1.1 413"
    assert stream.read(100, 30.0) == b""


def write_for_ever(stream: Stream) -> None:
    """Until the other end's buffer is full."""
    while True:
        stream.write(b"a" * 65_537, 0.01)


def test_errors_are_those_of_the_library(ends: tuple[CountingSocket, socket.socket]) -> None:
    ours, other = ends
    stream = Stream(ours)
    with pytest.raises(core.ReadTimeout):
        stream.read(100, 0.01)
    with pytest.raises(core.WriteTimeout):
        write_for_ever(stream)
    other.close()
    with pytest.raises(core.WriteError):
        stream.write(b"a" * 65_537, 30.0)
    ours.shutdown(socket.SHUT_RDWR)
    ours.close()
    with pytest.raises(core.ReadError):
        stream.read(100, 30.0)
