"""Requests that begin alike, at two real engines: `python -m benchmarks.prefix_routing`. Five minutes.

As many conversations as two caches hold together, but not one alone, are asked in an order that changes by chance. In
turns the client prefers the replica that was sent a beginning before, and chooses by load alone. The hit rate is that
of the engines' own counts of prompt tokens found in the cache. The model is a tiny one, on CPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import random
import re
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.bench_against_vllm import ENGINE, real_service
from benchmarks.common import Benchmark, Figures, Measured, run_alone, variables
from hpc_serve.client import connect
from hpc_serve.client.replicas import pool
from hpc_serve.demo_model import make_demo_model
from hpc_serve.trust.connection import pinned_context

BY_LOAD, BY_BEGINNING = "by load alone", "by beginning"
CHANCE = random.Random(1)


def tokens(count: int) -> list[int]:
    return [CHANCE.randrange(100, 250) for _ in range(count)]


def read_hits(client: Any) -> tuple[float, float]:
    """Prompt tokens of all replicas that were found in the cache, and all that were looked for."""
    total = {"hits": 0.0, "queries": 0.0}
    for status in client._watch.status.usable:
        record = status.record
        context = pinned_context(record.certificate)
        connection = http.client.HTTPSConnection("127.0.0.1", record.port, context=context, timeout=60)
        connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {client._watch.api_key}"})
        for line in connection.getresponse().read().decode().splitlines():
            if found := re.match(r"vllm:prefix_cache_(hits|queries)_total\{.*\} (\S+)", line):
                total[found[1]] += float(found[2])
        connection.close()
    return total["hits"], total["queries"]


def turn(client: Any, options: argparse.Namespace, lead: float) -> Figures:
    pool.LEAD = lead
    conversations = [tokens(options.prefix_len) for _ in range(options.conversations)]
    asked = [number for number in range(options.conversations) for _ in range(options.turns)]
    CHANCE.shuffle(asked)
    questions = [(number, tokens(options.question_len)) for number in asked]
    lock, first_s = threading.Lock(), []

    def ask(number: int, question: list[int]) -> None:
        with lock:
            conversations[number] = prompt = conversations[number] + question
        began_s = time.perf_counter()
        stream = client.completions.create(model=client.model, prompt=prompt, max_tokens=4, stream=True)
        next(stream)
        first_s.append(time.perf_counter() - began_s)
        for _ in stream:
            pass

    before = read_hits(client)
    began_s = time.perf_counter()
    with ThreadPoolExecutor(options.in_flight) as threads:
        list(threads.map(lambda one: ask(*one), questions))
    took_s = time.perf_counter() - began_s
    hits, queries = (now - then for now, then in zip(read_hits(client), before, strict=True))
    return {
        "hit rate, %": 100 * hits / queries,
        "median TTFT, ms": 1e3 * statistics.median(first_s),
        "requests/s": len(questions) / took_s,
    }


def measure(options: argparse.Namespace, measured: Measured) -> None:
    with tempfile.TemporaryDirectory() as root, contextlib.ExitStack() as stack:
        folder, home = Path(root), Path(root) / "home"
        model = str(make_demo_model(folder / "model"))
        stack.enter_context(variables(**ENGINE, HPC_SERVE_HOME=str(home), HF_HOME=f"{folder}/hf"))
        for _ in range(2):
            stack.enter_context(real_service(home, model, "prefixes"))
        client = connect("prefixes", max_retries=0)
        deadline_s = time.monotonic() + 60
        while len(client.replicas) < 2 and time.monotonic() < deadline_s:
            client.models.list()
            time.sleep(1)
        lead = pool.LEAD
        turns = {BY_LOAD: partial(turn, client, options, 0.0), BY_BEGINNING: partial(turn, client, options, lead)}
        what = f"{options.conversations} conversations of {options.turns} requests, {options.prefix_len} tokens each"
        measured.take_turns(f"{what}, {options.in_flight} in flight", turns, rounds=options.rounds, base=BY_LOAD)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--conversations", type=int, default=28)
    parser.add_argument("--turns", type=int, default=6, help="requests of a conversation")
    parser.add_argument("--prefix-len", type=int, default=1500, help="tokens that a conversation begins with")
    parser.add_argument("--question-len", type=int, default=40, help="tokens that each of its requests adds")
    parser.add_argument("--in-flight", type=int, default=4)


BENCHMARK = Benchmark(
    name="prefix_routing", about=__doc__, measure=measure, rounds=5, options=add_options, needs="a real engine"
)

if __name__ == "__main__":
    run_alone(BENCHMARK)
