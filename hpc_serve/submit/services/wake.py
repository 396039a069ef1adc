"""Wakes a service that is asleep or over: submits its least number of replicas again, with its own script.

Of several programs that wake it at once one submits, since each must first say so in the service's file.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_serve.client.replicas.status import ReplicaStatus
from hpc_serve.errors import HpcServeError, StoreError
from hpc_serve.rendezvous.elastic import Elastic, ElasticState, change_elastic, read_elastic
from hpc_serve.rendezvous.record import SubmittedJob
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.submit.services.live_replicas import live_replicas
from hpc_serve.submit.services.services import add_replicas
from hpc_serve.submit.status.status_reader import find_report, replicas_here

_MOST_TRIES = 10


@dataclass(frozen=True, kw_only=True)
class Woken:
    """The jobs that were submitted; if none, `note` says why none was needed."""

    jobs: tuple[SubmittedJob, ...] = ()
    note: str = ""


def wake(store: ServiceStore, service: str) -> Woken:
    """Submit the least number of replicas of a service, unless some wait, start or serve.

    Raises ServiceNotFoundError, StoreError, and what `add_replicas` raises; then it is asleep as before.
    """
    for _ in range(_MOST_TRIES):
        seen = read_elastic(store, service)
        found = replicas_here(store, find_report(store, service))
        if seen is not None and seen.is_submitting(time.time()):
            return Woken(note=f"another program submits {seen.submitting} of it at the moment")
        claimed, live = _claim(store, service, seen, found)
        if claimed is None:  # somebody has changed it since it was read
            continue
        if live:
            return Woken(note="; ".join(f"job {one.job_id} is {one.state}" for one in live))
        return Woken(jobs=_submit(store, service, claimed, before=seen))
    raise StoreError(f"{service} was not woken: its file changed {_MOST_TRIES} times meanwhile. Try again.")


def _claim(
    store: ServiceStore, service: str, seen: Elastic | None, found: Sequence[ReplicaStatus]
) -> tuple[Elastic | None, list[ReplicaStatus]]:
    """Say that the service is awake, and that this program submits its replicas if there are none.

    Returns what is written then, None if it was changed since it was `seen`; and the replicas that are there.
    """
    live: list[ReplicaStatus] = []
    before = seen or Elastic(least=1, most=1)  # a service that never had bounds comes back as one replica
    now = time.time()

    def change(is_now: Elastic | None) -> Elastic | None:
        if is_now != seen:
            return None
        # Requests to drain are read under the lock: a replica that sees its service asleep makes its own under it.
        live.extend(one for one in live_replicas(store, found) if one.job_id not in before.ending)
        awake = replace(before, state="awake", ending=())
        if live:
            return awake
        woken = replace(awake, decider="", submitting=before.least, submitting_at=now, starting=(), problem="")
        return replace(woken, failures=0, next_try_at=0.0).with_decision(now, f"woken with {before.least}")

    return change_elastic(store, service, change), live


def _submit(store: ServiceStore, service: str, mine: Elastic, *, before: Elastic | None) -> tuple[SubmittedJob, ...]:
    try:
        with _as_submitted(mine):
            jobs = add_replicas(store, service, mine.least)
    except HpcServeError:
        _end_submission(store, service, mine, state=before.state if before is not None else "stopped")
        raise
    _end_submission(store, service, mine, state="awake")
    return jobs


def _end_submission(store: ServiceStore, service: str, mine: Elastic, *, state: ElasticState) -> None:
    def change(found: Elastic | None) -> Elastic | None:
        if found is None or (found.submitting, found.submitting_at) != (mine.submitting, mine.submitting_at):
            return None
        return replace(found, submitting=0, state=state)

    change_elastic(store, service, change)


@contextlib.contextmanager
def _as_submitted(elastic: Elastic) -> Iterator[None]:
    """Be in the folder, and have the variables, with which the service was submitted: sbatch hands both on."""
    folder, before = Path.cwd(), dict(os.environ)
    os.environ.update(elastic.variables)
    try:
        if elastic.folder:
            with contextlib.suppress(OSError):
                os.chdir(elastic.folder)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        os.chdir(folder)
