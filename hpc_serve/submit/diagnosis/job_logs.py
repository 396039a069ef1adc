"""Finds the replica whose logs a person means by a name. log_files.py reads the files."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

from hpc_serve.client.replicas.status import ReplicaStatus
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.submit.slurm import scheduler
from hpc_serve.submit.slurm.scheduler import SchedulerView
from hpc_serve.submit.status.status_reader import find, is_same_replica, read_status

_SCHEDULER_S = 5.0  # a controller serves a whole site: it is asked less often than files are read


def find_job(store: ServiceStore, target: str, *, to_follow: bool = False) -> tuple[ReplicaStatus, list[ReplicaStatus]]:
    """Return the replica to show logs of for `target`, a service, a job or a replica; and the other replicas.

    The order is: a ready job, a running job, the last ended job, a waiting job. A waiting job has no logs yet, so it
    comes before ended jobs only `to_follow` its logs. Raises ServiceNotFoundError.
    """
    found = find(store, target)
    status = max(reversed(found), key=lambda one: _rank(one, to_follow))
    others = [one for one in found if one.name != status.name]
    return with_batch_log(status), others


def _rank(status: ReplicaStatus, to_follow: bool) -> int:
    if status.state == "pending":
        return 1 if to_follow else -1
    return 3 if status.state == "ready" else 0 if status.is_over else 2


def with_batch_log(status: ReplicaStatus) -> ReplicaStatus:
    """Return a replica with the place of its script's log, as far as Slurm still knows it."""
    if status.batch_log is None and status.job.cluster == "slurm":  # submitted by hand: Slurm knows where it writes to
        return replace(status, batch_log=scheduler.job_state(status.job_id).batch_log)
    return status


def end_of(store: ServiceStore, status: ReplicaStatus) -> Callable[[], bool]:
    """Return a function that says whether that replica is over. It may be called often: Slurm is asked seldom."""
    slurm = SchedulerView(max_age_s=_SCHEDULER_S)
    asked_s, over = -math.inf, False

    def is_over() -> bool:
        nonlocal asked_s, over
        if not over and time.monotonic() - asked_s > _SCHEDULER_S:
            found = read_status(store, status.service, slurm=slurm).everywhere
            over = all(one.is_over for one in found if is_same_replica(one, status))
            asked_s = time.monotonic()
        return over

    return is_over
