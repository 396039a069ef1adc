"""Brings a service to a number of replicas: submits more with its script, or drains those it can best spare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hpc_serve.client.status import ReplicaStatus
from hpc_serve.errors import InvalidRequestError
from hpc_serve.rendezvous.record import SubmittedJob
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.submit.job_status import without_successors
from hpc_serve.submit.services import add_replicas
from hpc_serve.submit.status_reader import find
from hpc_serve.submit.stop import stop

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
    take over from one that lives count not yet. They end with it.

    `on_stop` is told of each replica before it ends. Raises ServiceNotFoundError, and what `add_replicas` and `stop`
    raise; InvalidRequestError for a number below one.
    """
    if replicas < 1:
        raise InvalidRequestError(f"{service} cannot have {replicas} replicas; `hpc-serve stop {service}` ends it.")
    live = without_successors(
        status for status in find(store, service) if not status.is_over and status.state != "draining"
    )
    if replicas > len(live):
        return Scaled(before=len(live), added=add_replicas(store, service, replicas - len(live)))
    newest_first = live[::-1]
    spared = sorted(newest_first, key=lambda status: _SPARED_FIRST.index(status.state))[: len(live) - replicas]
    for status in spared:
        on_stop(status)
    return Scaled(before=len(live), ended=stop(store, spared, drain_s=drain_s) if spared else ())
