"""One request of a user and the replicas that it is sent to: which one, whether again, and how a broken stream goes on.

No work was begun after a refused connection, after our gate's "draining", and after an error of an engine that is being
stopped: the next replica gets the request at once. What may be sent again after it was lost with a replica says
`repeats`. The same code serves threads and event loops: `here` is how it waits, and on which connections it sends.
"""

from __future__ import annotations

import contextlib
import functools
import json

from hpc_serve.client.connections.connections import Connections
from hpc_serve.client.connections.message import Answer, Message
from hpc_serve.client.discovery.discovery import ServiceWatch
from hpc_serve.client.discovery.wait import Wait, WaitPolicy, wait_for_replica
from hpc_serve.client.replicas.beginnings import beginnings
from hpc_serve.client.replicas.pool import ReplicaAddress
from hpc_serve.client.replicas.sdk import http
from hpc_serve.client.requests.attempt import Attempt, AttemptBody
from hpc_serve.client.requests.repeats import MOST_ENGINES, Repeats, never_arrived
from hpc_serve.client.resume.received import CannotResumeError
from hpc_serve.client.resume.relay import Ask, Relay, Steps
from hpc_serve.client.resume.request import read_request
from hpc_serve.errors import HpcServeError, StreamBrokenError
from hpc_serve.rendezvous.gate_headers import is_draining

# A request that was lost waits for another replica as long as `connect(wait=…)` says, and for so long without it.
LOST_WAIT_S = 10.0
CONNECT_S = 5.0
CONNECT_FIRST_S = 1.5  # where another replica can be tried: one lost packet is sent again after 1 s


class NoReplicaError(http.ConnectError):
    """No ready replica is left for this request."""


class Exchange:
    """One request. `relay` is there if its answer is a stream that can be watched over.

    `sent` counts how often it was sent from its beginning, `resumed` how often its stream went on at another replica.
    """

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
        content = request.content
        asked = read_request(request.path, content, request.fields) if resume and content is not None else None
        self.relay: Relay | None = Relay(asked) if asked is not None else None

    async def answer(self) -> Answer:
        """The response of the first replica that has one."""
        failure: BaseException | None = None
        while True:
            try:
                attempt = await self._find()
            except (HpcServeError, NoReplicaError) as error:
                if not self._repeats.lost:
                    raise
                raise self._repeats.as_lost(f"no other one is ready: {error}") from failure
            self._request.show(attempt.replica)
            self.sent += 1
            try:
                response = await self._send(self._addressed(attempt), attempt)
            except BaseException as error:
                attempt.end_with(error)
                self._repeats.count(error)
                if self._repeats.may_follow(error):
                    failure = error
                    continue
                if (shown := self._repeats.shown(error)) is error:
                    raise
                raise shown from error
            if response.status_code < 500:
                return response
            try:
                self._watch.mark_suspect(attempt.replica)
                if not (await self._is_for_another(response, attempt.replica)):
                    return response
            except BaseException:
                await response.aclose()
                raise
            await response.aclose()

    def goes_on(self, response: Answer) -> bool:
        """Whether a break of this response is ours to mend."""
        return self.relay is not None and response.is_event_stream and "content-encoding" not in response.headers

    async def go_on(self, relay: Relay, replica: str, failure: BaseException) -> Answer:
        """The response that continues a stream which broke at a replica. Raises StreamBrokenError."""
        self._repeats.lost += 1
        while True:
            try:
                asks = relay.steps()
                ask, is_last = _next(asks)
                if self._repeats.is_over:
                    raise CannotResumeError(self._repeats.why_over)
                attempt = await self._find()
            except CannotResumeError as error:
                raise broken_stream(relay, replica, failure, str(error)) from failure
            except (HpcServeError, NoReplicaError) as error:
                raise broken_stream(relay, replica, failure, f"no other one is ready: {error}") from failure
            replica = attempt.replica.name
            try:
                while not is_last:
                    ask, is_last = _next(asks, await self._fetch(self._asking(ask, attempt)))
                response = await self._send(self._asking(ask, attempt), attempt)
                if response.status_code == 200:
                    relay.go_on(replica)
                    self.resumed += relay.is_continued
                    self.sent += not relay.is_continued
                    return response
                said = await self._read(response)
            except CannotResumeError as error:
                attempt.end()
                raise broken_stream(relay, replica, failure, str(error)) from failure
            except BaseException as error:
                attempt.end_with(error)
                if not isinstance(error, http.TransportError):
                    raise
                failure = error
                self._repeats.lost += not never_arrived(failure)
                continue
            failure = http.RemoteProtocolError(f"HTTP {response.status_code}: {said.decode(errors='replace')[:200]}")
            if response.status_code < 500:
                raise broken_stream(relay, replica, failure, "it does not go on there") from None
            self._watch.mark_suspect(attempt.replica)

    # -- which replica

    async def _find(self) -> Attempt:
        """A replica that was not tried; for a request that was lost, one that was tried and is back. NoReplicaError."""
        attempt = self._take(self._tried)
        if attempt is None:
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
        self._tried.add(attempt.replica.name)
        return attempt

    def _take(self, tried: set[str] | frozenset[str]) -> Attempt | None:
        pool = self._watch.pool
        lacking = pool.lacking(self._model) if pool.is_uneven else frozenset()
        replica = self._watch.pick(tried | lacking, self._begins)
        if replica is None:
            return None
        return Attempt(self._watch, replica, shows_signs=self._request.wants_signs)

    @functools.cached_property
    def _model(self) -> str:
        """What the request names as its model."""
        with contextlib.suppress(ValueError, AttributeError, RecursionError):
            model = (self._request.fields or json.loads(self._request.content or b"{}")).get("model")
            return model if isinstance(model, str) else ""
        return ""

    # -- whether again

    async def _is_for_another(self, response: Answer, replica: ReplicaAddress) -> bool:
        """Whether this 5xx means that no work was begun, so that another replica may get the request.

        vLLM answers 500 to requests that arrive while it shuts down, and to requests that broke it. The record tells
        which: a request that broke one engine must not be sent to the next.
        """
        if not self._repeats.is_replayable:
            return False
        if response.status_code == 503:
            return is_draining(response.headers)
        if response.status_code != 500:
            return False
        return await self._here.call(self._watch.is_being_stopped, replica)

    # -- sending

    async def _send(self, message: Message, attempt: Attempt) -> Answer:
        """The response to a request; its body was not read."""
        response = await self._here.send(message)
        attempt.answered(response)
        response.stream = AttemptBody(response.stream, attempt)
        return response

    async def _fetch(self, message: Message) -> bytes:
        """The whole body of the response to a request of our own."""
        return await self._read(await self._here.send(message))

    async def _read(self, response: Answer) -> bytes:
        try:
            return await response.aread()
        finally:
            await response.aclose()

    def _addressed(self, attempt: Attempt) -> Message:
        content = self.relay.request.content if self.relay is not None else None
        connect_s = CONNECT_FIRST_S if self._watch.pool.has_others(self._tried) else CONNECT_S
        return self._request.to(attempt.replica, content=content, connect_s=connect_s)

    def _asking(self, ask: Ask, attempt: Attempt) -> Message:
        return self._request.own(attempt.replica, ask.method, ask.path.encode(), ask.content, CONNECT_S)


def _next(asks: Steps, answer: bytes | None = None) -> tuple[Ask, bool]:
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
