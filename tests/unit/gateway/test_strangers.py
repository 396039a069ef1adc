"""A gateway's port as a stranger or a hostile client uses it: raw bytes, and what reaches the engine."""

from __future__ import annotations

import json
import re
import socket
from contextlib import suppress

import pytest

from tests.support.stub_engine import greedy_answer

GREEDY = ("--stub-greedy", "--stub-words", "3")
KEY = "k" * 32
BODY = json.dumps({"model": "405b", "prompt": "Why?", "temperature": 0}).encode()


@pytest.fixture
def front(service, gateway):
    service.start(*GREEDY)
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
    length = (
        []
        if any(b"ransfer" in header or b"ength" in header for header in headers)
        else [b"Content-Length: %d" % len(body)]
    )
    return b"\r\n".join([line + b" HTTP/1.1", *given, *length, b"", b""]) + body


def statuses(data: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", data)]


def test_the_request_that_the_others_are_compared_with(front):
    got = say(front, request(b"POST /v1/completions"))
    assert statuses(got) == [200]
    assert greedy_answer("Why?", 3).encode() in got


def test_of_an_absolute_url_the_path_counts(front):
    assert statuses(say(front, request(b"POST http://evil.example:1/v1/completions"))) == [200]
    assert statuses(say(front, request(b"POST http://evil.example:1/sleep"))) == [404]


@pytest.mark.parametrize(
    "path",
    [
        b"//v1/completions",
        b"/v1/../v1/completions",
        b"/v1/%2e%2e/sleep",
        b"/v1/completions/..",
        b"/%2fsleep",
        b"/v1/load_lora_adapter",
    ],
)
def test_other_ways_to_write_a_path_reach_no_engine(front, path):
    assert statuses(say(front, request(b"POST " + path))) == [404]


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
    assert statuses(say(front, request(b"POST /v1/completions"))) == [200]


def test_a_second_request_on_a_connection_shows_its_own_key(front):
    first = request(b"POST /v1/completions").replace(b"Connection: close\r\n", b"")
    second = request(b"GET /metrics", body=b"", key="x" * 32)
    assert statuses(say(front, first + second)) == [200, 401]


@pytest.mark.parametrize("value", [b"a\x0bb", b"\x1b[2J", b"a\x7f", b"a\x00b"])
def test_a_header_with_control_characters_breaks_no_connection_to_an_engine(front, value):
    (status,) = statuses(say(front, request(b"POST /v1/completions", b"X-Request-Id: " + value)))
    assert status == 400
    assert statuses(say(front, request(b"POST /v1/completions"))) == [200]
    assert front.ask("GET", "/metrics", Authorization=f"Bearer {KEY}").body.count(b"repeated_total") > 0


@pytest.mark.parametrize("value", [b"\xe9\xff", b"  blanks  ", b"", b"\tx\t", b"x" * 8000])
def test_odd_headers_reach_the_engine_or_are_refused(front, value):
    assert statuses(say(front, request(b"POST /v1/completions", b"X-Request-Id: " + value)))[0] in (200, 400)
    assert statuses(say(front, request(b"POST /v1/completions"))) == [200]


@pytest.mark.parametrize("query", [b"?a=b", b"?a=%0d%0aX: y", b"?\xff", b"?a=b\x1b", b"?" + b"x" * 2000])
def test_odd_queries_reach_the_engine_or_are_refused(front, query):
    assert statuses(say(front, request(b"POST /v1/completions" + query)))[0] in (200, 400, 404)
    assert statuses(say(front, request(b"POST /v1/completions"))) == [200]


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
    got = say(
        front,
        request(b"GET /v1/realtime", *upgrade, body=b"").replace(b"Connection: close", b"Connection: Upgrade, close"),
    )
    assert 101 not in statuses(got)
