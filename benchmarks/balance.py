"""Which replica gets which share of the requests: `python -m benchmarks.balance`. Two minutes; needs no engine.

Four stub engines, all equal or one of them ten times slower, are asked by one client with many requests in flight, by
many clients with one each, and by clients whose requests come whether or not those before were answered. Half of the
requests are streams. Printed are the shares in percent, once the clients have seen each engine, and the mean time that
a request took; beside it that of clients that go by the number of requests under way alone.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

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
                threading.Thread(target=go_on, args=(client,), daemon=True).start()

    def open(self, rate: float) -> None:
        """Requests come by chance, so many a second."""

        def go_on() -> None:
            turn = 0
            with ThreadPoolExecutor(500) as threads:
                while not self.is_over.wait(random.expovariate(rate)):
                    threads.submit(self.ask, random.choice(self.clients), turn)
                    turn += 1

        threading.Thread(target=go_on, daemon=True).start()


LOADS: dict[str, tuple[int, Callable[[Load], None]]] = {
    "1 client, 32 in flight": (1, lambda load: load.closed(32)),
    "32 clients, 1 in flight each": (32, lambda load: load.closed(1)),
    "1 client, 40 a second": (1, lambda load: load.open(40)),
    "16 clients, 40 a second": (16, lambda load: load.open(40)),
}


def measure(name: str, *, first_s: float, then_s: float, by_count: bool) -> str:
    """The line of one load: `first_s` to get to know the engines, then the shares of `then_s` seconds."""
    count, run = LOADS[name]
    clients = [connect("405b", max_retries=0) for _ in range(count)]
    for client in clients:
        client._watch.refresh()  # all four are known from the first request on
        if by_count:
            client._watch.pool.note_time = lambda *_: None  # type: ignore[method-assign]
    load = Load(clients)
    run(load)
    time.sleep(first_s)
    from_s = time.monotonic()
    time.sleep(then_s)
    load.is_over.set()
    seen = [(replica, took_s) for began_s, replica, took_s in load.seen if began_s >= from_s]
    time.sleep(SLOWER * WORDS * WORD_S)  # those under way end
    shares = Counter(replica for replica, _ in seen)
    percent = "  ".join(f"{100 * shares[f'{100 + place}-r0-0'] / len(seen):5.1f}" for place in range(4))
    kind = "by count" if by_count else "by speed"
    return f"{name:30} {kind}  {percent}   {1e3 * statistics.mean(took_s for _, took_s in seen):6.0f} ms  {len(seen)}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.balance", description=__doc__)
    parser.add_argument("--first", type=float, default=15.0, metavar="SECONDS", help="before anything is counted")
    parser.add_argument("--seconds", type=float, default=30.0, help="that are counted")
    options = parser.parse_args()
    for slower in (1, SLOWER):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["HPC_SERVE_HOME"] = f"{folder}/home"
            service = StubService(Path(folder) / "home")
            try:
                for place in range(4):
                    word_s = WORD_S * (slower if place == 3 else 1)
                    service.start("--stub-words", str(WORDS), "--stub-word-s", str(word_s))
                print("four equal engines" if slower == 1 else f"the last one {slower} times slower")
                for name in LOADS:
                    for by_count in (False, True) if slower > 1 else (False,):
                        times = {"first_s": options.first, "then_s": options.seconds}
                        print(measure(name, **times, by_count=by_count), flush=True)
            finally:
                service.close()


if __name__ == "__main__":
    main()
