"""OpenAI clients of one service: the SDK's own classes, with a transport that finds the replicas.

They add the service's name and model, and an error of ours when there is no replica. Everything else is the SDK's.
"""

from __future__ import annotations

from typing import Any

from hpc_serve.client.discovery.discovery import ServiceWatch
from hpc_serve.client.discovery.wait import Wait, WaitPolicy, wait_for_replica, wait_for_replica_async
from hpc_serve.client.replicas.replicas import Replica, known_replicas
from hpc_serve.client.replicas.sdk import http, openai
from hpc_serve.client.requests.transport import AsyncServiceTransport, NoReplicaError, ServiceTransport

# A replica may go between the wait and the request. How often a request waits for another one:
_MOST_ROUNDS = 3


class _RequestOver(BaseException):
    """The error of a request that is not to be sent again. The SDK before 2.40 sends one again after any Exception."""

    def __init__(self, error: openai.OpenAIError) -> None:
        super().__init__(str(error))
        self.error = error


class _Transport(ServiceTransport):
    def handle_request(self, request: http.Request) -> http.Response:
        try:
            return super().handle_request(request)
        except openai.OpenAIError as error:
            raise _RequestOver(error) from error


class _AsyncTransport(AsyncServiceTransport):
    async def handle_async_request(self, request: http.Request) -> http.Response:
        try:
            return await super().handle_async_request(request)
        except openai.OpenAIError as error:
            raise _RequestOver(error) from error


class _OfService:
    _watch: ServiceWatch
    _wait: Wait
    _resume: bool

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
        return known_replicas(self._watch.status, self._watch.pool)

    @property
    def last_replica(self) -> str | None:
        """The name of the replica that answered last in this thread or task, or else in any; None before that."""
        return self._watch.last_replica.name

    @property
    def _inherited(self) -> dict[str, Any]:
        return {"watch": self._watch, "wait": self._wait, "resume": self._resume}


class ServiceClient(_OfService, openai.OpenAI):
    """An `openai.OpenAI` for one service; `base_url` is that of one replica, requests go to any."""

    def __init__(self, *, watch: ServiceWatch, wait: Wait = None, resume: bool = True, **options: Any) -> None:
        self._watch = watch
        self._wait = wait
        self._resume = resume
        if options.get("http_client") is None:
            transport = _Transport(watch, resume=resume, wait=wait)
            options["http_client"] = openai.DefaultHttpxClient(transport=transport, trust_env=False)
        super().__init__(**_with_endpoint(watch, options))

    def copy(self, **changes: Any) -> ServiceClient:
        """A client for the same service with other options, as the SDK's `copy`."""
        return super().copy(**changes, _extra_kwargs=self._inherited)

    with_options = copy

    def request(self, *args: Any, **options: Any) -> Any:
        """The SDK's own, once a replica is ready. Raises ServiceNotFoundError, ServiceFailedError, WaitTimeoutError."""
        policy = WaitPolicy(self._wait)
        for rounds_left in reversed(range(_MOST_ROUNDS)):
            wait_for_replica(self._watch, policy)
            try:
                return super().request(*args, **options)
            except _RequestOver as over:
                raise over.error from over.error.__cause__
            except openai.APIConnectionError as error:
                if not rounds_left or not isinstance(error.__cause__, NoReplicaError):
                    raise


class AsyncServiceClient(_OfService, openai.AsyncOpenAI):
    """An `openai.AsyncOpenAI` for one service; `base_url` is that of one replica, requests go to any."""

    def __init__(self, *, watch: ServiceWatch, wait: Wait = None, resume: bool = True, **options: Any) -> None:
        self._watch = watch
        self._wait = wait
        self._resume = resume
        if options.get("http_client") is None:
            transport = _AsyncTransport(watch, resume=resume, wait=wait)
            options["http_client"] = openai.DefaultAsyncHttpxClient(transport=transport, trust_env=False)
        super().__init__(**_with_endpoint(watch, options))

    def copy(self, **changes: Any) -> AsyncServiceClient:
        """A client for the same service with other options, as the SDK's `copy`."""
        return super().copy(**changes, _extra_kwargs=self._inherited)

    with_options = copy

    async def request(self, *args: Any, **options: Any) -> Any:
        """The SDK's own, once a replica is ready. Raises ServiceNotFoundError, ServiceFailedError, WaitTimeoutError."""
        policy = WaitPolicy(self._wait)
        for rounds_left in reversed(range(_MOST_ROUNDS)):
            await wait_for_replica_async(self._watch, policy)
            try:
                return await super().request(*args, **options)
            except _RequestOver as over:
                raise over.error from over.error.__cause__
            except openai.APIConnectionError as error:
                if not rounds_left or not isinstance(error.__cause__, NoReplicaError):
                    raise


def _with_endpoint(watch: ServiceWatch, options: dict[str, Any]) -> dict[str, Any]:
    """The options with an address and a key, which the SDK requires. The transport replaces both in every request."""
    if "base_url" in options:  # a copy has both
        return options
    return {**options, "base_url": watch.status.ready[0].base_url, "api_key": watch.api_key}
