"""Runs a batch: sends its lines to a service, so many at once, and writes and yields each answer as it comes.

A run that breaks off is gone on with by the same call. How one line is asked: sender.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import anyio.to_thread

from hpc_serve.batch.answer_files import (
    Answer,
    AnswerFile,
    Progress,
    errors_path,
    find_answers,
    shard_path,
    write_in_order,
)
from hpc_serve.batch.request_file import BatchRequest, IdIndex, file_version, index_requests, read_requests
from hpc_serve.batch.sender import Sender
from hpc_serve.errors import HpcServeError, InvalidRequestError, ServiceFailedError, ServiceNotFoundError

_log = logging.getLogger(__name__)
_NODE_LOCK_S = 180.0  # a job that runs again waits so long for the lock of its own node that died
_LINES_AT_ONCE = 256  # lines that are skipped before answers have their turn
_MOST_REFUSED = 100  # without one answer: the rest would be refused as well


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
    Every `tick_s` seconds the engines are looked at, and `on_tick` is called; once more at the end. A service that is
    asleep is woken.

    Raises InvalidRequestError for a line that cannot be sent, before any is; StoreError where the output cannot be
    written; and what `connect_async` raises.
    """
    requests, output = Path(requests), Path(output)
    if shard is not None:
        if not 1 <= shard[0] <= shard[1]:
            raise InvalidRequestError(f"shard is {shard[0]}/{shard[1]}: it must be from 1/{shard[1]} on.")
        output = shard_path(output, shard)
    in_thread, progress = anyio.to_thread.run_sync, Progress()
    version = file_version(requests)
    with contextlib.ExitStack() as stack:
        files = answers, errors = await in_thread(_open_files, requests, output, stack, retry_errors)
        index = await in_thread(index_requests, requests)
        done = bytearray(map(bool, await in_thread(find_answers, index, files, requests)))
        progress.total = len(index) if shard is None else -(-(len(index) - shard[0] + 1) // shard[1])
        progress.before, progress.failed_before = sum(done), errors.lines
        if progress.left:
            await in_thread(on_need)
            sender = Sender(
                progress=progress,
                service=service,
                home=home,
                wait_s=wait,
                retries=retries,
                any_model=any_model,
                clients=shard[1] if shard else 1,
            )
            todo = _todo(requests, index, done, shard, version)
            ticking = _tick(sender, on_tick, tick_s)
            async with contextlib.aclosing(_send_all(todo, sender, ticking)) as sent:
                async for answer in sent:
                    (errors if answer.error else answers).append(answer.json_line)
                    progress.answered += answer.error is None
                    progress.failed += answer.error is not None
                    yield answer
        for file in files:
            file.sync()
        if in_order:
            places = await in_thread(find_answers, index, files, requests)
            await in_thread(write_in_order, requests, index, places, files, (answers.path, errors.path))
        progress.stage = "done"
        on_tick(progress)


def _open_files(
    requests: Path, output: Path, stack: contextlib.ExitStack, retry_errors: bool
) -> tuple[AnswerFile, AnswerFile]:
    failed = errors_path(output)
    for path in (output, failed):
        if path.exists() and path.samefile(requests):
            raise InvalidRequestError(f"{path} would be read and written: name another output.")

    def opened(path: Path) -> AnswerFile:
        file = AnswerFile(path, lock_s=_NODE_LOCK_S if "SLURM_RESTART_COUNT" in os.environ else 0.0)
        stack.callback(file.close)
        return file

    answers, errors = opened(output), opened(failed)
    if not retry_errors or not sum(1 for _ in errors.read()):  # a file of others stays
        return answers, errors
    number = next(n for n in range(1, 1 << 20) if not failed.with_name(f"{failed.name}.{n}").exists())
    os.rename(failed, failed.with_name(f"{failed.name}.{number}"))
    return answers, opened(failed)


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
    todo: AsyncIterator[BatchRequest], sender: Sender, ticking: Coroutine[Any, Any, None]
) -> AsyncGenerator[Answer, None]:
    progress = sender.progress
    finished: asyncio.Queue[asyncio.Task[Any]] = asyncio.Queue()
    asked: dict[asyncio.Task[Any], tuple[BatchRequest, int]] = {}
    again: deque[BatchRequest] = deque()

    def begin(coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(coroutine)
        task.add_done_callback(finished.put_nowait)
        return task

    ticks = begin(ticking)
    try:
        await sender.connect()
        await anyio.to_thread.run_sync(sender.view().look, 0.0)
        began_s = time.monotonic()
        while True:
            while len(asked) < progress.window and (request := again.popleft() if again else await anext(todo, None)):
                asked[begin(sender.ask(request))] = request, sender.times_found
            progress.in_flight = len(asked)
            if not asked:
                return
            task = await finished.get()
            if task is ticks:
                ticks.result()  # it ends with an error alone
            request, times_found = asked.pop(task)
            progress.serving_s = time.monotonic() - began_s
            try:
                answer = task.result()
            except (ServiceNotFoundError, ServiceFailedError) as error:  # of the service, not of the line
                again.append(request)
                if times_found == sender.times_found:
                    _log.info("%s", error)
                    await sender.connect()
                continue
            progress.in_flight = len(asked)
            yield answer
            _check_refusals(answer)
    finally:
        for task in (ticks, *asked):
            task.cancel()
        await asyncio.gather(ticks, *asked, return_exceptions=True)
        await sender.close()


def _check_refusals(answer: Answer) -> None:
    progress = answer.progress
    if answer.error and not progress.answered and progress.failed >= _MOST_REFUSED and not progress.before:
        raise HpcServeError(
            f"The first {progress.failed} lines all failed, the last with: {answer.error['message']} The other "
            f"{progress.left} were not sent. Correct the lines, or --any-model if they name another model; then "
            "--retry-errors asks them again."
        )


async def _tick(sender: Sender, on_tick: Callable[[Progress], None], tick_s: float) -> None:
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
        on_tick(sender.progress)
