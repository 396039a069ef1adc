"""The services behind a gateway: which there are, and which one a model's name means.

The records are read every ten seconds and, at most once a second, for an unknown name. A service goes once no live
record of it is left and no replica of it answers. `backend` sends its requests.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_serve.client.discovery.discovery import ServiceWatch
from hpc_serve.errors import HpcServeError, StoreError
from hpc_serve.gateway.answers import Refusal
from hpc_serve.gateway.backend import Backend, model_card
from hpc_serve.gateway.metrics import Counts
from hpc_serve.gateway.on_demand import OnDemandModels
from hpc_serve.gateway.settings import OnDemand, Settings
from hpc_serve.rendezvous.claims import read_wanted_or_none
from hpc_serve.rendezvous.record import EndpointRecord
from hpc_serve.rendezvous.store import ABANDONED_AFTER_S, EntryFiles, ServiceStore

LOOK_S = 10.0
AGAIN_S = 1.0
ASK_S = 5.0  # between two times that engines are asked for a name that is not known
_READ_S = 5.0
_SHOWN_NAME = 80

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Found:
    """A service with live records or submitted jobs: the names of its models, and how it is by the records."""

    names: tuple[str, ...] = ()
    states: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        return "ready" if "ready" in self.states else (self.states[-1] if self.states else "not started")


class Directory:
    """All services that are served. Used in one event loop."""

    def __init__(self, store: ServiceStore, settings: Settings, counts_of: Callable[[str], Counts]) -> None:
        self._store = store
        self._counts_of = counts_of
        self._settings = settings
        self._live: dict[str, EntryFiles] = {}
        self._found: dict[str, Found] = {}
        self._recorded: dict[str, Found] = {}
        """Those of `_found` that have records or jobs, and not only requests under way."""
        self._unread = "The services are not read yet."
        """Why a service may be there that no look has found."""
        self._backends: dict[str, Backend] = {}
        listed = settings.on_demand or OnDemand(models={})
        self._listed = OnDemandModels(store, listed, self, settings.wait_s)
        self._listed_names = tuple(listed.models)
        self._look: asyncio.Task[None] | None = None
        self._looked_at_s = float("-inf")
        self._asked_at_s = float("-inf")

    async def follow(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await self.look(older_than_s=0.0)
            await asyncio.sleep(LOOK_S)

    def known(self, model: str | None) -> Backend | None:
        """Return the service of a model's name as `find` does, if that needs no look. Raises Refusal."""
        service = self._service_of(model) if not self._listed_names else None
        return self._backend(service) if service is not None else None

    async def find(self, model: str | None) -> Backend:
        """Return the service of a model's name, or the only one without a name. Raises Refusal, StoreError."""
        if model is not None and model in self._listed_names:
            self._listed.note_asked(model)
            return self._backend(model)  # which brings it
        if (service := self._service_of(model)) is None:
            since_s = asyncio.get_running_loop().time() - self._looked_at_s
            await asyncio.sleep(max(0.0, AGAIN_S - since_s))  # it may have come since the last look
            await self.look()
            service = self._service_of(model)
        may_ask = asyncio.get_running_loop().time() - self._asked_at_s >= ASK_S
        if service is None and model is not None and self._found and may_ask:
            await self.models()  # an adapter of --lora-modules has a name that no record knows
            service = self._service_of(model)
        if service is None:
            raise self._unknown(model)
        self._listed.note_asked(service)
        return self._backend(service)

    def states(self, service: str) -> Sequence[str] | None:
        """Return the states of a service's replicas; None if it has no job and does not sleep."""
        found = self._recorded.get(service)
        return found.states if found is not None else None

    def is_ready(self, service: str) -> bool:
        """Return whether a replica of a service is known that takes requests."""
        backend = self._backends.get(service)
        return backend is not None and backend.is_ready

    def under_way(self, service: str) -> int:
        """Return how many requests are at a service, or wait for it."""
        backend = self._backends.get(service)
        return backend.turns.in_flight + backend.turns.queued if backend is not None else 0

    def _service_of(self, model: str | None) -> str | None:
        if model is None:
            if len(self._found) > 1:
                names = ", ".join(sorted(self._found))
                raise Refusal(
                    status=400,
                    code="model_required",
                    param="model",
                    message=f"The request names no model, and there are several services: {names}.",
                )
            return next(iter(self._found), None)
        if model in self._found:
            return model
        serving = [service for service in self._found if model in self._names_of(service)]
        serving = [service for service in serving if self._found[service].words == "ready"] or serving
        if len(serving) > 1:
            raise Refusal(
                status=400,
                code="ambiguous_model",
                param="model",
                message=f"Several services have that model: {', '.join(sorted(serving))}. Name the service as `model`.",
            )
        return serving[0] if serving else None

    def _names_of(self, service: str) -> Sequence[str]:
        backend = self._backends.get(service)
        return (*self._found[service].names, *(backend.names if backend is not None else ()))

    def _unknown(self, model: str | None) -> Exception:
        if self._unread and not self._found:
            return StoreError(self._unread)
        there = [
            f"{service} ({found.words})" + (f": {', '.join(found.names)}" if found.names else "")
            for service, found in self._found.items()
        ]
        there += [f"{service} (started on demand)" for service in self._listed_names if service not in self._found]
        listed = f"There is: {'; '.join(there)}." if there else "There is no service. Start one: hpc-serve submit"
        wanted = f"No service has the model {model[:_SHOWN_NAME]!r}." if model is not None else "No service is there."
        return Refusal(status=404, code="model_not_found", param="model", message=f"{wanted} {listed}")

    def _backend(self, service: str) -> Backend:
        if (backend := self._backends.get(service)) is None:
            backend = Backend(self._store, service, self._settings, self._counts_of(service))
            if service in self._listed_names:
                backend.bring = functools.partial(self._listed.bring, service)
            self._backends[service] = backend
            backend.names = self._found[service].names if service in self._found else ()
        return backend

    async def models(self) -> list[dict[str, Any]]:
        """Return the models that can be used now, as OpenAI lists models: each service's engine names and its own
        name."""
        self._asked_at_s = asyncio.get_running_loop().time()
        await self.look()
        backends = [self._backend(service) for service in list(self._found)]
        await asyncio.gather(*(asyncio.to_thread(_refresh, backend.watch) for backend in backends))
        ready = [backend for backend in backends if backend.is_ready]
        listed = []
        for backend, cards in zip(ready, await asyncio.gather(*(backend.models() for backend in ready)), strict=True):
            backend.names = _distinct(*backend.names, *(card["id"] for card in cards))
            listed += [{**card, "service": backend.service} for card in cards]
            if cards and all(card["id"] != backend.service for card in cards):
                listed.append({**cards[0], "id": backend.service, "root": cards[0]["id"], "service": backend.service})
        known = {card["id"] for card in listed}
        listed += [{**model_card(name), "service": name} for name in self._listed_names if name not in known]
        return listed

    def counts(self) -> Mapping[str, tuple[int, int]]:
        """Return the requests in flight and queued, by service."""
        return {backend.service: (backend.turns.in_flight, backend.turns.queued) for backend in self._backends.values()}

    async def close(self) -> None:
        self._listed.close()
        for backend in self._backends.values():
            await backend.close()

    # -- looking

    async def look(self, *, older_than_s: float = AGAIN_S) -> None:
        """Look once more if the last look is that old. One look at a time; a filesystem that hangs holds nobody up."""
        loop = asyncio.get_running_loop()
        if not older_than_s and self._look is not None and not self._look.done():
            await asyncio.wait({self._look}, timeout=_READ_S)  # it may have read before what is to be seen
        if self._look is None or self._look.done():
            if loop.time() - self._looked_at_s < older_than_s:
                return
            self._look = loop.create_task(self._look_once())
        await asyncio.wait({self._look}, timeout=_READ_S)

    async def _look_once(self) -> None:
        try:
            found, unreadable = await asyncio.to_thread(self._read)
        except HpcServeError as error:
            _log.debug("looking for services: %s", error)
            self._unread = str(error)
            return
        finally:
            self._looked_at_s = asyncio.get_running_loop().time()
        self._unread = f"The records of {', '.join(sorted(unreadable))} cannot be read." if unreadable else ""
        self._recorded = {**{name: self._recorded[name] for name in unreadable if name in self._recorded}, **found}
        for service, backend in list(self._backends.items()):
            if service in found or service in unreadable:
                continue
            await asyncio.to_thread(_refresh, backend.watch)
            if backend.is_ready or backend.turns.in_flight or backend.turns.queued:
                unreadable.add(service)
            else:
                del self._backends[service]
                self._live.pop(service, None)
                await backend.close()
        before = self._found
        self._found = {**{name: before[name] for name in unreadable if name in before}, **found}
        for service, backend in self._backends.items():
            if service in found:
                names = found[service].names
                gone = set(before[service].names if service in before else ()).difference(names)
                backend.names = _distinct(*names, *(name for name in backend.names if name not in gone))
        self._listed.note_states()

    def _last_names(self, service: str) -> tuple[str, ...]:
        """Return the names of a service after all its replicas have ended."""
        if service in self._found:
            return self._found[service].names
        records = self._store.read(service).records
        return records[-1].served_model_names if records else ()

    def _read(self) -> tuple[dict[str, Found], set[str]]:
        """Return the services found, and the services with unreadable files. Raises StoreError."""
        found: dict[str, Found] = {}
        unreadable: set[str] = set()
        named = set(self._settings.services).difference(self._listed_names)
        services = self._settings.services or self._store.services()
        services = tuple(dict.fromkeys((*services, *self._listed_names)))
        if not services and self._found and not (self._store.home / "services").is_dir():
            raise StoreError(f"{self._store.home} is away.")
        for service in services:
            live = self._live.setdefault(service, self._store.live(service))
            try:
                entries = live.read_all()
            except HpcServeError:
                unreadable.add(service)
                continue
            records = entries.records
            is_ready = any(record.state == "ready" for record in records)
            wanted = None if is_ready else read_wanted_or_none(self._store, service)
            coming = wanted.adapters if wanted is not None else ()  # a replica loads them before it is ready
            if entries.exists or service in named:
                names = [name for record in records for name in (*record.served_model_names, *record.adapter_names)]
                found[service] = Found(names=_distinct(*names, *coming), states=tuple(map(_state_of, records)))
            elif entries.unreadable:
                unreadable.add(service)
            elif wanted is not None and wanted.state == "asleep":
                found[service] = Found(names=_distinct(*self._last_names(service), *coming), states=("asleep",))
        return found, unreadable


def _distinct(*names: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def _state_of(record: EndpointRecord) -> str:
    return "not heard of any more" if time.time() - record.updated_at > ABANDONED_AFTER_S else record.state


def _refresh(watch: ServiceWatch) -> None:
    try:
        watch.refresh()
    except HpcServeError as error:  # go on with what is known
        _log.debug("looking for replicas of %s: %s", watch.service, error)
