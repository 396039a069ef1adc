"""Requests a second with many in flight, of our client and of others: `python -m benchmarks.client_throughput`.

The plain SDK, our client, httpx and aiohttp ask one stub engine, in threads and in asyncio, for whole answers and for
streams. All speak TLS and keep their connections. httpx and aiohttp read the same answers without the SDK: a JSON text,
or the lines of a stream, each parsed. CPU time is this process's. Ten minutes; needs no engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import ssl
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai

from benchmarks.client_cost import MESSAGES, PLAIN, plain_client
from benchmarks.common import Benchmark, Figures, Measured, cost_of, run_alone, variables
from hpc_serve.client import connect, connect_async
from hpc_serve.trust.connection import pinned_context
from tests.support.stubs import StubService

try:
    import aiohttp
except ImportError:  # it comes with the engine
    aiohttp = None

IN_FLIGHT = (1, 16, 64, 256)
KINDS = {"whole answers": False, "streams": True}
BODY = {"model": "405b", "messages": MESSAGES, "temperature": 0}

Ask = Callable[[bool], None]
AskAsync = Callable[[bool], Awaitable[None]]


def cost(work: Callable[[], int], chunks: int) -> Figures:
    """Of work that returns how many requests it has had answered, each in so many chunks."""
    found = cost_of(work)
    figures = {"requests/s": found.result / found.wall_s, "CPU ms a request": 1e3 * found.cpu_s / found.result}
    return {**figures, "CPU µs a chunk": 1e6 * found.cpu_s / found.result / chunks} if chunks else figures


def in_threads(ask: Ask, in_flight: int, seconds: float, stream: bool) -> int:
    counts = [0] * in_flight
    until_s = time.perf_counter() + seconds

    def go_on(place: int) -> None:
        while not counts[place] or time.perf_counter() < until_s:
            ask(stream)
            counts[place] += 1

    threads = [threading.Thread(target=go_on, args=(place,)) for place in range(in_flight)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts)


async def in_tasks(ask: AskAsync, in_flight: int, seconds: float, stream: bool) -> int:
    until_s = time.perf_counter() + seconds

    async def go_on() -> int:
        count = 0
        while not count or time.perf_counter() < until_s:
            await ask(stream)
            count += 1
        return count

    return sum(await asyncio.gather(*(go_on() for _ in range(in_flight))))


def run(loop: asyncio.AbstractEventLoop, ask: AskAsync, in_flight: int, seconds: float, stream: bool) -> int:
    return loop.run_until_complete(in_tasks(ask, in_flight, seconds, stream))


# -- who asks


def with_sdk(client: Any) -> Ask:
    def ask(stream: bool) -> None:
        answer = client.chat.completions.create(**BODY, stream=stream)
        for _ in answer if stream else ():
            pass

    return ask


def with_async_sdk(client: Any) -> AskAsync:
    async def ask(stream: bool) -> None:
        answer = await client.chat.completions.create(**BODY, stream=stream)
        if stream:
            async for _ in answer:
                pass

    return ask


def _parsed(line: str) -> None:
    if line.startswith("data: {"):
        json.loads(line[6:])


def with_httpx(client: httpx.Client, url: str) -> Ask:
    def ask(stream: bool) -> None:
        if not stream:
            client.post(url, json=BODY).raise_for_status().json()
            return
        with client.stream("POST", url, json={**BODY, "stream": True}) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                _parsed(line)

    return ask


def with_async_httpx(client: httpx.AsyncClient, url: str) -> AskAsync:
    async def ask(stream: bool) -> None:
        if not stream:
            (await client.post(url, json=BODY)).raise_for_status().json()
            return
        async with client.stream("POST", url, json={**BODY, "stream": True}) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                _parsed(line)

    return ask


def with_aiohttp(session: Any, url: str) -> AskAsync:
    async def ask(stream: bool) -> None:
        async with session.post(url, json={**BODY, "stream": stream}) as answer:
            answer.raise_for_status()
            if not stream:
                await answer.json()
                return
            async for line in answer.content:
                _parsed(line.decode())

    return ask


def threads_askers(service: StubService, context: ssl.SSLContext) -> Iterator[dict[str, Ask]]:
    plain = plain_client(service)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    headers = {"Authorization": f"Bearer {plain.api_key}"}
    with httpx.Client(verify=context, headers=headers, trust_env=False, limits=limits, timeout=60) as client:
        url = f"{plain.base_url}chat/completions"
        yield {PLAIN: with_sdk(plain), "client": with_sdk(connect("405b")), "httpx": with_httpx(client, url)}


async def tasks_askers(service: StubService, context: ssl.SSLContext) -> AsyncGenerator[dict[str, AskAsync], None]:
    plain = plain_client(service)
    http_client = openai.DefaultAsyncHttpxClient(verify=context, trust_env=False)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    headers = {"Authorization": f"Bearer {plain.api_key}"}
    url = f"{plain.base_url}chat/completions"
    async with (
        openai.AsyncOpenAI(base_url=plain.base_url, api_key=plain.api_key, http_client=http_client) as sdk,
        await connect_async("405b") as ours,
        httpx.AsyncClient(verify=context, headers=headers, trust_env=False, limits=limits, timeout=60) as client,
    ):
        askers = {
            PLAIN: with_async_sdk(sdk),
            "client": with_async_sdk(ours),
            "httpx": with_async_httpx(client, url),
        }
        if aiohttp is None:
            yield askers
            return
        connector = aiohttp.TCPConnector(ssl=context, limit=0)
        async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
            yield {**askers, "aiohttp": with_aiohttp(session, url)}


# -- what they are asked


def measure_service(options: argparse.Namespace, measured: Measured, service: StubService) -> None:
    (engine,) = service.engines
    assert engine.certificate is not None
    context = pinned_context(engine.certificate)
    kinds = {kind: KINDS[kind] for kind in options.kind or KINDS}

    def take_turns(what: str, askers: Any, runs: Callable[..., int]) -> None:
        chosen = {name: ask for name, ask in askers.items() if name in (options.client or askers)}
        for kind, stream in kinds.items():
            for count in options.in_flight:
                chunks = options.words if stream else 0
                turns = {
                    name: partial(cost, partial(runs, ask, count, options.seconds, stream), chunks)
                    for name, ask in chosen.items()
                }
                measured.take_turns(f"{kind}, {count} {what}", turns, rounds=options.rounds, base=PLAIN)

    if "threads" in options.how:
        for askers in threads_askers(service, context):
            take_turns("threads", askers, in_threads)
    if "tasks" in options.how:
        if aiohttp is None:
            measured.notes.append("aiohttp is not installed and was left out.")
        loop = asyncio.new_event_loop()
        made = tasks_askers(service, context)
        take_turns("tasks of asyncio", loop.run_until_complete(made.__anext__()), partial(run, loop))
        loop.run_until_complete(made.aclose())
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def measure(options: argparse.Namespace, measured: Measured) -> None:
    with tempfile.TemporaryDirectory() as folder, variables(HPC_SERVE_HOME=f"{folder}/home"):
        service = StubService(Path(folder) / "home")
        try:
            service.start("--stub-greedy", "--stub-words", str(options.words))
            measure_service(options, measured, service)
        finally:
            service.close()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--in-flight", type=int, nargs="+", default=IN_FLIGHT)
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--how", choices=["threads", "tasks"], nargs="+", default=["threads", "tasks"])
    parser.add_argument("--client", action="append", metavar="NAME", help="only these, by their names in the table")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each turn")
    parser.add_argument("--words", type=int, default=4, help="length of an answer")


BENCHMARK = Benchmark(
    name="client_throughput",
    about=__doc__,
    measure=measure,
    rounds=5,
    options=add_options,
    short={"in_flight": [2], "seconds": 0.01},
)

if __name__ == "__main__":
    run_alone(BENCHMARK)
