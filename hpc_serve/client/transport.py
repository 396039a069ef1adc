"""Below the OpenAI client: every request goes to a live replica, and to another one if it never reached an engine.

What is safe to repeat is decided here. A refused connection, our gate's "draining" and the farewell of an engine that
is being stopped have started no work: the next replica gets the request at once. Any other failure may have, so it
goes back to the SDK, whose `max_retries` decides; its replica is not offered again before it was asked how it is.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import cast

import anyio.to_thread

from hpc_serve.client.discovery import ServiceWatch
from hpc_serve.client.pool import Target
from hpc_serve.client.sdk import http
from hpc_serve.job.gate import DRAINING_HEADER

CONNECT_S = 5.0

# As many connections as the SDK allows. vLLM closes idle ones after 5 s: drop them first, or a request meets the end.
_LIMITS = http.Limits(max_connections=1000, max_keepalive_connections=100, keepalive_expiry=4.0)


class NoReplicaError(http.ConnectError):
    """No live replica is left for this request."""


class ServiceTransport(http.BaseTransport):
    """Sends requests to replicas of one service, whatever host their URL names."""

    def __init__(self, watch: ServiceWatch) -> None:
        self._watch = watch
        self._inner = http.HTTPTransport(trust_env=False, limits=_LIMITS)

    def handle_request(self, request: http.Request) -> http.Response:
        trip = _Trip(self._watch, request)
        while True:
            if not trip.has_target():
                self._watch.look()
                trip.require_target()
            try:
                response = self._inner.handle_request(request)
            except BaseException as error:
                if trip.goes_on_after(error):
                    continue
                raise
            stream = _WatchedStream(cast(http.SyncByteStream, response.stream), trip.hand_over())
            if response.status_code >= 500 and trip.was_turned_away(response):
                stream.close()
                continue
            response.stream = stream
            return response

    def close(self) -> None:
        self._inner.close()


class AsyncServiceTransport(http.AsyncBaseTransport):
    """The same for an AsyncOpenAI; what blocks (files, probes) runs in threads."""

    def __init__(self, watch: ServiceWatch) -> None:
        self._watch = watch
        self._inner = http.AsyncHTTPTransport(trust_env=False, limits=_LIMITS)

    async def handle_async_request(self, request: http.Request) -> http.Response:
        trip = _Trip(self._watch, request)
        while True:
            if not trip.has_target():
                await anyio.to_thread.run_sync(self._watch.look)
                trip.require_target()
            try:
                response = await self._inner.handle_async_request(request)
            except BaseException as error:
                if trip.goes_on_after(error):
                    continue
                raise
            stream = _AsyncWatchedStream(cast(http.AsyncByteStream, response.stream), trip.hand_over())
            try:
                if response.status_code >= 500 and await anyio.to_thread.run_sync(trip.was_turned_away, response):
                    await stream.aclose()
                    continue
            except BaseException:
                await stream.aclose()
                raise
            response.stream = stream
            return response

    async def aclose(self) -> None:
        await self._inner.aclose()


class _Visit:
    """A request at one replica; it ends once, well or not."""

    def __init__(self, watch: ServiceWatch, target: Target) -> None:
        self._watch = watch
        self._under_way = True
        self.target = target

    def end(self, *, well: bool = True) -> None:
        if not self._under_way:
            return
        self._under_way = False
        self._watch.pool.give_back(self.target)
        if not well:
            self._watch.doubt(self.target)


class _Trip:
    """A request on its way from replica to replica: where it has been, and what each outcome means."""

    def __init__(self, watch: ServiceWatch, request: http.Request) -> None:
        self._watch = watch
        self._request = request
        self._tried: set[str] = set()
        self._visit: _Visit | None = None

    def has_target(self) -> bool:
        """Address the request to a replica it has not tried; False if none is known."""
        target = self._watch.pick(self._tried)
        if target is None:
            return False
        self._visit = _Visit(self._watch, target)
        self._tried.add(target.name)
        self._address(target)
        return True

    def require_target(self) -> None:
        """The same, or NoReplicaError."""
        if not self.has_target():
            tried = f" ({len(self._tried)} tried)" if self._tried else ""
            raise NoReplicaError(f"no live replica of {self._watch.service} is left for this request{tried}")

    def goes_on_after(self, error: BaseException) -> bool:
        """End the visit; whether the request may be repeated elsewhere because it reached nobody."""
        is_the_replicas = isinstance(error, http.TransportError) and not isinstance(error, http.PoolTimeout)
        self.hand_over().end(well=not is_the_replicas)
        return isinstance(error, http.ConnectError | http.ConnectTimeout)

    def hand_over(self) -> _Visit:
        """The visit under way; who takes it ends it."""
        assert self._visit is not None
        return self._visit

    def was_turned_away(self, response: http.Response) -> bool:
        """Whether this 5xx means that no work was begun and the request can go elsewhere. Reads records for a 500.

        vLLM answers 500 to requests that come while it shuts down, and to those that broke it: only a record that
        says so tells the first from the second, and the second must not be taken to the next replica.
        """
        target = self.hand_over().target
        self._watch.doubt(target)
        if not _is_replayable(self._request):
            return False
        if response.status_code == 503:
            return response.headers.get(DRAINING_HEADER[0].decode()) == DRAINING_HEADER[1].decode()
        return response.status_code == 500 and self._watch.is_being_stopped(target)

    def _address(self, target: Target) -> None:
        request = self._request
        request.url = request.url.copy_with(scheme="http", host=target.host, port=target.port)
        request.headers["Host"] = request.url.netloc.decode("ascii")
        # Always the service's own: the SDK would also take keys and headers meant for OpenAI from the environment.
        request.headers["Authorization"] = f"Bearer {self._watch.api_key}"
        timeout = dict(request.extensions.get("timeout") or {})
        timeout["connect"] = min(timeout.get("connect") or CONNECT_S, CONNECT_S)
        request.extensions = {**request.extensions, "timeout": timeout}


class _WatchedStream(http.SyncByteStream):
    """A response's body that ends its visit when it ends, and tells when it broke."""

    def __init__(self, stream: http.SyncByteStream, visit: _Visit) -> None:
        self._stream = stream
        self._visit = visit

    def __iter__(self) -> Iterator[bytes]:
        try:
            yield from self._stream
        except http.TransportError:
            self._visit.end(well=False)
            raise

    def close(self) -> None:
        self._visit.end()
        self._stream.close()

    def __del__(self) -> None:
        self._visit.end()


class _AsyncWatchedStream(http.AsyncByteStream):
    def __init__(self, stream: http.AsyncByteStream, visit: _Visit) -> None:
        self._stream = stream
        self._visit = visit

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._stream:
                yield chunk
        except http.TransportError:
            self._visit.end(well=False)
            raise

    async def aclose(self) -> None:
        self._visit.end()
        await self._stream.aclose()

    def __del__(self) -> None:
        self._visit.end()


def _is_replayable(request: http.Request) -> bool:
    """Whether the body is held in memory; an upload that was streamed is gone."""
    try:
        return request.content is not None
    except http.RequestNotRead:
        return False
