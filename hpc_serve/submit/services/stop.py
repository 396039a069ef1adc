"""Stops jobs: asks replicas that serve to drain, tells jobs to end, waits until they have, and writes down the end of a
job that published no record.

How a replica drains is decided in its job.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
    submitted = {
        job.job_id: job for service in {status.service for status in found} for job in store.read_submitted(service)
    }
    alone = [status for status in live if _leaves_others(store, status, live)]
    if absent := [status for status in alone if status.record is None]:
        raise InvalidRequestError(
            f"{absent[0].name} has not begun, and there are others in its job: wait until it has, or end all of them: "
            f"hpc-serve stop {absent[0].job_id}"
        )
    live += _followers(store, [status for status in live if status not in alone], tuple(submitted.values()))
    replicas = [
        _Ending(store=store, status=one, submitted=submitted.get(one.job_id), is_alone=one in alone) for one in live
    ]
    for one in replicas:
        if one.submitted is None and one.status.job.cluster == "local":
            raise InvalidRequestError(
                f"{one.status.job_id} was started by hand: end its script where it runs (Ctrl-C or kill)."
            )
    by = f"hpc-serve stop on {socket.gethostname()}"
    for one in () if is_asked else replicas:
        if one.status.record is not None and (one.serves or one.is_alone):
            deadline_s = drain_s if one.serves else 0.0
            request = DrainRequest(by=by, cause="stop", deadline_s=deadline_s, requested_at=time.time())
            try:
                ask_to_drain(drain_file_of(store, one.status.record), request)
            except StoreError:
                if one.is_alone:
                    raise
                drain_s = 0.0  # for example on a full disk: the job is told by a signal
    deadline = time.monotonic() + drain_s + _WAY_DOWN_S
    jobs: dict[str, list[_Ending]] = {}
    for one in replicas:
        if not one.is_alone:
            jobs.setdefault(one.status.job_id, []).append(one)
    # First those that serve nobody: one that takes over from another shall not begin meanwhile.
    for job_id, of_job in sorted(jobs.items(), key=lambda item: any(one.serves for one in item[1])):
        serving = [one for one in of_job if one.serves]
        if is_asked and not serving:
            continue
        # A job with a replica that does not serve does not end by itself.
        if drain_s <= 0 or not all(one.is_over_by(deadline) for one in serving) or len(serving) < len(of_job):
            end_job(job_id, of_job[0].submitted)
    ended = [one.wait_until_over(timeout_s, deadline) for one in replicas]
    for status in (*(status for status in found if status.is_over), *ended):
        with contextlib.suppress(StoreError):  # for example on a full disk: the job has ended all the same
            write_end(store, status, submitted.get(status.job_id))
    return tuple(ended)


@dataclass(kw_only=True)
class _Ending:
    """A replica that shall end, as it was seen last. If it is `is_alone`, its job goes on with others."""

    store: ServiceStore
    status: ReplicaStatus
    submitted: SubmittedJob | None
    is_alone: bool

    @property
    def serves(self) -> bool:
        return self.status.record is not None and self.status.state in _SERVES

    def is_over_by(self, deadline: float) -> bool:
        """Wait; whether a replica that drains, or its job where it has no other, ends by itself before the deadline."""
        while True:
            job = self._look()
            is_over = job.is_over or (self.status.job.replicas_per_job > 1 and self.status.is_over)
            if is_over or time.monotonic() >= deadline:
                return is_over
            time.sleep(_RECORDS_S)

    def wait_until_over(self, timeout_s: float, drained_by: float) -> ReplicaStatus:
        """Return how it ended. Raises WaitTimeoutError."""
        timeout_s += max(0.0, drained_by - time.monotonic()) if self.is_alone else 0.0
        deadline = time.monotonic() + timeout_s
        while True:
            before, job = self.status, self._look()
            status = self.status
            if job.is_over and status is before:  # submitted by hand, and it had not begun
                return replace(status, state="stopped", reason=ended_sentence(job))
            if job.state == GONE and before.state == "pending":  # Slurm forgets a task that waited as it is cancelled
                return replace(status, state="stopped", reason="it was stopped while it waited")
            if status.is_over and (job.is_over or self.is_alone):
                return status
            if time.monotonic() >= deadline and self.is_alone:
                raise WaitTimeoutError(
                    f"{status.name} was asked to end {timeout_s:.0f} s ago and is still {status.state}; "
                    f"`hpc-serve stop {status.job_id}` ends it with the others of its job."
                )
            if time.monotonic() >= deadline:
                detail = f" ({job.detail})" if job.detail else ""
                raise WaitTimeoutError(
                    f"job {status.job_id} was told to end {timeout_s:.0f} s ago and is still {job.state}{detail}; "
                    f"look with `squeue --jobs={status.job_id}`."
                )
            time.sleep(_RECORDS_S)

    def _look(self) -> JobState:
        """See how the replica is now, and return its job; a replica that is not found is as it was."""
        if self.submitted is not None and self.submitted.cluster == "local":
            job = local_job_state(self.submitted)
        else:
            job = scheduler.job_state(self.status.job_id)
        seen = read_status(self.store, self.status.service).replicas
        self.status = next((found for found in seen if is_same_replica(found, self.status)), self.status)
        return job


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
