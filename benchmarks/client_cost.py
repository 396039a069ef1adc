"""What the client costs over the plain SDK: `python -m benchmarks.client_cost`. A minute; needs no engine.

One stub engine is asked the same things in turn, in an order that changes by chance: by the plain SDK, by a client of
this package, and by one that does not resume streams. All speak TLS and keep their connections. CPU time of this
process is the figure, divided by the requests and by the chunks of their streams.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import openai

from benchmarks.common import Benchmark, Figures, Measured, cost_of, run_alone, variables
from hpc_serve.client import connect
from hpc_serve.trust.connection import pinned_context
from tests.support.stubs import StubService

TOKENS = 200
PLAIN = "plain SDK"
MESSAGES: Any = [{"role": "user", "content": "Why is the sky blue? " * 20}]


def plain_client(service: StubService) -> openai.OpenAI:
    (engine,) = service.engines
    assert engine.certificate is not None
    http_client = openai.DefaultHttpxClient(verify=pinned_context(engine.certificate), trust_env=False)
    key = service.key_file.read_text().strip()
    return openai.OpenAI(base_url=f"https://127.0.0.1:{engine.port}/v1", api_key=key, http_client=http_client)


def ask(client: Any, *, tokens: int, stream: bool, **options: Any) -> None:
    answer = client.chat.completions.create(
        model="405b", messages=MESSAGES, temperature=0, max_tokens=tokens, stream=stream, **options
    )
    if stream:
        for _ in answer:
            pass


def cpu_of(call: Callable[[], None], times: int, chunks: int) -> Figures:
    cost = cost_of(lambda: [call() for _ in range(times)])
    figures = {"CPU ms a request": 1e3 * cost.cpu_s / times}
    return {**figures, "CPU µs a chunk": 1e6 * cost.cpu_s / times / chunks} if chunks > 1 else figures


def measure_costs(options: argparse.Namespace, measured: Measured, service: StubService) -> None:
    plain = plain_client(service)
    clients = {PLAIN: plain, "client": connect("405b"), "client, resume=False": connect("405b", resume=False)}
    # What the ids of the tokens cost by themselves: the SDK makes objects of them.
    ids: dict[str, dict[str, Any]] = {"plain SDK, token ids": {"extra_body": {"return_token_ids": True}}}
    clients |= dict.fromkeys(ids, plain)
    tokens, times = options.tokens, options.times
    cases: tuple[tuple[str, int, dict[str, Any]], ...] = (
        ("a whole answer", times, {"tokens": 4, "stream": False}),
        ("a stream of one token", times, {"tokens": 1, "stream": True}),
        (f"a stream of {tokens} tokens", max(1, times // 10), {"tokens": tokens, "stream": True}),
    )
    for what, count, asked in cases:
        chunks = asked["tokens"] if asked["stream"] else 0
        turns = {
            name: partial(cpu_of, partial(ask, client, **asked, **ids.get(name, {})), count, chunks)
            for name, client in clients.items()
        }
        measured.take_turns(what, turns, rounds=options.rounds, base=PLAIN)


def measure(options: argparse.Namespace, measured: Measured) -> None:
    with tempfile.TemporaryDirectory() as folder, variables(HPC_SERVE_HOME=f"{folder}/home"):
        service = StubService(Path(folder) / "home")
        try:
            service.start("--stub-greedy", "--stub-words", str(options.tokens))
            measure_costs(options, measured, service)
        finally:
            service.close()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of the long stream")
    parser.add_argument("--times", type=int, default=50, help="requests in a turn; a tenth of it for long streams")


BENCHMARK = Benchmark(
    name="client_cost",
    about=__doc__,
    measure=measure,
    rounds=15,
    options=add_options,
    short={"tokens": 4, "times": 1},
)

if __name__ == "__main__":
    run_alone(BENCHMARK)
