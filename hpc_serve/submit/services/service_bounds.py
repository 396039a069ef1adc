"""What people want of the number of a service's replicas, written where the jobs that decide read it.

How the number is brought about is left to adjust.py, scale.py, stop.py and wake.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hpc_serve.client.replicas.status import ReplicaStatus
from hpc_serve.errors import InvalidRequestError
from hpc_serve.rendezvous.elastic import Elastic, change_elastic, read_elastic
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.submit.request.bounds import check_bounds, shown_bounds
from hpc_serve.submit.request.request import ServeRequest
from hpc_serve.submit.services.live_replicas import live_replicas
from hpc_serve.submit.status.status_reader import read_status
from hpc_serve.variables import KEPT


def note_submission(
    store: ServiceStore, request: ServeRequest, replicas: int, environ: Mapping[str, str]
) -> Elastic | None:
    """Write down what was asked for with a submission of so many `replicas`. The service is awake from now on.

    MIN:MAX are the bounds of the whole service; a number are so many more. Returns what is written, if its jobs decide.
    """
    if request.idle_stop_s is not None and request.max_replicas is None:
        replicas = len(live_replicas(store, read_status(store, request.service).replicas))

    def change(found: Elastic | None) -> Elastic | None:
        if request.is_elastic:
            found = replace(
                found or Elastic(least=replicas, most=replicas),
                least=replicas,
                most=request.max_replicas or replicas,
                idle_stop_s=request.idle_stop_s,
                folder=os.getcwd(),
                variables={name: environ[name] for name in KEPT if environ.get(name)},
            )
        return replace(found, state="awake", ending=()) if found is not None else None

    if not request.is_elastic and read_elastic(store, request.service) is None:
        return None
    return change_elastic(store, request.service, change)


def note_stop_of(store: ServiceStore, found: Sequence[ReplicaStatus]) -> None:
    """A person ends these replicas: where they are all of a service, no job shall bring it back."""
    for service in dict.fromkeys(status.service for status in found):
        ended = {status.name for status in found if status.service == service}
        if all(status.is_over or status.name in ended for status in read_status(store, service).replicas):
            note_stop(store, service)


def note_stop(store: ServiceStore, service: str) -> None:
    """A person ends the service: no job shall bring it back."""

    def change(found: Elastic | None) -> Elastic | None:
        if found is None or found.state == "stopped":
            return None
        return replace(found, state="stopped", decider="").with_decision(time.time(), "stopped by a person")

    if read_elastic(store, service) is not None:
        change_elastic(store, service, change)


def set_fixed(store: ServiceStore, service: str, replicas: int, *, is_done: bool) -> None:
    """A person changes the number to `replicas`; until that `is_done`, more of them are no reason to end one."""

    def change(found: Elastic | None) -> Elastic | None:
        if found is None:
            return None
        return replace(found, state="awake", least=replicas, most=replicas if is_done else max(replicas, found.most))

    if read_elastic(store, service) is not None:
        change_elastic(store, service, change)


def set_bounds(store: ServiceStore, service: str, least: int, most: int) -> Elastic:
    """Raises InvalidRequestError for bounds that cannot be, and for a service whose jobs do not decide."""
    check_bounds(least, most)

    def change(found: Elastic | None) -> Elastic | None:
        if found is None:
            return None
        text = f"set to {shown_bounds(least, most)} by a person"
        return replace(found, least=least, most=most).with_decision(time.time(), text)

    changed = change_elastic(store, service, change)
    if changed is None:
        raise InvalidRequestError(
            f"The jobs of {service} do not decide how many they are: it was submitted without --replicas MIN:MAX or "
            f"--idle-stop. Give one number: hpc-serve scale {service} {most}."
        )
    return changed
