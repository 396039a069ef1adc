"""The faults that need no Slurm: of a service's processes and of the files that it shares with its clients."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.faults import hostile
from tests.faults.fault import fault
from tests.faults.service import Service


@fault(hold_s=3.0)
def nothing(service: Service) -> None:
    """Nothing breaks: what the load gets from a healthy service."""


# -- processes


@fault(is_short=True, hold_s=3.0)
def engine_killed(service: Service) -> None:
    """kill -9 of one engine."""
    service.signal(service.engine(0), signal.SIGKILL)


@fault(is_short=True, hold_s=3.0, has_worker=True)
def worker_killed(service: Service) -> None:
    """kill -9 of one engine's worker: the engine tells each client of an error, and ends."""
    service.signal(service.worker(0), signal.SIGKILL)


@fault(hold_s=3.0, ready_after=1)
def launcher_killed(service: Service) -> None:
    """kill -9 of one launcher."""
    service.signal(service.launcher(0), signal.SIGKILL)


@fault(is_short=True, ready_after=1)
def engine_stopped(service: Service) -> None:
    """SIGSTOP of one engine, which stays so."""
    service.signal(service.engine(0), signal.SIGSTOP)


@fault(is_short=True, ready_after=1)
def engine_hung(service: Service) -> None:
    """One engine makes no token, and its /health answers 200."""
    service.hang_file(0).touch()


@fault(is_short=True, hold_s=3.0, gateways=2)
def gateway_killed(service: Service) -> None:
    """kill -9 of one of two gateways; who asked there asks the other one."""
    service.signal(service.gateways()[:1], signal.SIGKILL)


@fault(hold_s=30.0, settle_s=3.0)
def client_frozen(service: Service) -> Iterator[None]:
    """SIGSTOP of the client's program for a while."""
    pids = service.load_pids()
    assert pids
    service.signal(pids, signal.SIGSTOP)
    yield
    service.signal(pids, signal.SIGCONT)


# -- planned ends


@fault(is_short=True, hold_s=3.0, ready_after=1)
def stop(service: Service) -> None:
    """`hpc-serve stop` of one replica."""
    service.hpc_serve("stop", service.jobs[0])


@fault(hold_s=3.0, ready_after=1)
def stop_now(service: Service) -> None:
    """`hpc-serve stop --now` of one replica."""
    service.hpc_serve("stop", "--now", service.jobs[0])


@fault(hold_s=3.0, has_worker=True, ready_after=1)
def stop_of_ranks(service: Service) -> None:
    """`hpc-serve stop` of one replica of several ranks: it drains before a rank is told to end."""
    service.hpc_serve("stop", service.jobs[0])


# -- shared files


@fault(is_short=True, hides_records=True, settle_s=3.0)
def home_away(service: Service) -> Iterator[None]:
    """The shared home is not there for a while."""
    mount = service.mount
    away = mount.with_name(mount.name + ".away")
    mount.rename(away)
    yield
    if mount.exists():  # a launcher that runs as root has made it anew
        mount.rename(mount.with_name(mount.name + ".meanwhile"))
    away.rename(mount)


@fault(is_short=True, hides_records=True, settle_s=3.0)
def records_torn(service: Service) -> Iterator[Callable[[], None]]:
    """Every record is cut in half, again and again, for a while."""

    def tear() -> None:
        for path in service.records():
            with suppress(OSError):
                size = path.stat().st_size
                if path.read_bytes().endswith(b"}\n"):
                    os.truncate(path, size // 2)

    yield tear


@fault(hides_records=True, settle_s=3.0)
def records_foreign(service: Service) -> Iterator[Callable[[], None]]:
    """Every record belongs to another user for a while."""

    def give_away() -> None:
        for path in service.records():
            with suppress(OSError):
                os.chown(path, 65534, 65534)

    yield give_away


@fault()
def records_hostile(service: Service) -> Iterator[None]:
    """Further records name addresses that take connections and never answer, or answer nonsense."""
    template = json.loads(service.records()[0].read_text())
    paths, strangers = [], []
    try:
        for number, manner in enumerate(hostile.MANNERS):
            program, host = service.popen_stranger([service.python, "-m", "tests.faults.hostile", manner])
            strangers.append(program)
            assert program.stdout is not None
            change = {"job_id": str(900 + number), "port": int(program.stdout.readline()), "hosts": [host]}
            paths.append(write_record(service, f"{900 + number}-r0-0.json", {**template, **change, "state": "ready"}))
        yield
    finally:
        for path in paths:
            path.unlink()
        for program in strangers:
            with program:
                program.kill()


def write_record(service: Service, name: str, record: dict[str, Any]) -> Path:
    """A record as its owner would write it."""
    like = service.records()[0].stat()
    path = service.service_folder / name
    path.touch(mode=0o600)
    path.write_text(json.dumps(record) + "\n")
    os.chown(path, like.st_uid, like.st_gid)
    return path
