"""The calls that a program makes: a client for a service, its address for another tool, a list of all services."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_serve.client.discovery.all_services import discover_services, find_ready_services
from hpc_serve.client.discovery.discovery import ServiceWatch
from hpc_serve.client.discovery.wait import Wait, WaitPolicy, wait_for_replica
from hpc_serve.client.replicas.event_loops import InLoop, InThread, run_blocking
from hpc_serve.client.replicas.messages import listing
from hpc_serve.client.replicas.status import ServiceStatus
from hpc_serve.errors import AmbiguousServiceError, InvalidRequestError, ServiceNotFoundError
from hpc_serve.rendezvous.shares import named_service
from hpc_serve.rendezvous.store import ServiceStore, default_home
from hpc_serve.trust.bundle import trust_variables

if TYPE_CHECKING:
    from hpc_serve.client.openai_client import AsyncServiceClient, ServiceClient


def connect(
    service: str | None = None,
    *,
    wait: Wait = None,
    wake: bool = False,
    home: str | Path | None = None,
    **options: Any,
) -> ServiceClient:
    """Return an `openai.OpenAI` client of a service: requests go to its ready replicas, `client.model` is its model.

    It takes the one service that is ready where no name is given. A service that another user shares is named by its
    folder, as /home/alice/.hpc-serve/services/70b. `wait` is how many seconds to wait for a replica that
    is coming (True: as long as it takes), now and whenever a request finds none. `home` is $HPC_SERVE_HOME unless
    given. `wake` brings a service back that is asleep, now and whenever a request finds it so; without `wait` that
    takes as long as it takes. A stream whose replica is lost is continued at another one, unless `resume=False`.
    `options` are the SDK's (timeout, max_retries, default_headers, …).

    Raises ServiceNotFoundError, ServiceAsleepError, AmbiguousServiceError, ServiceFailedError, WaitTimeoutError,
    StoreError (at once, if a person must mend the files).
    """
    from hpc_serve.client.openai_client import ServiceClient

    wait = True if wake and wait is None else wait
    return ServiceClient(watch=run_blocking(_ready_watch(service, wait, wake, home, InThread())), wait=wait, **options)


async def connect_async(
    service: str | None = None,
    *,
    wait: Wait = None,
    wake: bool = False,
    home: str | Path | None = None,
    **options: Any,
) -> AsyncServiceClient:
    """Return an `openai.AsyncOpenAI` client of a service; all else is as in `connect`."""
    from hpc_serve.client.openai_client import AsyncServiceClient

    wait = True if wake and wait is None else wait
    return AsyncServiceClient(watch=await _ready_watch(service, wait, wake, home, InLoop()), wait=wait, **options)


async def _ready_watch(
    service: str | None, wait: Wait, wake: bool, home: str | Path | None, here: InThread | InLoop
) -> ServiceWatch:
    """Return a watch that knows a ready replica of a service, or of the one service that is meant without a name."""
    store, policy = open_store(home), WaitPolicy(wait)
    if service:
        store, name = await here.call(named_service, service, store.home)
    else:
        name = pick_service(await here.call(find_ready_services, store), store, waits=policy.waits)
    watch = ServiceWatch(store, name, may_wake=wake)
    await wait_for_replica(watch, policy, here)
    return watch


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """One ready replica, for any tool that speaks to OpenAI. The base URL ends in /v1.

    `trust` are the environment variables that make other programs trust its certificate.
    """

    service: str
    model: str
    base_url: str
    api_key: str = field(repr=False)
    trust: Mapping[str, str] = field(default_factory=dict)

    @property
    def variables(self) -> dict[str, str]:
        """What other programs read from their environment."""
        return {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": self.api_key, **self.trust}


def endpoint(service: str | None = None, *, wait: Wait = None, home: str | Path | None = None) -> Endpoint:
    """Return the address, model name and key of a ready replica, and what other programs need to trust it.

    Waits and raises as `connect` does.
    """
    watch = run_blocking(_ready_watch(service, wait, False, home, InThread()))
    if watch.store.owner is not None:
        raise InvalidRequestError(
            f"{watch.service} is another user's, and its certificate is for our own clients: use connect() or `chat`, "
            f"or `hpc-serve gateway {service}`, which gives other programs an address of yours."
        )
    replica = watch.status.usable[-1]
    return Endpoint(
        service=watch.service,
        model=watch.model,
        base_url=replica.base_url,
        api_key=watch.api_key,
        trust=trust_variables(watch.store.home, os.environ),
    )


def services(*, home: str | Path | None = None) -> tuple[ServiceStatus, ...]:
    """Return every service that has a record or a submitted job, and how it is now. Raises StoreError."""
    return tuple(status for status in discover_services(open_store(home)) if status.exists or status.problems)


def pick_service(found: Sequence[ServiceStatus], store: ServiceStore, *, waits: bool) -> str:
    """The service that is meant without a name: the only one that is ready or, if `waits`, the only one that is coming.

    Raises ServiceNotFoundError when there is none, AmbiguousServiceError when there are several.
    """
    known = [status for status in found if status.exists or status.problems]
    meant = [status for status in known if status.ready] or [status for status in known if waits and status.is_coming]
    if len(meant) == 1:
        return meant[0].service
    if meant:
        raise AmbiguousServiceError(f"There are several services, name one:\n{listing(meant)}")
    if not known:
        raise ServiceNotFoundError(f"There is no service in {store.home}. Start one: hpc-serve submit")
    advice = " Name one and wait for it: connect(NAME, wait=600)." if any(s.is_coming for s in known) else ""
    raise ServiceNotFoundError(f"No service is ready.{advice}\n{listing(known)}")


def open_store(home: str | Path | None) -> ServiceStore:
    """The services of a folder, $HPC_SERVE_HOME unless it is given."""
    return ServiceStore(Path(home).expanduser().absolute() if home is not None else default_home(os.environ))
