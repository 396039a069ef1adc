"""Below the OpenAI client: every request goes to a ready replica, and its answer comes from as many as that takes.

`exchange` decides where a request goes, when it is sent again and how a broken stream goes on.
"""

from __future__ import annotations

from typing import cast

from hpc_serve.client.connections.connections import LoopConnections, ThreadConnections
from hpc_serve.client.connections.message import Answer, Message
from hpc_serve.client.discovery.discovery import ServiceWatch
from hpc_serve.client.discovery.wait import Wait
from hpc_serve.client.replicas.event_loops import run_blocking
from hpc_serve.client.replicas.sdk import http
from hpc_serve.client.requests.attempt import AttemptBody, Body
from hpc_serve.client.requests.exchange import Exchange, broken_stream
from hpc_serve.client.resume.received import CannotResumeError
from hpc_serve.client.resume.relay import Relay

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
        response = await self.ask(Message.of(request))
        return response.as_http()

    async def ask(self, request: Message) -> Answer:
        """Return the answer to a request; its body was not read."""
        exchange = Exchange(self._watch, self._here, request, resume=self._resume, wait=self._wait)
        response = await exchange.answer()
        response.extensions[EXCHANGE] = exchange
        if exchange.relay is not None and exchange.goes_on(response):
            response.stream = _ResumedBody(exchange, exchange.relay, cast(AttemptBody, response.stream))
        return response


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


class _ResumedBody(Body):
    """A stream that goes on at another replica after a break. Raises StreamBrokenError where it cannot."""

    def __init__(self, exchange: Exchange, relay: Relay, body: AttemptBody) -> None:
        self._exchange = exchange
        self._relay = relay
        self._body = body
        self._is_over = False
        self._is_closed = False

    async def __anext__(self) -> bytes:
        if self._is_over:
            raise StopAsyncIteration
        self._is_over = True  # whatever is raised here ends it
        relay = self._relay
        while True:
            failure: Exception | None = None
            replica = self._body.attempt.replica.name
            try:
                while not relay.failure:
                    if passed := relay.feed(await anext(self._body)):
                        self._is_over = False
                        return passed
            except StopAsyncIteration:
                pass
            except http.TransportError as error:
                failure = error
            except CannotResumeError as error:
                raise broken_stream(relay, replica, error, "it was resumed once") from None
            if relay.is_done:
                raise StopAsyncIteration
            if self._is_closed and failure is not None:  # by another thread
                raise failure
            failure = failure or http.RemoteProtocolError(relay.failure or "it ended early")
            self._body.attempt.end(is_suspect=True)
            await self._body.aclose()
            if (rest := relay.rest()) is not None:
                return rest
            response = await self._exchange.go_on(relay, replica, failure)
            self._body = cast(AttemptBody, response.stream)

    async def aclose(self) -> None:
        self._is_closed = True
        await self._body.aclose()
