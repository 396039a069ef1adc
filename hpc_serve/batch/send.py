"""Runs a batch: sends its lines to a service, so many at once, and writes and yields each answer as it comes.

The client chooses a replica and repeats what was lost with one; the SDK repeats what an engine may answer later (408,
409, 429, 5xx). What remains is written as the line's error. A run that breaks off is gone on with by the same call.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio.to_thread

from hpc_serve.batch.answer_files import AnswerFile, errors_path, find_answers, shard_path, write_in_order
from hpc_serve.batch.progress import Answer, Progress
from hpc_serve.batch.request_file import BatchRequest, IdIndex, file_version, index_requests, read_requests
from hpc_serve.batch.window import ReplicaView
from hpc_serve.client import connect_async
from hpc_serve.errors import HpcServeError, InvalidRequestError, ServiceFailedError, ServiceNotFoundError

if TYPE_CHECKING:
    from hpc_serve.client.openai_client import AsyncServiceClient

_log = logging.getLogger(__name__)
_AGAIN_S = 5.0
_LINES_AT_ONCE = 256  # lines that are skipped before answers have their turn
_MOST_REFUSED = 100  # without one answer: the rest would be refused as well
# The client sends other requests to three replicas itself. This one may have left something behind at an engine.
_TRIES = {"/v1/responses": 3}


async def run(
    requests: str | Path,
    output: str | Path,
    *,
    service: str | None = None,
    wait: float = 600.0,
    shard: tuple[int, int] | None = None,
    in_order: bool = False,
    any_model: bool = False,
    retry_errors: bool = False,
    retries: int = 5,
    home: str | Path | None = None,
    on_need: Callable[[], None] = lambda: None,
    on_tick: Callable[[Progress], None] = lambda progress: None,
    tick_s: float = 5.0,
) -> AsyncIterator[Answer]:
    """Answer each line of `requests` that has no answer yet, and yield each answer once it is in `output`.

    The lines without an answer go to a second file (`errors_path`); `retry_errors` asks them again. Without a `service`
    it is the only one that is ready. A service that is gone is waited for `wait` seconds. `shard` (3, 16) takes every
    sixteenth line, from the third on, to a file of its own. `in_order` puts the output in the order of the requests at
    the end. `any_model` asks the service's model, whatever a line names. `retries` bounds how often an engine's 429 or
    5xx is tried again. `on_need` is called in a thread, before the service is looked for, if lines are left.
    Every `tick_s` seconds the engines are looked at, and `on_tick` is called. A service that is asleep is woken.

    Raises InvalidRequestError for a line that cannot be sent, before any is; StoreError where the output cannot be
    written; and what `connect_async` raises.
    """
    requests, output = Path(requests), Path(output)
    if shard is not None:
        if not 1 <= shard[0] <= shard[1]:
            raise InvalidRequestError(f"shard is {shard[0]}/{shard[1]}: it must be from 1/{shard[1]} on.")
        output = shard_path(output, shard)
    progress = Progress()
    with contextlib.ExitStack() as files:
        answers, errors = _open_files(requests, output, files, retry_errors=retry_errors)
        version = file_version(requests)
        index, done = await anyio.to_thread.run_sync(_find_done, requests, output, shard)
        progress.total = len(index) if shard is None else -(-(len(index) - shard[0] + 1) // shard[1])
        progress.before = sum(map(bool, done))
        if progress.left:
            await anyio.to_thread.run_sync(on_need)
            sender = _Sender(service=service, home=home, wait_s=wait, retries=retries, any_model=any_model)
            todo = _todo(requests, index, done, shard, version)
            async with contextlib.aclosing(
                _send_all(todo, sender, progress, _tick(sender, progress, on_tick, tick_s), shard)
            ) as sent:
                async for answer in sent:
                    (errors if answer.error else answers).append(answer.json_line)
                    progress.answered += answer.error is None
                    progress.failed += answer.error is not None
                    yield answer
        for file in (answers, errors):
            file.sync()
        if in_order:
            for path in (output, errors_path(output)):
                await anyio.to_thread.run_sync(write_in_order, requests, index, [path], path)


def _open_files(
    requests: Path, output: Path, files: contextlib.ExitStack, *, retry_errors: bool
) -> tuple[AnswerFile, AnswerFile]:
    failed = errors_path(output)
    for path in (output, failed):
        if path.exists() and requests.exists() and path.samefile(requests):
            raise InvalidRequestError(f"{path} would be read and written: name another output.")
    answers = AnswerFile(output)
    files.callback(answers.close)
    if retry_errors and failed.exists():
        AnswerFile(failed).close()  # it is an errors file, and nobody writes it
        number = next(n for n in range(1, 1 << 20) if not failed.with_name(f"{failed.name}.{n}").exists())
        if failed.exists():
            os.rename(failed, failed.with_name(f"{failed.name}.{number}"))
    errors = AnswerFile(failed)
    files.callback(errors.close)
    return answers, errors


def _find_done(requests: Path, output: Path, shard: tuple[int, int] | None) -> tuple[IdIndex, bytearray]:
    """Check all lines; return the index of their ids, and by slot whether an id is in one of the files."""
    index = index_requests(requests)
    places = find_answers(index, [output, errors_path(output)], requests)
    return index, bytearray(map(bool, places))


async def _todo(
    requests: Path, index: IdIndex, done: bytearray, shard: tuple[int, int] | None, version: tuple[int, int, int]
) -> AsyncIterator[BatchRequest]:
    """Yield the requests without an answer, of this shard."""
    for position, request in enumerate(read_requests(requests)):
        if position % _LINES_AT_ONCE == 0:
            await asyncio.sleep(0)
            if file_version(requests) != version:
                raise InvalidRequestError(f"{requests} was changed during the run. The same command reads it anew.")
        slot = index.slot(request.custom_id)
        if slot is not None and not done[slot] and (shard is None or position % shard[1] == shard[0] - 1):
            yield request


async def _send_all(
    todo: AsyncIterator[BatchRequest],
    sender: _Sender,
    progress: Progress,
    ticking: Coroutine[Any, Any, None],
    shard: tuple[int, int] | None,
) -> AsyncGenerator[Answer, None]:
    finished: asyncio.Queue[asyncio.Task[Any]] = asyncio.Queue()
    asked: dict[asyncio.Task[Any], tuple[BatchRequest, AsyncServiceClient]] = {}
    again: deque[BatchRequest] = deque()

    def begin(coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(coroutine)
        task.add_done_callback(finished.put_nowait)
        return task

    ticks = begin(ticking)
    try:
        progress.stage = "waits for the service"
        await sender.connect()
        view = sender.view(progress, clients=shard[1] if shard else 1)
        await anyio.to_thread.run_sync(view.look, 0.0)
        progress.stage, sender.began_s = "asks", time.monotonic()
        while True:
            while len(asked) < progress.window and (request := again.popleft() if again else await anext(todo, None)):
                client = sender.client
                asked[begin(sender.ask(client, request, progress))] = request, client
            progress.in_flight = len(asked)
            if not asked:
                return
            task = await finished.get()
            if task is ticks:
                ticks.result()  # it ends with an error alone
            request, client = asked.pop(task)
            progress.serving_s = time.monotonic() - sender.began_s
            try:
                answer = task.result()
            except (ServiceNotFoundError, ServiceFailedError) as error:  # of the service, not of the line
                again.append(request)
                if client is sender.client:
                    _log.info("%s", error)
                    progress.stage = "waits for the service"
                    await sender.connect()
                    progress.stage = "asks"
                continue
            progress.in_flight = len(asked)
            yield answer
            _check_refusals(answer, progress)
    finally:
        for task in (ticks, *asked):
            task.cancel()
        await asyncio.gather(ticks, *asked, return_exceptions=True)
        await sender.close()


def _check_refusals(answer: Answer, progress: Progress) -> None:
    if answer.error and not progress.answered and progress.failed >= _MOST_REFUSED and not progress.before:
        raise HpcServeError(
            f"The first {progress.failed} lines all failed, the last with: {answer.error['message']} The other "
            f"{progress.left} were not sent. Correct the lines, or --any-model if they name another model; then "
            "--retry-errors asks them again."
        )


async def _tick(sender: _Sender, progress: Progress, on_tick: Callable[[Progress], None], tick_s: float) -> None:
    before_s = time.monotonic()
    while True:
        await asyncio.sleep(tick_s)
        now_s = time.monotonic()
        if sender.watched is not None:
            try:
                await anyio.to_thread.run_sync(sender.watched.look, now_s - before_s)
            except HpcServeError as error:
                _log.info("the replicas could not be looked at: %s", error)
        before_s = now_s
        on_tick(progress)


class _Sender:
    """Asks the service; brings its client back after the service was gone."""

    def __init__(
        self, *, service: str | None, home: str | Path | None, wait_s: float, retries: int, any_model: bool
    ) -> None:
        self._service, self._home, self._wait_s = service, home, wait_s
        self._retries, self._any_model = retries, any_model
        self._clients: list[AsyncServiceClient] = []  # the last is in use; requests may be under way at the others
        self.watched: ReplicaView | None = None
        self.began_s = 0.0

    @property
    def client(self) -> AsyncServiceClient:
        return self._clients[-1]

    async def connect(self) -> None:
        """Return once a replica is ready. Raises what `connect_async` raises if that takes longer than `wait`."""
        ends_s = time.monotonic() + self._wait_s
        while True:
            try:
                # An answer takes as long as it takes: the client finds out itself when an engine is lost.
                client = await connect_async(
                    self._service, wait=True, wake=True, home=self._home, timeout=None, max_retries=self._retries
                )
            except (ServiceNotFoundError, ServiceFailedError) as error:
                if time.monotonic() > ends_s:
                    raise
                _log.info("%s", error)
                await asyncio.sleep(min(_AGAIN_S, self._wait_s))
                continue
            self._service = client.service
            self._clients.append(client)
            return

    def view(self, progress: Progress, clients: int) -> ReplicaView:
        assert self._service is not None
        self.watched = ReplicaView(self._service, self._home, progress, clients)
        return self.watched

    async def close(self) -> None:
        for client in self._clients:
            await client.close()

    async def ask(self, client: AsyncServiceClient, request: BatchRequest, progress: Progress) -> Answer:
        """Return the answer to a line, or its failure. Raises HpcServeError where the service is gone."""
        from hpc_serve.client.replicas.sdk import http, openai
        from hpc_serve.client.requests.exchange import NoReplicaError

        body = dict(request.body)
        if self._any_model or not body.get("model"):
            body["model"] = client.model
        answer = Answer(line=request.line, custom_id=request.custom_id, progress=progress)
        for tries_left in reversed(range(_TRIES.get(request.url, 1))):
            try:
                response: Any = await client.post(request.url.removeprefix("/v1"), cast_to=http.Response, body=body)
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
            except ValueError as error:
                return dataclasses.replace(answer, error={"code": "no_json", "message": f"The answer: {error}"})
            else:
                progress.count_tokens(content)
                name = response.headers.get("x-request-id", "")
                return dataclasses.replace(answer, status=response.status_code, request_id=name, body=content)
        raise AssertionError
