"""Whose logs a person means who names a service, and how long new lines may come. The files are logs.py's."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.submit import scheduler
from hpc_serve.submit.look import look
from hpc_serve.submit.scheduler import SchedulerView
from hpc_serve.submit.services import find
from hpc_serve.submit.status import ServiceStatus

_SCHEDULER_S = 5.0  # a controller serves a whole site: it is asked less often than files are read


def find_job(store: ServiceStore, target: str, *, to_follow: bool = False) -> tuple[ServiceStatus, list[ServiceStatus]]:
    """The job of a service whose logs tell most, or the job itself, with its batch script's log; and the other ones.

    One that is ready, else one that runs, else the last that ended, else one that waits (and has no logs yet, so that
    it comes before those that ended only `to_follow` it). Raises ServiceNotFoundError.
    """
    found = find(store, target)
    status = max(reversed(found), key=lambda one: _tells(one, to_follow))
    others = [one for one in found if one.job_id != status.job_id]
    return _with_batch_log(status), others


def _tells(status: ServiceStatus, to_follow: bool) -> int:
    if status.state == "pending":
        return 1 if to_follow else -1
    return 3 if status.state == "ready" else 0 if status.is_over else 2


def _with_batch_log(status: ServiceStatus) -> ServiceStatus:
    if status.batch_log is None and status.cluster == "slurm":  # submitted by hand: Slurm knows where it writes to
        return replace(status, batch_log=scheduler.job_state(status.job_id).batch_log)
    return status


def end_of(store: ServiceStore, status: ServiceStatus) -> Callable[[], bool]:
    """A question that may be asked often: whether that job is over."""
    slurm = SchedulerView(max_age_s=_SCHEDULER_S)
    looked_s, over = -math.inf, False

    def is_over() -> bool:
        nonlocal looked_s, over
        if not over and time.monotonic() - looked_s > _SCHEDULER_S:
            found = look(store, status.service, slurm=slurm).services
            over = all(one.is_over for one in found if one.job_id == status.job_id)
            looked_s = time.monotonic()
        return over

    return is_over
