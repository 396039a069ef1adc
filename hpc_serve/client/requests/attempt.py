"""One request at one replica: it counts as under way until it ends, and fails at once when its replica is lost.

Each attempt is watched while it is under way (`request_watch`), and the pool is told how long it took. A stream is read
to the end of its body before its user gets its `[DONE]`, so that its connection serves the next request. What a failed
attempt means for the request is decided in `exchange`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import Protocol, cast

from hpc_serve.client.connections.connections import Origins
from hpc_serve.client.connections.origins import OpenConnection
from hpc_serve.client.connections.verified_streams import reads_within
from hpc_serve.client.discovery.discovery import ServiceWatch
from hpc_serve.client.replicas.pool import ReplicaAddress
from hpc_serve.client.replicas.sdk import http
from hpc_serve.client.replicas.speeds import Kind
from hpc_serve.client.resume.received import DONE_EVENT

# The SDK closes a stream at `[DONE]`. Only the chunk that ends the body is to come then: it is waited for so long.
END_S = 0.2


class ReplicaLostError(http.ReadError):
    """The replica was lost while it had the request; the message says why that is believed."""


class Second(Protocol):
    """The same request at another replica, beside this one (`hedge`)."""

    def cancel(self) -> None: ...


class Attempt:
    """One request at one replica. It counts as under way from the pool's choice until `end`, which counts once.

    `abandon` is called from another thread while it is under way, as is `ask_beside`, where there is one.
    """

    def __init__(
        self,
        watch: ServiceWatch,
        replica: ReplicaAddress,
        origins: Origins,
        prompt_bytes: int = 0,
        *,
        is_second: bool = False,
    ) -> None:
        self._watch = watch
        self._origins = origins
        self._is_under_way = True
        self._unclaimed = [True]
        self._connection: OpenConnection | None = None
        self.is_second = is_second
        self.second: Second | None = None
        self.ask_beside: Callable[[Attempt], bool] | None = None
        self.why_lost: str | None = None
        self.began_at_s = time.monotonic()
        self.prompt_bytes = prompt_bytes
        self.heard_at_s = float("-inf")
        self.is_talking = False
        self.replica = replica
        self._kind: Kind | None = None
        watch.requests.begin(self)

    def abandon(self) -> None:
        """The replica is lost: whoever waits for it gets ReplicaLostError, with `why_lost`."""
        self._origins.cut(self.replica)

    def sends_on(self, connection: OpenConnection) -> None:
        """It has a connection, which is its own until it ends."""
        self._connection = connection
        if not self.is_unanswered:  # the second one's answer came while this one was connecting
            connection.cut()

    def cut(self) -> None:
        """End this request alone: a second one was answered. Under the lock of the requests under way."""
        if self._connection is not None:
            self._connection.cut(lambda: self._is_under_way)

    def claim_answer(self) -> bool:
        """Whether the request has no answer yet: who claims it first, this attempt or a second one, gives it."""
        try:
            return self._unclaimed.pop()
        except IndexError:
            return False

    @property
    def is_unanswered(self) -> bool:
        """Whether no answer has begun, neither its own nor that of a second request."""
        return bool(self._unclaimed)

    @property
    def is_waiting(self) -> bool:
        """Whether it is under way, and no answer has begun."""
        return self._is_under_way and self.is_unanswered

    def answered(self, response: http.Response) -> bool:
        """The replica's answer has begun. False: a second one's was there before, and this one is to be left."""
        if not self.claim_answer():
            return False
        self.heard_at_s = time.monotonic()
        if self.second is not None:
            self.second.cancel()
        if response.status_code == 200:  # a refusal is quick
            is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
            self._kind = "stream" if is_stream else "whole"
        if not self.is_second:
            self._watch.last_replica.note(self.replica.name)
        return True

    @property
    def is_stream(self) -> bool:
        """Whether the answer is a stream of events."""
        return self._kind == "stream"

    def heard_first(self) -> None:
        """The first bytes of the answer have come."""
        self.heard_at_s = time.monotonic()
        if self.is_stream:
            self.is_talking = True
            self._watch.pool.note_time(self.replica, "first", self.heard_at_s - self.began_at_s)

    def end(self, *, is_suspect: bool = False) -> None:
        """The request is over; the replica may be at fault."""
        if not self._is_under_way:
            return
        self._is_under_way = False
        self._watch.requests.end(self)
        kind = None if is_suspect else self._kind
        self._watch.pool.give_back(self.replica, kind, time.monotonic() - self.began_at_s)
        if is_suspect:
            self._watch.mark_suspect(self.replica)

    def end_with(self, error: BaseException) -> BaseException:
        """The request failed. A failed connection makes the replica suspect; a full connection pool is our own.

        Returns the error that it failed with: ReplicaLostError if it was abandoned.
        """
        is_failed_connection = isinstance(error, http.TransportError) and not isinstance(error, http.PoolTimeout)
        self.end(is_suspect=is_failed_connection)
        if self.why_lost is None or not is_failed_connection:
            return error
        lost = ReplicaLostError(f"{self.replica.name} is lost: {self.why_lost}")
        lost.__cause__ = error
        return lost


class AttemptBody(http.SyncByteStream):
    """A response's body. Its end ends the attempt; a body that breaks makes the replica suspect."""

    def __init__(self, response: http.Response, attempt: Attempt) -> None:
        self._body = cast(http.SyncByteStream, response.stream)
        self._pieces = iter(self._body)  # one: who iterates again after the end must not wait for more
        self._is_begun = False
        self._more = b""
        self._connection = response.extensions.get("network_stream")
        self.attempt = attempt

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        if self._more:
            more, self._more = self._more, b""
            return more
        try:
            piece = next(self._pieces)
        except http.TransportError as error:
            raise self.attempt.end_with(error) from error.__cause__
        if not self._is_begun:
            self._is_begun = True
            self.attempt.heard_first()
            return piece
        self.attempt.heard_at_s = time.monotonic()
        if self.attempt.is_stream and piece.endswith(DONE_EVENT):
            self._more = self._read_end()
        return piece

    def _read_end(self) -> bytes:
        """What follows `[DONE]`, which is nothing. Without an end of the body in time the connection is closed."""
        with reads_within(self._connection, END_S), suppress(http.TransportError):
            return next(self._pieces, b"")
        return b""

    def close(self) -> None:
        self.attempt.end()
        self._body.close()

    def __del__(self) -> None:
        self.attempt.end()


class AsyncAttemptBody(http.AsyncByteStream):
    """The same for asyncio and trio."""

    def __init__(self, response: http.Response, attempt: Attempt) -> None:
        self._body = cast(http.AsyncByteStream, response.stream)
        self._pieces = aiter(self._body)
        self._is_begun = False
        self._more = b""
        self._connection = response.extensions.get("network_stream")
        self.attempt = attempt

    # No async generator: the SDK leaves one suspended at `[DONE]`, and the event loop makes a task to end each of them.
    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self._more:
            more, self._more = self._more, b""
            return more
        try:
            piece = await anext(self._pieces)
        except http.TransportError as error:
            raise self.attempt.end_with(error) from error.__cause__
        if not self._is_begun:
            self._is_begun = True
            self.attempt.heard_first()
            return piece
        self.attempt.heard_at_s = time.monotonic()
        if self.attempt.is_stream and piece.endswith(DONE_EVENT):
            self._more = await self._read_end()
        return piece

    async def _read_end(self) -> bytes:
        with reads_within(self._connection, END_S), suppress(http.TransportError):
            return await anext(self._pieces, b"")
        return b""

    async def aclose(self) -> None:
        self.attempt.end()
        await self._body.aclose()

    def __del__(self) -> None:
        self.attempt.end()
