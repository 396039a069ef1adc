"""One service behind the gateway: the turns of its requests, the wait for a replica, and the way of an answer.

The requests of a service that are under way at once are limited, and so are those that wait for their turn. A request
is held whole, since the client's transport may send it again. The answer is passed on as it comes. When the client
leaves, the request is cancelled at the engine.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import anyio

from hpc_serve.client.connections.message import Header, Message
from hpc_serve.client.discovery.discovery import ServiceWatch
from hpc_serve.client.discovery.wait import WaitPolicy, wait_for_replica
from hpc_serve.client.replicas.event_loops import InLoop
from hpc_serve.client.replicas.pool import replica_of_file
from hpc_serve.client.replicas.sdk import http
from hpc_serve.client.replicas.status import summary
from hpc_serve.client.requests.exchange import AsyncServiceTransport, Exchange, NoReplicaError
from hpc_serve.errors import HpcServeError, WaitTimeoutError
from hpc_serve.gateway.answers import Refusal, broken_event
from hpc_serve.gateway.http_parts import for_client, with_model
from hpc_serve.gateway.metrics import Counts
from hpc_serve.gateway.request import Request
from hpc_serve.gateway.settings import Settings
from hpc_serve.printable import printable
from hpc_serve.rendezvous.store import ServiceStore

# A replica may go between the wait and the request. How often a request waits for another one:
_MOST_ROUNDS = 3
_FIRST_LOOK_S = 10.0
_BRING_AGAIN_S = 5.0
_REFUSAL_COUNTS_S = 1.0
_MODELS_S = 3.0

_log = logging.getLogger(__name__)


class Turns:
    """The requests of one service. `in_flight` have their turn, `queued` wait for it or for a replica."""

    def __init__(self, service: str, settings: Settings) -> None:
        self._service = service
        self._max_in_flight, self._most_queued = settings.max_in_flight, settings.most_queued
        self._turns = anyio.Semaphore(settings.max_in_flight)
        self.in_flight = 0
        self.queued = 0

    def enter_now(self) -> bool:
        """Give a request of a ready service its turn, until `leave`, if it need not wait for it."""
        if not self._turns.value:
            return False
        self._turns.acquire_nowait()
        self.in_flight += 1
        return True

    async def enter(self, ready: Callable[[], Awaitable[None]]) -> None:
        """Wait until the service is `ready` and the request has its turn, until `leave`.

        Raises Refusal, and what `ready` raises.
        """
        if self.in_flight + self.queued >= self._max_in_flight + self._most_queued:
            raise self._full()
        self.queued += 1
        try:
            await ready()
            await self._turns.acquire()
        finally:
            self.queued -= 1
        self.in_flight += 1

    def leave(self) -> None:
        """End the turn of a request."""
        self.in_flight -= 1
        self._turns.release()

    def _full(self) -> Refusal:
        text = (
            f"{self._service} has {self.in_flight + self.queued} requests through this gateway: at most"
            f" {self._max_in_flight} may be under way, and {self._most_queued} may wait. Try again, or start the"
            " gateway with another --max-in-flight or --queue."
        )
        return Refusal(status=429, code="queue_full", message=text)


def model_card(name: str) -> dict[str, Any]:
    """Return a model as OpenAI lists it, where no engine describes it."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "hpc-serve"}


class Backend:
    """One service. Its engines answer to `names`."""

    def __init__(self, store: ServiceStore, service: str, settings: Settings, counts: Counts) -> None:
        self.service = service
        self.watch = ServiceWatch(store, service, may_wake=settings.wake)
        self.turns = Turns(service, settings)
        self.counts = counts
        self.names: tuple[str, ...] = ()
        self.bring: Callable[[float, str], Awaitable[None]] | None = None
        """Returns once the service is there or submitted, if it is started on demand: until when, and for whom."""
        self._wait_s = settings.wait_s
        self._transport = AsyncServiceTransport(self.watch, wait=settings.wait_s or None)
        self._search: asyncio.Task[None] | None = None
        self._refused: tuple[float, HpcServeError] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether a replica is known that takes requests."""
        return bool(self.watch.pool)

    @property
    def gpus(self) -> int:
        """The GPUs of the ready replicas, by the last look."""
        replicas = self.watch.status.replicas
        return sum(one.record.num_gpus for one in replicas if one.state == "ready" and one.record is not None)

    @property
    def state(self) -> str:
        """How the service is, in one line."""
        return summary(self.watch.status)

    async def ready(self, person: str = "") -> None:
        """Return once a replica is ready. Raises HpcServeError when none is in the time that a request waits.

        `person` is whose request it is, if it has a key of its own.
        """
        clock = asyncio.get_running_loop().time
        until_s = clock() + self._wait_s
        while not self.is_ready:
            if self._refused is not None and clock() < self._refused[0]:
                raise self._refused[1]
            if self.bring is not None:
                await self.bring(until_s, person)
            search, left_s = self._searching(), max(until_s - clock(), 0.0)
            step_s = min(left_s or _FIRST_LOOK_S, _BRING_AGAIN_S)
            await asyncio.wait({search}, timeout=left_s + _FIRST_LOOK_S if self.bring is None else step_s)
            if not search.done() and self.bring is not None:
                if clock() < until_s:
                    continue  # somebody may have stopped it meanwhile
                raise WaitTimeoutError(f"{self.service} was not ready after {self._wait_s:g} s: {self.state}.")
            if not search.done():
                raise WaitTimeoutError(f"Whether {self.service} has a ready replica could not be found out in time.")
            error = search.exception()
            if isinstance(error, WaitTimeoutError) and clock() < until_s:
                continue  # another request had begun that wait
            if isinstance(error, HpcServeError):
                self._refused = clock() + _REFUSAL_COUNTS_S, error
            if error is not None:
                raise error

    def _searching(self) -> asyncio.Task[None]:
        """Return the search for a replica that all waiting requests share."""
        if self._search is None or self._search.done():
            wait = wait_for_replica(self.watch, WaitPolicy(self._wait_s or None), InLoop())
            self._search = asyncio.get_running_loop().create_task(wait)
        return self._search

    async def model(self) -> str:
        """Return the name under which the engines serve. A replica that was just found is not in the last look."""
        if not self.watch.model:
            await asyncio.to_thread(self.watch.refresh)
        return self.watch.model or self.service

    async def send(self, message: Message, model: str | None) -> Exchange:
        """Send a request for a model; return it with its answer, whose body is unread.

        The service's own name is replaced by a model's that its engines know; between two rounds they may be others.
        Raises what the client's transport raises.
        """
        rounds_left = _MOST_ROUNDS
        while True:
            rounds_left -= 1
            asked = message
            if model == self.service and model not in self.names:
                asked = with_model(message, await self.model())
            exchange = self._transport.exchange(asked)
            try:
                await exchange.begin()
                return exchange
            except NoReplicaError:
                if not rounds_left:
                    raise
            await self.ready()

    async def models(self) -> list[dict[str, Any]]:
        """Return an engine's list of models; without an answer in time, the names in the records."""
        headers = [(b"accept-encoding", b"identity")]
        request = Message(method="GET", target=b"/v1/models", headers=headers, content=b"")
        try:
            exchange = self._transport.exchange(request)
            await asyncio.wait_for(exchange.begin(), _MODELS_S)
            answer = await asyncio.wait_for(exchange.body.read_all(), _MODELS_S)
            found = [card for card in json.loads(answer)["data"] if isinstance(card["id"], str)]
        except (asyncio.TimeoutError, http.HTTPError, HpcServeError, ValueError, TypeError, KeyError):
            found = [model_card(name) for name in self.names]
        return found

    async def close(self) -> None:
        if self._search is not None:
            self._search.cancel()
        await self._transport.aclose()


class BrokenAnswerError(Exception):
    """The answer broke off half-way, and its client can only be told by the end of the connection."""


async def forward(backend: Backend, message: Message, request: Request, further: Iterable[Header]) -> int:
    """Send a request to its service as a message, pass the answer on, and return its status.

    The answer gets `further` headers. No timeout is set: the client may leave, and the watch finds a lost replica.
    Raises Refusal, and what the transport raises. After any error but BrokenAnswerError, nothing of an answer was sent.
    """
    arrived_at_s = time.perf_counter()
    counts, turns = backend.counts, backend.turns
    if not (backend.is_ready and turns.enter_now()):
        await turns.enter(lambda: backend.ready(request.person.name if request.person is not None else ""))
    begun_at_s = time.perf_counter()
    try:
        counts.wait_seconds.observe(begun_at_s - arrived_at_s)
        counts.received_bytes += len(request.body)
        exchange = await backend.send(message, request.model)
        counts.first_byte_seconds.observe(time.perf_counter() - begun_at_s)
        try:
            await _pass_on(backend, exchange, request, further)
        finally:
            counts.repeated += exchange.sent - 1
            counts.resumed += exchange.resumed
            await exchange.body.aclose()
        return exchange.answer.status_code
    finally:
        if request.count is not None:
            request.count.gpu_seconds = (time.perf_counter() - begun_at_s) * backend.gpus / turns.in_flight
        turns.leave()


async def _pass_on(backend: Backend, exchange: Exchange, request: Request, further: Iterable[Header]) -> None:
    answer, body, counts = exchange.answer, exchange.body, backend.counts
    is_stream = answer.is_event_stream
    headers = for_client(answer.raw_headers, is_stream=is_stream)
    replica = replica_of_file(exchange.replica).encode()
    headers += [(b"x-hpc-serve-service", backend.service.encode()), (b"x-hpc-serve-replica", replica), *further]
    request.begin(answer.status_code, headers)
    if (count := request.count) is not None:
        count.begin(is_stream=is_stream)
    try:
        while (data := await body.read()) is not None:
            counts.sent_bytes += len(data)
            request.write(data)
            if count is not None:
                count.feed(data)
            if not request.connection.has_room.is_set():
                await request.connection.has_room.wait()
    except Exception as error:  # half of an answer is out: whatever it was, the client is told
        counts.broken_streams += 1
        _log.warning("%s", printable(f"{backend.service}: {error}"))
        if not is_stream:
            raise BrokenAnswerError(str(error)) from error
        request.write(broken_event(error))
    else:
        if count is not None:
            count.note_whole()
    request.end()
