"""Makes one run after the other: each service, each workload, each pace. Every run has new prompts.

A cache of prefixes would answer prompts of the run before. Before a run each replica answers one request that does not
count, as `vllm bench serve` sends one first: what is wrong with the requests is told then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_serve.bench.load import ask, send_all, unless
from hpc_serve.bench.measured import Measured
from hpc_serve.bench.outcome import BenchRequest, Pace, Run, Split
from hpc_serve.bench.service import BenchError, BenchService
from hpc_serve.bench.texts import EngineTexts
from hpc_serve.bench.workload import MADE, BenchWorkload, make_requests
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


class Watcher:
    """Is told how far a sweep is. This one tells nobody."""

    def preparing(self, service: str, workload: BenchWorkload) -> None:
        """Requests are made."""

    def began(self, service: str, workload: BenchWorkload, count: int, pace: Pace) -> None:
        """Note that a run of `count` requests begins."""

    def ended_one(self) -> None:
        """Note that a request has ended."""


async def make_runs(store: ServiceStore, sweep: Sweep, *, stop: asyncio.Event, watcher: Watcher) -> AsyncIterator[Run]:
    """Run after run. After `stop` comes the run under way, with what it had by then, and no other.

    Raises what `connect` raises, InvalidRequestError, BenchError.
    """
    number = 0
    for name in sweep.services:
        service = BenchService(store, name, sweep.split)
        try:
            await service.ready(sweep.wait)
            for workload in sweep.workloads:
                for pace in sweep.paces:
                    number += 1
                    own = replace(workload, seed=workload.seed * 1_000_003 + number)
                    watcher.preparing(name, own)
                    requests = await unless(stop, _prepare(service, own))
                    if requests is not None:
                        yield await _run(service, own, requests, pace, stop, watcher)
                    if stop.is_set():
                        return
        finally:
            await service.close()


def measure(sweep: Sweep, *, home: str | Path | None = None) -> tuple[Measured, ...]:
    """Make all runs of a sweep, and return each with its figures. `home` is $HPC_SERVE_HOME unless given.

    For programs without an event loop. Raises what `connect` raises, InvalidRequestError, BenchError.
    """

    async def collect() -> tuple[Measured, ...]:
        runs = make_runs(open_store(home), sweep, stop=asyncio.Event(), watcher=Watcher())
        return tuple([Measured(run=run) async for run in runs])

    return asyncio.run(collect())


async def _prepare(service: BenchService, workload: BenchWorkload) -> tuple[BenchRequest, ...]:
    """Return the requests of a run, after each replica has answered one that does not count."""
    if workload.dataset in MADE and workload.count is not None:
        first, *requests = await make_requests(replace(workload, count=workload.count + 1), EngineTexts(service))
    else:
        requests = list(await make_requests(workload, EngineTexts(service)))
        first = requests[0]
    service.watch.takes_turns = True
    try:
        for place in range(len(service.replicas)):
            outcome = await ask(service, place, first)
            if not outcome.is_answered:
                raise BenchError(f"{service.name} does not answer the first request: {outcome.error}")
    finally:
        service.watch.takes_turns = service.split == "equally"
    return tuple(requests)


async def _run(
    service: BenchService,
    workload: BenchWorkload,
    requests: tuple[BenchRequest, ...],
    pace: Pace,
    stop: asyncio.Event,
    watcher: Watcher,
) -> Run:
    date, replicas = time.strftime("%Y%m%d-%H%M%S"), service.replicas
    watcher.began(service.name, workload, len(requests), pace)
    sent = await send_all(service, requests, pace, seed=workload.seed, stop=stop, on_end=watcher.ended_one)
    return Run(
        **vars(sent),
        service=service.name,
        model=service.model,
        workload=workload.title,
        requests=requests,
        pace=pace,
        split=service.split,
        replicas=replicas,
        date=date,
    )
