"""What `connect()` costs: `python -m benchmarks.connect_cost`. A minute; stub engines alone, on this machine.

Services with many records, or with one of a node that is gone, beside a service with two records. They take turns in an
order that changes by chance, each figure is a median, each ratio the median of the rounds' ratios. CPU time of this
process is the figure to trust on a shared machine.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hpc_serve.client import connect
from tests.support.stubs import StubService, make_record, make_submitted

RECORDS = 1000
LIVE = 10
ANSWERING = 100
ENGINES = 2


@dataclass(frozen=True)
class Cost:
    """Milliseconds of the wall's clock and of this process's CPU."""

    wall_ms: float
    cpu_ms: float


def measure(work: Callable[[], object]) -> Cost:
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    work()
    return Cost(1000 * (time.perf_counter() - wall_s), 1000 * (time.process_time() - cpu_s))


def service(home: Path, name: str) -> StubService:
    made = StubService(home, name)
    for _ in range(ENGINES):
        made.start()
    return made


def add_ended(made: StubService) -> None:
    """Records of jobs that ended, as months of use leave them, beside LIVE live ones."""
    now = time.time()
    for number in range(RECORDS - LIVE):
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


def _connect(name: str, home: Path, made: list[Any]) -> None:
    made.append(connect(name, home=home))


def settled() -> None:
    """Wait until what a connect left to do in the background is done."""
    while any(thread.name.startswith("hpc-serve") for thread in threading.enumerate()):
        time.sleep(0.01)


def report_connect(home: Path, names: list[str], rounds: int) -> None:
    costs: dict[str, list[Cost]] = {name: [] for name in names}
    for name in names:
        connect(name, home=home).close()
        settled()
    for _ in range(rounds):
        for name in random.sample(names, len(names)):
            made: list[Any] = []
            costs[name].append(measure(partial(_connect, name, home, made)))
            settled()
            made[0].close()
    few = [cost.wall_ms for cost in costs[names[0]]]
    print(f"{'connect()':44}{'wall, ms':>10}{'best':>8}{'CPU, ms':>9}{'ratio':>8}")
    for name, found in costs.items():
        wall, cpu = statistics.median(c.wall_ms for c in found), statistics.median(c.cpu_ms for c in found)
        ratio = statistics.median(cost.wall_ms / least for cost, least in zip(found, few, strict=True))
        print(f"{name:44}{wall:10.1f}{min(c.wall_ms for c in found):8.1f}{cpu:9.1f}{ratio:8.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        home = Path(root) / "home"
        few, ended, live, dead = (
            "2-records",
            "1000-records-10-live",
            "1000-live-looking-100-answer",
            "2-and-a-dead-node",
        )
        made = [service(home, name) for name in (few, ended, live, dead)]
        try:
            add_ended(made[1])
            add_live(made[2], RECORDS - ENGINES, answering=ANSWERING)
            # 192.0.2.0/24 is for documentation: nobody answers there.
            record = make_record(service=dead, job_id="7", hosts=("192.0.2.1",), port=9, certificate=None)
            made[3].store.write(record)
            report_connect(home, [few, ended, live, dead], options.rounds)
        finally:
            for each in made:
                each.close()


if __name__ == "__main__":
    main()
