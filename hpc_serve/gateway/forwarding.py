"""One request on its way through the gateway: from its turn to the last byte of its answer.

The request is held whole, since the client's transport may send it again. The answer is passed on as it comes. When
the client leaves, the request is cancelled at the engine.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from hpc_serve.client.connections.message import Message
from hpc_serve.client.replicas.replicas import replica_of_file
from hpc_serve.client.requests.exchange import Exchange
from hpc_serve.gateway.answers import broken_event
from hpc_serve.gateway.front import Front
from hpc_serve.gateway.headers import Header, for_client
from hpc_serve.gateway.request import Request
from hpc_serve.printable import printable

_log = logging.getLogger(__name__)


class BrokenAnswerError(Exception):
    """The answer broke off half-way, and its client can only be told by the end of the connection."""


async def forward(front: Front, message: Message, request: Request, further: Iterable[Header]) -> int:
    """Send a request to its service as a message, pass the answer on, and return its status.

    The answer gets `further` headers. No timeout is set: the client may leave, and the watch finds a lost replica.
    Raises Refusal, and what the transport raises. After any error but BrokenAnswerError, nothing of an answer was sent.
    """
    arrived_at_s = time.perf_counter()
    counts, turns = front.counts, front.turns
    if not (front.is_ready and turns.enter_now()):
        await turns.enter(front.ready)
    begun_at_s = time.perf_counter()
    try:
        counts.wait_seconds.observe(begun_at_s - arrived_at_s)
        counts.received_bytes += len(request.body)
        exchange = await front.send(message, request.model)
        counts.first_byte_seconds.observe(time.perf_counter() - begun_at_s)
        try:
            await _pass_on(front, exchange, request, further)
        finally:
            counts.repeated += exchange.sent - 1
            counts.resumed += exchange.resumed
            await exchange.body.aclose()
        return exchange.answer.status_code
    finally:
        if request.count is not None:
            request.count.gpu_seconds = (time.perf_counter() - begun_at_s) * front.gpus / turns.in_flight
        turns.leave()


async def _pass_on(front: Front, exchange: Exchange, request: Request, further: Iterable[Header]) -> None:
    answer, body, counts = exchange.answer, exchange.body, front.counts
    is_stream = answer.is_event_stream
    headers = for_client(answer.raw_headers, is_stream=is_stream)
    replica = replica_of_file(exchange.replica).encode()
    headers += [(b"x-hpc-serve-service", front.service.encode()), (b"x-hpc-serve-replica", replica), *further]
    request.begin(answer.status_code, headers)
    if (count := request.count) is not None:
        count.begin(is_stream=is_stream)
    try:
        while (data := await body.read()) is not None:
            counts.sent_bytes += len(data)
            request.write(data)
            if count is not None:
                count.feed(data)
            if request.connection.is_full:
                await request.connection.room()
    except Exception as error:  # half of an answer is out: whatever it was, the client is told
        counts.broken_streams += 1
        _log.warning("%s", printable(f"{front.service}: {error}"))
        if not is_stream:
            raise BrokenAnswerError(str(error)) from error
        request.write(broken_event(error))
    else:
        if count is not None:
            count.note_whole()
    request.end()
