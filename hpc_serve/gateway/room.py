"""Which listed model is started or ended next, within the bounds on services, GPUs and GPU-hours. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hpc_serve.gateway.settings import OnDemand
from hpc_serve.rendezvous.record import EndpointRecord

LEAST_KEPT_S = 30.0
_DAY_S = 86_400.0


@dataclass(frozen=True, kw_only=True)
class Running:
    """A listed service that has jobs. Times are in seconds: since it was ready (None: it is not), and what that took,
    and since it was last asked. `under_way` are requests at it or waiting for it."""

    gpus: int
    ready_for_s: float | None
    start_s: float
    asked_for_s: float
    under_way: int
    is_ending: bool = False


@dataclass(frozen=True, kw_only=True)
class Step:
    """What is to be done with a service. `wait`: nothing now."""

    what: Literal["start", "end", "wait"]
    service: str
    why: str


def decide(
    service: str, waited_s: float, running: Mapping[str, Running], limits: OnDemand, used_gpu_hours: float = 0.0
) -> Step:
    """Return the next step towards a service that is not there, for which a request has waited so long.

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
        if one.ready_for_s is not None
        and one.ready_for_s >= max(one.start_s, LEAST_KEPT_S)
        and (not one.under_way or waited_s >= max(one.start_s, LEAST_KEPT_S))
    }
    if not may_end:
        names = ", ".join(running)
        return Step(what="wait", service=service, why=f"there is no room beside {names}, which came lately or are busy")
    name = min(may_end, key=lambda name: (may_end[name].under_way > 0, -may_end[name].asked_for_s))
    asked = may_end[name].asked_for_s
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
