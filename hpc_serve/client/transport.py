"""Below the OpenAI client: every request goes to a ready replica, and to another one if no engine began to work on it.

This decides which requests are safe to repeat. No work was begun after a refused connection, after our gate's
"draining", and after an error of an engine that is being stopped: the next replica gets the request at once. After any
other failure the engine may have worked on it, so the failure goes to the SDK, whose `max_retries` decides. A replica
that failed is not offered again before it was probed.

Each attempt is watched while it is under way (`request_watch`): at a replica that is lost it fails at once.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from typing import cast

import anyio.to_thread

from hpc_serve.client.connections import Origins, make_async_transport, make_transport
from hpc_serve.client.discovery import ServiceWatch
from hpc_serve.client.pool import ReplicaAddress
from hpc_serve.client.sdk import http
from hpc_serve.rendezvous.gate_headers import is_draining

CONNECT_S = 5.0


class NoReplicaError(http.ConnectError):
    """No ready replica is left for this request."""


class ReplicaLostError(http.ReadError):
    """The replica was lost while it had the request; the message says why that is believed."""


class ServiceTransport(http.BaseTransport):
    """Sends requests to replicas of one service, whatever host their URL names."""

    def __init__(self, watch: ServiceWatch) -> None:
        self._watch = watch
        self._origins = Origins()
        self._inner = make_transport(self._origins)

    def handle_request(self, request: http.Request) -> http.Response:
        routing = _Routing(self._watch, request, self._origins)
        while True:
            attempt = routing.next_attempt()
            if attempt is None:
                self._watch.refresh()
                attempt = routing.next_attempt_or_error()
            try:
                response = self._inner.handle_request(_on_connection_to(attempt.replica, request, self._origins))
            except BaseException as error:
                lost = attempt.end_with(error)
                if _never_arrived(error):
                    continue
                if lost is not None:
                    raise lost from error
                raise
            attempt.heard_at_s = time.monotonic()
            body = _CountedBody(cast(http.SyncByteStream, response.stream), attempt)
            if response.status_code >= 500:
                self._watch.mark_suspect(attempt.replica)
                if routing.may_go_elsewhere(attempt, response):
                    body.close()
                    continue
            response.stream = body
            return response

    def close(self) -> None:
        self._inner.close()


class AsyncServiceTransport(http.AsyncBaseTransport):
    """The same for an AsyncOpenAI. Reading files and probing run in threads."""

    def __init__(self, watch: ServiceWatch) -> None:
        self._watch = watch
        self._origins = Origins()
        self._inner = make_async_transport(self._origins)

    async def handle_async_request(self, request: http.Request) -> http.Response:
        routing = _Routing(self._watch, request, self._origins)
        while True:
            attempt = routing.next_attempt()
            if attempt is None:
                await anyio.to_thread.run_sync(self._watch.refresh)
                attempt = routing.next_attempt_or_error()
            try:
                response = await self._inner.handle_async_request(
                    _on_connection_to(attempt.replica, request, self._origins)
                )
            except BaseException as error:
                lost = attempt.end_with(error)
                if _never_arrived(error):
                    continue
                if lost is not None:
                    raise lost from error
                raise
            attempt.heard_at_s = time.monotonic()
            body = _AsyncCountedBody(cast(http.AsyncByteStream, response.stream), attempt)
            try:
                if response.status_code >= 500:
                    self._watch.mark_suspect(attempt.replica)
                    if await anyio.to_thread.run_sync(routing.may_go_elsewhere, attempt, response):
                        await body.aclose()
                        continue
            except BaseException:
                await body.aclose()
                raise
            response.stream = body
            return response

    async def aclose(self) -> None:
        await self._inner.aclose()


class _Attempt:
    """One request at one replica. It counts as under way from the pool's choice until `end`, which counts once.

    `abandon` is called from another thread while it is under way.
    """

    def __init__(self, watch: ServiceWatch, replica: ReplicaAddress, origins: Origins) -> None:
        self._watch = watch
        self._origins = origins
        self._is_under_way = True
        self.why_lost: str | None = None
        self.heard_at_s = float("-inf")
        self.replica = replica
        watch.requests.begin(self)

    def abandon(self) -> None:
        """The replica is lost: whoever waits for it gets ReplicaLostError, with `why_lost`."""
        self._origins.cut(self.replica)

    def end(self, *, is_suspect: bool = False) -> None:
        """The request is over; the replica may be at fault."""
        if not self._is_under_way:
            return
        self._is_under_way = False
        self._watch.requests.end(self)
        self._watch.pool.give_back(self.replica)
        if is_suspect:
            self._watch.mark_suspect(self.replica)

    def end_with(self, error: BaseException) -> ReplicaLostError | None:
        """The request failed. A failed connection makes the replica suspect; a full connection pool is our own.

        Returns the error to raise if it failed because it was abandoned.
        """
        is_failed_connection = isinstance(error, http.TransportError) and not isinstance(error, http.PoolTimeout)
        self.end(is_suspect=is_failed_connection)
        if self.why_lost is None or not is_failed_connection:
            return None
        return ReplicaLostError(f"{self.replica.name} is lost: {self.why_lost}")


class _Routing:
    """One request and the replicas it was sent to."""

    def __init__(self, watch: ServiceWatch, request: http.Request, origins: Origins) -> None:
        self._watch = watch
        self._request = request
        self._origins = origins
        self._tried: set[str] = set()

    def next_attempt(self) -> _Attempt | None:
        """Choose a replica that was not tried and address the request to it; None if none is known."""
        replica = self._watch.pick(self._tried)
        if replica is None:
            return None
        self._tried.add(replica.name)
        _send_to(self._request, replica)
        return _Attempt(self._watch, replica, self._origins)

    def next_attempt_or_error(self) -> _Attempt:
        """The same. Raises NoReplicaError if none is known."""
        if (attempt := self.next_attempt()) is not None:
            return attempt
        tried = f" ({len(self._tried)} tried)" if self._tried else ""
        raise NoReplicaError(f"no ready replica of {self._watch.service} is left for this request{tried}")

    def may_go_elsewhere(self, attempt: _Attempt, response: http.Response) -> bool:
        """Whether this 5xx means that no work was begun, so that another replica may get the request.

        vLLM answers 500 to requests that arrive while it shuts down, and to requests that broke it. The record tells
        which: a request that broke one engine must not be sent to the next. Reads the records for a 500.
        """
        if not _is_replayable(self._request):
            return False
        if response.status_code == 503:
            return is_draining(response.headers)
        return response.status_code == 500 and self._watch.is_being_stopped(attempt.replica)


def _send_to(request: http.Request, replica: ReplicaAddress) -> None:
    """Rewrite the request's URL and headers for that replica."""
    scheme = "http" if replica.identity.certificate is None else "https"
    request.url = request.url.copy_with(scheme=scheme, host=replica.host, port=replica.port)
    request.headers["Host"] = request.url.netloc.decode("ascii")
    # Always the service's own key: the SDK may have taken keys and headers meant for OpenAI from the environment.
    request.headers["Authorization"] = f"Bearer {replica.identity.api_key}"
    timeout = dict(request.extensions.get("timeout") or {})
    timeout["connect"] = min(timeout.get("connect") or CONNECT_S, CONNECT_S)
    request.extensions = {**request.extensions, "timeout": timeout}


def _on_connection_to(replica: ReplicaAddress, request: http.Request, origins: Origins) -> http.Request:
    """The request as the inner transport takes it: its URL names the connections that are verified for this replica."""
    url = request.url.copy_with(scheme="http", host=origins.origin_of(replica))
    return http.Request(
        request.method, url, headers=request.headers, stream=request.stream, extensions=request.extensions
    )


def _never_arrived(error: BaseException) -> bool:
    """Whether no engine received anything of the request."""
    return isinstance(error, http.ConnectError | http.ConnectTimeout)


def _is_replayable(request: http.Request) -> bool:
    """Whether the body is held in memory. An upload that was streamed is gone."""
    try:
        return request.content is not None
    except http.RequestNotRead:
        return False


class _CountedBody(http.SyncByteStream):
    """A response's body. Its end ends the attempt; a body that breaks makes the replica suspect."""

    def __init__(self, body: http.SyncByteStream, attempt: _Attempt) -> None:
        self._body = body
        self._attempt = attempt

    def __iter__(self) -> Iterator[bytes]:
        try:
            for chunk in self._body:
                self._attempt.heard_at_s = time.monotonic()
                yield chunk
        except http.TransportError as error:
            if (lost := self._attempt.end_with(error)) is not None:
                raise lost from error
            raise

    def close(self) -> None:
        self._attempt.end()
        self._body.close()

    def __del__(self) -> None:
        self._attempt.end()


class _AsyncCountedBody(http.AsyncByteStream):
    def __init__(self, body: http.AsyncByteStream, attempt: _Attempt) -> None:
        self._body = body
        self._attempt = attempt

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._body:
                self._attempt.heard_at_s = time.monotonic()
                yield chunk
        except http.TransportError as error:
            if (lost := self._attempt.end_with(error)) is not None:
                raise lost from error
            raise

    async def aclose(self) -> None:
        self._attempt.end()
        await self._body.aclose()

    def __del__(self) -> None:
        self._attempt.end()
