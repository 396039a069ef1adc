"""Asks a service for the answer to one line, and brings the client back after the service was gone.

The client chooses a replica and repeats what was lost with one; the SDK repeats what an engine may answer later (408,
409, 429, 5xx). What remains is the line's error.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_serve.batch.progress import Answer, Progress
from hpc_serve.batch.request_file import BatchRequest
from hpc_serve.batch.window import ReplicaView
from hpc_serve.client import connect_async
from hpc_serve.errors import ServiceFailedError, ServiceNotFoundError

if TYPE_CHECKING:
    from hpc_serve.client.openai_client import AsyncServiceClient

_AGAIN_S = 5.0
# The client sends other requests to three replicas itself. This one may have left something behind at an engine.
_TRIES = {"/v1/responses": 3}


class Sender:
    """Asks the service; brings its client back after the service was gone."""

    def __init__(
        self,
        progress: Progress,
        *,
        service: str | None,
        home: str | Path | None,
        wait_s: float,
        retries: int,
        any_model: bool,
    ) -> None:
        self._progress = progress
        self._service, self._home, self._wait_s = service, home, wait_s
        self._retries, self._any_model = retries, any_model
        self._client: AsyncServiceClient | None = None
        self.times_found = 0
        """How often the service was found."""
        self.watched: ReplicaView | None = None

    async def connect(self) -> None:
        """Return once a replica is ready. Raises what `connect_async` raises if that takes longer than `wait`."""
        ends_s, waits = time.monotonic() + self._wait_s, "waits for the service"
        self._progress.stage = waits
        while True:
            try:
                # An answer takes as long as it takes: the client finds out itself when an engine is lost.
                client = await connect_async(
                    self._service, wait=True, wake=True, home=self._home, timeout=None, max_retries=self._retries
                )
            except (ServiceNotFoundError, ServiceFailedError) as error:
                if time.monotonic() > ends_s:
                    raise
                self._progress.stage = f"{waits} ({error})"
                await asyncio.sleep(min(_AGAIN_S, self._wait_s))
                continue
            self._service, self._progress.stage = client.service, "asks"
            self.times_found += 1
            if self._client is None:
                self._client = client
            else:  # the first one follows the service: a client for each time would be memory for each time
                await client.close()
            return

    def view(self, clients: int) -> ReplicaView:
        assert self._service is not None
        self.watched = ReplicaView(self._service, self._home, self._progress, clients)
        return self.watched

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    async def ask(self, request: BatchRequest) -> Answer:
        """Return the answer to a line, or its failure. Raises HpcServeError where the service is gone."""
        from hpc_serve.client.replicas.sdk import http, openai
        from hpc_serve.client.requests.exchange import NoReplicaError

        client, body = self._client, dict(request.body)
        assert client is not None
        if self._any_model or not body.get("model"):
            body["model"] = client.model
        answer = Answer(line=request.line, custom_id=request.custom_id, progress=self._progress)
        response: Any = None
        for tries_left in reversed(range(_TRIES.get(request.url, 1))):
            try:
                response = await client.post(request.url.removeprefix("/v1"), cast_to=http.Response, body=body)
                content = response.json()
            except openai.APIStatusError as error:
                return dataclasses.replace(
                    answer,
                    status=error.status_code,
                    request_id=error.request_id or "",
                    body=error.body,
                    error={"code": f"http_{error.status_code}", "message": error.message},
                )
            except openai.OpenAIError as error:
                if isinstance(error.__cause__, NoReplicaError):
                    raise ServiceNotFoundError(f"{client.service} has no replica now: {error}") from error
                if not tries_left:
                    return dataclasses.replace(answer, error={"code": "lost", "message": str(error)})
            except ValueError as error:  # such as half a character, or NaN
                code, what = ("not_sent", "request") if response is None else ("no_json", "answer")
                return dataclasses.replace(answer, error={"code": code, "message": f"The {what}: {error}"})
            else:
                self._progress.count_tokens(content)
                name = response.headers.get("x-request-id", "")
                return dataclasses.replace(answer, status=response.status_code, request_id=name, body=content)
        raise AssertionError
