"""The preflight as a separate job: its request, and the report that the job's launcher has left.

The job has the script of a service, but ends before an engine starts. The job decides what is checked
(`hpc_serve.job.preflight`).
"""

from __future__ import annotations

from dataclasses import replace

from hpc_serve.client.replicas.status import ReplicaStatus
from hpc_serve.errors import InvalidRequestError
from hpc_serve.rendezvous.names import record_file_name
from hpc_serve.rendezvous.preflight import PreflightReport, preflight_file, read_preflight
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.submit.request.request import ServeRequest

_TIME = "00:15:00"
_LONGEST_NAME = 63


def preflight_request(request: ServeRequest, *, time: str | None = None) -> ServeRequest:
    """Return the request of a job that checks the nodes that `request` would get. The job has a separate name.

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
    """Return the preflight report of a replica's run; None if there was no preflight."""
    try:
        name = record_file_name(status.job_id, status.restart, status.replica)
    except InvalidRequestError:
        return None
    return read_preflight(preflight_file(store, status.service, name))
