"""What `connect()` costs: `python -m benchmarks.connect_cost`. A minute; stub engines alone, on this machine.

Services with many records, or with one of a node that is gone, beside a service with two records. CPU time of this
process is the figure to trust on a shared machine.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

from benchmarks.common import Benchmark, Figures, Measured, cost_of, run_alone
from hpc_serve.client import connect
from tests.support.stubs import StubService, make_record, make_submitted

LIVE = 10
DEAD = 50
ENGINES = 2


def service(home: Path, name: str) -> StubService:
    made = StubService(home, name)
    for _ in range(ENGINES):
        made.start()
    return made


def add_ended(made: StubService, count: int) -> None:
    """Records of jobs that ended, as months of use leave them, beside LIVE live ones."""
    now = time.time()
    for number in range(count - LIVE):
        at = now - 500_000 + 400 * number
        record = make_record(
            service=made.service,
            job_id=str(1000 + number),
            state=random.choice(["stopped", "failed"]),
            certificate=made.engines[0].certificate,
            reason="engine exited with code 1",
            last_log_lines=tuple("a line of the engine's log, as long as they are" for _ in range(20)),
            started_at=at,
            updated_at=at + 300,
        )
        made.store.write(record)
        made.store.write_submitted(make_submitted(service=made.service, job_id=str(1000 + number), submitted_at=at))
    add_live(made, LIVE, answering=LIVE)


def add_live(made: StubService, count: int, *, answering: int) -> None:
    """Records that say ready; only so many of them, here and there, are of an engine that is there."""
    is_there = random.sample([True] * answering + [False] * (count - answering), count)
    for number, there in enumerate(is_there):
        engine = random.choice(made.engines)
        port = engine.port if there else 1
        job_id = str(500_000 + number)
        made.store.write(
            make_record(service=made.service, job_id=job_id, port=port, certificate=engine.certificate, counter=1)
        )


def add_stale(made: StubService, count: int) -> None:
    """Records of jobs that died without an end in their record, DEAD of them a moment ago on nodes that are gone."""
    now = time.time()
    for number in range(count):
        is_dead = number < DEAD
        host = f"192.0.2.{number + 1}" if is_dead else "127.0.0.1"
        at = now - 20 if is_dead else now - 200_000 - 60 * number
        made.store.write(
            make_record(
                service=made.service,
                job_id=str(500_000 + number),
                hosts=(host,),
                port=1,
                certificate=made.engines[0].certificate,
                started_at=at,
                updated_at=at,
            )
        )


def connecting(name: str, home: Path) -> Figures:
    """One connect, and what it left to do in the background is waited for."""
    before = set(threading.enumerate())
    cost = cost_of(partial(connect, name, home=home))
    while any(thread.name.startswith("hpc-serve") for thread in set(threading.enumerate()) - before):
        time.sleep(0.01)
    cost.result.close()
    return {"ms": 1e3 * cost.wall_s, "CPU ms": 1e3 * cost.cpu_s}


def measure(options: argparse.Namespace, measured: Measured) -> None:
    count = options.records
    services = {
        "2 records": "few",
        f"{count} records, {LIVE} of them live": "ended",
        f"{count} records that look live, {count // 10} of them are": "live",
        "2 records, and one of a dead node": "dead",
        f"{count} records, 2 of them live, {DEAD} of dead nodes, none of the others renewed": "stale",
    }
    with tempfile.TemporaryDirectory() as root:
        home = Path(root) / "home"
        made = {name: service(home, name) for name in services.values()}
        try:
            add_ended(made["ended"], count)
            add_live(made["live"], count - ENGINES, answering=count // 10)
            add_stale(made["stale"], count - ENGINES)
            # 192.0.2.0/24 is for documentation: nobody answers there.
            record = make_record(service="dead", job_id="7", hosts=("192.0.2.1",), port=9, certificate=None)
            made["dead"].store.write(record)
            turns = {what: partial(connecting, name, home) for what, name in services.items()}
            measured.take_turns("connect()", turns, rounds=options.rounds, base="2 records")
        finally:
            for each in made.values():
                each.close()


BENCHMARK = Benchmark(
    name="connect_cost",
    about=__doc__,
    measure=measure,
    rounds=9,
    options=lambda parser: parser.add_argument("--records", type=int, default=1000),
    short={"records": 20},
)

if __name__ == "__main__":
    run_alone(BENCHMARK)
