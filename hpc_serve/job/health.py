"""Whether the engine is ready: it answers /health, lists the model's name, and has completed one request.

One of these alone is not enough: /health answers before the workers are up, and an engine can end at its first request.
Each connection is verified first (`trust.connection`): until the engine listens, anybody may take its port, and would
get the key. When to ask, and what follows from the answer, is decided by the head.
"""

from __future__ import annotations

import contextlib
import http.client
import json
from dataclasses import dataclass
from typing import Any

from hpc_serve.trust.connection import Identity, VerifiedConnection
from hpc_serve.vllm import metrics

_TIMEOUT_S = 10.0
_METRICS_TIMEOUT_S = 5.0
_HEALTH = "/health"


class NotReadyError(Exception):
    """The engine is not ready yet. The text says which check failed."""


@dataclass(frozen=True, kw_only=True)
class EngineAddress:
    """Where the engine listens, and how it shows that it is the engine."""

    host: str
    port: int
    identity: Identity


def is_healthy(engine: EngineAddress) -> bool:
    """Whether /health answers with 200 now."""
    try:
        return _request(engine, "GET", _HEALTH, timeout_s=_TIMEOUT_S)[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def check_ready(engine: EngineAddress, model: str, *, completion_timeout_s: float) -> None:
    """Check once that the engine serves `model`. Raises NotReadyError if any of the three checks fails.

    The first request may take `completion_timeout_s` seconds, any other `_TIMEOUT_S`.
    """
    try:
        status, _ = _request(engine, "GET", _HEALTH, timeout_s=_TIMEOUT_S)
        _require(status == 200, f"/health answers {status}")
        status, models = _request(engine, "GET", "/v1/models", timeout_s=_TIMEOUT_S)
        _require(status == 200, f"/v1/models answers {status}")
        names = [entry.get("id") for entry in models.get("data", [])]
        _require(model in names, f"/v1/models lists {names}, not {model}")
        body = {"model": model, "prompt": "1", "max_tokens": 1}
        status, _ = _request(engine, "POST", "/v1/completions", body=body, timeout_s=completion_timeout_s)
        if status in (400, 404, 405, 501):  # the model does not generate text: ask for an embedding
            body = {"model": model, "input": "1"}
            status, _ = _request(engine, "POST", "/v1/embeddings", body=body, timeout_s=completion_timeout_s)
        _require(status == 200, f"a first request was answered with {status}")
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise NotReadyError(str(error) or type(error).__name__) from error


def requests_under_way(engine: EngineAddress) -> int | None:
    """How many requests run or wait, as the engine says it; None if its metrics have no such figures.

    Raises OSError or HTTPException if it does not say anything now.
    """
    status, text, _ = _exchange(engine, "GET", "/metrics", timeout_s=_METRICS_TIMEOUT_S)
    if status == 404:
        return None
    if status != 200:
        raise OSError(f"/metrics answers {status}")
    return metrics.requests_under_way(text.decode(errors="replace"))


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise NotReadyError(what)


def _request(
    engine: EngineAddress, method: str, path: str, *, timeout_s: float, body: dict[str, Any] | None = None
) -> tuple[int, dict[str, Any]]:
    status, content, kind = _exchange(engine, method, path, timeout_s=timeout_s, body=body)
    return status, json.loads(content) if kind == "application/json" and content else {}


def _exchange(
    engine: EngineAddress, method: str, path: str, *, timeout_s: float, body: dict[str, Any] | None = None
) -> tuple[int, bytes, str]:
    """Status, content and content type of an answer."""
    connection = VerifiedConnection(engine.host, engine.port, engine.identity, timeout_s=_TIMEOUT_S)
    with contextlib.closing(connection):
        connection.connect()
        connection.sock.settimeout(timeout_s)
        headers = {"Content-Type": "application/json"}
        if path != _HEALTH:  # which needs no key
            headers["Authorization"] = f"Bearer {engine.identity.api_key}"
        connection.request(method, path, json.dumps(body) if body is not None else None, headers)
        response = connection.getresponse()
        content = response.read()
    return response.status, content, response.headers.get_content_type()
