"""The preflight as a job of its own: the request of one, and the report that a job's launcher has left.

The job has the script of a service, which ends before it starts an engine. What is looked at is decided in the job
(`hpc_serve.job.preflight`).
"""

from __future__ import annotations

from dataclasses import replace

from hpc_serve.client.replicas.status import ReplicaStatus
from hpc_serve.errors import InvalidRequestError
from hpc_serve.rendezvous.preflight import PreflightReport, preflight_file, read_preflight
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.submit.request.request import ServeRequest

_TIME = "00:15:00"
_LONGEST_NAME = 63


def preflight_request(request: ServeRequest, *, time: str | None = None) -> ServeRequest:
    """The request of a job that looks at the nodes which `request` would get, under a name of its own.

    It has one replica and a short time limit: `time`, or 15 minutes.
    """
    return replace(
        request,
        service=f"preflight-{request.service}"[:_LONGEST_NAME],
        preflight_only=True,
        replicas=1,
        replicas_per_job=1,
        max_replicas=None,
        idle_stop_s=None,
        keep_up=False,
        chain=1,
        overlap_s=None,
        slurm=replace(request.slurm, time=time or _TIME),
    )


def report_of(store: ServiceStore, status: ReplicaStatus) -> PreflightReport | None:
    """What the preflight of a replica's run found; None if there was none."""
    try:
        path = preflight_file(
            store, status.service, job_id=status.job_id, restart=status.restart, replica=status.replica
        )
    except InvalidRequestError:
        return None
    return read_preflight(path)
