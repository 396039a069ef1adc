"""Below the OpenAI client: every request goes to a ready replica, and its answer comes from as many as that takes.

`exchange` decides where a request goes, when it is sent again and how a broken stream goes on.
"""

from __future__ import annotations

from hpc_serve.client.connections.connections import LoopConnections, ThreadConnections
from hpc_serve.client.connections.message import Message
from hpc_serve.client.discovery.discovery import ServiceWatch
from hpc_serve.client.discovery.wait import Wait
from hpc_serve.client.replicas.event_loops import run_blocking
from hpc_serve.client.replicas.sdk import http
from hpc_serve.client.requests.exchange import Exchange

EXCHANGE = "hpc_serve_exchange"
"""In the extensions of a response: the `Exchange` that it is the answer of."""


class ReplicaTransport:
    """Sends requests to replicas of one service, whatever host their URL names."""

    _connections: type[ThreadConnections] | type[LoopConnections]

    def __init__(self, watch: ServiceWatch, *, resume: bool = True, wait: Wait = None) -> None:
        self._watch = watch
        self._resume = resume
        self._wait = wait
        self._here = self._connections(watch.lost)

    async def answer(self, request: http.Request) -> http.Response:
        """Return the response to a request; its body was not read."""
        exchange = self.exchange(Message.of(request))
        await exchange.begin()
        answer, extensions = exchange.answer, {"http_version": b"HTTP/1.1", EXCHANGE: exchange}
        return http.Response(
            answer.status_code, headers=answer.raw_headers, stream=exchange.body, extensions=extensions
        )

    def exchange(self, request: Message) -> Exchange:
        """Return a request that is to be sent by `begin`."""
        return Exchange(self._watch, self._here, request, resume=self._resume, wait=self._wait)


class ServiceTransport(ReplicaTransport, http.BaseTransport):
    """For an OpenAI client in threads."""

    _connections = ThreadConnections

    def handle_request(self, request: http.Request) -> http.Response:
        return run_blocking(self.answer(request))

    def close(self) -> None:
        run_blocking(self._here.close_all())


class AsyncServiceTransport(ReplicaTransport, http.AsyncBaseTransport):
    """For an AsyncOpenAI. Reading files and probing run in threads."""

    _connections = LoopConnections

    async def handle_async_request(self, request: http.Request) -> http.Response:
        return await self.answer(request)

    async def aclose(self) -> None:
        await self._here.close_all()
