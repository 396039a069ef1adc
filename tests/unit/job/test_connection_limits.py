"""What a stranger can make the engine spend on a connection: real uvicorn, real sockets, plain and over TLS."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import ssl
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

import pytest

from hpc_serve.gate import connection_limits as limits
from hpc_serve.gate.gate import Gate
from tests.support import asgi_server
from tests.unit.job.conftest import KEY, tls_options

pytest.importorskip("httptools")
uvicorn = pytest.importorskip("uvicorn")
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol  # noqa: E402

WITH_KEY = f"Authorization: Bearer {KEY}\r\n".encode()
UPGRADE = (
    b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)
SOON_S = 60.0


pytestmark = pytest.mark.usefixtures("key_file")


async def engine(scope, receive, send):
    length = 0
    while scope["method"] == "POST":
        message = await receive()
        length += len(message.get("body", b""))
        if not message.get("more_body"):
            break
    body = b"let in, %d bytes" % length
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextmanager
def served(app=engine, **options):
    """A uvicorn with the limits and the gate in front of `app`; yields its port and its protocol class."""
    protocol = limits.limited(HttpToolsProtocol)
    with asgi_server.served(Gate(app), http=protocol, log_level="warning", lifespan="off", **options) as port:
        yield port, protocol


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=SOON_S)


def request(*headers: bytes, method: bytes = b"GET", path: bytes = b"/v1/models") -> bytes:
    return method + b" " + path + b" HTTP/1.1\r\nHost: e\r\n" + b"".join(headers) + b"\r\n"


def until(connection: socket.socket, words: bytes | None) -> bytes:
    """What comes up to these words, or (None) until the other end closes; a reset is an end too."""
    received = b""
    with suppress(ConnectionResetError, ssl.SSLEOFError):
        while (words is None or words not in received) and (chunk := connection.recv(65536)):
            received += chunk
    return received


all_of = partial(until, words=None)


def let_in(connection: socket.socket) -> bool:
    """Whether a request with the key is answered on this connection."""
    connection.sendall(request(WITH_KEY))
    return b"let in" in until(connection, b"let in")


def pour(connection: socket.socket, head: bytes, endless: bytes, total: int) -> int:
    """Send `head`, then `endless` again and again; how many bytes went before the other end closed."""
    sent = 0
    try:
        connection.sendall(head)
        while sent < total:
            connection.sendall(endless)
            sent += len(endless)
    except (ConnectionResetError, BrokenPipeError, ssl.SSLError):
        pass
    return sent


CHUNKED = b"POST /x HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
ENDLESS = {
    "headers": (b"GET /health HTTP/1.1\r\n", b"x: " + b"a" * 8000 + b"\r\n"),
    "one header": (b"GET /health HTTP/1.1\r\nx: ", b"a" * 8192),
    "a header's name": (b"GET /health HTTP/1.1\r\n", b"a" * 8192),
    "the path": (b"GET /", b"a" * 8192),
    "trailers": (CHUNKED + b"0\r\n", b"x: " + b"a" * 8000 + b"\r\n"),
    "a trailer": (CHUNKED + b"0\r\nx: ", b"a" * 8192),
    "a chunk's extension": (CHUNKED + b"1;", b"a" * 8192),
    "empty lines": (b"", b"\r\n" * 4096),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_what_has_no_end_is_cut_off(what):
    with served() as (port, _), connect(port) as connection:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert pour(connection, *ENDLESS[what], total=400 << 20) < 64 << 20  # what the kernel's buffers hold
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB
        with connect(port) as another:
            assert let_in(another)


@pytest.mark.parametrize("with_key", [WITH_KEY, b""], ids=["with the key", "without it"])
@pytest.mark.parametrize("in_pieces", [1, 7])
@pytest.mark.parametrize(
    ("size", "status"),
    [(limits.MAX_HEADER_BYTES, b"200"), (limits.MAX_HEADER_BYTES + 1, b"431"), (80_000, b"431"), (81_000, b"431")],
)
def test_the_bound_of_headers_is_the_one_that_is_said(size, status, in_pieces, with_key):
    begin = b"GET /health HTTP/1.1\r\n" + with_key + b"x: "
    request = begin + b"a" * (size - len(begin) - 4) + b"\r\n\r\n"
    with served() as (port, _), connect(port) as connection:
        for start in range(0, size, -(-size // in_pieces)):
            with suppress(ConnectionError):
                connection.sendall(request[start : start + -(-size // in_pieces)])
        assert connection.recv(65536).startswith(b"HTTP/1.1 " + status)


def test_a_request_behind_another_has_the_same_bound():
    begin = b"GET /health HTTP/1.1\r\nx: "
    with served() as (port, _), connect(port) as connection, suppress(ConnectionError):
        connection.sendall(b"GET /health HTTP/1.1\r\n\r\n" + begin + b"a" * 78_000 + b"\r\n\r\n")
        assert b"HTTP/1.1 400 " in all_of(connection)


def test_long_headers_and_long_bodies_of_who_has_the_key_go_through():
    body = b"b" * (3 << 20)
    with served() as (port, _), connect(port) as connection:
        cookie = b"Cookie: " + b"a" * (limits.MAX_HEADER_BYTES // 2) + b"\r\n"
        connection.sendall(request(WITH_KEY, cookie, b"Content-Length: %d\r\n" % len(body), method=b"POST") + body)
        assert b"3145728 bytes" in until(connection, b"3145728 bytes")
        chunked = b"".join(b"1\r\nb\r\n" for _ in range(100_000)) + b"0\r\n\r\n"
        connection.sendall(request(WITH_KEY, b"Transfer-Encoding: chunked\r\n", method=b"POST") + chunked)
        assert b"100000 bytes" in until(connection, b"100000 bytes")


def test_trickled_headers_are_not_waited_for(monkeypatch):
    """Every byte used to begin the wait anew."""
    monkeypatch.setattr(limits, "HEADERS_TIMEOUT_S", 0.4)
    with served() as (port, _), connect(port) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nx: ")
        connection.settimeout(0.02)
        deadline = time.monotonic() + SOON_S
        with suppress(ConnectionError):
            while time.monotonic() < deadline:
                with suppress(TimeoutError):
                    connection.sendall(b"a")
                    if connection.recv(1) == b"":
                        break
        assert time.monotonic() < deadline


@pytest.mark.parametrize("sent", [b"", request(path=b"/health")], ids=["silent", "served"])
def test_without_the_key_a_connection_ends(monkeypatch, sent):
    monkeypatch.setattr(limits, "HEADERS_TIMEOUT_S", 0.2)
    with served(timeout_keep_alive=600) as (port, protocol), connect(port) as connection:
        connection.sendall(sent)
        assert not sent or until(connection, b"let in, 0 bytes").startswith(b"HTTP/1.1 200")
        monkeypatch.setattr(limits, "CONNECTION_WITHOUT_KEY_S", 0.5)  # not before: the answer has all the time it needs
        assert all_of(connection) == b""
        assert not protocol._without_key


def test_with_the_key_a_connection_stays(monkeypatch):
    monkeypatch.setattr(limits, "HEADERS_TIMEOUT_S", 0.1)
    with served(timeout_keep_alive=600) as (port, _), connect(port) as connection, connect(port) as stranger:
        assert let_in(connection)
        monkeypatch.setattr(limits, "CONNECTION_WITHOUT_KEY_S", 0.3)  # not before: the key has all the time it needs
        assert all_of(stranger) == b""  # the same time later
        assert let_in(connection)


def test_a_flood_of_connections_takes_no_place_from_who_has_the_key(monkeypatch):
    monkeypatch.setattr(limits, "MAX_CONNECTIONS_WITHOUT_KEY", 20)
    with served(timeout_keep_alive=600) as (port, protocol), ExitStack() as held, connect(port) as connection:
        assert let_in(connection)
        for _ in range(200):
            held.enter_context(connect(port)).sendall(b"GET /health HTTP/1.1\r\n")
        with connect(port) as another:
            assert let_in(another)
        assert let_in(connection)
        assert len(protocol._without_key) <= 20


def test_a_few_requests_in_one_packet_are_answered_and_many_are_not_all_begun():
    """14,000 of them fit into one read; each was a task with its own buffers."""
    with served() as (port, _), connect(port) as connection, connect(port) as another:
        connection.sendall(request(WITH_KEY) * 3 + request(WITH_KEY, b"Connection: close\r\n"))
        assert all_of(connection).count(b"let in") == 4
        pour(another, b"", request(path=b"/health") * 5000, total=1)
        assert all_of(another).count(b"HTTP/1.1 200") <= limits.MAX_PIPELINED + 1


def test_the_limits_hold_over_tls(certificate, monkeypatch):
    monkeypatch.setattr(limits, "HEADERS_TIMEOUT_S", 0.4)
    context = ssl.create_default_context(cadata=certificate.certificate)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    with served(**tls_options(certificate)) as (port, _):
        with context.wrap_socket(connect(port), server_hostname="127.0.0.1") as connection:
            assert let_in(connection)
        for what in ("headers", "one header", "trailers"):
            with context.wrap_socket(connect(port), server_hostname="127.0.0.1") as connection:
                assert pour(connection, *ENDLESS[what], total=4 << 30) < 1 << 30
        with context.wrap_socket(connect(port), server_hostname="127.0.0.1") as connection:
            connection.sendall(b"GET /health HTT")
            assert all_of(connection) == b""


def test_a_websocket_of_who_has_the_key_stays_and_a_strangers_is_refused(monkeypatch):
    pytest.importorskip("websockets")
    monkeypatch.setattr(limits, "HEADERS_TIMEOUT_S", 0.1)
    stranger_is_refused = threading.Event()

    async def talk(scope, receive, send):
        await receive()
        await send({"type": "websocket.accept"})
        await asyncio.to_thread(stranger_is_refused.wait, SOON_S)
        monkeypatch.setattr(limits, "CONNECTION_WITHOUT_KEY_S", 0.3)  # not before: both have all the time they need
        await asyncio.sleep(1)  # longer than a connection without the key may last
        await send({"type": "websocket.send", "text": "let in"})
        await send({"type": "websocket.close"})

    with served(talk) as (port, _), connect(port) as connection, connect(port) as stranger:
        connection.sendall(request(WITH_KEY, UPGRADE))
        stranger.sendall(request(UPGRADE))
        assert all_of(stranger).startswith((b"HTTP/1.1 403", b"HTTP/1.1 401"))
        stranger_is_refused.set()
        assert b"let in" in until(connection, b"let in")


@pytest.mark.parametrize("body", [b"Content-Length: 1000000\r\n", b"Transfer-Encoding: chunked\r\n"])
def test_a_websocket_handshake_that_never_ends_is_ended(monkeypatch, body):
    pytest.importorskip("websockets")
    monkeypatch.setattr(limits, "HEADERS_TIMEOUT_S", 0.1)
    monkeypatch.setattr(limits, "MAX_CONNECTIONS_WITHOUT_KEY", 4)
    with ExitStack() as open_ones, served() as (port, protocol):
        strangers = [open_ones.enter_context(connect(port)) for _ in range(8)]
        for stranger in strangers:
            with suppress(ConnectionError):  # the first four have lost their places to the others
                stranger.sendall(request(UPGRADE, body))
        monkeypatch.setattr(limits, "CONNECTION_WITHOUT_KEY_S", 0.3)  # not before: all have the time to ask
        assert all(b"let in" not in all_of(stranger) for stranger in strangers)
        assert not protocol._without_key


# -- the log


def logged(make_records) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.Logger("uvicorn.access")
    logger.addHandler(handler)
    logger.addFilter(limits.LogLimit())
    make_records(logger)
    return lines


def access(logger: logging.Logger, path: str, status: int) -> None:
    logger.info('%s - "%s %s HTTP/%s" %d', "10.0.0.9:1", "GET", path, "1.1", status)


def test_a_long_path_is_one_short_line():
    (line,) = logged(lambda logger: access(logger, "/" + "a" * 60_000, 200))
    assert len(line) < 300
    assert "(60001 characters)" in line


@pytest.mark.parametrize(("path", "status"), [("/health", 200), ("/v1/models", 401), ("/x", 404)])
def test_what_a_stranger_may_ask_for_is_logged_now_and_then(monkeypatch, path, status):
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)  # within one interval, however busy the machine is
    lines = logged(lambda logger: [access(logger, path, status) for _ in range(1000)])
    assert len(lines) == limits._LOGGED_PER_INTERVAL


def test_what_was_left_out_is_counted(monkeypatch):
    clock = iter([0.0] * 100 + [limits._LOG_INTERVAL_S])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    lines = logged(lambda logger: [access(logger, "/x", 401) for _ in range(101)])
    assert "80 lines like this were left out before" in lines[-1]


def test_requests_with_the_key_are_all_logged():
    assert len(logged(lambda logger: [access(logger, "/v1/completions", 200) for _ in range(100)])) == 100


# -- as the engine loads it

IN_AN_ENGINE = """
import asyncio, logging
from hpc_serve.gate.engine_gate import Gate
import uvicorn

async def app(scope, receive, send): ...
config = uvicorn.Config(app)
config.load()
print(config.http_protocol_class.__name__)
filters = [logging.getLogger(name).filters for name in ("uvicorn.access", "uvicorn.error")]
print([type(one).__name__ for some in filters for one in some])

async def ask():
    loop = asyncio.get_running_loop()
    gate = Gate(app)
    server = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0)
    server.close()
    async def receive(): return {}
    async def send(message): print(message["status"] if "status" in message else "")
    try:
        await gate({"type": "http", "method": "GET", "path": "/health", "headers": []}, receive, send)
    except RuntimeError as error:
        print(error)
asyncio.run(ask())
"""


def test_the_engine_loads_the_limits_with_the_gate_and_answers_nothing_without_them():
    done = subprocess.run([sys.executable, "-c", IN_AN_ENGINE], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[:2] == ["LimitedProtocol", "['LogLimit', 'LogLimit']"]
    assert "limits for connections are not in force" in lines[2]


@pytest.mark.parametrize("name", limits._USED_METHODS)
def test_a_uvicorn_that_they_do_not_fit_is_refused_and_named(monkeypatch, name):
    monkeypatch.delattr(HttpToolsProtocol, name)
    if hasattr(HttpToolsProtocol, name):  # asyncio.Protocol has one of its own
        monkeypatch.setattr(HttpToolsProtocol, name, None)
    with pytest.raises(limits.LimitsNotInForceError, match=rf"HttpToolsProtocol has no {name}.*Install uvicorn"):
        limits.install()


def test_a_uvicorn_with_another_protocol_is_refused(monkeypatch):
    monkeypatch.setitem(uvicorn.config.HTTP_PROTOCOLS, "auto", "elsewhere:Protocol")
    with pytest.raises(limits.LimitsNotInForceError, match="elsewhere:Protocol"):
        limits.install()


def test_a_half_open_tls_handshake_is_not_waited_for_in_any_loop():
    async def run() -> object:
        seen = {}

        async def create_server(*args, **options):
            seen.update(options)

        loop = asyncio.get_running_loop()
        loop.create_server = create_server  # type: ignore[method-assign]
        limits.bound_tls_handshakes(loop)
        await loop.create_server(None, ssl="context")
        return seen["ssl_handshake_timeout"]

    assert asyncio.run(run()) == limits.TLS_HANDSHAKE_TIMEOUT_S
    uvloop = pytest.importorskip("uvloop")
    assert uvloop.run(run()) == limits.TLS_HANDSHAKE_TIMEOUT_S
