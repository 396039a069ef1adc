"""One request at one replica: it counts as under way until it ends.

The pool is told how long each attempt took, and whether its replica failed. Signs that the replica lives do not reach
the user of a stream. A stream is read to the end of its body before its user gets its `[DONE]`, so that its connection
serves the next request. What a failed attempt means for the request is decided in `exchange`.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

from hpc_serve.client.connections.engine_connection import EngineAnswer
from hpc_serve.client.connections.message import Answer
from hpc_serve.client.discovery.discovery import ServiceWatch
from hpc_serve.client.replicas.event_loops import run_blocking
from hpc_serve.client.replicas.pool import ReplicaAddress
from hpc_serve.client.replicas.sdk import http
from hpc_serve.client.replicas.speeds import Kind
from hpc_serve.client.resume.received import DONE_EVENT
from hpc_serve.rendezvous.gate_headers import COMMENT

# The SDK closes a stream at `[DONE]`. Only the chunk that ends the body is to come then: it is waited for so long.
END_S = 0.2


class Attempt:
    """One request at one replica. It counts as under way from the pool's choice until `end`, which counts once.

    `shows_signs`: the user has asked for signs, and gets those within a stream. `is_whole`: all of the answer came.
    """

    def __init__(self, watch: ServiceWatch, replica: ReplicaAddress, *, shows_signs: bool = False) -> None:
        self._watch = watch
        self._process = os.getpid()
        self._is_under_way = True
        self._began_at_s = time.monotonic()
        self._kind: Kind | None = None
        self.replica = replica
        self.shows_signs = shows_signs
        self.is_whole = False

    def answered(self, response: Answer) -> None:
        """The replica's answer has begun."""
        if response.status_code == 200:  # a refusal is quick
            self._kind = "stream" if response.is_event_stream else "whole"
        self._watch.last_replica.note(self.replica.name)

    @property
    def is_stream(self) -> bool:
        """Whether the answer is a stream of events."""
        return self._kind == "stream"

    def heard_first(self) -> None:
        """The first bytes of the answer have come."""
        if self.is_stream:
            self._watch.pool.note_time(self.replica, "first", time.monotonic() - self._began_at_s)

    def end(self, *, is_suspect: bool = False) -> None:
        """The request is over; the replica may be at fault."""
        if not self._is_under_way or self._process != os.getpid():  # after a fork it is the other process's
            return
        self._is_under_way = False
        kind = None if is_suspect else self._kind
        took_s = time.monotonic() - self._began_at_s
        # A replica that answers with an error, whole as it may be, is not well again.
        self._watch.pool.give_back(self.replica, kind, took_s, is_whole=self.is_whole and kind is not None)
        if is_suspect:
            self._watch.mark_suspect(self.replica)

    def end_with(self, error: BaseException) -> None:
        """The request failed. A failed connection makes the replica suspect; a full connection pool is our own."""
        self.end(is_suspect=isinstance(error, http.TransportError) and not isinstance(error, http.PoolTimeout))


class Body(http.SyncByteStream, http.AsyncByteStream):
    """A response's body, for threads and event loops. A kind of body has `__anext__` and `aclose`."""

    # No generators: the SDK leaves one suspended at `[DONE]`, and the event loop makes a task to end each of them.
    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        raise NotImplementedError

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        try:
            return run_blocking(self.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def close(self) -> None:
        run_blocking(self.aclose())


class AttemptBody(Body):
    """The body of an attempt's answer. Its end ends the attempt; a body that breaks makes the replica suspect."""

    def __init__(self, answer: EngineAnswer, attempt: Attempt) -> None:
        self._answer = answer
        self._is_begun = False
        self._more: bytes | None = None
        self.attempt = attempt

    async def __anext__(self) -> bytes:
        if more := self._more:
            self._more = None
            return more
        attempt = self.attempt
        try:
            while (piece := await anext(self._answer, None)) == COMMENT and self._hides_signs:
                pass
        except http.TransportError as error:
            attempt.end_with(error)
            raise
        if piece is None:
            attempt.is_whole = True
            raise StopAsyncIteration
        if not self._is_begun:
            self._is_begun = True
            attempt.heard_first()
        if attempt.is_stream and (attempt.is_whole or piece.endswith(DONE_EVENT)):
            attempt.is_whole = True
            self._more = await self._read_end()
        return piece

    @property
    def _hides_signs(self) -> bool:
        return self.attempt.is_stream and not self.attempt.shows_signs

    async def _read_end(self) -> bytes | None:
        """What follows `[DONE]`, which is nothing. Without an end of the body in time the connection is closed."""
        self._answer.timeout_s = END_S
        with suppress(http.TransportError):
            return await anext(self._answer, None)
        return None

    async def aclose(self) -> None:
        self.attempt.end()
        self._answer.close()

    def __del__(self) -> None:
        self.attempt.end()
