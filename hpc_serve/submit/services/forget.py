"""Forgets jobs that are over: which of those found may be, and what is removed. Their logs stay.

What is written about a job is needed while it may come back, and while `wake` may submit it again.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from hpc_serve.client.replicas.status import ReplicaStatus
from hpc_serve.errors import InvalidRequestError
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.submit.status.job_status import StatusReport
from hpc_serve.submit.status.status_reader import read_status


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
