"""Forgets jobs that are over: which of those found may be, and what is removed. Their logs stay.

What is written about a job is needed while it may come back, and while `wake` may submit it again.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpc_serve.client.replicas.status import ReplicaStatus
from hpc_serve.errors import InvalidRequestError
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.submit.status.status_reader import read_status


def forget(store: ServiceStore, found: Sequence[ReplicaStatus]) -> tuple[str, ...]:
    """Forget the jobs of `found`, which are over, and return their ids. Slurm may list them a while longer.

    Raises InvalidRequestError for a job with a replica that is not over, and for a service that is asleep.
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
    for service in {service for service, _ in jobs}:
        store.forget(service, {job_id for of, job_id in jobs if of == service})
    return tuple(job_id for _, job_id in jobs)
