"""The calls that a program makes: a client for a service, its address for another tool, a list of all services.

`tell_all` tells all ready replicas of a service the same, at once: a request that is balanced reaches one of them. A
program of reinforcement learning pauses all engines, updates their weights and lets them go on. vLLM has these routes
with VLLM_SERVER_DEV_MODE=1 (entrypoints/rl, entrypoints/serve/dev). A replica's record has what
`/update_weight_version` called its weights.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_serve.background import in_background
from hpc_serve.client.discovery.discovery import ServiceWatch, discover_services, find_ready_services
from hpc_serve.client.discovery.wait import Wait, WaitPolicy, wait_for_replica
from hpc_serve.client.replicas.event_loops import InLoop, InThread, run_blocking
from hpc_serve.client.replicas.pool import ReplicaAddress, replica_of_file
from hpc_serve.client.replicas.status import ServiceStatus, listing, not_found
from hpc_serve.errors import (
    AmbiguousServiceError,
    InvalidRequestError,
    NotAllReplicasError,
    ServiceNotFoundError,
    error_text,
)
from hpc_serve.rendezvous.shares import named_service
from hpc_serve.rendezvous.store import ServiceStore, default_home
from hpc_serve.trust.certificates import trust_variables
from hpc_serve.trust.connection import VerifiedConnection

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
    if service is not None:
        store, name = await here.call(named_service, service, store.home)
    else:
        name = pick_service(await here.call(find_ready_services, store), store, waits=policy.waits)
    watch = ServiceWatch(store, name, may_wake=wake)
    await wait_for_replica(watch, policy, here)
    return watch


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """One ready replica, for any tool that speaks to OpenAI. The base URL ends in /v1.

    `trust` are the environment variables that make other programs trust its certificate, and ask it without a proxy.
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
        trust={**trust_variables(watch.store.home, os.environ), **without_proxy(replica.base_url)},
    )


def without_proxy(url: str) -> dict[str, str]:
    """Return the variables that keep requests for a URL from the proxy that the environment names, if it names one."""
    proxies = urllib.request.getproxies()
    known = proxies.pop("no", "")
    if not proxies or known == "*":
        return {}
    hosts = dict.fromkeys([*known.split(","), str(urllib.parse.urlsplit(url).hostname)])
    return dict.fromkeys(("no_proxy", "NO_PROXY"), ",".join(filter(None, hosts)))


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


# -- the same to all replicas

_CONNECT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class ReplicaAnswer:
    """What one replica answered: the HTTP status, None without an answer, and the body or the error as text."""

    status: int | None
    text: str

    @property
    def is_done(self) -> bool:
        """Whether the engine did as it was told."""
        return self.status is not None and 200 <= self.status < 300


def tell_all(
    service: str,
    path: str,
    body: Mapping[str, Any] | None = None,
    *,
    undo: str | None = None,
    timeout: float = 600.0,
    home: str | Path | None = None,
) -> dict[str, ReplicaAnswer]:
    """POST the same to every ready replica of a service at once; returns their answers by the replica's name.

    If one does not do it, and `undo` is the path of a request that takes it back, those that did it or gave no answer
    are sent that request. A replica may take `timeout` seconds. Replicas that are not ready are told nothing.
    `home` is $HPC_SERVE_HOME unless given. Ctrl-C ends the wait alone: requests under way go on, and `undo` is not
    sent.

    Raises NotAllReplicasError, whose `answers` say what each replica did, ServiceNotFoundError, StoreError. Raises
    InvalidRequestError for a path without / at its beginning, or a `body` that is no mapping; then nothing is sent.
    """
    for one in (path, "/" if undo is None else undo):
        if not one.startswith("/"):
            raise InvalidRequestError(f"{one!r} is no path: it begins with /, as '/pause?mode=keep'.")
    if body is not None and not isinstance(body, Mapping):
        raise InvalidRequestError(f"The body {body!r} is no mapping: write {{'new_version': 'step-200'}}.")
    store, name = named_service(service, open_store(home).home)
    watch = ServiceWatch(store, name)
    watch.refresh(is_complete=True)
    replicas = watch.pool.others(frozenset())
    if not replicas and not watch.status.exists:
        raise ServiceNotFoundError(not_found(watch.status, discover_services(store)))
    if not replicas:
        raise ServiceNotFoundError(f"{name} has no ready replica to tell: `hpc-serve status {name}` says why.")
    answers = _tell(replicas, path, body, timeout)
    failed = {one: answer for one, answer in answers.items() if not answer.is_done}
    if not failed:
        return answers
    told = "; ".join(f"{one}: {answer.status or 'no answer'} {answer.text[:200]}" for one, answer in failed.items())
    done = [one for one in replicas if (answer := answers[replica_of_file(one.name)]).is_done or answer.status is None]
    no_route = any(answer.status == 404 for answer in failed.values())
    more = " vLLM has most such routes in development mode alone: `--env VLLM_SERVER_DEV_MODE=1`." if no_route else ""
    if undo is not None and done:
        back = _tell(done, undo, None, timeout)
        left = [one for one, answer in back.items() if not answer.is_done]
        more += f" {undo} was sent to those that did it or gave no answer"
        more += f"; it failed at {', '.join(left)}." if left else "."
    raise NotAllReplicasError(
        f"{len(failed)} of {len(replicas)} replicas of {name} did not do POST {path}: {told}.{more}",
        answers=answers,
    )


def _tell(
    replicas: list[ReplicaAddress], path: str, body: Mapping[str, Any] | None, timeout_s: float
) -> dict[str, ReplicaAnswer]:
    told = {replica_of_file(one.name): in_background(_ask, one, path, body, timeout_s) for one in replicas}
    return {name: answer.result() for name, answer in told.items()}


def _ask(replica: ReplicaAddress, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> ReplicaAnswer:
    connection = VerifiedConnection(replica.host, replica.port, replica.identity, timeout_s=_CONNECT_S)
    try:
        with contextlib.closing(connection):
            connection.connect()
            connection.sock.settimeout(timeout_s)
            response = connection.ask("POST", path, json.dumps(body) if body is not None else None)
            return ReplicaAnswer(status=response.status, text=response.read().decode(errors="replace"))
    except (OSError, http.client.HTTPException) as error:
        return ReplicaAnswer(status=None, text=error_text(error))
