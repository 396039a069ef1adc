"""Waits until a service is ready, for the person who submitted it.

A job that failed ends the wait, with the cause of its end. A job that waits in the queue for a reason that only a
person can change ends the wait in the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from hpc_serve.client.replicas.status import ReplicaStatus
from hpc_serve.errors import InvalidRequestError, ServiceAsleepError, ServiceFailedError, WaitTimeoutError
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.submit.diagnosis import diagnose_replica, with_batch_log
from hpc_serve.submit.slurm import scheduler
from hpc_serve.submit.slurm.scheduler import SchedulerView
from hpc_serve.submit.slurm.slurm import UNKNOWN
from hpc_serve.submit.slurm.slurm_messages import pending_cure
from hpc_serve.submit.status.job_status import never_starts, without_successors
from hpc_serve.submit.status.status_reader import is_of_job, is_same_replica, not_found_error, read_status
from hpc_serve.submit.status.wanted_words import asleep_sentence

_RECORDS_S = 1.0
_SCHEDULER_S = 5.0  # a controller serves a whole site: it is asked less often than our own files are read
_RECORD_MAY_FOLLOW_S = 5.0  # on a shared filesystem the record of an end may be seen after Slurm tells of the end


def wait(
    store: ServiceStore,
    service: str,
    *,
    job_id: str | None = None,
    replicas: int = 1,
    timeout_s: float | None = None,
    on_change: Callable[[ReplicaStatus], None] = lambda status: None,
) -> ReplicaStatus:
    """Return once `replicas` of the service (or of its job or array `job_id`) are ready: the last of them.

    `on_change` is called with each new stage. Raises ServiceFailedError when so many jobs have ended, or will never
    start, that fewer are left, ServiceAsleepError, WaitTimeoutError after `timeout_s` seconds, ServiceNotFoundError
    if there is none, InvalidRequestError if there were never so many.
    """
    slurm = SchedulerView(max_age_s=_SCHEDULER_S)
    deadline = time.monotonic() + timeout_s if timeout_s is not None else None
    shown: tuple[object, ...] = ()
    ended_at_s: float | None = None
    while True:
        report = read_status(store, service, slurm=slurm)
        found = [one for one in report.everywhere if job_id is None or is_of_job(one, job_id)]
        if not found:
            raise not_found_error(store, job_id or service)
        ready = [one for one in found if one.state == "ready"]
        status = ready[-1] if len(ready) >= replicas else _to_wait_for(without_successors(found), replicas)
        seen = (status.name, status.restart, status.state, status.stage, status.progress, status.start, status.reason)
        if seen != shown:
            on_change(status)
            shown = seen
        if len(ready) >= replicas:
            return status
        if never_starts(status):
            cure = pending_cure(status.pending_reason, status.job_id, scheduler.partitions_if_known())
            raise ServiceFailedError(
                f"{status.service} (job {status.name}) waits in the queue, and {status.reason}. {cure} "
                f"End this one: hpc-serve stop {status.job_id}"
            )
        if status.is_over and service in report.wanted and report.wanted[service].state == "asleep":
            raise ServiceAsleepError(asleep_sentence(service, report.wanted[service]))
        ended_at_s = (ended_at_s or time.monotonic()) if status.is_over else None  # or its job was requeued meanwhile
        if ended_at_s is not None:
            is_settled = status.end_reported_by_job and _slurm_is_done_with(status)
            if is_settled or time.monotonic() - ended_at_s > _RECORD_MAY_FOLLOW_S:
                now = read_status(store, service).everywhere  # Slurm may tell the cause once the job is cleared away
                last = next((one for one in now if is_same_replica(one, status) and one.is_over), status)
                raise ServiceFailedError(failure_report(last))
        if deadline is not None and time.monotonic() >= deadline:
            so_far = f"has {len(ready)} of {replicas} replicas ready" if replicas > 1 else "is not ready"
            said = (
                f"{service} {so_far} after {timeout_s:.0f} s, its job goes on: {status.sentence}. Wait again with "
                f"`hpc-serve wait {service}`, or end it with `hpc-serve stop {service}`."
            )
            raise WaitTimeoutError(" ".join((said, *report.problems)))
        time.sleep(_RECORDS_S)


def failure_report(status: ReplicaStatus) -> str:
    """How a replica ended, why, what to do about it, and where the logs are; the last lines where no cause is known."""
    status = with_batch_log(status)
    diagnosis = diagnose_replica(status)
    is_known = diagnosis.cause is not None and diagnosis.cause.is_known
    lines = "".join(f"\n    {line}" for line in status.last_log_lines[-10:])
    last = f"\nLast log lines:{lines}" if lines and not is_known else ""
    return f"{status.service} (job {status.name}) {status.sentence}{last}\n{diagnosis.report}"


def _to_wait_for(found: Sequence[ReplicaStatus], wanted: int) -> ReplicaStatus:
    """The replica that decides: one that may become ready if enough are left, else one that has ended. The latest.

    Raises InvalidRequestError if there were never so many.
    """
    lost = [status for status in found if status.is_over or never_starts(status)]
    coming = [status for status in found if status not in lost and status.state != "ready"]
    left = len(found) - len(lost)
    if left >= wanted:
        return coming[-1]
    if lost:
        return lost[-1]
    service = found[0].service
    raise InvalidRequestError(
        f"{service} has {left} replicas, so {wanted} will not be ready: "
        f"`hpc-serve scale {service} {wanted}` starts more."
    )


def _slurm_is_done_with(status: ReplicaStatus) -> bool:
    """Whether Slurm will not run the job again; while it still clears a job away, it may be about to requeue it."""
    if status.job.cluster != "slurm":
        return True
    job = scheduler.job_state(status.job_id)
    return job.is_over or job.state == UNKNOWN
