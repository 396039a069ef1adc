"""Brings a service to a number of replicas: submits more with its script, or drains those it can best spare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpc_serve.client.replicas.status import ReplicaStatus
from hpc_serve.errors import InvalidRequestError
from hpc_serve.rendezvous.record import SubmittedJob
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.submit.services.service_bounds import set_fixed
from hpc_serve.submit.services.services import add_replicas
from hpc_serve.submit.services.stop import stop
from hpc_serve.submit.status.job_status import without_successors
from hpc_serve.submit.status.status_reader import find_report, replicas_here

# Those that serve nobody yet end first.
_SPARED_FIRST = ("pending", "unknown", "unresponsive", "starting", "ready")


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """What was done: jobs that were `added`, replicas that have `ended`. `before` is how many there were."""

    before: int
    added: tuple[SubmittedJob, ...] = ()
    ended: tuple[ReplicaStatus, ...] = ()


def scale(
    store: ServiceStore,
    service: str,
    replicas: int,
    *,
    drain_s: float = 120.0,
    on_stop: Callable[[ReplicaStatus], None] = lambda status: None,
) -> Scaled:
    """Bring the service to so many replicas that wait, start or serve; those that drain count no more, and those that
    take over from one that lives count not yet. They end with it. Replicas that share a job come and end together.

    `on_stop` is told of each replica before it ends. Raises ServiceNotFoundError, and what `add_replicas` and `stop`
    raise; InvalidRequestError for a number below one, or one that whole jobs do not give.
    """
    if replicas < 1:
        raise InvalidRequestError(f"{service} cannot have {replicas} replicas; `hpc-serve stop {service}` ends it.")
    found = replicas_here(store, find_report(store, service))
    live = without_successors(status for status in found if not status.is_over and status.state != "draining")
    more = replicas - len(live)
    newest_first = live[::-1]
    by_use = sorted(newest_first, key=lambda status: _SPARED_FIRST.index(status.state))
    spared = _whole_jobs(by_use, -more, service) if more < 0 else []
    _check_whole_jobs(more, store, service, now=len(live))
    set_fixed(store, service, replicas, is_done=more >= 0)
    if more > 0:
        return Scaled(before=len(live), added=add_replicas(store, service, more))
    for status in spared:
        on_stop(status)
    ended = stop(store, spared, drain_s=drain_s) if spared else ()
    set_fixed(store, service, replicas, is_done=True)
    return Scaled(before=len(live), ended=ended)


def _check_whole_jobs(more: int, store: ServiceStore, service: str, *, now: int) -> None:
    """Raises InvalidRequestError where so many `more` replicas are no whole jobs."""
    last = max(store.read_submitted(service), key=lambda job: job.submitted_at, default=None)
    per_job = last.replicas_per_job if last is not None else 1
    if more > 0 and more % per_job:
        below = now + more - more % per_job
        raise InvalidRequestError(
            f"{service} has {now} replicas, and a job of it has {per_job}: it can have {below + per_job}"
            + (f", or {below}." if below > now else ".")
        )


def _whole_jobs(by_use: Sequence[ReplicaStatus], count: int, service: str) -> list[ReplicaStatus]:
    """So many of the replicas, the first ones as far as that is possible, that no job keeps some of its own and loses
    others. Raises InvalidRequestError where there are no such jobs."""
    spared: list[ReplicaStatus] = []
    for job_id in dict.fromkeys(status.job_id for status in by_use):
        of_job = [status for status in by_use if status.job_id == job_id]
        if len(spared) + len(of_job) <= count:
            spared += of_job
    if len(spared) < count:
        name = by_use[0].name
        raise InvalidRequestError(
            f"{service} cannot lose {count} of its {len(by_use)} replicas in whole jobs, {len(spared)} at most; "
            f"`hpc-serve stop {name}` ends one of a job, and its GPUs stay with the job."
        )
    return spared
