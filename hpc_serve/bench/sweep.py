"""Makes one run after the other: each service, each workload, each pace. Every run has new prompts.

A cache of prefixes would answer prompts of the run before. Before a run each replica answers one request that does not
count, as `vllm bench serve` sends one first: what is wrong with the requests is told then.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpc_serve.bench.load import ask, send_all, unless, waited_for_cores_s
from hpc_serve.bench.results import result_of
from hpc_serve.bench.run import BenchRequest, Pace, Run, Split
from hpc_serve.bench.service import BenchError, BenchService
from hpc_serve.bench.texts import EngineTexts
from hpc_serve.bench.workload import BenchWorkload, make_requests
from hpc_serve.client.access import open_store
from hpc_serve.client.discovery.wait import Wait
from hpc_serve.rendezvous.store import ServiceStore


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The runs to make. `count` is their number."""

    services: tuple[str, ...]
    workloads: tuple[BenchWorkload, ...]
    paces: tuple[Pace, ...]
    split: Split = "client"
    wait: Wait = None

    @property
    def count(self) -> int:
        return len(self.services) * len(self.workloads) * len(self.paces)


Progress = Callable[[str, int | None, int], None]
"""Is told the step under way, its number of requests (None: not known yet), and how many of them have ended."""


async def make_runs(
    store: ServiceStore, sweep: Sweep, *, stop: asyncio.Event, progress: Progress = lambda *_: None
) -> AsyncIterator[Run]:
    """Run after run. After `stop` comes the run under way, with what it had by then, and no other.

    Raises what `connect` raises, InvalidRequestError, BenchError.
    """
    number = 0
    for name in sweep.services:
        service = BenchService(store, name, sweep.split)
        try:
            await service.ready(sweep.wait)
            await service.check_completes()
            for workload in sweep.workloads:
                for pace in sweep.paces:
                    number += 1
                    own = replace(workload, seed=workload.seed * 1_000_003 + number)
                    progress(f"{name}: making requests, {own.title}", None, 0)
                    requests = await unless(stop, _prepare(service, own))
                    if requests is not None:
                        run = Run(
                            service=name,
                            model=service.model,
                            workload=own.title,
                            requests=requests,
                            pace=pace,
                            split=sweep.split,
                            replicas=service.replicas,
                            date=time.strftime("%Y%m%d-%H%M%S"),
                        )
                        title = f"run {number} of {sweep.count}: {name}, {own.title}, {pace}"
                        tell = functools.partial(progress, title, len(requests))
                        tell(0)
                        yield await _watched(service, send_all(service, run, seed=own.seed, stop=stop, on_end=tell))
                    if stop.is_set():
                        return
        finally:
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
    generated, waited_s, began_s = await service.generated_tokens(), waited_for_cores_s(), time.monotonic()
    done = await sending
    took_s, waited_now_s = time.monotonic() - began_s, waited_for_cores_s()
    now, own = await service.generated_tokens(), sum(outcome.output_len for outcome in done.outcomes)
    return replace(
        done,
        others_tokens=None if generated is None or now is None else max(0.0, now - generated - own),
        waited=(waited_now_s - waited_s) / took_s if service.is_here and waited_s and waited_now_s else None,
        vllm=await service.version(),
    )
