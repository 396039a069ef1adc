"""One request on its way through the gateway: from its turn to the last byte of its answer.

The request is held whole, since the client's transport may send it again. The answer is passed on as it comes. When
the client leaves, the request is cancelled at the engine.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hpc_serve.client.connections.message import Message
from hpc_serve.client.requests.transport import EXCHANGE
from hpc_serve.gateway.answers import broken_event
from hpc_serve.gateway.bodies import with_model
from hpc_serve.gateway.front import Front
from hpc_serve.gateway.headers import Header, for_client
from hpc_serve.gateway.request import Request
from hpc_serve.printable import printable
from hpc_serve.rendezvous.gate_headers import SIGNS

_log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class Asked:
    """A request to pass on: its headers for the engine, the fields of its body, and the model's name in it."""

    method: str
    route: str
    target: bytes
    headers: list[Header]
    content_type: str
    body: bytes
    fields: Mapping[str, Any]
    model: str | None


class BrokenAnswerError(Exception):
    """The answer broke off half-way, and its client can only be told by the end of the connection."""


async def forward(front: Front, asked: Asked, request: Request, further: Iterable[Header]) -> int:
    """Send a request to its service, pass the answer on, and return its status.

    The answer gets `further` headers. No timeout is set: the client may leave, and the watch finds a lost replica.
    Raises Refusal, and what the transport raises. After any error but BrokenAnswerError, nothing of an answer was sent.
    """
    arrived_at_s = time.perf_counter()
    counts = front.counts
    await front.turns.enter(front.ready)
    begun_at_s = time.perf_counter()
    try:
        counts.wait_seconds.observe(begun_at_s - arrived_at_s)
        counts.received_bytes += len(request.body)
        response = await front.send(lambda: _for_service(front, asked))
        counts.first_byte_seconds.observe(time.perf_counter() - begun_at_s)
        try:
            await _pass_on(front, response, request, further)
        finally:
            exchange = response.extensions[EXCHANGE]
            counts.repeated += exchange.sent - 1
            counts.resumed += exchange.resumed
            await response.aclose()
        return int(response.status_code)
    finally:
        if request.count is not None:
            request.count.gpu_seconds = (time.perf_counter() - begun_at_s) * front.gpus / front.turns.in_flight
        front.turns.leave()


async def _for_service(front: Front, asked: Asked) -> Message:
    """Return the request. A service's name in its body is replaced by a model name that the engine knows."""
    body, fields = asked.body, asked.fields
    if asked.model == front.service and asked.model not in front.names:
        model = await front.model()
        body, fields = with_model(asked.content_type, body, model), {**fields, "model": model}
    return Message(
        method=asked.method,
        target=asked.target,
        headers=asked.headers,
        content=body,
        fields=fields,
        wants_signs=SIGNS in asked.headers,
    )


async def _pass_on(front: Front, response: Any, request: Request, further: Iterable[Header]) -> None:
    is_stream = response.is_event_stream
    replica = front.watch.last_replica.name or ""
    headers = for_client(response.raw_headers, is_stream=is_stream)
    headers += [(b"x-hpc-serve-service", front.service.encode()), (b"x-hpc-serve-replica", replica.encode()), *further]
    request.begin(response.status_code, headers)
    if (count := request.count) is not None:
        count.begin(is_stream=is_stream)
    try:
        async for data in response.stream:
            front.counts.sent_bytes += len(data)
            request.write(data)
            if count is not None:
                count.feed(data)
            if request.connection.is_full:
                await request.connection.room()
    except Exception as error:  # half of an answer is out: whatever it was, the client is told
        front.counts.broken_streams += 1
        _log.warning("%s", printable(f"{front.service}: {error}"))
        if not is_stream:
            raise BrokenAnswerError(str(error)) from error
        request.write(broken_event(error))
    else:
        if count is not None:
            count.note_whole()
    request.end()
