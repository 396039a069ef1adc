"""Below the OpenAI client: every request goes to a ready replica, and its answer comes from as many as that takes.

`exchange` decides where a request goes, when it is sent again and how a broken stream goes on. Here its steps are
carried out, once in threads and once for asyncio and trio.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, TypeVar, cast

import anyio.to_thread

from hpc_serve.client.connections.connections import Origins, make_async_transport, make_transport
from hpc_serve.client.connections.verified_streams import answer_begins
from hpc_serve.client.discovery.discovery import ServiceWatch
from hpc_serve.client.discovery.wait import Wait, wait_for_replica, wait_for_replica_async
from hpc_serve.client.replicas.sdk import http
from hpc_serve.client.requests.attempt import AsyncAttemptBody, AttemptBody
from hpc_serve.client.requests.exchange import Exchange, NoReplicaError, broken_stream
from hpc_serve.client.requests.steps import Call, Close, Fetch, Read, Send, Step, Steps
from hpc_serve.client.resume.received import CannotResumeError
from hpc_serve.client.resume.relay import Relay

__all__ = ["AsyncServiceTransport", "NoReplicaError", "ServiceTransport"]

EXCHANGE = "hpc_serve_exchange"
"""In the extensions of a response: the `Exchange` that it is the answer of."""

T = TypeVar("T")


class ServiceTransport(http.BaseTransport):
    """Sends requests to replicas of one service, whatever host their URL names."""

    def __init__(self, watch: ServiceWatch, *, resume: bool = True, wait: Wait = None) -> None:
        self._watch = watch
        self._resume = resume
        self._wait = wait
        self._origins = Origins(watch.lost)
        self._inner = make_transport(self._origins)

    def handle_request(self, request: http.Request) -> http.Response:
        exchange = Exchange(self._watch, self._origins, request, resume=self._resume, wait=self._wait)
        response = self.carry_out(exchange.answer())
        response.extensions[EXCHANGE] = exchange
        if exchange.relay is not None and exchange.goes_on(response):
            response.stream = _ResumedBody(self, exchange, exchange.relay, cast(AttemptBody, response.stream))
        return response

    def carry_out(self, steps: Steps[T]) -> T:
        """Carry out all steps; what they return."""
        try:
            step = next(steps)
            while True:
                try:
                    result = self._do(step)
                except BaseException as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(result)
        except StopIteration as end:
            return cast(T, end.value)

    def _do(self, step: Step) -> Any:
        if isinstance(step, Send):
            response = self._inner.handle_request(step.request)
            step.attempt.answered(response)
            response.stream = AttemptBody(response, step.attempt)
            return response
        if isinstance(step, Call):
            return step.function()
        if isinstance(step, Fetch | Read):
            response = step.response if isinstance(step, Read) else self._inner.handle_request(step.request)
            answer_begins(response)
            try:
                return response.read()
            finally:
                response.close()
        if isinstance(step, Close):
            return step.response.close()
        return wait_for_replica(self._watch, step.policy)

    def close(self) -> None:
        self._inner.close()


class AsyncServiceTransport(http.AsyncBaseTransport):
    """The same for an AsyncOpenAI. Reading files and probing run in threads."""

    def __init__(self, watch: ServiceWatch, *, resume: bool = True, wait: Wait = None) -> None:
        self._watch = watch
        self._resume = resume
        self._wait = wait
        self._origins = Origins(watch.lost)
        self._inner = make_async_transport(self._origins)

    async def handle_async_request(self, request: http.Request) -> http.Response:
        exchange = Exchange(self._watch, self._origins, request, resume=self._resume, wait=self._wait)
        response = await self.carry_out(exchange.answer())
        response.extensions[EXCHANGE] = exchange
        if exchange.relay is not None and exchange.goes_on(response):
            body = cast(AsyncAttemptBody, response.stream)
            response.stream = _AsyncResumedBody(self, exchange, exchange.relay, body)
        return response

    async def carry_out(self, steps: Steps[T]) -> T:
        """Carry out all steps; what they return."""
        try:
            step = next(steps)
            while True:
                try:
                    result = await self._do(step)
                except BaseException as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(result)
        except StopIteration as end:
            return cast(T, end.value)

    async def _do(self, step: Step) -> Any:
        if isinstance(step, Send):
            response = await self._inner.handle_async_request(step.request)
            step.attempt.answered(response)
            response.stream = AsyncAttemptBody(response, step.attempt)
            return response
        if isinstance(step, Call):
            return await anyio.to_thread.run_sync(step.function)
        if isinstance(step, Fetch | Read):
            if isinstance(step, Read):
                response = step.response
            else:
                response = await self._inner.handle_async_request(step.request)
            answer_begins(response)
            try:
                return await response.aread()
            finally:
                await response.aclose()
        if isinstance(step, Close):
            return await step.response.aclose()
        return await wait_for_replica_async(self._watch, step.policy)

    async def aclose(self) -> None:
        await self._inner.aclose()


class _ResumedBody(http.SyncByteStream):
    """A stream that goes on at another replica after a break. Raises StreamBrokenError where it cannot."""

    def __init__(self, transport: ServiceTransport, exchange: Exchange, relay: Relay, body: AttemptBody) -> None:
        self._transport = transport
        self._exchange = exchange
        self._relay = relay
        self._body = body
        self._is_over = False

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        if self._is_over:
            raise StopIteration
        self._is_over = True  # whatever is raised here ends it
        relay = self._relay
        while True:
            failure: Exception | None = None
            try:
                while not relay.failure:
                    if passed := relay.feed(next(self._body)):
                        self._is_over = False
                        return passed
            except StopIteration:
                pass
            except http.TransportError as error:
                failure = error
            except CannotResumeError as error:
                raise broken_stream(relay, self._replica, error, "it was resumed once") from None
            if relay.is_done:
                raise StopIteration
            failure = failure or http.RemoteProtocolError(relay.failure or "it ended early")
            self._body.attempt.end(is_suspect=True)
            self._body.close()
            if (rest := relay.rest()) is not None:
                return rest
            response = self._transport.carry_out(self._exchange.go_on(relay, self._replica, failure))
            self._body = cast(AttemptBody, response.stream)

    @property
    def _replica(self) -> str:
        return self._body.attempt.replica.name

    def close(self) -> None:
        self._body.close()


class _AsyncResumedBody(http.AsyncByteStream):
    """The same for asyncio and trio."""

    def __init__(
        self, transport: AsyncServiceTransport, exchange: Exchange, relay: Relay, body: AsyncAttemptBody
    ) -> None:
        self._transport = transport
        self._exchange = exchange
        self._relay = relay
        self._body = body
        self._is_over = False

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self._is_over:
            raise StopAsyncIteration
        self._is_over = True  # whatever is raised here ends it
        relay = self._relay
        while True:
            failure: Exception | None = None
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
                raise broken_stream(relay, self._replica, error, "it was resumed once") from None
            if relay.is_done:
                raise StopAsyncIteration
            failure = failure or http.RemoteProtocolError(relay.failure or "it ended early")
            self._body.attempt.end(is_suspect=True)
            await self._body.aclose()
            if (rest := relay.rest()) is not None:
                return rest
            response = await self._transport.carry_out(self._exchange.go_on(relay, self._replica, failure))
            self._body = cast(AsyncAttemptBody, response.stream)

    @property
    def _replica(self) -> str:
        return self._body.attempt.replica.name

    async def aclose(self) -> None:
        await self._body.aclose()
