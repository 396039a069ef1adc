"""Stops jobs, and forgets jobs that are over.

A stop asks replicas that serve to drain, tells jobs to end, waits until they have, and writes down the end of a job
that published no record. The replica's job decides how it drains. `forget` removes the files about a job, but not its
logs. The files are needed while the job may come back, and while `wake` may submit it again.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

from hpc_serve.client.replicas.status import ReplicaStatus
from hpc_serve.errors import InvalidRequestError, StoreError, WaitTimeoutError
from hpc_serve.rendezvous.record import JobEnd, SubmittedJob, followers_of
from hpc_serve.rendezvous.store import DrainRequest, ServiceStore, ask_to_drain, drain_file
from hpc_serve.submit.slurm import scheduler
from hpc_serve.submit.slurm.scheduler import SchedulerView, local_job_state, stop_local_job
from hpc_serve.submit.slurm.slurm import GONE, JobState
from hpc_serve.submit.slurm.slurm_messages import ended_sentence
from hpc_serve.submit.status.job_status import StatusReport
from hpc_serve.submit.status.status_reader import is_same_replica, read_status


def forget(store: ServiceStore, found: Sequence[ReplicaStatus]) -> tuple[str, ...]:
    """Forget the jobs of `found`, which are over, and return their ids. Slurm may list them a while longer.

    Raises InvalidRequestError for a job with a replica that is not over, for a service that is asleep, and for the last
    job of a kind of machine on which others are wanted.
    """
    report = read_status(store)
    for service in dict.fromkeys(status.service for status in found):
        if service in report.wanted and report.wanted[service].state == "asleep":
            raise InvalidRequestError(
                f"{service} is asleep, and its jobs are what `hpc-serve wake {service}` submits again: "
                f"hpc-serve stop {service} first."
            )
    jobs = dict.fromkeys((status.service, status.job_id) for status in found)
    for status in report.replicas:
        if (status.service, status.job_id) in jobs and not status.is_over:
            raise InvalidRequestError(
                f"{status.service} (job {status.name}) is {status.state}, not over: hpc-serve stop {status.name} first."
            )
    for status in found:
        _check_script_stays(store, status, jobs.keys(), report)
    for service in {service for service, _ in jobs}:
        store.forget(service, {job_id for of, job_id in jobs if of == service})
    return tuple(job_id for _, job_id in jobs)


def _check_script_stays(
    store: ServiceStore, status: ReplicaStatus, jobs: Set[tuple[str, str]], report: StatusReport
) -> None:
    """Raises InvalidRequestError where a service that goes on has no script left for a kind of machine."""
    service, wanted = status.service, report.wanted.get(status.service)
    is_wanted = wanted is not None and wanted.is_kept and wanted.state == "awake" and status.machine in wanted.counts
    if not is_wanted or all(one.is_over for one in report.replicas if one.service == service):
        return
    left = [job for job in store.read_submitted(service) if (service, job.job_id) not in jobs]
    if all(job.machine != status.machine for job in left):
        raise InvalidRequestError(
            f"{service} (job {status.name}) has the script that replicas on {status.machine} are submitted with: "
            f"hpc-serve scale {service} {status.machine}:0 first, or stop {service}."
        )


# -- stop

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
    services = dict.fromkeys(status.service for status in found)
    submitted = {job.job_id: job for service in services for job in store.read_submitted(service)}
    here = [one for service in services for one in read_status(store, service).replicas if not one.is_over]
    named = {status.name for status in live}
    going_on = {one.job_id for one in here if one.name not in named} & {one.job_id for one in live}
    ending = list(dict.fromkeys(status.job_id for status in live if status.job_id not in going_on))
    followers = followers_of(ending, tuple(submitted.values()))
    live += [one for one in here if one.job_id in followers]
    for status in live:
        if status.job_id in going_on and status.record is None:
            raise InvalidRequestError(
                f"{status.name} has not begun, and there are others in its job: wait until it has, or end all of them: "
                f"hpc-serve stop {status.job_id}"
            )
        if status.job.cluster == "local" and status.job_id not in submitted:
            raise InvalidRequestError(
                f"{status.job_id} was started by hand: end its script where it runs (Ctrl-C or kill)."
            )
    replicas = [_Ending(status=one, is_alone=one.job_id in going_on) for one in live]
    if not is_asked:
        drain_s = _ask(store, replicas, drain_s)
    began = time.monotonic()
    drained_by = began + drain_s + _WAY_DOWN_S
    told_already = set(ending) - {one.status.job_id for one in replicas if one.serves} if is_asked else set()
    # First those that serve nobody: one that takes over from another shall not begin meanwhile. A job with one of them
    # does not end by itself.
    tell_at: dict[str, float] = {}
    for one in sorted(replicas, key=lambda one: one.serves):
        is_due_at = drained_by if drain_s > 0 and one.serves else began
        one.until = (drained_by if one.is_alone else is_due_at) + timeout_s
        if not one.is_alone and one.status.job_id not in told_already:
            tell_at.setdefault(one.status.job_id, is_due_at)
    _wait_until_over(store, replicas, submitted, tell_at, timeout_s)
    ended = [one.end for one in replicas if one.end is not None]
    for status in (*(status for status in found if status.is_over), *ended):
        with contextlib.suppress(StoreError):  # for example on a full disk: the job has ended all the same
            write_end(store, status, submitted.get(status.job_id))
    return tuple(ended)


def _wait_until_over(
    store: ServiceStore,
    replicas: Sequence[_Ending],
    submitted: Mapping[str, SubmittedJob],
    tell_at: dict[str, float],
    timeout_s: float,
) -> None:
    """Wait until all have ended, and tell each job to end when its time in `tell_at` has come.

    Raises SchedulerError, WaitTimeoutError.
    """
    while waiting := [one for one in replicas if one.end is None]:
        for job_id in [job_id for job_id, at in tell_at.items() if time.monotonic() >= at]:
            del tell_at[job_id]
            if of_job := [one for one in waiting if one.status.job_id == job_id]:
                end_job(job_id, submitted.get(job_id))
            for one in of_job:
                one.until = time.monotonic() + timeout_s
        slurm = SchedulerView()
        slurm.jobs()  # before the records: a launcher writes its end before its job is over
        seen = [
            one
            for service in {one.status.service for one in waiting}
            for one in read_status(store, service, slurm=slurm).replicas
        ]
        for one in waiting:
            job_id = one.status.job_id
            job = submitted.get(job_id)
            one.look(seen, local_job_state(job) if job and job.cluster == "local" else slurm.state(job_id))
        if any(one.end is None for one in waiting):
            time.sleep(_RECORDS_S)


def _ask(store: ServiceStore, replicas: Sequence[_Ending], drain_s: float) -> float:
    """Ask those that serve to drain, and those that end alone; returns the seconds that they have for it.

    Raises StoreError for one that ends alone.
    """
    has_s = drain_s
    for one in replicas:
        if one.status.record is None or not (one.serves or one.is_alone):
            continue
        by, deadline_s = f"hpc-serve stop on {socket.gethostname()}", drain_s if one.serves else 0.0
        request = DrainRequest(by=by, cause="stop", deadline_s=deadline_s, requested_at=time.time())
        try:
            ask_to_drain(drain_file(store, one.status.service, one.status.record.name), request)
        except StoreError:
            if one.is_alone:
                raise
            has_s = 0.0  # for example on a full disk: the job is told by a signal
    return has_s


@dataclass(kw_only=True)
class _Ending:
    """A replica that shall end before `until`, as it was seen last. If it `is_alone`, its job goes on with others."""

    status: ReplicaStatus
    is_alone: bool
    until: float = 0.0
    end: ReplicaStatus | None = None

    @property
    def serves(self) -> bool:
        return self.status.record is not None and self.status.state in _SERVES

    def look(self, replicas: Sequence[ReplicaStatus], job: JobState) -> None:
        """See how it is now, among `replicas`. Raises WaitTimeoutError."""
        seen = next((one for one in replicas if is_same_replica(one, self.status)), None)
        was_pending, self.status = self.status.state == "pending", seen or self.status
        status = self.status
        if job.is_over and seen is None:  # submitted by hand, and it had not begun
            self.end = replace(status, state="stopped", reason=ended_sentence(job))
        elif job.state == GONE and was_pending:  # Slurm forgets a task that waited as it is cancelled
            self.end = replace(status, state="stopped", reason="it was stopped while it waited")
        elif status.is_over and (job.is_over or self.is_alone):
            self.end = status
        elif time.monotonic() >= self.until and self.is_alone:
            raise WaitTimeoutError(
                f"{status.name} was asked to end and is still {status.state}; `hpc-serve stop {status.job_id}` ends it "
                "with the others of its job."
            )
        elif time.monotonic() >= self.until:
            detail = f" ({job.detail})" if job.detail else ""
            raise WaitTimeoutError(
                f"job {status.job_id} was told to end and is still {job.state}{detail}; look with "
                f"`squeue --jobs={status.job_id}`."
            )


def end_job(job_id: str, submitted: SubmittedJob | None) -> None:
    """Tell a job to end: a local one by signals, any other by scancel. Raises SchedulerError."""
    if submitted is not None and submitted.cluster == "local":
        stop_local_job(submitted, grace_s=_LOCAL_GRACE_S)
    else:
        scheduler.cancel(job_id)


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
