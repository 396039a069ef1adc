"""Waits until a service is ready, for the person who submitted it, and tells how a job ended that failed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from hpc_serve.client.status import ReplicaStatus
from hpc_serve.errors import ServiceFailedError, WaitTimeoutError
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.submit import scheduler
from hpc_serve.submit.log_files import places_of
from hpc_serve.submit.scheduler import SchedulerView
from hpc_serve.submit.slurm import UNKNOWN
from hpc_serve.submit.status_reader import is_same_replica, not_found_error, read_status

_RECORDS_S = 1.0
_SCHEDULER_S = 5.0  # a controller serves a whole site: it is asked less often than our own files are read
_RECORD_MAY_FOLLOW_S = 5.0  # on a shared filesystem the record of an end may be seen after Slurm tells of the end


def wait(
    store: ServiceStore,
    service: str,
    *,
    job_id: str | None = None,
    timeout_s: float | None = None,
    on_change: Callable[[ReplicaStatus], None] = lambda status: None,
) -> ReplicaStatus:
    """Return once a replica of the service (or its job `job_id`) is ready. `on_change` is called with each new stage.

    Raises ServiceFailedError when every job of it has ended, WaitTimeoutError after `timeout_s` seconds,
    ServiceNotFoundError if there is none.
    """
    slurm = SchedulerView(max_age_s=_SCHEDULER_S)
    deadline = time.monotonic() + timeout_s if timeout_s is not None else None
    shown: ReplicaStatus | None = None
    ended_at_s: float | None = None
    while True:
        status = _most_hopeful(read_status(store, service, slurm=slurm).replicas, job_id)
        if status is None:
            raise not_found_error(store, job_id or service)
        if shown is None or _progress_key(status) != _progress_key(shown):
            on_change(status)
            shown = status
        if status.state == "ready":
            return status
        if status.is_over:
            ended_at_s = ended_at_s or time.monotonic()
            is_settled = status.end_reported_by_job and _slurm_is_done_with(status)
            if is_settled or time.monotonic() - ended_at_s > _RECORD_MAY_FOLLOW_S:
                raise ServiceFailedError(failure_report(_read_end_again(store, status)))
        if deadline is not None and time.monotonic() >= deadline:
            raise WaitTimeoutError(
                f"{service} is not ready after {timeout_s:.0f} s, its job goes on: {status.sentence}. "
                f"Wait again with `hpc-serve wait {service}`, or end it with `hpc-serve stop {service}`."
            )
        time.sleep(_RECORDS_S)


def failure_report(status: ReplicaStatus) -> str:
    """How a replica ended, with the last lines of its logs and where the logs are."""
    lines = "".join(f"\n    {line}" for line in status.last_log_lines[-10:])
    last = f"\nLast log lines:{lines}" if lines else ""
    logs = ", ".join(places_of(status))
    return f"{status.service} (job {status.job_id}) {status.sentence}{last}\nLogs: {logs}"


def _most_hopeful(replicas: Sequence[ReplicaStatus], job_id: str | None) -> ReplicaStatus | None:
    """The replica to wait for: one that is ready, else the latest that may become ready, else the latest."""
    candidates = [status for status in replicas if job_id in (None, status.job_id)]
    ready = [status for status in candidates if status.state == "ready"]
    coming = [status for status in candidates if not status.is_over]
    best = ready or coming or candidates
    return best[-1] if best else None


def _progress_key(status: ReplicaStatus) -> tuple[object, ...]:
    """What must differ between two statuses for the second to be shown."""
    return (status.job_id, status.restart, status.state, status.stage, status.progress, status.reason)


def _slurm_is_done_with(status: ReplicaStatus) -> bool:
    """Whether Slurm will not run the job again; while it still clears a job away, it may be about to requeue it."""
    if status.cluster != "slurm":
        return True
    job = scheduler.job_state(status.job_id)
    return job.is_over or job.state == UNKNOWN


def _read_end_again(store: ServiceStore, status: ReplicaStatus) -> ReplicaStatus:
    """The same end with the cause, which Slurm can tell once it has cleared the job away."""
    now = read_status(store, status.service).replicas
    return next((one for one in now if is_same_replica(one, status) and one.is_over), status)
