"""The launcher's questions to an engine: whether it is ready, and later whether it still works.

An engine is ready when it answers /health, lists the model's name, and has completed one request. One of these alone is
not enough: /health answers before the workers are up, and an engine can end at its first request. Each connection is
verified first (`trust.connection`), so nobody else gets the key. The head decides when to ask, and what follows from
the answer.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import wave
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.message import Message
from typing import Any

from hpc_serve.errors import error_text
from hpc_serve.rendezvous.gate_headers import (
    CANARY_HEADER,
    ENGINE_HEADER,
    LAUNCHER_HEADER,
    EngineLoad,
    read_request_count,
)
from hpc_serve.trust.connection import Identity, NotOurEngineError, VerifiedConnection
from hpc_serve.vllm import metrics

_TIMEOUT_S = 10.0
_METRICS_TIMEOUT_S = 5.0
_LOWEST_PRIORITY = 1_000_000
_PORTS_REMEMBERED = 64
_HEALTH = "/health"
_JSON = "application/json"
_FIRST_REQUESTS: Mapping[str, Mapping[str, Any]] = {
    "/v1/completions": {"prompt": "1", "max_tokens": 1},
    "/v1/embeddings": {"input": "1"},
    "/score": {"text_1": "1", "text_2": "1"},
    "/classify": {"input": "1"},
    "/pooling": {"input": "1"},
    "/v1/audio/transcriptions": {"language": "en", "max_completion_tokens": 1},
}
"""A small request of each kind: text, embeddings, a reranker's scores, classes, what else is pooled, transcriptions."""
_FORM_BOUNDARY = "hpc-serve-form"
_SAMPLES_PER_S = 16_000
_LONGEST_REASON = 200
_NOT_OF_THIS_KIND = (400, 404, 405, 501)
"""What vLLM answers to a request that the model is not for."""


class NotReadyError(Exception):
    """The engine is not ready yet. The text says which check failed."""


@dataclass(frozen=True, kw_only=True)
class EngineAddress:
    """The address of the engine, and the identity by which it is verified. `token` shows it that its launcher asks.

    `own_ports` are our ends of the latest connections to it.
    """

    host: str
    port: int
    identity: Identity
    token: str = field(default="", repr=False)
    own_ports: deque[int] = field(default_factory=lambda: deque(maxlen=_PORTS_REMEMBERED), repr=False, compare=False)


@dataclass(frozen=True, kw_only=True)
class SmallRequest:
    """A request of the least work that the engine's model can do: one token, an embedding or a score of one token, or
    the first token of a second of silence."""

    path: str
    body: Mapping[str, Any]

    def after_all_others(self) -> SmallRequest:
        """The same for an engine that was told to go by priorities; any other refuses them."""
        return SmallRequest(path=self.path, body={**self.body, "priority": _LOWEST_PRIORITY})

    def encoded(self) -> tuple[str, bytes]:
        """Return the content type and the content: JSON, or for speech a form with a second of silence."""
        if "/audio/" not in self.path:
            return _JSON, json.dumps(self.body).encode()
        parts = [(f'name="{name}"', str(value).encode()) for name, value in self.body.items()]
        parts.append(('name="file"; filename="silence.wav"', _silence()))
        mark = f"--{_FORM_BOUNDARY}".encode()
        form = b"".join(
            mark + f"\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode() + value + b"\r\n"
            for head, value in parts
        )
        return f"multipart/form-data; boundary={_FORM_BOUNDARY}", form + mark + b"--\r\n"


def _silence() -> bytes:
    """Return a second of silence as a WAV file."""
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(_SAMPLES_PER_S)
        sound.writeframes(bytes(2 * _SAMPLES_PER_S))
    return file.getvalue()


def is_healthy(engine: EngineAddress) -> bool:
    """Return whether /health answers with 200 now. Raises NotOurEngineError if another program answers."""
    try:
        return _ask(engine, "GET", _HEALTH).status == 200
    except NotOurEngineError:
        raise
    except (OSError, http.client.HTTPException):
        return False


def check_ready(engine: EngineAddress, model: str, *, completion_timeout_s: float) -> SmallRequest:
    """Check once that the engine serves `model`; returns the request that it completed.

    Raises NotReadyError if any of the three checks fails, NotOurEngineError if another program answers.
    The first request may take `completion_timeout_s` seconds, any other `_TIMEOUT_S`.
    """
    try:
        for path in (_HEALTH, "/v1/models"):
            answer = _ask(engine, "GET", path)
            _require(answer.status == 200, f"{path} answers {answer.status}")
        names = [entry.get("id") for entry in json.loads(answer.content).get("data", [])]
        _require(model in names, f"/v1/models lists {names}, not {model}")
        for path, what in _FIRST_REQUESTS.items():
            first = SmallRequest(path=path, body={"model": model, **what})
            answer = _ask(engine, "POST", path, timeout_s=completion_timeout_s, encoded=first.encoded())
            if answer.status not in _NOT_OF_THIS_KIND:
                break
        words = "" if answer.status in (200, 404) else f": {' '.join(answer.text.split())[:_LONGEST_REASON]}"
        _require(answer.status == 200, f"a first request was answered with {answer.status}{words}")
        return first
    except NotOurEngineError:
        raise
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise NotReadyError(error_text(error)) from error


def ask(engine: EngineAddress, request: SmallRequest, *, timeout_s: float) -> int:
    """Return the status of the answer to a small request. Raises OSError or HTTPException without an answer."""
    return _ask(engine, "POST", request.path, timeout_s=timeout_s, encoded=request.encoded()).status


def told(engine: EngineAddress, path: str, body: Mapping[str, Any], *, timeout_s: float) -> str:
    """Tell an engine to do something; returns why it did not, or "".

    Raises OSError or HTTPException without an answer.
    """
    answer = _ask(engine, "POST", path, timeout_s=timeout_s, encoded=(_JSON, json.dumps(body).encode()))
    if answer.status == 200:
        return ""
    with contextlib.suppress(ValueError, LookupError, TypeError):
        return str(json.loads(answer.content)["error"]["message"])
    return f"the engine answered {answer.status}"


@dataclass(frozen=True, kw_only=True)
class Look:
    """One look at an engine: the status of /health, and the words of its gate; None without an answer.

    The words are `busy`, `idle`, `paused`, or why the engine makes no step.
    """

    status: int | None
    words: str | None = None


def look(engine: EngineAddress, *, timeout_s: float) -> Look:
    """Ask for /health."""
    try:
        answer = _ask(engine, "GET", _HEALTH, timeout_s=timeout_s)
    except (OSError, http.client.HTTPException):
        return Look(status=None)
    return Look(status=answer.status, words=answer.headers.get(ENGINE_HEADER.decode()))


def read_weight_version(engine: EngineAddress) -> str | None:
    """Return what the engine calls the weights that it has; "" if its ranks differ, None if it has no such route.

    vLLM has the route in its development mode. Raises OSError or HTTPException without an answer.
    """
    answer = _ask(engine, "GET", "/weight_info")
    if answer.status == 404:
        return None
    with contextlib.suppress(ValueError, LookupError, TypeError):
        return str(json.loads(answer.content)["weight_version"])[:_LONGEST_REASON]
    return ""


def requests_under_way(engine: EngineAddress) -> int | None:
    """Return the number of requests that run or wait; None if the engine's metrics have no such figures.

    Raises OSError or HTTPException if the engine does not answer now.
    """
    answer = _ask(engine, "GET", "/metrics", timeout_s=_METRICS_TIMEOUT_S)
    if answer.status == 404:
        return None
    if answer.status != 200:
        raise OSError(f"/metrics answers {answer.status}")
    return metrics.read_work(answer.text).requests


def read_load(engine: EngineAddress, *, timeout_s: float = _METRICS_TIMEOUT_S) -> EngineLoad | None:
    """Return the load of an engine; None if it cannot be read."""
    try:
        answer = _ask(engine, "GET", "/metrics", timeout_s=timeout_s)
    except (OSError, http.client.HTTPException):
        return None
    work, requests = metrics.read_work(answer.text if answer.status == 200 else ""), read_request_count(answer.headers)
    if work.running is None or work.waiting is None or requests is None:
        return None
    return EngineLoad(running=work.running, waiting=work.waiting, requests=requests)


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise NotReadyError(what)


@dataclass(frozen=True, kw_only=True)
class _Answer:
    status: int
    headers: Message
    content: bytes

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace")


def _ask(
    engine: EngineAddress,
    method: str,
    path: str,
    *,
    timeout_s: float = _TIMEOUT_S,
    encoded: tuple[str, bytes] | None = None,
) -> _Answer:
    """Ask over a new connection, which may take `_TIMEOUT_S` at most. A request with content is a canary."""
    content_type, content = encoded or (_JSON, None)
    headers = {"Content-Type": content_type, "Authorization": f"Bearer {engine.identity.api_key}"}
    if content is not None:
        headers[CANARY_HEADER[0].decode()] = CANARY_HEADER[1].decode()
        headers[LAUNCHER_HEADER.decode()] = engine.token
    connecting_s = min(timeout_s, _TIMEOUT_S)
    with contextlib.closing(
        VerifiedConnection(engine.host, engine.port, engine.identity, timeout_s=connecting_s)
    ) as connection:
        connection.connect()
        engine.own_ports.append(connection.sock.getsockname()[1])
        connection.sock.settimeout(timeout_s)
        connection.request(method, path, content, headers)
        response = connection.getresponse()
        return _Answer(status=response.status, headers=response.headers, content=response.read())
