"""All services of a store at once: how each is, for lists and for whoever names none."""

from __future__ import annotations

from collections.abc import Callable

from hpc_serve.background import in_background
from hpc_serve.client.discovery.discovery import ServiceWatch
from hpc_serve.client.replicas.status import ServiceStatus
from hpc_serve.errors import HpcServeError
from hpc_serve.rendezvous.store import ServiceStore


def discover_services(store: ServiceStore) -> tuple[ServiceStatus, ...]:
    """Every service of the store with all its replicas, all read and probed at the same time. Raises StoreError."""
    return _each_service(store, lambda watch: watch.refresh(is_complete=True))


def find_ready_services(store: ServiceStore) -> tuple[ServiceStatus, ...]:
    """The same, without waiting for the other replicas of a service of which one is ready."""
    return _each_service(store, lambda watch: watch.status if watch.find_one() else watch.refresh())


def _each_service(store: ServiceStore, find: Callable[[ServiceWatch], ServiceStatus]) -> tuple[ServiceStatus, ...]:
    def read(service: str) -> ServiceStatus:
        try:
            return find(ServiceWatch(store, service))
        except HpcServeError as error:
            return ServiceStatus(service=service, home=str(store.home), problems=(str(error),))

    reading = [in_background(read, service) for service in store.services()]
    return tuple(one.result() for one in reading)
