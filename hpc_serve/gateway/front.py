"""One service behind the gateway: its watch, its transport, its turns, and the wait for a replica."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from hpc_serve.client.connections.message import Message
from hpc_serve.client.discovery.discovery import ServiceWatch
from hpc_serve.client.discovery.wait import WaitPolicy, wait_for_replica
from hpc_serve.client.replicas.event_loops import InLoop
from hpc_serve.client.replicas.messages import summary
from hpc_serve.client.replicas.sdk import http
from hpc_serve.client.requests.exchange import Exchange, NoReplicaError
from hpc_serve.client.requests.transport import AsyncServiceTransport
from hpc_serve.errors import HpcServeError, WaitTimeoutError
from hpc_serve.gateway.bodies import with_model
from hpc_serve.gateway.metrics import Counts
from hpc_serve.gateway.settings import Settings
from hpc_serve.gateway.turns import Turns
from hpc_serve.rendezvous.store import ServiceStore

# A replica may go between the wait and the request. How often a request waits for another one:
_MOST_ROUNDS = 3
_FIRST_LOOK_S = 10.0
_BRING_AGAIN_S = 5.0
_REFUSAL_COUNTS_S = 1.0
_MODELS_S = 3.0


def model_card(name: str) -> dict[str, Any]:
    """Return a model as OpenAI lists it, where no engine describes it."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "hpc-serve"}


class Front:
    """One service. Its engines answer to `names`."""

    def __init__(self, store: ServiceStore, service: str, settings: Settings, counts: Counts) -> None:
        self.service = service
        self.watch = ServiceWatch(store, service, may_wake=settings.wake)
        self.turns = Turns(service, most_in_flight=settings.most_in_flight, most_queued=settings.most_queued)
        self.counts = counts
        self.names: tuple[str, ...] = ()
        self.bring: Callable[[], Awaitable[None]] | None = None
        """Returns once the service is there or submitted, if it is started on demand."""
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

    async def ready(self) -> None:
        """Return once a replica is ready. Raises HpcServeError when none is in the time that a request waits."""
        clock = asyncio.get_running_loop().time
        until_s = clock() + self._wait_s
        while not self.is_ready:
            if self._refused is not None and clock() < self._refused[0]:
                raise self._refused[1]
            if self.bring is not None:
                await self.bring()
            search = self._searching()
            left_s = max(until_s - clock(), 0.0) + _FIRST_LOOK_S
            await asyncio.wait({search}, timeout=min(left_s, _BRING_AGAIN_S) if self.bring is not None else left_s)
            if not search.done() and self.bring is not None and clock() < until_s:
                continue  # somebody may have stopped it meanwhile
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
