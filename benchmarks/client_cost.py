"""What the client costs over the plain SDK: `python -m benchmarks.client_cost`. About a minute; needs no engine.

One stub engine is asked the same things in turn, in an order that changes by chance: by the plain SDK, by a client of
this package, and by one that does not resume streams. All speak TLS and keep their connections. CPU time of this
process is the figure; each is a median over the rounds, each difference the median of the rounds' differences.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import openai

from hpc_serve.client import connect
from hpc_serve.trust.pinned import pinned_context
from tests.support.stubs import StubService

TOKENS = 200
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


def cpu_ms(call: Callable[[], None], times: int) -> float:
    began = time.process_time()
    for _ in range(times):
        call()
    return (time.process_time() - began) * 1e3 / times


def measure(service: StubService, rounds: int) -> None:
    plain = plain_client(service)
    clients = {"plain SDK": plain, "client": connect("405b"), "client, resume=False": connect("405b", resume=False)}
    # What the ids of the tokens cost by themselves: the SDK makes objects of them.
    ids: dict[str, dict[str, Any]] = {"plain SDK, token ids": {"extra_body": {"return_token_ids": True}}}
    clients |= dict.fromkeys(ids, plain)
    cases: tuple[tuple[str, int, dict[str, Any]], ...] = (
        ("a whole answer", 50, {"tokens": 4, "stream": False}),
        ("a stream of one token", 50, {"tokens": 1, "stream": True}),
        (f"a stream of {TOKENS} tokens", 5, {"tokens": TOKENS, "stream": True}),
    )
    for what, times, options in cases:
        seen: dict[str, list[float]] = {name: [] for name in clients}
        for _ in range(rounds):
            for name in random.sample(list(clients), len(clients)):
                client, more = clients[name], ids.get(name, {})
                seen[name].append(cpu_ms(partial(ask, client, **options, **more), times))
        for name, found in seen.items():
            over = statistics.median(mine - base for mine, base in zip(found, seen["plain SDK"], strict=True))
            print(f"{what:24} {name:22} {statistics.median(found):8.3f} ms  {over:+8.3f} ms over the plain SDK")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.client_cost", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HPC_SERVE_HOME"] = f"{folder}/home"
        service = StubService(Path(folder) / "home")
        try:
            service.start("--stub-greedy", "--stub-words", str(TOKENS))
            measure(service, options.rounds)
        finally:
            service.close()


if __name__ == "__main__":
    main()
