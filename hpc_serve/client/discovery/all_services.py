"""All services of a store at once: how each is, for lists and for whoever names none."""

from __future__ import annotations

import threading
from collections.abc import Callable

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
    found: dict[str, ServiceStatus] = {}

    def read(service: str) -> None:
        try:
            found[service] = find(ServiceWatch(store, service))
        except HpcServeError as error:
            found[service] = ServiceStatus(service=service, home=str(store.home), problems=(str(error),))

    services = store.services()
    threads = [threading.Thread(target=read, args=(service,), daemon=True) for service in services]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tuple(found[service] for service in services)
