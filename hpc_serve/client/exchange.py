"""One request of a user and the replicas that it is sent to: which one, whether again, and how a broken stream goes on.

No work was begun after a refused connection, after our gate's "draining", and after an error of an engine that is being
stopped: the next replica gets the request at once. A request that was lost with a replica is sent to another one if it
has no side effects, at most twice: it may be what ends engines. Any other failure is the user's. The transports carry
out what is decided here: each step that waits for something is handed to them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from hpc_serve.client.addressing import CONNECT_FIRST_S, CONNECT_S, addressed, own_request, shown_url
from hpc_serve.client.attempt import Attempt
from hpc_serve.client.connections import Origins
from hpc_serve.client.discovery import ServiceWatch
from hpc_serve.client.pool import ReplicaAddress
from hpc_serve.client.resume.received import CannotResumeError
from hpc_serve.client.resume.relay import Ask, Relay
from hpc_serve.client.resume.relay import Steps as Asks
from hpc_serve.client.resume.request import read_request
from hpc_serve.client.sdk import http, openai
from hpc_serve.client.wait import Wait, WaitPolicy
from hpc_serve.errors import HpcServeError, StreamBrokenError
from hpc_serve.rendezvous.gate_headers import is_draining

# A request that was lost waits for another replica as long as `connect(wait=…)` says, and for so long without it.
LOST_WAIT_S = 10.0
MOST_ENGINES = 3

# What an engine is asked for without leaving anything behind. All of vLLM's that generate, score or embed.
_WITHOUT_EFFECT = (
    *("/completions", "/embeddings", "/pooling", "/classify", "/score", "/rerank", "/tokenize", "/detokenize"),
    *("/audio/transcriptions", "/audio/translations"),
)


class NoReplicaError(http.ConnectError):
    """No ready replica is left for this request."""


@dataclass(frozen=True)
class Send:
    """Send a request; the answer is a response whose body was not read."""

    request: http.Request
    attempt: Attempt


@dataclass(frozen=True)
class Fetch:
    """Send a request; the answer is the whole body of its response."""

    request: http.Request


@dataclass(frozen=True)
class Call:
    """Call a function that waits for files or probes; the answer is what it returns."""

    function: Callable[[], Any]


@dataclass(frozen=True)
class WaitForReplica:
    policy: WaitPolicy


@dataclass(frozen=True)
class Read:
    """Read a response to its end and close it; the answer is its bytes."""

    response: http.Response


@dataclass(frozen=True)
class Close:
    response: http.Response


Step = Send | Fetch | Call | WaitForReplica | Read | Close
T = TypeVar("T")
Steps = Generator[Step, Any, T]


class Exchange:
    """One request. `relay` is there if its answer is a stream that can be watched over.

    `sent` counts how often it was sent from its beginning, `resumed` how often its stream went on at another replica.
    """

    def __init__(
        self, watch: ServiceWatch, origins: Origins, request: http.Request, *, resume: bool, wait: Wait
    ) -> None:
        self._watch = watch
        self._origins = origins
        self._request = request
        self._wait = wait
        self._waiting: WaitPolicy | None = None
        self._tried: set[str] = set()
        self._lost = 0
        self.sent = 0
        self.resumed = 0
        content = request.content if _is_replayable(request) else None
        self._prompt_bytes = len(content or b"")
        asked = read_request(request.url.path, content) if resume and content is not None else None
        self.relay: Relay | None = Relay(asked) if asked is not None else None

    def answer(self) -> Steps[http.Response]:
        """The response of the first replica that has one."""
        failure: BaseException | None = None
        while True:
            try:
                attempt = yield from self._find()
            except HpcServeError as error:
                if failure is None:
                    raise
                raise self._as_lost(f"no other one is ready: {error}") from failure
            self._request.url = shown_url(self._request.url, attempt.replica)
            self.sent += 1
            try:
                response: http.Response = yield Send(self._addressed(attempt), attempt)
            except BaseException as error:
                failure = attempt.end_with(error)
                if _never_arrived(failure) or self._may_be_repeated(failure):
                    continue
                shown = self._shown(failure)
                if shown is failure:
                    raise failure from failure.__cause__
                raise shown from failure
            if response.status_code < 500:
                return response
            try:
                self._watch.mark_suspect(attempt.replica)
                if not (yield from self._is_for_another(response, attempt.replica)):
                    return response
            except BaseException:
                yield Close(response)
                raise
            yield Close(response)

    def goes_on(self, response: http.Response) -> bool:
        """Whether a break of this response is ours to mend."""
        is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
        return self.relay is not None and is_stream and "content-encoding" not in response.headers

    def go_on(self, relay: Relay, replica: str, failure: BaseException) -> Steps[http.Response]:
        """The response that continues a stream which broke at a replica. Raises StreamBrokenError."""
        self._lost += 1
        while True:
            try:
                asks = relay.steps()
                ask, is_last = _next(asks)
                if self._lost >= MOST_ENGINES:
                    raise CannotResumeError(f"{self._lost} replicas were lost with it")
                attempt = yield from self._find()
            except CannotResumeError as error:
                raise broken_stream(relay, replica, failure, str(error)) from failure
            except (HpcServeError, NoReplicaError) as error:
                raise broken_stream(relay, replica, failure, f"no other one is ready: {error}") from failure
            replica = attempt.replica.name
            try:
                while not is_last:
                    ask, is_last = _next(asks, (yield Fetch(self._asking(ask, attempt))))
                response: http.Response = yield Send(self._asking(ask, attempt), attempt)
            except CannotResumeError as error:
                attempt.end()
                raise broken_stream(relay, replica, failure, str(error)) from failure
            except BaseException as error:
                failure = attempt.end_with(error)
                if not isinstance(failure, http.TransportError):
                    raise
                self._lost += not _never_arrived(failure)
                continue
            if response.status_code == 200:
                relay.go_on(replica)
                self.resumed += relay.is_continued
                self.sent += not relay.is_continued
                return response
            said: bytes = yield Read(response)
            failure = http.RemoteProtocolError(f"HTTP {response.status_code}: {said.decode(errors='replace')[:200]}")
            if response.status_code < 500:
                raise broken_stream(relay, replica, failure, "it does not go on there") from None
            self._watch.mark_suspect(attempt.replica)

    # -- which replica

    def _find(self) -> Steps[Attempt]:
        """A replica that was not tried; for a request that was lost, one that was tried and is back. NoReplicaError."""
        attempt = self._take(self._tried)
        if attempt is None:
            yield Call(self._watch.refresh)
            attempt = self._take(self._tried)
        if attempt is None and self._lost:
            self._waiting = self._waiting or WaitPolicy(self._wait or LOST_WAIT_S)
            yield WaitForReplica(self._waiting)
            attempt = self._take(self._tried) or self._take(frozenset())
        if attempt is None:
            tried = f" ({len(self._tried)} tried)" if self._tried else ""
            raise NoReplicaError(f"no ready replica of {self._watch.service} is left for this request{tried}")
        self._tried.add(attempt.replica.name)
        return attempt

    def _take(self, tried: set[str] | frozenset[str]) -> Attempt | None:
        replica = self._watch.pick(tried)
        return Attempt(self._watch, replica, self._origins, self._prompt_bytes) if replica is not None else None

    # -- whether again

    def _may_be_repeated(self, failure: BaseException) -> bool:
        if not _was_lost(failure):
            return False
        self._lost += 1
        return self._lost < MOST_ENGINES and self._is_without_effect and _is_replayable(self._request)

    @property
    def _is_without_effect(self) -> bool:
        path = self._request.url.path
        return self._request.method in ("GET", "HEAD") or path.endswith(_WITHOUT_EFFECT)

    def _shown(self, failure: BaseException) -> BaseException:
        """The error for the SDK. After any but its own it would send the request again by itself."""
        if _was_lost(failure):
            lost = f"{self._lost} replicas were lost with it"
            return self._as_lost(lost if self._is_without_effect else "it may have had an effect")
        if isinstance(failure, http.ReadTimeout | http.WriteTimeout) and not self._is_without_effect:
            return openai.APITimeoutError(request=self._request)
        return failure

    def _as_lost(self, reason: str) -> openai.APIConnectionError:
        text = f"The request was lost with its replica and is not sent again: {reason}."
        return openai.APIConnectionError(message=text, request=self._request)

    def _is_for_another(self, response: http.Response, replica: ReplicaAddress) -> Steps[bool]:
        """Whether this 5xx means that no work was begun, so that another replica may get the request.

        vLLM answers 500 to requests that arrive while it shuts down, and to requests that broke it. The record tells
        which: a request that broke one engine must not be sent to the next.
        """
        if not _is_replayable(self._request):
            return False
        if response.status_code == 503:
            return is_draining(response.headers)
        if response.status_code != 500:
            return False
        is_being_stopped: bool = yield Call(lambda: self._watch.is_being_stopped(replica))
        return is_being_stopped

    def _addressed(self, attempt: Attempt) -> http.Request:
        content = self.relay.request.content if self.relay is not None else None
        connect_s = CONNECT_FIRST_S if self._watch.pool.has_others(self._tried) else CONNECT_S
        return addressed(self._request, attempt.replica, self._origins, content=content, connect_s=connect_s)

    def _asking(self, ask: Ask, attempt: Attempt) -> http.Request:
        return own_request(self._request, attempt.replica, self._origins, ask)


def _next(asks: Asks, answer: bytes | None = None) -> tuple[Ask, bool]:
    """The next request of a continuation, and whether it is the last."""
    try:
        return asks.send(json.loads(answer) if answer is not None else None), False
    except StopIteration as end:
        last: Ask = end.value
        return last, True
    except ValueError as error:
        raise CannotResumeError("another replica answered what is no JSON") from error


def broken_stream(relay: Relay, replica: str, failure: BaseException, reason: str) -> StreamBrokenError:
    """The error that ends a stream which broke at a replica; `reason` is why it does not go on."""
    received, why = relay.read(), str(failure) or type(failure).__name__
    return StreamBrokenError(
        f"The stream broke at {replica} ({why}) and cannot go on at another replica: {reason}. This error holds what"
        f" had come of the answer: {len(received.text)} characters.",
        replica=replica,
        text=received.text,
        token_ids=received.ids,
        chunks=received.chunks,
    )


def _never_arrived(error: BaseException) -> bool:
    """Whether no engine received anything of the request."""
    return isinstance(error, http.ConnectError | http.ConnectTimeout)


def _was_lost(error: BaseException) -> bool:
    """Whether the connection broke before an answer came."""
    return isinstance(error, http.NetworkError | http.RemoteProtocolError) and not _never_arrived(error)


def _is_replayable(request: http.Request) -> bool:
    """Whether the body is held in memory. An upload that was streamed is gone."""
    try:
        return request.content is not None
    except http.RequestNotRead:
        return False
