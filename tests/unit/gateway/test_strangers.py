"""A gateway's port as a stranger or a hostile client uses it: raw bytes, and what reaches the engine.

Then every way in to a service: with the right key, with none, with a wrong one, as a page of another origin, and by a
host name that DNS rebinding led here. A page of another origin has no key; that it is refused with one shows that the
origin decides.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from hpc_serve.gateway.personal_keys import add_person
from tests.unit.gateway.conftest import ANSWER, ASKED

KEY = "k" * 32
BODY = json.dumps(ASKED).encode()


@pytest.fixture
def front(engine, gateway):
    return gateway(key=KEY)


def say(front, data: bytes) -> bytes:
    """What the gateway answers to these bytes."""
    got = b""
    with socket.create_connection(("127.0.0.1", front.port), timeout=60) as connection, suppress(ConnectionError):
        connection.sendall(data)
        while part := connection.recv(65536):
            got += part
    return got


def request(line: bytes, *headers: bytes, body: bytes = BODY, key: str = KEY) -> bytes:
    own = [b"Host: localhost", b"Content-Type: application/json", b"Connection: close"]
    given = [*own, b"Authorization: Bearer " + key.encode(), *headers]
    has_length = any(b"ransfer" in header or b"ength" in header for header in headers)
    length = [] if has_length else [b"Content-Length: %d" % len(body)]
    return b"\r\n".join([line + b" HTTP/1.1", *given, *length, b"", b""]) + body


COMPLETION = request(b"POST /v1/completions")


def statuses(data: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", data)]


def test_the_request_that_the_others_are_compared_with(front):
    got = say(front, COMPLETION)
    assert statuses(got) == [200]
    assert ANSWER.encode() in got


@pytest.mark.parametrize(
    ("path", "status"),
    [
        (b"http://evil.example:1/v1/completions", 200),
        (b"http://evil.example:1/sleep", 404),
        (b"/v1/%2e%2e/sleep", 404),
    ],
)
def test_only_a_path_that_is_written_as_the_route_reaches_an_engine(front, path, status):
    assert statuses(say(front, request(b"POST " + path))) == [status]


@pytest.mark.parametrize(
    "headers",
    [
        (b"Content-Length: 5", b"Content-Length: 6"),
        (b"Content-Length: 5, 6",),
        (b"Content-Length: +5",),
        (b"Content-Length: -1",),
        (b"Transfer-Encoding: chunked", b"Content-Length: 5"),
        (b"Transfer-Encoding: xchunked",),
        (b"Transfer-Encoding : chunked",),
        (b"Transfer-Encoding: chunked\r\n Content-Length: 5",),
    ],
)
def test_two_ways_to_read_a_body_are_refused_or_read_in_one(front, headers):
    smuggled = b"5\r\nhello\r\n0\r\n\r\nGET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
    got = say(front, request(b"POST /v1/completions", *headers, body=smuggled))
    assert b"hpc_serve_gateway" not in got  # the key of the first request is not that of a second
    assert 200 not in statuses(got)
    assert statuses(say(front, COMPLETION)) == [200]


def test_a_second_request_on_a_connection_shows_its_own_key(front):
    second = request(b"GET /metrics", body=b"", key="x" * 32)
    assert statuses(say(front, COMPLETION.replace(b"Connection: close\r\n", b"") + second)) == [200, 401]


IDS = (b"\xe9\xff", b"  blanks  ", b"", b"\tx\t", b"x" * 8000)
QUERIES = (b"?a=b", b"?a=%0d%0aX: y", b"?\xff", b"?a=b\x1b", b"?" + b"x" * 2000)
ODD = [
    *((b"", b"X-Request-Id: " + value, {400}) for value in (b"a\x0bb", b"\x1b[2J", b"a\x7f", b"a\x00b")),
    *((b"", b"X-Request-Id: " + value, {200, 400}) for value in IDS),
    *((query, b"X-Y: z", {200, 400, 404}) for query in QUERIES),
]


@pytest.mark.parametrize(("query", "header", "wanted"), ODD)
def test_what_is_odd_reaches_the_engine_or_is_refused_and_breaks_no_connection(front, query, header, wanted):
    assert statuses(say(front, request(b"POST /v1/completions" + query, header)))[0] in wanted
    assert statuses(say(front, COMPLETION)) == [200]


def test_headers_are_bounded(front):
    many = [b"X-%d: %s" % (number, b"y" * 1000) for number in range(200)]
    assert 200 not in statuses(say(front, request(b"POST /v1/completions", *many)))


def test_without_the_key_a_body_is_not_kept(front):
    announced = request(b"POST /v1/completions", b"Content-Length: 99999999999", body=b"x" * 1000, key="x" * 32)
    with socket.create_connection(("127.0.0.1", front.port), timeout=60) as connection:
        connection.sendall(announced)
        connection.shutdown(socket.SHUT_WR)
        assert statuses(connection.recv(65536)) in ([401], [])
    assert front.ask("GET", "/health").status == 200


def test_what_a_client_names_is_written_out_in_the_log(front, caplog):
    body = json.dumps({"model": "\x1b[2Jevil\n2026 ERROR", "prompt": "x"}).encode()
    got = say(front, request(b"POST /v1/completions", body=body))
    assert statuses(got) == [404]
    assert b"\x1b" not in got
    assert "\x1b" not in caplog.text


def test_a_websocket_is_no_route(front):
    upgrade = (b"Upgrade: websocket", b"Sec-WebSocket-Key: eA==", b"Sec-WebSocket-Version: 13")
    asked = request(b"GET /v1/realtime", *upgrade, body=b"")
    got = say(front, asked.replace(b"Connection: close", b"Connection: Upgrade, close"))
    assert 101 not in statuses(got)


# -- every way in

WRONG = "x" * 43
Ask = Callable[..., int]


def asking(connect: Callable[[], http.client.HTTPConnection]) -> Ask:
    """Return what asks on a connection of its own, with a key and further headers, and returns the status."""

    def ask(key: str | None, **headers: str) -> int:
        shown = {"Authorization": f"Bearer {key}"} if key is not None else {}
        connection = connect()
        try:
            asked = {"Content-Type": "application/json", **shown, **headers}
            connection.request("POST", "/v1/completions", BODY, asked)
            return connection.getresponse().status
        finally:
            connection.close()

    return ask


def over_tls(port: int) -> http.client.HTTPConnection:
    """Return a connection that believes any certificate, as a stranger's does."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return http.client.HTTPSConnection("127.0.0.1", port, timeout=60, context=context)


def over_socket(path: Path) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("localhost", timeout=60)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(str(path))
    return connection


@pytest.fixture
def way(request, service, program, tmp_path) -> Iterator[tuple[Ask, str | None]]:
    """What asks by this way, and its right key."""
    engine = service.start()
    home = service.store.home
    if request.param == "engine":
        yield asking(lambda: over_tls(engine.port)), service.key_file.read_text().strip()
    elif request.param == "socket":
        program("--socket", str(tmp_path / "s")).started()
        yield asking(lambda: over_socket(tmp_path / "s")), None
    elif request.param == "port":
        port = program("--port", "0").started().port
        key = (home / "gateway" / "api_key").read_text().strip()
        yield asking(lambda: http.client.HTTPConnection("127.0.0.1", port, timeout=60)), key
    else:
        key = add_person(home / "gateway", "alice", max_in_flight=None, tokens_a_day=None)
        shared = tmp_path / "shared"
        words = ("--port", "0", "--host", "0.0.0.0", "--share", str(shared), "--own-keys")
        program(*words).started()
        port = int(re.search(r":(\d+)/v1", (shared / "env.sh").read_text())[1])
        yield asking(lambda: over_tls(port)), key


@pytest.mark.parametrize(
    ("way", "without", "page", "rebound"),
    [
        ("engine", 401, (401, 200), (401, 200)),
        ("port", 401, (403, 403), (421, 421)),
        ("tls", 401, (403, 403), (401, 200)),  # a browser refuses the name, which is not in the certificate
        ("socket", 200, (403, 403), (421, 421)),  # nobody else can connect
    ],
    indirect=["way"],
)
def test_keys_pages_and_host_names(way, without, page, rebound):
    """Of `page` and `rebound`, the first is without a key, as a page has none, and the second with it."""
    ask, key = way
    near = (key[:-1], f"{key}x", key.swapcase(), "", " ", f"{key}, {WRONG}") if key is not None else ()
    assert [ask(one) for one in (None, WRONG, *near)] == [without] * (2 + len(near))
    assert ask(key) == 200
    for origin in ("http://evil.example", "null", "http://localhost.evil.example"):
        assert (ask(None, Origin=origin), ask(key, Origin=origin)) == page, origin
    for host in ("evil.example", "evil.example:80", "localhost.evil.example"):
        assert (ask(None, Host=host), ask(key, Host=host)) == rebound, host
