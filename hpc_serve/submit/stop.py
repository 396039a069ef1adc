"""Stops jobs: asks replicas that serve to drain, tells jobs to end, waits until they have, and writes down the end of a
job that published no record.

How a replica drains is decided in its job.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import replace

from hpc_serve.client.status import ReplicaStatus
from hpc_serve.errors import InvalidRequestError, WaitTimeoutError
from hpc_serve.rendezvous.drain import DrainRequest, ask_to_drain, drain_file
from hpc_serve.rendezvous.record import EndpointRecord, JobEnd, SubmittedJob
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.submit import scheduler
from hpc_serve.submit.local import local_job_state, stop_local_job
from hpc_serve.submit.slurm import GONE, JobState
from hpc_serve.submit.slurm_messages import ended_sentence
from hpc_serve.submit.status_reader import is_same_replica, read_status

_RECORDS_S = 1.0
_LOCAL_GRACE_S = 60.0
# How long after its drain a job may take to end by itself.
_WAY_DOWN_S = 30.0
# States of a replica that may have requests under way; one that does not answer would not hear of a drain either.
_SERVES = ("ready", "draining")


def stop(
    store: ServiceStore,
    found: Sequence[ReplicaStatus],
    *,
    timeout_s: float = 120.0,
    drain_s: float = 120.0,
) -> tuple[ReplicaStatus, ...]:
    """End those of the jobs in `found` that are not over, and return how they ended, once they have.

    A replica that serves first finishes the requests under way, for `drain_s` seconds at most (0: it does not); then it
    ends by itself. A job that has not ended by then, and one that does not serve, is told to end, and has `timeout_s`.
    The end of a job that had published nothing is written down, since clients do not ask Slurm, and Slurm forgets.
    Raises SchedulerError, StoreError, InvalidRequestError for one that was started by hand, WaitTimeoutError.
    """
    live = [status for status in found if not status.is_over]
    services = dict.fromkeys(status.service for status in found)
    submitted = {job.job_id: job for service in services for job in store.read_submitted(service)}
    for job_id, cluster in {status.job_id: status.cluster for status in live}.items():
        if job_id not in submitted and cluster == "local":
            raise InvalidRequestError(f"{job_id} was started by hand: end its script where it runs (Ctrl-C or kill).")
    serving = [(status, status.record) for status in live if status.record is not None and status.state in _SERVES]
    for _, record in serving:
        _ask_to_drain(store, record, drain_s)
    deadline = time.monotonic() + drain_s + _WAY_DOWN_S
    drained = {
        status.job_id
        for status, _ in serving
        if drain_s > 0 and _is_over_by(deadline, store, status, submitted.get(status.job_id))
    }
    for job_id in dict.fromkeys(status.job_id for status in live if status.job_id not in drained):
        end_job(job_id, submitted.get(job_id))
    ended = tuple(_wait_until_over(store, status, submitted.get(status.job_id), timeout_s) for status in live)
    for status in (*(status for status in found if status.is_over), *ended):
        _write_end(store, status, submitted.get(status.job_id))
    return ended


def end_job(job_id: str, submitted: SubmittedJob | None) -> None:
    """Tell a job to end: a local one by signals, any other by scancel. Raises SchedulerError."""
    if submitted is not None and submitted.cluster == "local":
        stop_local_job(submitted, grace_s=_LOCAL_GRACE_S)
    else:
        scheduler.cancel(job_id)


def _ask_to_drain(store: ServiceStore, record: EndpointRecord, drain_s: float) -> None:
    path = drain_file(store, record.service, job_id=record.job_id, restart=record.restart, replica=record.replica)
    by = f"hpc-serve stop on {socket.gethostname()}"
    ask_to_drain(path, DrainRequest(by=by, deadline_s=drain_s, requested_at=time.time()))


def _is_over_by(deadline: float, store: ServiceStore, status: ReplicaStatus, submitted: SubmittedJob | None) -> bool:
    """Whether the job of a replica that drains ends by itself before the deadline; waits for it."""
    while not (is_over := _look(store, status, submitted)[1].is_over) and time.monotonic() < deadline:
        time.sleep(_RECORDS_S)
    return is_over


def _look(store: ServiceStore, status: ReplicaStatus, submitted: SubmittedJob | None) -> tuple[ReplicaStatus, JobState]:
    """How the replica and its job are now; a replica that is not found is as it was."""
    is_local = submitted is not None and submitted.cluster == "local"
    job = local_job_state(submitted) if is_local and submitted else scheduler.job_state(status.job_id)
    seen = [found for found in read_status(store, status.service).replicas if is_same_replica(found, status)]
    return (seen[0] if seen else status), job


def _wait_until_over(
    store: ServiceStore, status: ReplicaStatus, submitted: SubmittedJob | None, timeout_s: float
) -> ReplicaStatus:
    deadline = time.monotonic() + timeout_s
    while True:
        before = status
        status, job = _look(store, status, submitted)
        if job.is_over and status is before:  # submitted by hand, and it had not begun
            return replace(status, state="stopped", reason=ended_sentence(job))
        if job.state == GONE and before.state == "pending":  # Slurm forgets a task that waited as it is cancelled
            return replace(status, state="stopped", reason="it was stopped while it waited")
        if job.is_over and status.is_over:
            return status
        if time.monotonic() >= deadline:
            detail = f" ({job.detail})" if job.detail else ""
            raise WaitTimeoutError(
                f"job {status.job_id} was told to end {timeout_s:.0f} s ago and is still {job.state}{detail}; "
                f"look with `squeue --jobs={status.job_id}`."
            )
        time.sleep(_RECORDS_S)


def _write_end(store: ServiceStore, status: ReplicaStatus, submitted: SubmittedJob | None) -> None:
    if submitted is None or submitted.end is not None or status.started_at is not None:
        return
    end = JobEnd(
        state="failed" if status.state == "failed" else "stopped",
        reason=status.reason,
        at=status.updated_at or time.time(),
        exit_code=status.exit_code,
    )
    store.write_submitted(replace(submitted, end=end))
