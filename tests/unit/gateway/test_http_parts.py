"""What of a request is passed on: routes, names of models, headers. Nothing of the extra is needed."""

from __future__ import annotations

import json

import pytest

from hpc_serve.client.connections.message import Message
from hpc_serve.gateway.http_parts import (
    GET_ROUTES,
    POST_ROUTES,
    for_client,
    for_engine,
    read_body,
    route_of,
    with_model,
)

JSON = "application/json"


def model_of(kind: str, body: bytes) -> str | None:
    return read_body(kind, body)[1]


def renamed(kind: str, body: bytes, model: str) -> bytes | None:
    headers = [(b"content-type", kind.encode())]
    asked = Message(method="POST", target=b"/", headers=headers, content=body, fields=read_body(kind, body)[0])
    return with_model(asked, model).content


@pytest.mark.parametrize(
    "path",
    [
        *("//v1/completions", "/v1//completions", "/v1/completions/", "/v1/../v1/completions", "/v1/./completions"),
        *("/v1/%2e%2e/sleep", "/v1/completions/..", "/%2fsleep"),
        *("/v1/%63ompletions", "/v1%2fcompletions", "/v1/completions%00", "/v1/completions;a=b", "/V1/completions"),
        *("/sleep", "/v1/load_lora_adapter", "/collective_rpc", "/metrics", "", "*", "/v1/completions\x85"),
    ],
)
def test_a_path_that_is_not_written_as_the_route_is_no_route(path):
    assert route_of("POST", path.encode("latin-1")) is None


def test_a_route_has_its_method():
    assert all(route_of("POST", path.encode()) == path for path in POST_ROUTES)
    assert not [path for path in POST_ROUTES if route_of("GET", path.encode())]
    assert all(route_of("GET", path.encode()) == path for path in GET_ROUTES)


@pytest.mark.parametrize(
    ("body", "model"),
    [
        (b'{"model": "405b", "prompt": "x"}', "405b"),
        (b'{"model": "a\\u001b[2J"}', "a\x1b[2J"),
        (b'{"prompt": "x"}', None),
        (b'{"model": 7}', None),
        (b'{"model": ""}', None),
        (b'["model"]', None),
        (b"no json", None),
        (b"[" * 100_000, None),
        (b"\xff\xfe", None),
        (b"", None),
    ],
)
def test_the_model_of_a_body_of_json(body, model):
    assert model_of(JSON, body) == model


def form(*parts: tuple[str, bytes], boundary: str = "XyZ") -> bytes:
    made = b"".join(
        b"--%b\r\nContent-Disposition: form-data; %b\r\n\r\n%b\r\n" % (boundary.encode(), head.encode(), value)
        for head, value in parts
    )
    return made + b"--%b--\r\n" % boundary.encode()


FILE = ('name="file"; filename="a.wav"\r\nContent-Type: audio/wav', b'\r\n\r\nname="model"\r\n\r\nother\r\n')


@pytest.mark.parametrize("kind", ["multipart/form-data; boundary=XyZ", 'Multipart/Form-Data; Boundary="XyZ"; a=b'])
def test_the_model_of_a_form(kind):
    body = form(FILE, ('name="model"', b"whisper"), ('name="language"', b"en"))
    assert model_of(kind, body) == "whisper"
    assert renamed(kind, body, "openai/whisper") == body.replace(b"\nwhisper\r", b"\nopenai/whisper\r")


@pytest.mark.parametrize(
    "body",
    [
        form(FILE),
        form(('name="models"', b"x")),
        form(('name="model"', b"")),
        form(('name="model"', b"x" * 2000)),
        form(('name="model"', b"x"))[:-20],
        b"",
        b"--XyZ",
        b"--XyZ\r\n\r\n--XyZ",
    ],
)
def test_a_form_without_a_model(body):
    assert model_of("multipart/form-data; boundary=XyZ", body) is None
    assert renamed("multipart/form-data; boundary=XyZ", body, "y") == body


def test_another_name_changes_nothing_else():
    body = b'{"model": "405b", "prompt": "\\u00e9\\ud83d\\ude00", "temperature": 0.1, "n": 1e3}'
    changed = json.loads(renamed(JSON, body, "llama") or b"")
    assert changed == {**json.loads(body), "model": "llama"}


def test_headers_of_a_connection_and_secrets_stay_here():
    given = [
        *((b"Host", b"evil"), (b"Authorization", b"Bearer key"), (b"X-Api-Key", b"key"), (b"Cookie", b"a=b")),
        *((b"Connection", b"keep-alive, X-Secret"), (b"X-Secret", b"1"), (b"Keep-Alive", b"5"), (b"TE", b"trailers")),
        *((b"Transfer-Encoding", b"chunked"), (b"Content-Length", b"7"), (b"Upgrade", b"h2c"), (b"Expect", b"x")),
        *((b"X-Forwarded-For", b"1.2.3.4"), (b"Forwarded", b"for=x"), (b"X-HPC-Serve-Challenge", b"n")),
        *((b"Origin", b"http://x"), (b"Sec-Fetch-Site", b"none"), (b"Accept-Encoding", b"gzip")),
        *((b"Content-Type", b"application/json"), (b"X-Request-Id", b"7"), (b"traceparent", b"00-1")),
    ]
    kept = [(b"content-type", b"application/json"), (b"x-request-id", b"7"), (b"traceparent", b"00-1")]
    assert for_engine([(name.lower(), value) for name, value in given]) == [*kept, (b"accept-encoding", b"identity")]


def test_headers_of_an_answer():
    given = [
        *((b"Content-Type", b"text/event-stream"), (b"Content-Length", b"5"), (b"Connection", b"close, X-A")),
        *(
            (b"X-A", b"1"),
            (b"Server", b"uvicorn"),
            (b"Date", b"now"),
            (b"X-HPC-Serve-Proof", b"p"),
            (b"X-Request-Id", b"7"),
        ),
    ]
    given = [(name.lower(), value) for name, value in given]
    passed = [(b"content-type", b"text/event-stream"), (b"date", b"now"), (b"x-request-id", b"7")]
    assert for_client(given, is_stream=False) == [passed[0], (b"content-length", b"5"), *passed[1:]]
    assert for_client(given, is_stream=True) == passed
