"""What the gateway passes on of a request and of an answer: headers, routes, and the name of the model. Pure.

Headers of one connection stay there (RFC 9110, 7.6.1). The key and cookies of a client are for the gateway. Names of
headers are in small letters. The parser of requests has refused headers with characters that none may have.

Routes are those that ask something of a model. Routes that change an engine (`/sleep`, `/v1/load_lora_adapter`,
`/reset_prefix_cache` …) are not passed on, nor those for the state of one replica alone (`GET /v1/responses/ID`). A
path must be written exactly as here: it is compared as it came, and the engine gets the path that stands here.

A JSON body names its model in the field `model`, a form (audio) in a part. The engine checks all other fields.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from hpc_serve.client.connections.message import Header, Message
from hpc_serve.rendezvous.gate_headers import SIGNS

# -- headers

_OF_A_CONNECTION = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade")
)
_NOT_FOR_THE_ENGINE = _OF_A_CONNECTION | {
    *(b"host", b"content-length", b"expect", b"accept-encoding", b"authorization", b"x-api-key", b"api-key"),
    *(b"proxy-authorization", b"proxy-authenticate", b"cookie", b"origin", b"referer", b"forwarded", b"via"),
    *(b"x-real-ip", b"http2-settings"),
}
_LEFT_OUT_BEGINNINGS = (b"x-forwarded-", b"x-hpc-serve", b"sec-", b"access-control-")
_NOT_FOR_THE_CLIENT = _OF_A_CONNECTION | {b"server", b"proxy-authenticate", b"set-cookie"}
_OF_ENGINE_BEGINNINGS = (b"x-hpc-serve", b"access-control-")
_NOT_FOR_THE_CLIENT_OF_A_STREAM = _NOT_FOR_THE_CLIENT | {b"content-length"}


def for_engine(given: Sequence[Header]) -> list[Header]:
    """Return the headers of a request as the engine gets them.

    A client that asks for signs gets them by its own header; the transport asks the engine in any case.
    """
    left_out = _with_those_named(given, _NOT_FOR_THE_ENGINE)
    passed = [
        header
        for header in given
        if header == SIGNS or (header[0] not in left_out and not header[0].startswith(_LEFT_OUT_BEGINNINGS))
    ]
    return [*passed, (b"accept-encoding", b"identity")]


def for_client(given: Sequence[Header], *, is_stream: bool) -> list[Header]:
    """Return the headers of an answer as the client gets them. The length of a stream is not known."""
    left_out = _with_those_named(given, _NOT_FOR_THE_CLIENT_OF_A_STREAM if is_stream else _NOT_FOR_THE_CLIENT)
    return [header for header in given if header[0] not in left_out and not header[0].startswith(_OF_ENGINE_BEGINNINGS)]


@functools.lru_cache(maxsize=64)
def is_own_host(host: bytes, named: tuple[str, ...]) -> bool:
    """Return whether a Host header means localhost, a loopback address or one of the names.

    >>> is_own_host(b"localhost:8000", ()), is_own_host(b"[::1]:8000", ()), is_own_host(b"evil.example:8000", ())
    (True, True, False)
    """
    try:
        name = urlsplit(f"//{host.decode('latin-1')}").hostname or ""
        return name == "localhost" or name in named or ip_address(name).is_loopback
    except ValueError:
        return False


def _with_those_named(headers: Sequence[Header], names: frozenset[bytes]) -> frozenset[bytes]:
    """Return the names, and those that a header `Connection` names."""
    for name, value in headers:
        if name == b"connection":
            names = names | {word.strip().lower() for word in value.split(b",")}
    return names


# -- routes

POST_ROUTES = frozenset(
    (
        *("/v1/chat/completions", "/v1/chat/completions/batch", "/v1/chat/completions/render"),
        *("/v1/chat/completions/derender", "/v1/completions", "/v1/completions/render", "/v1/completions/derender"),
        *("/v1/responses", "/v1/responses/render", "/v1/messages", "/v1/messages/count_tokens", "/v1/messages/render"),
        *("/v1/embeddings", "/v2/embed", "/v1/audio/transcriptions", "/v1/audio/translations"),
        *("/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank", "/pooling", "/classify"),
        *("/generative_scoring", "/cohere/v2/chat", "/tokenize", "/detokenize", "/inference/v1/generate"),
    )
)
"""Of vLLM 0.32. A websocket (`/v1/realtime`) is none of them."""
GET_ROUTES = frozenset(("/version", "/tokenizer_info"))


def route_of(method: str, raw_path: bytes) -> str | None:
    """Return the route that is passed on; None for any other request.

    >>> route_of("POST", b"/v1/completions")
    '/v1/completions'
    >>> route_of("POST", b"/v1/%63ompletions"), route_of("POST", b"//v1/completions"), route_of("POST", b"/sleep")
    (None, None, None)
    """
    path = raw_path.decode("latin-1")
    if path in POST_ROUTES and method == "POST":
        return path
    return path if path in GET_ROUTES and method in ("GET", "HEAD") else None


# -- the model in a body

_BOUNDARY = re.compile(r'boundary=(?:"([^"\r\n]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
_IS_MODEL = re.compile(
    rb'^content-disposition:[^\r\n]*;[ \t]*name="?model"?[ \t]*(;|\r|$)', re.IGNORECASE | re.MULTILINE
)
_LONGEST_NAME = 1_000
_DECODER = json.JSONDecoder()  # json.loads first finds out in which encoding bytes are


def read_body(content_type: str, body: bytes) -> tuple[Mapping[str, Any], str | None]:
    """Return the fields of a JSON body, and the model that a request is for; None if it names none.

    Another body has no fields. The engine has to say what is wrong with a body.
    """
    if _is_form(content_type):
        found = _model_part(content_type, body)
        return {}, found[1].decode(errors="replace") if found is not None else None
    try:
        fields = _DECODER.raw_decode(body.decode().lstrip())[0]
    except (ValueError, RecursionError):
        return {}, None
    if not isinstance(fields, dict):
        return {}, None
    model = fields.get("model")
    return fields, model if isinstance(model, str) and model else None


def with_model(message: Message, model: str) -> Message:
    """Return the same request, for another name of the model."""
    content_type, body = dict(message.headers).get(b"content-type", b"").decode("latin-1"), message.content or b""
    if _is_form(content_type):
        found = _model_part(content_type, body)
        if found is not None:
            body = body[: found[0]] + model.encode() + body[found[0] + len(found[1]) :]
        return replace(message, content=body)
    fields = {**(message.fields or {}), "model": model}
    return replace(message, content=json.dumps(fields, separators=(",", ":")).encode(), fields=fields)


def _is_form(content_type: str) -> bool:
    return content_type.partition(";")[0].strip().lower() == "multipart/form-data"


def _model_part(content_type: str, body: bytes) -> tuple[int, bytes] | None:
    """Return the offset and the value of the form's field `model`."""
    match = _BOUNDARY.search(content_type)
    if match is None:
        return None
    mark = b"--" + (match[1] or match[2]).encode("latin-1", "replace")
    begin = body.find(mark)
    while begin != -1:
        end = body.find(b"\r\n" + mark, begin + len(mark))
        head_end = body.find(b"\r\n\r\n", begin, end if end != -1 else None)
        if end == -1 or head_end == -1:
            return None
        if _IS_MODEL.search(body[begin + len(mark) + 2 : head_end]):
            value = body[head_end + 4 : end]
            return (head_end + 4, value) if 0 < len(value) <= _LONGEST_NAME else None
        begin = end + 2
    return None
