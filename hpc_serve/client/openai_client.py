"""OpenAI clients of one service: the SDK's own classes, with a transport that finds the replicas.

They add the service's name and model, and an error of ours when there is no replica. Everything else is the SDK's.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from hpc_serve.client.discovery.discovery import ServiceWatch
from hpc_serve.client.discovery.wait import Wait, WaitPolicy, wait_for_replica
from hpc_serve.client.replicas.event_loops import InLoop, InThread, run_blocking
from hpc_serve.client.replicas.pool import Replica, known_replica
from hpc_serve.client.replicas.sdk import http, openai
from hpc_serve.client.requests.exchange import AsyncServiceTransport, NoReplicaError, ReplicaTransport, ServiceTransport

if TYPE_CHECKING:
    from typing_extensions import Self

# A replica may go between the wait and the request. How often a request waits for another one:
_MOST_ROUNDS = 3


class _RequestOver(BaseException):
    """The error of a request that is not to be sent again. The SDK before 2.40 sends one again after any Exception."""

    def __init__(self, error: openai.OpenAIError) -> None:
        super().__init__(str(error))
        self.error = error


class _ForSdk(ReplicaTransport):
    async def answer(self, request: http.Request) -> http.Response:
        try:
            return await super().answer(request)
        except openai.OpenAIError as error:
            raise _RequestOver(error) from error


class _Transport(_ForSdk, ServiceTransport):
    pass


class _AsyncTransport(_ForSdk, AsyncServiceTransport):
    pass


class _OfService:
    """What a client of the SDK has more when it is of one service."""

    _transport_of_service: type[_ForSdk]
    _http_client: Callable[..., Any]

    def __init__(self, *, watch: ServiceWatch, wait: Wait = None, resume: bool = True, **options: Any) -> None:
        self._watch = watch
        self._wait = wait
        self._resume = resume
        if options.get("http_client") is None:
            transport = self._transport_of_service(watch, resume=resume, wait=wait)
            options["http_client"] = self._http_client(transport=transport, trust_env=False)
        super().__init__(**(options if "base_url" in options else options | self._first_address()))

    def _first_address(self) -> dict[str, str]:
        """Return what the SDK requires, a copy has, and the transport replaces; in no variable, for tracebacks."""
        return {"base_url": self._watch.status.usable[0].base_url, "api_key": self._watch.api_key}

    @property
    def service(self) -> str:
        """The service's name."""
        return self._watch.service

    @property
    def model(self) -> str:
        """The name of its model, for `model=client.model`."""
        return self._watch.model

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """The replicas that are known, and how each is. Looks at nothing anew."""
        return tuple(known_replica(one, self._watch.pool) for one in self._watch.status.replicas)

    @property
    def last_replica(self) -> str | None:
        """The name of the replica that answered last in this thread or task, or else in any; None before that."""
        return self._watch.last_replica.name

    def copy(self, **changes: Any) -> Self:
        """A client for the same service with other options, as the SDK's `copy`."""
        inherited = {"watch": self._watch, "wait": self._wait, "resume": self._resume}
        copied: Self = super().copy(**changes, _extra_kwargs=inherited)  # type: ignore[misc]
        return copied

    with_options = copy

    def _make_status_error(self, err_msg: str, *, body: object, response: http.Response) -> openai.APIStatusError:
        """The SDK's own; it says no more than 404 of a route that an engine lacks."""
        if response.status_code == 404 and body == {"detail": "Not Found"}:
            err_msg += f" - {self.service} has no {response.url.path}: its model is of another kind."
        sdk: Any = super()
        error: openai.APIStatusError = sdk._make_status_error(err_msg, body=body, response=response)
        return error

    async def _when_ready(self, here: InThread | InLoop, ask: Callable[[], Awaitable[Any]]) -> Any:
        """The SDK's answer, asked for once a replica is ready."""
        policy = WaitPolicy(self._wait)
        for rounds_left in reversed(range(_MOST_ROUNDS)):
            await wait_for_replica(self._watch, policy, here)
            try:
                return await ask()
            except _RequestOver as over:
                raise over.error from over.error.__cause__
            except openai.APIConnectionError as error:
                if not rounds_left or not isinstance(error.__cause__, NoReplicaError):
                    raise


class ServiceClient(_OfService, openai.OpenAI):
    """An `openai.OpenAI` for one service; `base_url` is that of one replica, requests go to any."""

    _transport_of_service, _http_client = _Transport, openai.DefaultHttpxClient

    def request(self, *args: Any, **options: Any) -> Any:
        """The SDK's own, once a replica is ready. Raises ServiceNotFoundError, ServiceFailedError, WaitTimeoutError."""
        sdk: Any = super()

        async def ask() -> Any:
            return sdk.request(*args, **options)

        return run_blocking(self._when_ready(InThread(), ask))


class AsyncServiceClient(_OfService, openai.AsyncOpenAI):
    """An `openai.AsyncOpenAI` for one service; `base_url` is that of one replica, requests go to any."""

    _transport_of_service, _http_client = _AsyncTransport, openai.DefaultAsyncHttpxClient

    async def request(self, *args: Any, **options: Any) -> Any:
        """The SDK's own, once a replica is ready. Raises ServiceNotFoundError, ServiceFailedError, WaitTimeoutError."""
        sdk: Any = super()
        return await self._when_ready(InLoop(), functools.partial(sdk.request, *args, **options))
