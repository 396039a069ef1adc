"""Models that are started when a request asks for them, and ended when another one needs their room.

A listed model is a service that `hpc-serve submit` starts with the words of the list, and `hpc-serve stop` ends, which
lets requests under way finish. `decide` says which one is started or ended next, within the bounds on services, GPUs
and GPU-hours. The caller says which services there are.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from hpc_serve.client.discovery.wake import CommandFailedError, run_command
from hpc_serve.errors import RendezvousError
from hpc_serve.gateway.answers import Refusal
from hpc_serve.gateway.settings import OnDemand
from hpc_serve.printable import printable
from hpc_serve.rendezvous.claims import change_wanted
from hpc_serve.rendezvous.record import EndpointRecord
from hpc_serve.rendezvous.store import ServiceStore
from hpc_serve.rendezvous.wanted import Decision, Wanted

# -- which model is started or ended next

LEAST_KEPT_S = 30.0
_DAY_S = 86_400.0


@dataclass(kw_only=True)
class Listed:
    """What is known of a listed service, in seconds of the event loop's clock.

    It takes `gpus`. `asked_at_s`: when it was last asked. `wanted_since_s`: since when a request waits for its jobs.
    `begun_at_s`: when its jobs were submitted. `ready_at_s`: since when it is ready. `under_way` are requests at it or
    waiting for it. `why` says what it waits for, or how it failed.
    """

    gpus: int
    asked_at_s: float = -math.inf
    wanted_since_s: float | None = None
    begun_at_s: float | None = None
    ready_at_s: float | None = None
    under_way: int = 0
    is_starting: bool = False
    is_ending: bool = False
    failed_until_s: float = 0.0
    may_start_at_s: float = 0.0
    failures: int = 0
    why: str = ""
    asked_by: str = ""

    @property
    def kept_s(self) -> float:
        """How long it stays at least once it is ready: as long as its start took."""
        if self.ready_at_s is None or self.begun_at_s is None:
            return LEAST_KEPT_S
        return max(self.ready_at_s - self.begun_at_s, LEAST_KEPT_S)


@dataclass(frozen=True, kw_only=True)
class Step:
    """What is to be done with a service. `wait`: nothing now, and not before `in_s` seconds have passed."""

    what: Literal["start", "end", "wait"]
    service: str
    why: str
    in_s: float = 0.0


def decide(
    service: str, now_s: float, waited_s: float, running: Mapping[str, Listed], limits: OnDemand, used_gpu_hours: float
) -> Step:
    """Return the next step towards a service that is not there, for which a request has waited so long.

    `running` are the listed services that have jobs.
    Nothing is started once the listed services have used the GPU-hours of a day. A ready service stays as long as its
    start took. Then the one that was asked longest ago goes, an idle one first. One that is never idle goes once the
    request has waited for as long as that one's start took.
    """
    if used_gpu_hours >= limits.most_gpu_hours:
        used = f"the listed models have used {used_gpu_hours:.1f} GPU-hours in a day"
        return Step(what="wait", service=service, why=f"{used}, and may use {limits.most_gpu_hours:g}")
    gpus = sum(one.gpus for one in running.values())
    if len(running) + 1 <= limits.most_services and gpus + limits.models[service].gpus <= limits.most_gpus:
        return Step(what="start", service=service, why="a request asks for it")
    if ending := [name for name, one in running.items() if one.is_ending]:
        return Step(what="wait", service=service, why=f"{ending[0]} is ending to make room")
    may_end = {
        name: one
        for name, one in running.items()
        if one.ready_at_s is not None
        and now_s - one.ready_at_s >= one.kept_s
        and (not one.under_way or waited_s >= one.kept_s)
    }
    if not may_end:
        names = ", ".join(running)
        kept = "a model stays while it is busy, and at least as long as its start took"
        in_s = min(one.kept_s - (now_s - (one.ready_at_s or now_s)) for one in running.values())
        return Step(what="wait", service=service, why=f"there is no room beside {names}: {kept}", in_s=in_s)
    name = min(may_end, key=lambda name: (may_end[name].under_way > 0, may_end[name].asked_at_s))
    asked = now_s - may_end[name].asked_at_s
    since = f"was last asked {asked:.0f} s ago" if math.isfinite(asked) else "was not asked since the gateway began"
    return Step(what="end", service=name, why=f"{service} is asked for and needs its room; it {since}")


def gpu_hours(records: Iterable[EndpointRecord], now_s: float, *, forgotten_s: float = 0.0) -> float:
    """Return the GPU-hours of these jobs in the day before `now_s`, in seconds since the epoch.

    `forgotten_s` at the beginning of that day do not count.

    >>> gpu_hours([], 0.0)
    0.0
    """
    seconds = 0.0
    for one in records:
        until_s = one.updated_at if one.is_final or one.is_overdue(now_s) else now_s
        held_s = until_s - max(one.started_at, now_s - _DAY_S + forgotten_s)
        seconds += max(held_s, 0.0) * one.num_gpus
    return seconds / 3600


def hours_free_in_s(records: Sequence[EndpointRecord], now_s: float, most_gpu_hours: float) -> int:
    """Return the seconds until less than `most_gpu_hours` of a day are used, if no job runs from now on.

    >>> hours_free_in_s([], 0.0, 10.0)
    0
    """
    seconds = range(int(_DAY_S))
    return bisect_left(
        seconds, True, key=lambda passed_s: gpu_hours(records, now_s, forgotten_s=passed_s) < most_gpu_hours
    )


# -- starting and ending

_LOOK_S = 1.0
_POLL_S = 0.25
_FAILED_FOR_S = 60.0
_MOST_FAILED_FOR_S = 3600.0

_log = logging.getLogger(__name__)


class Services(Protocol):
    """What the gateway knows of the services of a home."""

    async def look(self, *, older_than_s: float = 1.0) -> None:
        """Look once more, if the last look is that old. `note_states` is called after each look."""

    def states(self, service: str) -> Sequence[str] | None:
        """Return the states of a service's replicas; None if it has no job."""

    def is_ready(self, service: str) -> bool:
        """Return whether a replica is known that takes requests."""

    def under_way(self, service: str) -> int:
        """Return how many requests are at it, or wait for it."""


class OnDemandModels:
    """The listed models of a gateway, which are started by `hpc-serve` commands with the home of `store`."""

    def __init__(self, store: ServiceStore, limits: OnDemand, services: Services, wait_s: float) -> None:
        self._store = store
        self._limits = limits
        self._services = services
        self._wait_s = wait_s
        self._listed = {name: Listed(gpus=model.gpus) for name, model in limits.models.items()}
        self._commands: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None

    async def bring(self, service: str, until_s: float, person: str = "") -> None:
        """Return once a service is there or submitted. Raises Refusal if it is not by `until_s` of the loop's clock.

        `person` is whose request it is, if it has a key of its own.
        """
        clock = asyncio.get_running_loop().time
        listed = self._listed[service]
        listed.asked_at_s = clock()
        if self._is_there(service) and self._services.is_ready(service):
            return
        await self._services.look()
        while not self._is_there(service):
            now_s = clock()
            has_failed = now_s < listed.failed_until_s
            if not has_failed:
                self._want(listed, now_s, person)
            if has_failed or now_s >= until_s:
                retry_s = max(listed.failed_until_s - now_s, listed.may_start_at_s - now_s, _LOOK_S)
                why = listed.why.rstrip(".") or "it was asked for now"
                text = f"{service} is started on demand, and is not there yet: {why}."
                raise Refusal(status=503, code="on_demand", message=text, retry_s=math.ceil(retry_s))
            await asyncio.sleep(_POLL_S)

    def note_asked(self, service: str) -> None:
        """A request asks for a service, by whichever name."""
        if service in self._listed:
            self._listed[service].asked_at_s = asyncio.get_running_loop().time()

    def _want(self, listed: Listed, now_s: float, person: str) -> None:
        if listed.wanted_since_s is None:
            listed.wanted_since_s = now_s
            listed.asked_by = f"a request{f' of {person}' if person else ''} asked the gateway for it"
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._follow())

    def _is_there(self, service: str) -> bool:
        states = self._services.states(service)
        return states is not None and "asleep" not in states and not self._listed[service].is_ending

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    # -- following what is wanted

    async def _follow(self) -> None:
        """Do what follows until no listed service is wanted that is not there."""
        clock = asyncio.get_running_loop().time
        while True:
            await self._services.look()
            wanted = [name for name, listed in self._listed.items() if listed.wanted_since_s is not None]
            if not wanted:
                return
            used, free_in_s = await self._used_gpu_hours()
            for service in sorted(wanted, key=lambda name: self._listed[name].wanted_since_s or 0.0):
                if not self._listed[service].is_starting:
                    self._listed[service].may_start_at_s = clock() + free_in_s
                    self._step(service, clock(), used)
            await asyncio.sleep(_LOOK_S)

    def note_states(self) -> None:
        """There was a look: note what came, what is ready, and what ended."""
        now_s = asyncio.get_running_loop().time()
        for name, listed in self._listed.items():
            states = self._services.states(name)
            if self._is_there(name):
                listed.wanted_since_s = None
                if listed.ready_at_s is None and states and "ready" in states:
                    listed.ready_at_s, listed.failures = now_s, 0
                continue
            if listed.wanted_since_s is not None and now_s - listed.asked_at_s > self._wait_s + LEAST_KEPT_S:
                listed.wanted_since_s = None  # who asked has gone
            if listed.is_starting:
                continue
            if listed.begun_at_s is not None and listed.ready_at_s is None and not listed.is_ending:
                self._note_failure(name, f"its job ended before it was ready; `hpc-serve doctor {name}` says why")
            listed.begun_at_s = listed.ready_at_s = None

    def _note_failure(self, service: str, why: str) -> None:
        listed, now_s = self._listed[service], asyncio.get_running_loop().time()
        listed.failed_until_s = now_s + min(_FAILED_FOR_S * 2**listed.failures, _MOST_FAILED_FOR_S)
        listed.failures += 1
        listed.begun_at_s = listed.wanted_since_s = None
        listed.why = why
        _log.warning("%s", printable(f"on demand: {service}: {why}"))

    async def _used_gpu_hours(self) -> tuple[float, int]:
        """Return the GPU-hours of a day that are used, and the seconds until some are left."""
        most = self._limits.most_gpu_hours
        if math.isinf(most):
            return 0.0, 0

        def read() -> tuple[float, int]:
            records = [record for name in self._limits.models for record in self._store.read(name).records]
            now_s = time.time()
            return gpu_hours(records, now_s), hours_free_in_s(records, now_s, most)

        return await asyncio.to_thread(read)

    def _step(self, service: str, now_s: float, used_gpu_hours: float) -> None:
        listed = self._listed[service]
        waited_s = now_s - (listed.wanted_since_s or now_s)
        step = decide(service, now_s, waited_s, self._running(), self._limits, used_gpu_hours)
        if step.what == "wait" or (step.what == "start" and listed.is_ending):
            listed.why = step.why
            listed.may_start_at_s = max(listed.may_start_at_s, now_s + step.in_s)
            return
        _log.warning("%s", printable(f"on demand: {step.what} {step.service}: {step.why}"))
        if step.what == "end":
            listed.why = f"{step.service} is ending to make room"
            self._listed[step.service].is_ending = True
            command = self._end(step.service, step.why)
        else:
            listed.is_starting = True
            command = self._start(service, now_s)
        task = asyncio.get_running_loop().create_task(command)
        self._commands.add(task)
        task.add_done_callback(self._commands.discard)

    async def _start(self, service: str, now_s: float) -> None:
        """Submit or wake a service. Its room is taken meanwhile; other models need not wait for a slow sbatch."""
        listed, is_asleep = self._listed[service], "asleep" in (self._services.states(service) or ())
        words = ["wake", service] if is_asleep else ["submit", "--once", "--json", *self._limits.models[service].words]
        try:
            said = await asyncio.to_thread(run_command, words, self._store.home)
        except CommandFailedError as error:
            self._note_failure(service, f"`hpc-serve {words[0]}` failed: {error}")
        else:
            listed.begun_at_s = now_s
            if not _was_there(said):  # else another gateway submitted it, or a person
                await self._tell(service, "submit", listed.asked_by)
            await self._services.look(older_than_s=0.0)
        finally:
            listed.is_starting = False

    async def _end(self, service: str, why: str) -> None:
        try:
            await asyncio.to_thread(run_command, ["stop", service], self._store.home)
            await self._tell(service, "end", why)
        except CommandFailedError as error:
            _log.warning("%s", printable(f"on demand: {service} did not end: {error}"))
        finally:
            await self._services.look(older_than_s=0.0)
            self._listed[service].is_ending = False

    async def _tell(self, service: str, action: Literal["submit", "end"], why: str) -> None:
        """Write down what was done and why, for `hpc-serve status`."""
        decision = Decision(action=action, cause="demand", why=why, count=1 if action == "submit" else 0)

        def told(found: Wanted | None) -> Wanted | None:
            return found.with_decisions(time.time(), decision) if found is not None else None

        with contextlib.suppress(RendezvousError):
            await asyncio.to_thread(change_wanted, self._store, service, told)

    def _running(self) -> dict[str, Listed]:
        """Return the listed services that have jobs, with the requests under way at them."""
        running = {}
        for name, listed in self._listed.items():
            states = self._services.states(name)
            has_jobs = states is not None and ("asleep" not in states or listed.is_ending)
            if has_jobs or listed.is_starting:
                listed.under_way = self._services.under_way(name)
                running[name] = listed
        return running


def _was_there(said: str) -> bool:
    """Return whether `hpc-serve submit --once --json` found the service's jobs, and submitted none."""
    with contextlib.suppress(ValueError, TypeError):
        return bool(json.loads(said)["is_there"])
    return False
