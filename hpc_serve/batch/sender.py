"""Asks a service for the answer to one line, brings the client back, and bounds the requests under way.

The client chooses a replica and repeats what was lost with one; the SDK repeats what an engine may answer later (408,
409, 429, 5xx). What remains is the line's error. After the service was gone, the client is brought back to it.

As many requests may be under way as the replicas take (the sum of their --max-num-seqs), with no long queue at any. The
window shrinks where requests wait at the engines, and grows again where few wait. So several clients of one service
share it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_serve.batch.answer_files import Answer, Progress
from hpc_serve.batch.request_file import BatchRequest
from hpc_serve.client import connect_async
from hpc_serve.client.access import open_store
from hpc_serve.client.discovery.discovery import ServiceWatch
from hpc_serve.client.engine_work import WorkWatch
from hpc_serve.errors import ServiceFailedError, ServiceNotFoundError

if TYPE_CHECKING:
    from hpc_serve.client.openai_client import AsyncServiceClient

# -- how many requests may be under way

_USUAL_SEQUENCES = 256  # of a replica whose record has no plan
_QUEUE_SHARE = 8  # an eighth of what runs may wait, so that an engine never lacks work


def _next_window(window: int, most: int, *, running: float, waiting: float) -> int:
    """Return the next bound on requests under way.

    >>> _next_window(288, 288, running=256, waiting=30), _next_window(288, 288, running=64, waiting=224)
    (288, 230)
    >>> _next_window(100, 288, running=100, waiting=0)
    118
    >>> _next_window(5, 9, running=5, waiting=0)
    6
    """
    if waiting > running / _QUEUE_SHARE:
        return max(1, window * 4 // 5)
    return min(max(most, 1), window + max(1, most // 16))


class ReplicaView:
    """Looks at the replicas of a service and writes what it sees into `progress`. For one thread at a time."""

    def __init__(self, service: str, home: str | Path | None, progress: Progress, clients: int) -> None:
        store = open_store(home)
        self._watch = ServiceWatch(store, service)
        self._works = WorkWatch(store.read_api_key)
        self._progress = progress
        self._clients = clients

    def look(self, passed_s: float) -> None:
        """Renew window, replicas and GPU-hours; `passed_s` seconds went by since the last look."""
        status, progress = self._watch.refresh(is_complete=True), self._progress
        ready = status.ready
        gpus = sum(
            one.record.num_gpus
            for one in status.replicas
            if one.record is not None and not one.is_over and one.state != "unknown"
        )
        progress.gpu_hours += gpus * passed_s / 3600
        progress.replicas = len(ready)
        takes = sum(int(one.predicted.get("max_num_seqs") or _USUAL_SEQUENCES) for one in ready)
        most = takes + takes // _QUEUE_SHARE
        if not progress.window:
            progress.window = max(1, most // self._clients)
            return
        works = [work.now for work in self._works.look(ready)]
        running = [work.running for work in works if work.running is not None]
        waiting = [work.waiting for work in works if work.waiting is not None]
        if works and len(running) == len(waiting) == len(works):  # one too busy to say leaves the window as it is
            progress.window = _next_window(progress.window, most, running=sum(running), waiting=sum(waiting))


# -- asking

_AGAIN_S = 5.0
# The client sends other requests to three replicas itself. This one may have left something behind at an engine.
_TRIES = {"/v1/responses": 3}


@dataclasses.dataclass(kw_only=True)
class Sender:
    """Asks the service as one of `clients`; brings its client back after the service was gone.

    `times_found` is how often the service was found.
    """

    progress: Progress
    service: str | None
    home: str | Path | None
    wait_s: float
    retries: int
    any_model: bool
    clients: int
    times_found: int = 0
    watched: ReplicaView | None = None
    _client: AsyncServiceClient | None = None

    async def connect(self) -> None:
        """Return once a replica is ready. Raises what `connect_async` raises if that takes longer than `wait`."""
        ends_s, waits = time.monotonic() + self.wait_s, "waits for the service"
        self.progress.stage = waits
        while True:
            try:
                # An answer takes as long as it takes: the client finds out itself when an engine is lost.
                client = await connect_async(
                    self.service, wait=True, wake=True, home=self.home, timeout=None, max_retries=self.retries
                )
            except (ServiceNotFoundError, ServiceFailedError) as error:
                if time.monotonic() > ends_s:
                    raise
                self.progress.stage = f"{waits} ({error})"
                await asyncio.sleep(min(_AGAIN_S, self.wait_s))
                continue
            self.service, self.progress.stage = client.service, "asks"
            self.times_found += 1
            if self._client is None:
                self._client = client
            else:  # the first one follows the service: a client for each time would be memory for each time
                await client.close()
            return

    def view(self) -> ReplicaView:
        assert self.service is not None
        self.watched = ReplicaView(self.service, self.home, self.progress, self.clients)
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
        if self.any_model or not body.get("model"):
            body["model"] = client.model
        answer = Answer(line=request.line, custom_id=request.custom_id, progress=self.progress)
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
                self.progress.count_tokens(content)
                name = response.headers.get("x-request-id", "")
                return dataclasses.replace(answer, status=response.status_code, request_id=name, body=content)
        raise AssertionError
