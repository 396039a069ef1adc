"""Makes one run after the other: each service, each workload, each pace. Every run has new prompts.

A cache of prefixes would answer prompts of the run before. Before a run each replica answers one request that does not
count, as `vllm bench serve` sends one first: what is wrong with the requests is told then. The times of requests follow
the formula of `vllm bench serve` (its `get_request`). A failure is an outcome like another. A run that is told to stop
keeps what had ended by then.

A person who measures may check answers by a function of their own: `--check FILE.py:FUNCTION`. It is called after each
run, with the body of a request and the text of its answer, and returns the fault in a few words, or nothing. The
function alone decides what an answer should be.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import itertools
import json
import math
import random
import runpy
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from hpc_serve.bench.results import result_of
from hpc_serve.bench.run import BenchRequest, Pace, RequestResult, Run, Split
from hpc_serve.bench.service import AnswerReader, BenchError, BenchService, refusal
from hpc_serve.bench.workload import BenchWorkload, EngineTexts, make_requests
from hpc_serve.client.access import open_store
from hpc_serve.client.discovery.wait import Wait
from hpc_serve.client.requests.exchange import EXCHANGE
from hpc_serve.errors import InvalidRequestError
from hpc_serve.rendezvous.store import ServiceStore

# -- one run

_WATCH_STEP_S = 0.05

T = TypeVar("T")


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Return when each of `count` requests is sent, in seconds from the beginning.

    The times between them follow a gamma distribution with the mean 1/`rate` and the shape `burstiness`: 1 is a Poisson
    process, less comes in bursts, more is even, inf is a clock. They are scaled so that the last one is sent at
    count/rate: different seeds have the same load.

    >>> arrival_times(3, math.inf, 1.0, seed=0)
    [0.0, 0.0, 0.0]
    >>> arrival_times(3, 2.0, math.inf, seed=0)
    [0.5, 1.0, 1.5]
    """
    if math.isinf(rate):
        return [0.0] * count
    if math.isinf(burstiness):
        return [(place + 1) / rate for place in range(count)]
    chance = random.Random(f"arrivals {seed}")
    times, now_s = [], 0.0
    for _ in range(count):
        now_s += chance.gammavariate(burstiness, 1 / (rate * burstiness))
        times.append(now_s)
    return [time_s * (count / rate) / now_s for time_s in times] if now_s else times


async def _send_all(
    service: BenchService, run: Run, *, seed: int, stop: asyncio.Event, on_end: Callable[[int], None]
) -> Run:
    """Send all requests of a run, and return it with their results: early, with those that there are, after `stop`.

    `on_end` is told how many have ended.
    """
    requests, pace = run.requests, run.pace
    outcomes: list[RequestResult] = []
    arrived: asyncio.Queue[tuple[int, BenchRequest, float] | None] = asyncio.Queue()
    senders = min(pace.max_concurrency or len(requests), len(requests))
    times_s = arrival_times(len(requests), pace.request_rate, pace.burstiness, seed)

    async def come() -> None:
        for place, (request, at_s) in enumerate(zip(requests, times_s)):
            if (left_s := began_s + at_s - time.perf_counter()) > 0:
                await asyncio.sleep(left_s)
            arrived.put_nowait((place, request, time.perf_counter()))
        for _ in range(senders):
            arrived.put_nowait(None)

    async def send() -> None:
        while (next_one := await arrived.get()) is not None:
            outcomes.append(await ask(service, *next_one))
            on_end(len(outcomes))

    late_s = [0.0]
    gc.collect()
    gc.freeze()  # a collection that goes through all prompts would make the loop late
    watch = asyncio.create_task(_watch_own_loop(late_s))
    began_s, began_cpu_s = time.perf_counter(), time.thread_time()
    try:
        await unless(stop, asyncio.gather(come(), *(send() for _ in range(senders))))
    finally:
        watch.cancel()
        gc.unfreeze()
    took_s = max(time.perf_counter() - began_s, 1e-9)
    return replace(
        run,
        outcomes=tuple(sorted(outcomes, key=lambda outcome: outcome.place)),
        duration_s=took_s,
        busy=min((time.thread_time() - began_cpu_s) / took_s, 1.0),
        late_s=sorted(late_s)[int(0.95 * (len(late_s) - 1))],
    )


async def _watch_own_loop(late_s: list[float]) -> None:
    """Note how late this program wakes: a loop without time left stamps late, as if the service were slow."""
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + _WATCH_STEP_S
        await asyncio.sleep(_WATCH_STEP_S)
        late_s.append(max(0.0, loop.time() - due_s))


def _waited_for_cores_s() -> float | None:
    """Return the seconds since this node started in which a program waited for a core. None if the kernel counts none.

    Source: the kernel's pressure stall information (Documentation/accounting/psi.rst).
    """
    with contextlib.suppress(OSError, ValueError):
        first = Path("/proc/pressure/cpu").read_text().splitlines()[0]
        return int(first.rpartition("total=")[2]) / 1e6
    return None


async def unless(stop: asyncio.Event, making: Awaitable[T]) -> T | None:
    """Return what is awaited; None, after cancelling it, once `stop` is set."""
    task, stopping = asyncio.ensure_future(making), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        stopping.cancel()
        task.cancel()
        await asyncio.gather(task, stopping, return_exceptions=True)


async def ask(
    service: BenchService, place: int, request: BenchRequest, arrived_s: float | None = None
) -> RequestResult:
    """Send one request, whose number in the run is `place`, and read its stream."""
    options = {"model": service.model, "stream": True, "stream_options": {"include_usage": True}}
    body = json.dumps({**request.body, **options}).encode()
    start_s = time.perf_counter()
    reader, error, replica, sent = AnswerReader(start_s), "", "", 1
    try:
        response = await service.send(request.path, body)
        replica, sent = service.last_replica, response.extensions[EXCHANGE].sent
        try:
            if response.status_code == 200:
                async for data in response.stream:  # type: ignore[union-attr]
                    reader.feed(data, time.perf_counter())
                error = reader.failure()
            else:
                error = f"HTTP {response.status_code}: {refusal(await response.aread())}"
        finally:
            await response.aclose()
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
    return RequestResult(
        place=place,
        input_len=reader.input_len if reader.input_len is not None else request.input_len or 0,
        output_len=reader.output_len or len(reader.itls_s) + (reader.ttft_s is not None),
        ttft_s=reader.ttft_s or 0.0,
        itls_s=tuple(reader.itls_s),
        latency_s=reader.latency_s,
        start_s=start_s,
        queue_s=start_s - (start_s if arrived_s is None else arrived_s),
        text=reader.text,
        error=error,
        replica=replica,
        sent=sent,
    )


# -- checks of answers

Check = Callable[[Mapping[str, Any], str], object]


def load_check(words: str) -> Check:
    """Return the function that FILE.py:FUNCTION names. Raises InvalidRequestError."""
    file, _, name = words.rpartition(":")
    path = Path(file)
    if not file or not name.isidentifier() or not path.is_file():
        raise InvalidRequestError(f"--check {words} names no function of a file: write mine.py:is_wrong.")
    try:
        function = runpy.run_path(str(path), run_name="hpc_serve_bench_check").get(name)
    except Exception as error:
        raise InvalidRequestError(f"--check {words}: {path} fails with {type(error).__name__}: {error}") from error
    if not callable(function):
        raise InvalidRequestError(f"--check {words}: {path} has no function {name}.")
    check: Check = function
    return check


def wrong_answers(run: Run, check: Check) -> dict[int, str]:
    """Return the faults of answers, by the place of the request. A check that raises is a fault, too."""
    found = {}
    for outcome in run.outcomes:
        if not outcome.is_answered:
            continue
        try:
            wrong = check(run.requests[outcome.place].body, outcome.text)
        except Exception as error:
            wrong = f"the check failed with {type(error).__name__}: {error}"
        if wrong:
            found[outcome.place] = str(wrong)
    return found


# -- all runs


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The runs to make: each workload at each pace, of one service after the other."""

    services: tuple[str, ...]
    workloads: tuple[BenchWorkload, ...]
    paces: tuple[Pace, ...]
    split: Split = "client"
    wait: Wait = None


OnProgress = Callable[[str, int | None, int], None]
"""Is told the step under way, its number of requests (None: not known yet), and how many of them have ended."""


async def make_runs(
    store: ServiceStore, sweep: Sweep, *, stop: asyncio.Event, progress: OnProgress = lambda *_: None
) -> AsyncIterator[Run]:
    """Run after run. After `stop` comes the run under way, with what it had by then, and no other.

    Raises what `connect` raises, InvalidRequestError, BenchError.
    """
    services = [BenchService(store, name, sweep.split) for name in sweep.services]
    try:
        for service in services:  # all of them, before the first run takes its minutes
            await unless(stop, service.ready(sweep.wait))
        to_make = list(itertools.product(services, sweep.workloads, sweep.paces))
        for number, (service, workload, pace) in enumerate(to_make, 1):
            own = replace(workload, seed=workload.seed * 1_000_003 + number)
            progress(f"{service.name}: making requests, {own.title}", None, 0)
            requests = await unless(stop, _prepare(service, own))
            if requests is not None:
                run = Run(
                    service=service.name,
                    model=service.model,
                    workload=own.title,
                    requests=requests,
                    pace=pace,
                    split=sweep.split,
                    replicas=service.replicas,
                    date=time.strftime("%Y%m%d-%H%M%S"),
                )
                title = f"run {number} of {len(to_make)}: {service.name}, {own.title}, {pace}"
                tell = functools.partial(progress, title, len(requests))
                tell(0)
                yield await _watched(service, _send_all(service, run, seed=own.seed, stop=stop, on_end=tell))
            if stop.is_set():
                return
    finally:
        for service in services:
            await service.close()


def measure(sweep: Sweep, *, home: str | Path | None = None) -> tuple[dict[str, Any], ...]:
    """Make all runs of a sweep, and return the result of each under the keys of `vllm bench serve --save-result`.

    For programs without an event loop. `home` is $HPC_SERVE_HOME unless given. Raises what `connect` raises,
    InvalidRequestError, BenchError.
    """

    async def collect() -> tuple[dict[str, Any], ...]:
        runs = make_runs(open_store(home), sweep, stop=asyncio.Event())
        return tuple([result_of(run) async for run in runs])

    return asyncio.run(collect())


async def _prepare(service: BenchService, workload: BenchWorkload) -> tuple[BenchRequest, ...]:
    """Return the requests of a run, after each replica has answered one that does not count."""
    if workload.path is None and workload.count is not None:
        first, *requests = await make_requests(replace(workload, count=workload.count + 1), EngineTexts(service))
    else:
        requests = list(await make_requests(workload, EngineTexts(service)))
        first = requests[0]
    for place in service.turns():
        outcome = await ask(service, place, first)
        if not outcome.is_answered:
            raise BenchError(f"{service.name} does not answer the first request: {outcome.error}")
    return tuple(requests)


async def _watched(service: BenchService, sending: Awaitable[Run]) -> Run:
    """Return the run that is sent, with what the engines and this node did meanwhile beside it."""
    generated, waited_s, began_s = await service.generated_tokens(), _waited_for_cores_s(), time.monotonic()
    done = await sending
    took_s, waited_now_s = time.monotonic() - began_s, _waited_for_cores_s()
    now, own = await service.generated_tokens(), sum(outcome.output_len for outcome in done.outcomes)
    return replace(
        done,
        others_tokens=None if generated is None or now is None else max(0.0, now - generated - own),
        waited=(waited_now_s - waited_s) / took_s if service.is_here and waited_s and waited_now_s else None,
        vllm=await service.version(),
    )
