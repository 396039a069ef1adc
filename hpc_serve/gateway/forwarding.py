"""One request on its way through the gateway: from its body to the last byte of its answer.

The request is held whole, since the client's transport may send it again. The answer is passed on as it comes. When
the client leaves, the request is cancelled at the engine, by `app`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from hpc_serve.client.replicas.sdk import http
from hpc_serve.client.requests.transport import EXCHANGE
from hpc_serve.gate.gate import discard_body
from hpc_serve.gateway.answers import Refusal, broken_event
from hpc_serve.gateway.bodies import with_model
from hpc_serve.gateway.front import Front
from hpc_serve.gateway.headers import Header, for_client
from hpc_serve.gateway.metrics import Metrics
from hpc_serve.gateway.settings import MIB
from hpc_serve.printable import printable

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

# The client decides how long an answer may take: it may leave. The watch finds a lost replica.
_TIMEOUTS = {"connect": None, "read": None, "write": None, "pool": None}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request to pass on; `model` is the name in its body."""

    method: str
    route: str
    query: bytes
    headers: list[Header]
    content_type: str
    body: bytes
    model: str | None


class Bodies:
    """Reads the bodies of requests, and counts the bytes that are held."""

    def __init__(self, *, most_bytes: int, most_held_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._most_held_bytes = most_held_bytes
        self.held_bytes = 0

    async def read(self, receive: Receive, announced: bytes, held: list[int]) -> bytes:
        """Return the whole body. `held` notes how many bytes to `release`. Raises Refusal; ClientLeftError."""
        if announced.isdigit() and int(announced[:19]) > self._most_bytes:
            await discard_body(receive)
            raise self._too_large()
        parts: list[bytes] = []
        size, is_more = 0, True
        while is_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientLeftError
            part = message.get("body", b"")
            is_more = message.get("more_body", False)
            size += len(part)
            refusal = self._refusal(size, len(part))
            if refusal is not None:
                if is_more:
                    await discard_body(receive)
                raise refusal
            self.held_bytes += len(part)
            held.append(len(part))
            parts.append(part)
        return b"".join(parts)

    def _refusal(self, size: int, more: int) -> Refusal | None:
        if size > self._most_bytes:
            return self._too_large()
        return self._too_many() if self.held_bytes + more > self._most_held_bytes else None

    def release(self, held: list[int]) -> None:
        self.held_bytes -= sum(held)
        held.clear()

    def _too_large(self) -> Refusal:
        most = self._most_bytes / MIB
        text = f"The body is larger than {most:g} MiB. Send less, or start the gateway with another --max-body."
        return Refusal(status=413, code="body_too_large", message=text)

    def _too_many(self) -> Refusal:
        text = (
            f"The gateway holds {self.held_bytes / MIB:.0f} MiB of requests, and takes no more until some have ended."
        )
        return Refusal(
            status=429, code="memory_full", kind="rate_limit_error", message=text, headers={"retry-after": "1"}
        )


class ClientLeftError(Exception):
    """The client closed its connection."""


class BrokenAnswerError(Exception):
    """The answer broke off half-way, and its client can only be told by the end of the connection."""


async def forward(front: Front, asked: Asked, send: Send, metrics: Metrics) -> int:
    """Send a request to its service, pass the answer on, and return its status.

    Raises Refusal, and what the transport raises. After any error but BrokenAnswerError, nothing of an answer was sent.
    """
    arrived_at_s = time.perf_counter()
    async with front.turns.turn(front.ready):
        begun_at_s = time.perf_counter()
        metrics.waited.labels(front.service).observe(begun_at_s - arrived_at_s)
        body = _for_engine(front, asked)
        metrics.received.labels(front.service).inc(len(body))
        url = http.URL("http://gateway").copy_with(raw_path=asked.route.encode() + asked.query)
        response = await front.send(lambda: _request(asked, url, body))
        metrics.answered.labels(front.service).observe(time.perf_counter() - begun_at_s)
        try:
            await _pass_on(front, response, send, metrics)
        finally:
            _count(front.service, response, metrics)
            await response.aclose()
        return response.status_code


def _for_engine(front: Front, asked: Asked) -> bytes:
    """Return the body. A service's name in it is replaced by a model name that the engine knows."""
    if asked.model != front.service or asked.model in front.names or not (model := front.watch.model):
        return asked.body
    return with_model(asked.content_type, asked.body, model)


def _request(asked: Asked, url: http.URL, body: bytes) -> http.Request:
    return http.Request(asked.method, url, headers=asked.headers, content=body, extensions={"timeout": _TIMEOUTS})


async def _pass_on(front: Front, response: http.Response, send: Send, metrics: Metrics) -> None:
    is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
    headers = for_client(response.headers.raw, is_stream=is_stream)
    replica = front.watch.last_replica.name or ""
    headers += [(b"x-hpc-serve-service", front.service.encode()), (b"x-hpc-serve-replica", replica.encode())]
    await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
    sent = metrics.sent.labels(front.service)
    stream: Any = response.stream
    try:
        async for data in stream:
            if data:
                sent.inc(len(data))
                await send({"type": "http.response.body", "body": data, "more_body": True})
    except Exception as error:  # half of an answer is out: whatever it was, the client is told
        metrics.broken.labels(front.service).inc()
        _log.warning("%s", printable(f"{front.service}: {error}"))
        if not is_stream:
            raise BrokenAnswerError(str(error)) from error
        await send({"type": "http.response.body", "body": broken_event(error), "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _count(service: str, response: http.Response, metrics: Metrics) -> None:
    exchange = response.extensions.get(EXCHANGE)
    if exchange is not None:
        metrics.repeated.labels(service).inc(max(exchange.sent - 1, 0))
        metrics.resumed.labels(service).inc(exchange.resumed)
