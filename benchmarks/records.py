"""What records cost, by their number and by the filesystem: `python -m benchmarks.records`. Ten minutes; no engine.

A job publishes its record anew; a reader reads all records; a client looks at a service for the first time, and again
when nothing has changed. All records but ten have ended, as months of use leave them. The filesystems are tmpfs, the
one of the folder for temporary files, and, for root with bindfs, a FUSE mount of that one which keeps attributes and
names for seconds, as network filesystems do. Where strace is installed the calls that name or use a file of the
service are counted, once each.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.common import ROOT, Benchmark, Figures, Measured, cost_of, run_alone
from hpc_serve.client.discovery.discovery import ServiceWatch
from hpc_serve.client.replicas.status import ProbeResult
from hpc_serve.rendezvous.fields import to_json_text
from hpc_serve.rendezvous.record import EndpointRecord
from hpc_serve.rendezvous.store import ServiceStore
from tests.cluster import wait_for
from tests.support.stubs import make_record

SERVICE = "405b"
LIVE = 10
CACHE_S = 3
TMPFS, LAGGING = "tmpfs", "a lagging mount"
_FROM, _TO = "count-from-here", "count-to-here"
_CALLS = "trace=%file,%desc"


def make_records(store: ServiceStore, count: int) -> None:
    """So many records; LIVE of them say that they are ready."""
    folder = store.ensure_service(SERVICE)
    store.ensure_api_key(SERVICE)
    now = time.time()
    for number in range(count):
        is_live = number >= count - LIVE
        state = "ready" if is_live else random.choice(["stopped", "failed"])
        at = now - 300 * (count - number)
        lines = () if is_live else ("a line of the engine's log, as long as they are",) * 20
        record = make_record(
            service=SERVICE,
            job_id=str(1000 + number),
            state=state,
            last_log_lines=lines,
            started_at=at,
            updated_at=now if is_live else at + 200,
            counter=1,
        )
        descriptor = os.open(folder / record.name, os.O_WRONLY | os.O_CREAT, 0o600)
        with open(descriptor, "w") as file:
            file.write(to_json_text(record))


def all_ready(records: Sequence[EndpointRecord], _: str) -> dict[str, ProbeResult]:
    """In place of probes: what is measured are files."""
    return {record.name: ProbeResult(status="ready", host="127.0.0.1") for record in records}


def operations(home: Path) -> dict[str, Callable[[], Callable[[], object]]]:
    """What makes each operation ready; the operation is what that returns."""
    store = ServiceStore(home)

    def publish() -> Callable[[], object]:
        record = max(store.read(SERVICE).records, key=lambda record: int(record.job_id))
        return lambda: store.write(replace(record, counter=record.counter + 1, updated_at=time.time()))

    def read() -> Callable[[], object]:
        return lambda: store.read(SERVICE)

    def first_look() -> Callable[[], object]:
        return ServiceWatch(store, SERVICE, probe=all_ready).refresh

    def next_look() -> Callable[[], object]:
        look = first_look()
        look()
        return look

    return {"publish": publish, "read all": read, "a first look": first_look, "a look again": next_look}


def turn(make: Callable[[], Callable[[], object]]) -> Figures:
    cost = cost_of(make())
    return {"ms": 1e3 * cost.wall_s, "CPU ms": 1e3 * cost.cpu_s}


def calls(home: Path, operation: str) -> int:
    """How many system calls of an operation name a file below `home` or use one that is open."""
    code = (
        "import os, sys; from pathlib import Path; from benchmarks.records import operations; home = Path(sys.argv[1]);"
        "run = operations(home)[sys.argv[2]]();"
        f"os.path.exists(home / {_FROM!r}); run(); os.path.exists(home / {_TO!r})"
    )
    with tempfile.NamedTemporaryFile() as trace:
        argv = ["strace", "-f", "-y", "-qq", "-e", _CALLS, "-o", trace.name]
        argv += [sys.executable, "-c", code, str(home), operation]
        subprocess.run(argv, check=True, cwd=ROOT)
        lines = Path(trace.name).read_text(errors="replace").splitlines()
    first = next(number for number, line in enumerate(lines) if _FROM in line)
    last = next(number for number, line in enumerate(lines) if _TO in line)
    return sum(str(home) in line and " resumed>" not in line for line in lines[first + 1 : last])


@contextlib.contextmanager
def lagging(folder: Path, source: Path) -> Iterator[Path]:
    """A mount of `source` that keeps attributes and names for CACHE_S seconds."""
    folder.mkdir()
    cached = ",".join(f"{kind}_timeout={CACHE_S}" for kind in ("attr", "entry", "negative"))
    daemon = subprocess.Popen(["bindfs", "-f", "-o", cached, str(source), str(folder)], stdin=subprocess.DEVNULL)
    try:
        wait_for(folder.is_mount, 60, what=f"the mount of {folder}")
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False)
        daemon.wait()


@contextlib.contextmanager
def filesystems(measured: Measured, *, only_tmpfs: bool) -> Iterator[dict[str, Path]]:
    with contextlib.ExitStack() as stack:
        found = {TMPFS: Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))}
        if not only_tmpfs:
            disk = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            asked = subprocess.run(["stat", "-f", "-c", "%T", str(disk)], capture_output=True, text=True, check=True)
            kind = "ext4" if asked.stdout.strip() == "ext2/ext3" else asked.stdout.strip()
            found[kind if kind != TMPFS else "tmpfs of temporary files"] = disk
            if os.geteuid() == 0 and shutil.which("bindfs"):
                source = disk / "source"
                source.mkdir()
                found[LAGGING] = stack.enter_context(lagging(disk / "mount", source))
            else:
                measured.notes.append("A lagging mount needs root and bindfs, and was left out.")
        yield found


def measure(options: argparse.Namespace, measured: Measured) -> None:
    with filesystems(measured, only_tmpfs=options.only_tmpfs) as folders:
        for count in options.records:
            homes = {kind: folder / f"home-{count}" for kind, folder in folders.items()}
            for home in homes.values():
                make_records(ServiceStore(home), count)
            by_kind = {kind: operations(home) for kind, home in homes.items()}
            for operation in by_kind[TMPFS]:
                turns = {kind: partial(turn, found[operation]) for kind, found in by_kind.items()}
                measured.take_turns(f"{operation}, {count} records", turns, rounds=options.rounds, base=TMPFS)
        if options.only_tmpfs:
            return
        if not shutil.which("strace"):
            measured.notes.append("strace is not installed: calls were not counted.")
            return
        for count in options.records:
            home = folders[TMPFS] / f"home-{count}"
            for operation in operations(home):
                figures = {"system calls on files of the service": [calls(home, operation)]}
                measured.add(f"{operation}, {count} records", "any filesystem", figures)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--records", type=int, nargs="+", default=[10, 100, 1000, 10_000])
    parser.add_argument("--only-tmpfs", action="store_true", help="one filesystem, and no calls counted")


BENCHMARK = Benchmark(
    name="records",
    about=__doc__,
    measure=measure,
    rounds=5,
    options=add_options,
    short={"records": [LIVE + 2], "only_tmpfs": True},
)

if __name__ == "__main__":
    run_alone(BENCHMARK)
