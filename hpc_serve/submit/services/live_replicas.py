"""Which replicas of a service count, where more or fewer of them are wanted."""

from __future__ import annotations

from collections.abc import Sequence

from hpc_serve.client.replicas.status import ReplicaStatus
from hpc_serve.rendezvous.drain import DrainRequest, drain_file_of, read_drain_request
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.submit.services.handover import was_stopped
from hpc_serve.submit.status.job_status import without_successors


def live_replicas(store: ServiceStore, replicas: Sequence[ReplicaStatus]) -> list[ReplicaStatus]:
    """Those that wait, start or serve, oldest first.

    Not those that were asked to drain, nor those that only take over from another one: they end with it, if that one
    is not needed any more. Raises RecordError for a request to drain that cannot be read.
    """
    live, ended_with = [], set()
    for status in replicas:
        if status.is_over:
            continue
        request = _asked(store, status)
        if was_stopped(request, status.record):
            ended_with.add(status.successor_job_id)
        if request is None and status.state != "draining":
            live.append(status)
    return [status for status in without_successors(live) if status.job_id not in ended_with]


def _asked(store: ServiceStore, status: ReplicaStatus) -> DrainRequest | None:
    if status.record is None:
        return None
    return read_drain_request(drain_file_of(store, status.record))
