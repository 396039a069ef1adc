"""Stops jobs: asks replicas that serve to drain, tells jobs to end, waits until they have, and writes down the end of a
job that published no record.

How a replica drains is decided in its job.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence
from dataclasses import replace

from hpc_serve.client.replicas.status import ReplicaStatus
from hpc_serve.errors import InvalidRequestError, StoreError, WaitTimeoutError
from hpc_serve.rendezvous.chain import followers_of
from hpc_serve.rendezvous.drain import DrainRequest, ask_to_drain, drain_file_of
from hpc_serve.rendezvous.record import JobEnd, SubmittedJob
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.submit.slurm import scheduler
from hpc_serve.submit.slurm.local import local_job_state, stop_local_job
from hpc_serve.submit.slurm.slurm import GONE, JobState
from hpc_serve.submit.slurm.slurm_messages import ended_sentence
from hpc_serve.submit.status.status_reader import is_same_replica, read_status

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
    is_asked: bool = False,
) -> tuple[ReplicaStatus, ...]:
    """End those of `found` that are not over, and return how they ended, once they have.

    A replica that serves first finishes the requests under way, for `drain_s` seconds at most (0: it does not); then it
    ends by itself. A job that has not ended by then, and one that does not serve, is told to end, and has `timeout_s`.
    If `is_asked`, the reconciler has told the jobs already: replicas that serve to drain, others to end.
    A replica whose job has others that are not in `found` ends alone; its job goes on. With a job end those that were
    submitted to take over from it (`submit --chain`).
    The end of a job that had published nothing is written down, since clients do not ask Slurm, and Slurm forgets.
    Raises SchedulerError, StoreError, InvalidRequestError for one that was started by hand, or that cannot end alone,
    WaitTimeoutError.
    """
    live = [status for status in found if not status.is_over]
    alone = [status for status in live if _leaves_others(store, status, live)]
    if absent := [status for status in alone if status.record is None]:
        raise InvalidRequestError(
            f"{absent[0].name} has not begun, and there are others in its job: wait until it has, or end all of them: "
            f"hpc-serve stop {absent[0].job_id}"
        )
    services = dict.fromkeys(status.service for status in found)
    submitted = {job.job_id: job for service in services for job in store.read_submitted(service)}
    live += _followers(store, [status for status in live if status not in alone], tuple(submitted.values()))
    for job_id, cluster in {status.job_id: status.job.cluster for status in live}.items():
        if job_id not in submitted and cluster == "local":
            raise InvalidRequestError(f"{job_id} was started by hand: end its script where it runs (Ctrl-C or kill).")
    by = f"hpc-serve stop on {socket.gethostname()}"
    for status in () if is_asked else live:
        serves = status.state in _SERVES
        if status.record is not None and (serves or status in alone):
            deadline_s = drain_s if serves else 0.0
            request = DrainRequest(by=by, cause="stop", deadline_s=deadline_s, requested_at=time.time())
            try:
                ask_to_drain(drain_file_of(store, status.record), request)
            except StoreError:
                if status in alone:
                    raise
                drain_s = 0.0  # for example on a full disk: the job is told by a signal
    deadline = time.monotonic() + drain_s + _WAY_DOWN_S
    jobs: dict[str, list[ReplicaStatus]] = {}
    for status in live:
        if status not in alone:
            jobs.setdefault(status.job_id, []).append(status)
    # First those that serve nobody: one that takes over from another shall not begin meanwhile.
    for job_id, replicas in sorted(jobs.items(), key=lambda item: _serves(item[1])):
        if is_asked and not _serves(replicas):
            continue
        if drain_s <= 0 or not _end_by_themselves(deadline, store, replicas, submitted.get(job_id)):
            end_job(job_id, submitted.get(job_id))
    ended = []
    for status in live:
        job_goes_on = status in alone
        within_s = timeout_s + (max(0.0, deadline - time.monotonic()) if job_goes_on else 0.0)
        job = submitted.get(status.job_id)
        ended.append(_wait_until_over(store, status, job, within_s, job_goes_on=job_goes_on))
    for status in (*(status for status in found if status.is_over), *ended):
        with contextlib.suppress(StoreError):  # for example on a full disk: the job has ended all the same
            write_end(store, status, submitted.get(status.job_id))
    return tuple(ended)


def _serves(replicas: Sequence[ReplicaStatus]) -> bool:
    return any(one.state in _SERVES for one in replicas)


def _followers(
    store: ServiceStore, ended: Sequence[ReplicaStatus], submitted: Sequence[SubmittedJob]
) -> list[ReplicaStatus]:
    """The replicas of the jobs that would take over from those that are `ended`, and are not over."""
    followers = followers_of(list(dict.fromkeys(status.job_id for status in ended)), submitted)
    services = dict.fromkeys(status.service for status in ended) if followers else ()
    found = [status for service in services for status in read_status(store, service).replicas]
    return [status for status in found if status.job_id in followers and not status.is_over]


def end_job(job_id: str, submitted: SubmittedJob | None) -> None:
    """Tell a job to end: a local one by signals, any other by scancel. Raises SchedulerError."""
    if submitted is not None and submitted.cluster == "local":
        stop_local_job(submitted, grace_s=_LOCAL_GRACE_S)
    else:
        scheduler.cancel(job_id)


def _leaves_others(store: ServiceStore, status: ReplicaStatus, ended: Sequence[ReplicaStatus]) -> bool:
    """Whether the job of a replica goes on with others that are not among those that are `ended`."""
    if status.job.replicas_per_job == 1:
        return False
    of_job = [one for one in read_status(store, status.service).replicas if one.job_id == status.job_id]
    return any(not one.is_over and not any(is_same_replica(one, other) for other in ended) for one in of_job)


def _end_by_themselves(
    deadline: float, store: ServiceStore, replicas: Sequence[ReplicaStatus], submitted: SubmittedJob | None
) -> bool:
    """Whether all replicas of a job, which drain, end before the deadline, and the job with them; waits for those that
    serve. If another one does not serve, the job does not end by itself."""
    serving = [status for status in replicas if status.record is not None and status.state in _SERVES]
    is_over = [_is_over_by(deadline, store, status, submitted) for status in serving]
    return all(is_over) and len(serving) == len(replicas)


def _is_over_by(deadline: float, store: ServiceStore, status: ReplicaStatus, submitted: SubmittedJob | None) -> bool:
    """Whether a replica that drains, or its job where it has no other, ends by itself before the deadline; waits."""
    while True:
        seen, job = _look(store, status, submitted)
        is_over = job.is_over or (status.job.replicas_per_job > 1 and seen.is_over)
        if is_over or time.monotonic() >= deadline:
            return is_over
        time.sleep(_RECORDS_S)


def _look(store: ServiceStore, status: ReplicaStatus, submitted: SubmittedJob | None) -> tuple[ReplicaStatus, JobState]:
    """How the replica and its job are now; a replica that is not found is as it was."""
    is_local = submitted is not None and submitted.cluster == "local"
    job = local_job_state(submitted) if is_local and submitted else scheduler.job_state(status.job_id)
    seen = [found for found in read_status(store, status.service).replicas if is_same_replica(found, status)]
    return (seen[0] if seen else status), job


def _wait_until_over(
    store: ServiceStore,
    status: ReplicaStatus,
    submitted: SubmittedJob | None,
    timeout_s: float,
    *,
    job_goes_on: bool,
) -> ReplicaStatus:
    deadline = time.monotonic() + timeout_s
    while True:
        before = status
        status, job = _look(store, status, submitted)
        if job.is_over and status is before:  # submitted by hand, and it had not begun
            return replace(status, state="stopped", reason=ended_sentence(job))
        if job.state == GONE and before.state == "pending":  # Slurm forgets a task that waited as it is cancelled
            return replace(status, state="stopped", reason="it was stopped while it waited")
        if status.is_over and (job.is_over or job_goes_on):
            return status
        if time.monotonic() >= deadline:
            detail = f" ({job.detail})" if job.detail else ""
            if job_goes_on:
                raise WaitTimeoutError(
                    f"{status.name} was asked to end {timeout_s:.0f} s ago and is still {status.state}; "
                    f"`hpc-serve stop {status.job_id}` ends it with the others of its job."
                )
            raise WaitTimeoutError(
                f"job {status.job_id} was told to end {timeout_s:.0f} s ago and is still {job.state}{detail}; "
                f"look with `squeue --jobs={status.job_id}`."
            )
        time.sleep(_RECORDS_S)


def write_end(store: ServiceStore, status: ReplicaStatus, submitted: SubmittedJob | None) -> None:
    """Write down how a job ended that published no record. Raises StoreError."""
    if submitted is None or submitted.end is not None or status.record is not None:
        return
    end = JobEnd(
        state="failed" if status.state == "failed" else "stopped",
        reason=status.reason,
        at=status.updated_at or time.time(),
        exit_code=status.exit_code,
    )
    store.write_submitted(replace(submitted, end=end))
