"""A service of stub engines, and runs of requests against it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from hpc_serve.bench.run import BenchRequest, Lengths, Pace, RequestResult, Run
from hpc_serve.bench.sweep import OnProgress, Sweep, make_runs
from hpc_serve.bench.workload import BenchWorkload
from tests.support.stubs import StubEngine, StubService
from tests.unit.client.conftest import service, work_log

assert all((service, work_log))  # fixtures of the client's tests

Measure = Callable[..., list[Run]]


@pytest.fixture
def engine(service: StubService) -> StubEngine:
    """The one engine of the service."""
    return service.start()


@pytest.fixture
def measure(service: StubService) -> Measure:
    """The runs of one service. Takes fields of workload and sweep, and `at_once`, `rate`, `progress`, `stop`."""

    def run(
        *,
        at_once: tuple[int | None, ...] = (4,),
        rate: float = float("inf"),
        split: Any = "client",
        wait: float | None = None,
        progress: OnProgress = lambda *_: None,
        stop: asyncio.Event | None = None,
        **fields: Any,
    ) -> list[Run]:
        workload = BenchWorkload(**{"lengths": Lengths(input_len=30, output_len=5), "count": 20, **fields})
        paces = tuple(Pace(max_concurrency=most, request_rate=rate) for most in at_once)
        sweep = Sweep(services=(service.service,), workloads=(workload,), paces=paces, split=split, wait=wait)

        async def collect() -> list[Run]:
            runs = make_runs(service.store, sweep, stop=stop or asyncio.Event(), progress=progress)
            return [run async for run in runs]

        return asyncio.run(collect())

    return run


def make_outcome(**fields: Any) -> RequestResult:
    """An answer of 3 tokens: the first after 0.1 s, the others 0.02 s and 0.04 s later."""
    usual: dict[str, Any] = {"place": 0, "input_len": 10, "output_len": 3, "ttft_s": 0.1, "itls_s": (0.02, 0.04)}
    usual |= {"latency_s": 0.16, "start_s": 100.0, "replica": "1-r0-0"}
    return RequestResult(**{**usual, **fields})


def make_run(*outcomes: RequestResult, **fields: Any) -> Run:
    """A run of two seconds whose requests asked for what `make_outcome` is."""
    body = {"prompt": [1] * 10, "max_tokens": 3, "ignore_eos": True}
    request = BenchRequest(path="/v1/completions", body=body, input_len=10, output_len=3)
    usual: dict[str, Any] = {"service": "405b", "model": "m", "workload": "random 10/3", "date": "20261122-130000"}
    usual |= {"requests": (request,) * len(outcomes), "outcomes": outcomes, "pace": Pace(max_concurrency=2)}
    usual |= {"duration_s": 2.0, "split": "client", "replicas": ("1-r0-0",), "busy": 0.1, "late_s": 0.001}
    return Run(**{**usual, **fields})
