"""The calls a program makes: a client for a service, its address for another tool, a list of what there is."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_serve.client.discovery import ServiceWatch, discover_services
from hpc_serve.client.views import ServiceView, listing
from hpc_serve.client.wait import Wait, WaitPolicy, wait_for_replica, wait_for_replica_async
from hpc_serve.errors import AmbiguousServiceError, ServiceNotFoundError
from hpc_serve.rendezvous.store import ServiceStore, default_home

if TYPE_CHECKING:
    from hpc_serve.client.openai_client import AsyncServiceClient, ServiceClient


def connect(
    service: str | None = None, *, wait: Wait = None, home: str | Path | None = None, **options: Any
) -> ServiceClient:
    """An `openai.OpenAI` client of a service: requests go to its live replicas, `client.model` is its model's name.

    Without a name, the one live service is taken. `wait` is seconds to wait for a replica that is coming (True: as
    long as it takes), now and whenever a request finds none. `home` is $HPC_SERVE_HOME unless given. `options` are
    the SDK's (timeout, max_retries, default_headers, …). Raises ServiceNotFoundError, AmbiguousServiceError,
    ServiceFailedError, WaitTimeoutError, StoreError.
    """
    from hpc_serve.client.openai_client import ServiceClient

    store, patience = _store(home), WaitPolicy(wait)
    watch = ServiceWatch(store, service or pick_service(discover_services(store), store, waits=patience.waits))
    wait_for_replica(watch, patience)
    return ServiceClient(watch=watch, wait=wait, **options)


async def connect_async(
    service: str | None = None, *, wait: Wait = None, home: str | Path | None = None, **options: Any
) -> AsyncServiceClient:
    """An `openai.AsyncOpenAI` client of a service; all else is as in `connect`."""
    import anyio.to_thread

    from hpc_serve.client.openai_client import AsyncServiceClient

    store, patience = _store(home), WaitPolicy(wait)
    if service is None:
        service = pick_service(await anyio.to_thread.run_sync(discover_services, store), store, waits=patience.waits)
    watch = ServiceWatch(store, service)
    await wait_for_replica_async(watch, patience)
    return AsyncServiceClient(watch=watch, wait=wait, **options)


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """One live replica as any OpenAI-compatible tool wants it: the base URL ends in /v1."""

    service: str
    model: str
    base_url: str
    api_key: str = field(repr=False)


def endpoint(service: str | None = None, *, wait: Wait = None, home: str | Path | None = None) -> Endpoint:
    """The address, model name and key of a live replica of a service. Waits and raises as `connect` does."""
    store, patience = _store(home), WaitPolicy(wait)
    watch = ServiceWatch(store, service or pick_service(discover_services(store), store, waits=patience.waits))
    wait_for_replica(watch, patience)
    return Endpoint(
        service=watch.service, model=watch.model, base_url=watch.view.live[-1].base_url, api_key=watch.api_key
    )


def services(*, home: str | Path | None = None) -> tuple[ServiceView, ...]:
    """Every service that has a record or a submitted job, and how it is now. Raises StoreError."""
    return tuple(view for view in discover_services(_store(home)) if view.exists or view.problems)


def pick_service(views: Sequence[ServiceView], store: ServiceStore, *, waits: bool) -> str:
    """The one service that can be meant without a name: the one that is live or, if `waits`, the one that is coming.

    Raises ServiceNotFoundError when there is none, AmbiguousServiceError when there are several.
    """
    there = [view for view in views if view.exists or view.problems]
    found = [view for view in there if view.live] or [view for view in there if waits and view.is_coming]
    if len(found) == 1:
        return found[0].service
    if found:
        raise AmbiguousServiceError(f"Several services are there, name one:\n{listing(found)}")
    if not there:
        raise ServiceNotFoundError(f"There is no service in {store.home}. Start one: hpc-serve submit")
    advice = " Name one and wait for it: connect(NAME, wait=600)." if any(view.is_coming for view in there) else ""
    raise ServiceNotFoundError(f"No service is live.{advice}\n{listing(there)}")


def _store(home: str | Path | None) -> ServiceStore:
    return ServiceStore(Path(home).expanduser().absolute() if home is not None else default_home(os.environ))
