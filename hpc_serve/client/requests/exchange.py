"""One request of a user and the replicas that it is sent to: which one, whether again, and how a broken stream goes on.

No work was begun after a refused connection, after our gate's "draining", and after an error of an engine that is being
stopped: the next replica gets the request at once. attempt.py says what may be sent again after it was lost with a
replica. The same code serves threads and event loops: `here` is how it waits, and on which connections it sends. The
transports are what the HTTP library below an OpenAI client calls.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace

from hpc_serve.client.connections.connections import Connections, LoopConnections, ThreadConnections
from hpc_serve.client.connections.engine_connection import Body, EngineAnswer
from hpc_serve.client.connections.message import Message
from hpc_serve.client.discovery.discovery import ServiceWatch
from hpc_serve.client.discovery.wait import Wait, WaitPolicy, wait_for_replica
from hpc_serve.client.replicas.event_loops import run_blocking
from hpc_serve.client.replicas.pool import ReplicaAddress, beginnings
from hpc_serve.client.replicas.sdk import http
from hpc_serve.client.requests.attempt import MOST_ENGINES, Attempt, Repeats, never_arrived
from hpc_serve.client.resume.relay import Ask, Relay, Steps
from hpc_serve.client.resume.stream import CannotResumeError, read_request
from hpc_serve.errors import HpcServeError, StreamBrokenError, error_text
from hpc_serve.rendezvous.gate_headers import is_draining

EXCHANGE = "hpc_serve_exchange"
"""In the extensions of a response: the `Exchange` that it is the answer of."""
# A request that was lost waits for another replica as long as `connect(wait=…)` says, and for so long without it.
LOST_WAIT_S = 10.0
CONNECT_S = 5.0  # where another replica can be tried, a connection may take as long as a replica may be silent


class NoReplicaError(http.ConnectError):
    """No ready replica is left for this request."""


class Exchange:
    """One request and, after `begin`, its `answer` with the `body`, from as many replicas as that takes.

    `relay` is there if the answer is a stream that can be watched over. `sent` counts how often the request was sent
    from its beginning, `resumed` how often its stream went on at another replica.
    """

    answer: EngineAnswer
    """The head of the answer."""
    body: Body
    replica: str
    """The name of the record of the replica that answered first."""

    def __init__(self, watch: ServiceWatch, here: Connections, request: Message, *, resume: bool, wait: Wait) -> None:
        self._watch = watch
        self._here = here
        self._request = request
        self._wait = wait
        self._waiting: WaitPolicy | None = None
        self._tried: set[str] = set()
        self._returns = 0
        self._repeats = Repeats(request)
        self._begins = beginnings(request.content) if request.content and len(watch.pool) > 1 else None
        self.sent = 0
        self.resumed = 0
        self.relay: Relay | None = None
        content = request.content
        if resume and content and b'"stream"' in content:
            asked = read_request(request.path, content, request.fields)
            if asked is not None:
                self.relay, self._request = Relay(asked), replace(request, content=asked.content)

    async def begin(self) -> None:
        """Have the request answered by the first replica that does."""
        failure: BaseException | None = None
        while True:
            try:
                attempt = self._take(self._tried) or await self._find()
            except (HpcServeError, NoReplicaError) as error:
                if not self._repeats.lost:
                    raise
                raise self._repeats.as_lost(f"no other one is ready: {error}") from failure
            self._request.show(attempt.replica)
            self.sent += 1
            try:
                connect_s = CONNECT_S
                if self._watch.pool.has_others(self._tried):
                    connect_s = min(self._watch.lost.limit_s(attempt.replica.name), CONNECT_S)
                attempt.answered(await self._here.send(self._request, attempt.replica, connect_s))
            except BaseException as error:
                attempt.end_with(error)
                if self._repeats.may_follow(error):
                    failure = error
                    continue
                if (shown := self._repeats.shown(error)) is error:
                    raise
                raise shown from error
            status = attempt.answer.status_code
            if status < 500 and status != 404:
                return self._take_answer(attempt)
            try:
                if status >= 500:
                    self._watch.mark_suspect(attempt.replica)
                if not (await self._is_for_another(attempt.answer, attempt.replica)):
                    return self._take_answer(attempt)
            except BaseException:
                await attempt.aclose()
                raise
            await attempt.aclose()

    def _take_answer(self, attempt: Attempt) -> None:
        self.answer, self.body, self.replica = attempt.answer, attempt, attempt.replica.name
        if self.relay is not None and self.answer.is_event_stream and "content-encoding" not in self.answer.headers:
            self.body = _ResumedBody(self, self.relay, attempt)  # a break is ours to mend

    async def go_on(self, relay: Relay, replica: str, failure: BaseException) -> Attempt:
        """The attempt whose answer continues a stream which broke at a replica. Raises StreamBrokenError."""
        self._repeats.lost += 1
        try:
            while True:
                asks = relay.steps()
                ask, is_last = _next(asks)
                if self._repeats.is_over:
                    raise CannotResumeError(self._repeats.why_over)
                attempt = self._take(self._tried) or await self._find()
                replica = attempt.replica.name
                try:
                    while not is_last:
                        found = await self._here.send(self._asking(ask), attempt.replica, CONNECT_S)
                        ask, is_last = _next(asks, await found.read_all())
                    attempt.answered(await self._here.send(self._asking(ask), attempt.replica, CONNECT_S))
                    status = attempt.answer.status_code
                    if status == 200:
                        relay.go_on(replica)
                        self.resumed += relay.is_continued
                        self.sent += not relay.is_continued
                        return attempt
                    said = await attempt.read_all()
                except BaseException as error:
                    attempt.end_with(error)
                    if not isinstance(error, http.TransportError):
                        raise
                    failure = error
                    self._repeats.lost += not never_arrived(failure)
                    continue
                failure = http.RemoteProtocolError(f"HTTP {status}: {said.decode(errors='replace')[:200]}")
                if status < 500:
                    raise CannotResumeError("it does not go on there")
                self._watch.mark_suspect(attempt.replica)
        except CannotResumeError as error:
            raise _broken_stream(relay, replica, failure, str(error)) from failure
        except (HpcServeError, NoReplicaError) as error:
            raise _broken_stream(relay, replica, failure, f"no other one is ready: {error}") from failure

    # -- which replica

    async def _find(self) -> Attempt:
        """A replica that is new; for a request that was lost, one that was tried and is back. NoReplicaError."""
        await self._here.call(self._watch.refresh)
        attempt = self._take(self._tried)
        if attempt is None and self._repeats.lost and self._returns < MOST_ENGINES:
            self._waiting = self._waiting or WaitPolicy(self._wait or LOST_WAIT_S)
            await wait_for_replica(self._watch, self._waiting, self._here)
            attempt = self._take(self._tried)
            if attempt is None and (attempt := self._take(frozenset())) is not None:
                self._returns += 1
        if attempt is None:
            tried = f" ({len(self._tried)} tried)" if self._tried else ""
            raise NoReplicaError(f"no ready replica of {self._watch.service} is left for this request{tried}")
        return attempt

    def _take(self, tried: set[str] | frozenset[str]) -> Attempt | None:
        pool = self._watch.pool
        lacking = pool.lacking(self._model) if pool.is_uneven else frozenset()
        replica = self._watch.pick(tried | lacking, self._begins)
        if replica is None:
            return None
        self._tried.add(replica.name)
        return Attempt(self._watch, replica)

    @property
    def _model(self) -> str:
        """What the request names as its model."""
        with contextlib.suppress(ValueError, AttributeError, RecursionError):
            model = (self._request.fields or json.loads(self._request.content or b"{}")).get("model")
            return model if isinstance(model, str) else ""
        return ""

    # -- whether again

    async def _is_for_another(self, answer: EngineAnswer, replica: ReplicaAddress) -> bool:
        """Whether this 404 or 5xx means that no work was begun, so that another replica may get the request.

        vLLM answers 404 for an adapter that it lacks, and a replica that is not known yet may have it. It answers 500
        to requests that arrive while it shuts down, and to requests that broke it. The record tells which: a request
        that broke one engine must not be sent to the next.
        """
        if self._request.content is None:
            return False
        if answer.status_code == 404:
            with contextlib.suppress(HpcServeError):
                await self._here.call(self._watch.refresh)
            model = self._model
            return any(model in other.adapters for other in self._watch.pool.others(self._tried))
        if answer.status_code == 503:
            return is_draining(answer.headers)
        if answer.status_code != 500:
            return False
        return await self._here.call(self._watch.is_being_stopped, replica)

    # -- sending

    def _asking(self, ask: Ask) -> Message:
        """Return a request of our own, with the headers and timeouts of the user's."""
        return replace(self._request, method=ask.method, target=ask.path.encode(), content=ask.content, of_user=None)


def _next(asks: Steps, answer: bytes | None = None) -> tuple[Ask, bool]:
    """The next request of a continuation, and whether it is the last."""
    try:
        return asks.send(json.loads(answer) if answer is not None else None), False
    except StopIteration as end:
        last: Ask = end.value
        return last, True
    except ValueError as error:
        raise CannotResumeError("another replica answered what is no JSON") from error


def _broken_stream(relay: Relay, replica: str, failure: BaseException, reason: str) -> StreamBrokenError:
    """The error that ends a stream which broke at a replica; `reason` is why it does not go on."""
    received, why = relay.read(), error_text(failure)
    return StreamBrokenError(
        f"The stream broke at {replica} ({why}) and cannot go on at another replica: {reason}. This error holds what"
        f" had come of the answer: {len(received.text)} characters.",
        replica=replica,
        text=received.text,
        token_ids=received.ids,
        chunks=received.chunks,
    )


class _ResumedBody(Body):
    """A stream that goes on at another replica after a break. Raises StreamBrokenError where it cannot."""

    def __init__(self, exchange: Exchange, relay: Relay, attempt: Attempt) -> None:
        self._exchange = exchange
        self._relay = relay
        self._attempt = attempt
        self._is_over = False
        self._is_closed = False

    async def read(self) -> bytes | None:
        if self._is_over:
            return None
        self._is_over = True  # whatever is raised here ends it
        relay = self._relay
        while True:
            failure: Exception | None = None
            replica = self._attempt.replica.name
            try:
                while not relay.failure and (piece := await self._attempt.read()) is not None:
                    if passed := relay.feed(piece):
                        self._is_over = False
                        return passed
            except http.TransportError as error:
                failure = error
            except CannotResumeError as error:
                raise _broken_stream(relay, replica, error, "it was resumed once") from None
            if relay.is_done:
                return None
            if self._is_closed and failure is not None:  # by another thread
                raise failure
            failure = failure or http.RemoteProtocolError(relay.failure or "it ended early")
            self._attempt.end(is_suspect=True)
            await self._attempt.aclose()
            if (rest := relay.rest()) is not None:
                return rest
            self._attempt = await self._exchange.go_on(relay, replica, failure)

    async def aclose(self) -> None:
        self._is_closed = True
        await self._attempt.aclose()


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
