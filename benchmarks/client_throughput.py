"""Requests a second with many in flight, of the plain SDK and of our client: `python -m benchmarks.client_throughput`.

One stub engine is asked by the plain SDK and by a client of this package, in threads and in asyncio, for whole answers
and for streams. All speak TLS and keep their connections. In each round both take a turn of the same length, in an
order that changes by chance. Each rate is a median over the rounds, each ratio the median of the rounds' ratios. CPU
time is this process's. Three minutes; needs no engine. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import openai

from benchmarks.client_cost import MESSAGES, plain_client
from hpc_serve.client import connect, connect_async
from hpc_serve.trust.pinned import pinned_context
from tests.support.stubs import StubService

IN_FLIGHT = (1, 16, 64, 256)
PLAIN, OURS = "plain SDK", "client"
KINDS = {"whole answers": False, "streams": True}


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What one client did in one turn."""

    rate: float
    cpu_ms: float


def timed(work: Callable[[], int]) -> Turn:
    """`work` returns how many requests it has had answered."""
    began_s, cpu_s = time.perf_counter(), time.process_time()
    answered = work()
    took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
    return Turn(rate=answered / took_s, cpu_ms=1e3 * cpu_s / answered)


def asked(client: Any, *, stream: bool) -> Any:
    return client.chat.completions.create(model="405b", messages=MESSAGES, temperature=0, stream=stream)


def in_threads(client: Any, in_flight: int, seconds: float, *, stream: bool) -> int:
    counts = [0] * in_flight
    until_s = time.perf_counter() + seconds

    def go_on(place: int) -> None:
        while time.perf_counter() < until_s:
            answer = asked(client, stream=stream)
            for _ in answer if stream else ():
                pass
            counts[place] += 1

    threads = [threading.Thread(target=go_on, args=(place,)) for place in range(in_flight)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts)


async def in_tasks(client: Any, in_flight: int, seconds: float, *, stream: bool) -> int:
    until_s = time.perf_counter() + seconds

    async def go_on() -> int:
        count = 0
        while time.perf_counter() < until_s:
            answer = await asked(client, stream=stream)
            if stream:
                async for _ in answer:
                    pass
            count += 1
        return count

    return sum(await asyncio.gather(*(go_on() for _ in range(in_flight))))


def compare(what: str, turns: Mapping[str, Callable[[], int]], rounds: int) -> None:
    """Let the clients take turns, and print what they did."""
    seen: dict[str, list[Turn]] = {name: [] for name in turns}
    for turn in turns.values():
        turn()  # connections, caches
    for _ in range(rounds):
        for name in random.sample(list(turns), len(turns)):
            seen[name].append(timed(turns[name]))
    ratio = statistics.median(mine.rate / base.rate for mine, base in zip(seen[OURS], seen[PLAIN], strict=True))
    over_ms = statistics.median(mine.cpu_ms - base.cpu_ms for mine, base in zip(seen[OURS], seen[PLAIN], strict=True))
    plain, ours = (statistics.median(turn.rate for turn in seen[name]) for name in (PLAIN, OURS))
    plain_ms = statistics.median(turn.cpu_ms for turn in seen[PLAIN])
    cost = f"CPU a request {plain_ms:5.2f} {over_ms:+5.2f} ms"
    print(f"{what:38} {plain:6.0f} {ours:6.0f} requests/s, ratio {ratio:4.2f}; {cost}", flush=True)


def measure(service: StubService, *, in_flight: list[int], kinds: list[str], rounds: int, seconds: float) -> None:
    clients = {PLAIN: plain_client(service), OURS: connect("405b")}
    print(f"{'':38} {'plain':>6} {'ours':>6}")
    for kind in kinds:
        for count in in_flight:
            turns = {
                name: partial(in_threads, client, count, seconds, stream=KINDS[kind])
                for name, client in clients.items()
            }
            compare(f"{kind}, {count} threads", turns, rounds)
    loop = asyncio.new_event_loop()
    (engine,) = service.engines
    assert engine.certificate is not None
    http_client = openai.DefaultAsyncHttpxClient(verify=pinned_context(engine.certificate), trust_env=False)
    plain, ours = clients[PLAIN], loop.run_until_complete(connect_async("405b"))
    tasks = {
        PLAIN: openai.AsyncOpenAI(base_url=plain.base_url, api_key=plain.api_key, http_client=http_client),
        OURS: ours,
    }
    for kind in kinds:
        for count in in_flight:
            turns = {
                name: partial(run, loop, client, count, seconds, stream=KINDS[kind]) for name, client in tasks.items()
            }
            compare(f"{kind}, {count} tasks of asyncio", turns, rounds)
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


def run(loop: asyncio.AbstractEventLoop, client: Any, count: int, seconds: float, *, stream: bool) -> int:
    return loop.run_until_complete(in_tasks(client, count, seconds, stream=stream))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.client_throughput", description=__doc__)
    parser.add_argument("--in-flight", type=int, nargs="+", default=IN_FLIGHT)
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each turn")
    parser.add_argument("--words", type=int, default=4, help="length of an answer")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HPC_SERVE_HOME"] = f"{folder}/home"
        service = StubService(Path(folder) / "home")
        try:
            service.start("--stub-greedy", "--stub-words", str(options.words))
            kinds = options.kind or list(KINDS)
            measure(service, in_flight=options.in_flight, kinds=kinds, rounds=options.rounds, seconds=options.seconds)
        finally:
            service.close()


if __name__ == "__main__":
    main()
