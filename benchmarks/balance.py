"""Which replica gets which share of the requests: `python -m benchmarks.balance`. Ten minutes; no engine.

Four stub engines, all equal or one of them ten times slower, are asked by one client with many requests in flight, by
many clients with one each, and by clients whose requests come whether or not those before were answered. Half of the
requests are streams. Shares are in percent, counted once the clients have seen each engine. Beside them are those of
clients that go by the number of requests under way alone.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import Benchmark, Figures, Measured, run_alone, variables
from hpc_serve.client import connect
from tests.support.stubs import StubService

WORDS = 8
WORD_S = 0.05
SLOWER = 10
MESSAGES: Any = [{"role": "user", "content": "Why is the sky blue?"}]


class Load:
    """Requests of some clients, counted by the replica that answered."""

    def __init__(self, clients: list[Any]) -> None:
        self.clients = clients
        self.is_over = threading.Event()
        self._threads: list[threading.Thread] = []
        self.seen: list[tuple[float, str, float]] = []  # when it was asked, who answered, how long it took

    def ask(self, client: Any, turn: int) -> None:
        began_s = time.monotonic()
        answer = client.chat.completions.create(model="405b", messages=MESSAGES, stream=bool(turn % 2))
        for _ in answer if turn % 2 else ():
            pass
        self.seen.append((began_s, client.last_replica, time.monotonic() - began_s))

    def closed(self, in_flight: int) -> None:
        """Each client keeps so many requests in flight."""

        def go_on(client: Any) -> None:
            turn = random.randrange(2)
            while not self.is_over.is_set():
                self.ask(client, turn)
                turn += 1

        for client in self.clients:
            for _ in range(in_flight):
                self._start(partial(go_on, client))

    def open(self, rate: float) -> None:
        """Requests come by chance, so many a second."""

        def go_on() -> None:
            turn = 0
            with ThreadPoolExecutor(500) as threads:
                while not self.is_over.wait(random.expovariate(rate)):
                    threads.submit(self.ask, random.choice(self.clients), turn)
                    turn += 1

        self._start(go_on)

    def _start(self, work: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=work))
        self._threads[-1].start()

    def end(self) -> None:
        """No new requests; those under way end."""
        self.is_over.set()
        for thread in self._threads:
            thread.join()


LOADS: dict[str, tuple[int, Callable[[Load], None]]] = {
    "1 client, 32 in flight": (1, lambda load: load.closed(32)),
    "32 clients, 1 in flight each": (32, lambda load: load.closed(1)),
    "1 client, 40 a second": (1, lambda load: load.open(40)),
    "16 clients, 40 a second": (16, lambda load: load.open(40)),
}


def shares(name: str, options: argparse.Namespace, *, by_count: bool) -> Figures:
    """Of one load: `--first` to get to know the engines, then what `--seconds` more showed."""
    count, run = LOADS[name]
    clients = [connect("405b", max_retries=0) for _ in range(count)]
    for client in clients:
        client._watch.refresh()  # all four are known from the first request on
        if by_count:
            client._watch.pool.note_first = lambda *_: None  # type: ignore[method-assign]
    load = Load(clients)
    run(load)
    time.sleep(options.first)
    from_s = time.monotonic()
    time.sleep(options.seconds)
    seen = [(replica, took_s) for began_s, replica, took_s in list(load.seen) if began_s >= from_s]
    load.end()
    for client in clients:
        client.close()
    found = Counter(replica for replica, _ in seen)
    of_each = {f"% to {place + 1}": 100 * found[f"{100 + place}-r0-0"] / max(1, len(seen)) for place in range(4)}
    return {**of_each, "mean ms": 1e3 * statistics.fmean([took_s for _, took_s in seen] or [0]), "requests": len(seen)}


def measure(options: argparse.Namespace, measured: Measured) -> None:
    for slower in (1, SLOWER):
        with tempfile.TemporaryDirectory() as folder, variables(HPC_SERVE_HOME=f"{folder}/home"):
            service = StubService(Path(folder) / "home")
            try:
                for place in range(4):
                    word_s = options.word_s * (slower if place == 3 else 1)
                    service.start("--stub-words", str(WORDS), "--stub-word-s", str(word_s))
                engines = "four equal engines" if slower == 1 else f"the fourth {slower} times slower"
                for name in list(LOADS)[: options.loads]:
                    turns = {"by count": partial(shares, name, options, by_count=True)} if slower > 1 else {}
                    turns["by speed"] = partial(shares, name, options, by_count=False)
                    measured.take_turns(f"{engines}; {name}", turns, rounds=options.rounds, warm=False)
            finally:
                service.close()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--first", type=float, default=15.0, metavar="SECONDS", help="before anything is counted")
    parser.add_argument("--seconds", type=float, default=30.0, help="that are counted")
    parser.add_argument("--loads", type=int, help="only so many of the four")
    parser.add_argument("--word-s", type=float, default=WORD_S, help="a word's time at an engine that is not slow")


BENCHMARK = Benchmark(
    name="balance",
    about=__doc__,
    measure=measure,
    rounds=1,
    options=add_options,
    short={"first": 0.05, "seconds": 0.1, "word_s": 0.001, "loads": 1},
)

if __name__ == "__main__":
    run_alone(BENCHMARK)
