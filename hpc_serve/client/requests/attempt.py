"""One request at one replica, and whether it may be sent again after it failed, or which error its user gets.

An attempt counts as under way until it ends, and is the body of the answer for its reader. The pool is told how long it
took, and whether its replica failed. A stream is read to the end of its body before its user gets its `[DONE]`, so that
its connection serves the next request.

No work was begun after a refused connection. A request that was lost with a replica may be sent to another one if it
has no side effects, and to three in all: it may be what ends engines. Any other failure is the user's. exchange.py
carries that out.
"""

from __future__ import annotations

import time
from contextlib import suppress

from hpc_serve.client.connections.engine_connection import Body, EngineAnswer
from hpc_serve.client.connections.message import Message
from hpc_serve.client.discovery.discovery import ServiceWatch
from hpc_serve.client.replicas.pool import Kind, ReplicaAddress
from hpc_serve.client.replicas.sdk import http, openai
from hpc_serve.client.resume.stream import DONE_EVENT

MOST_ENGINES = 3
# The SDK closes a stream at `[DONE]`. Only the chunk that ends the body is to come then: it is waited for so long.
END_S = 0.2
# What an engine is asked for without leaving anything behind. All of vLLM's that generate, score or embed.
_WITHOUT_EFFECT = (
    *("/completions", "/embeddings", "/pooling", "/classify", "/score", "/rerank", "/tokenize", "/detokenize"),
    *("/audio/transcriptions", "/audio/translations"),
)


class Repeats:
    """One request, and with how many replicas it was lost."""

    def __init__(self, request: Message) -> None:
        self._request = request
        self.lost = 0

    @property
    def is_over(self) -> bool:
        """Whether it was lost with as many replicas as it may be."""
        return self.lost >= MOST_ENGINES

    @property
    def why_over(self) -> str:
        return f"{self.lost} replicas were lost with it"

    @property
    def is_without_effect(self) -> bool:
        return self._request.method in ("GET", "HEAD") or self._request.path.endswith(_WITHOUT_EFFECT)

    def may_follow(self, failure: BaseException) -> bool:
        """Count a failure; return whether the request may be sent once more. An upload that was streamed is gone."""
        if never_arrived(failure):
            return True
        if not _was_lost(failure):
            return False
        self.lost += 1
        return not self.is_over and self.is_without_effect and self._request.content is not None

    def shown(self, failure: BaseException) -> BaseException:
        """The error for the SDK. After any but its own it would send the request again by itself."""
        if _was_lost(failure):
            return self.as_lost(self.why_over if self.is_without_effect else "it may have had an effect")
        if isinstance(failure, http.ReadTimeout | http.WriteTimeout) and not self.is_without_effect:
            return openai.APITimeoutError(request=self._request.of_user)
        return failure

    def as_lost(self, reason: str) -> openai.APIConnectionError:
        """The error of a request that was lost; `reason` is why it is not sent again."""
        text = f"The request was lost with its replica and is not sent again: {reason}."
        return openai.APIConnectionError(message=text, request=self._request.of_user)


def never_arrived(error: BaseException) -> bool:
    """Whether no engine received anything of the request."""
    return isinstance(error, http.ConnectError | http.ConnectTimeout)


def _was_lost(error: BaseException) -> bool:
    """Whether the connection broke before an answer came."""
    return isinstance(error, http.NetworkError | http.RemoteProtocolError) and not never_arrived(error)


class Attempt(Body):
    """One request at one replica. It counts as under way from the pool's choice until `end`, which counts once.

    A body that breaks makes the replica suspect. `is_whole`: all of the answer came.
    """

    answer: EngineAnswer
    """Its answer, once it has begun."""

    def __init__(self, watch: ServiceWatch, replica: ReplicaAddress) -> None:
        self._watch = watch
        self._process = watch.pool.process
        self._is_under_way = True
        self._began_at_s = time.monotonic()
        self._kind: Kind | None = None
        self._is_begun = False
        self._more: bytes | None = None
        self.replica = replica
        self.is_whole = False

    def answered(self, answer: EngineAnswer) -> None:
        """The replica's answer has begun."""
        self.answer = answer
        if answer.status_code == 200:  # a refusal is quick
            self._kind = "stream" if answer.is_event_stream else "whole"
        self._watch.last_replica.note(self.replica.name)

    async def read(self) -> bytes | None:
        if more := self._more:
            self._more = None
            return more
        try:
            piece = await self.answer.read()
        except http.TransportError as error:
            self.end_with(error)
            raise
        if piece is None:
            self.is_whole = True
        elif self._kind == "stream":
            if not self._is_begun:
                self._is_begun = True
                self._watch.pool.note_first(self.replica, time.monotonic() - self._began_at_s)
            if self.is_whole or piece.endswith(DONE_EVENT):
                self.is_whole = True
                # Nothing follows `[DONE]`. Without an end of the body in time the connection is closed.
                self.answer.timeout_s = END_S
                with suppress(http.TransportError):
                    self._more = await self.answer.read()
        return piece

    def end(self, *, is_suspect: bool = False) -> None:
        """The request is over; the replica may be at fault."""
        pool = self._watch.pool
        if not self._is_under_way or self._process is not pool.process:  # after a fork it is the other process's
            return
        self._is_under_way = False
        kind = None if is_suspect else self._kind
        took_s = time.monotonic() - self._began_at_s
        # A replica that answers with an error, whole as it may be, is not well again.
        pool.give_back(self.replica, kind, took_s, is_whole=self.is_whole and kind is not None)
        if is_suspect:
            self._watch.mark_suspect(self.replica)

    def end_with(self, error: BaseException) -> None:
        """The request failed. A failed connection makes the replica suspect; a full connection pool is our own."""
        self.end(is_suspect=isinstance(error, http.TransportError) and not isinstance(error, http.PoolTimeout))

    async def aclose(self) -> None:
        self.end()
        self.answer.close()

    def __del__(self) -> None:
        self.end()
