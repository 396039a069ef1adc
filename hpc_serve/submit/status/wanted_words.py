"""Says in words what is wanted of a service, and what was decided of late, for `status` and `submit`. Pure.

rendezvous/wanted.py has the value, submit/services/reconcile.py decides.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpc_serve.rendezvous.wanted import MachineWanted, Wanted
from hpc_serve.submit.request.bounds import shown_counts
from hpc_serve.units import duration

if TYPE_CHECKING:
    from hpc_serve.client.replicas.status import ReplicaStatus


def asleep_sentence(service: str, wanted: Wanted) -> str:
    """Return since when, and why, a service is asleep, and how it is woken."""
    last = wanted.decided[-1] if wanted.decided else None
    since = f" since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(last.at))}: {last.why}" if last else ""
    return f"{service} is asleep{since}. Wake it: hpc-serve wake {service}"


def bounds_sentence(wanted: Wanted) -> str:
    """Return how many replicas there may be."""
    words = [f"{_bounds(wanted)} of them" if wanted.least == wanted.most else _bounds(wanted)]
    if wanted.machines:
        words = [shown_counts(wanted.counts)]
    if (per_job := wanted.replicas_per_job) > 1 and (wanted.least % per_job or wanted.most % per_job):
        jobs = f"{-(-wanted.least // per_job)} to {-(-wanted.most // per_job)}"
        words.append(f"rounded up to {jobs} whole jobs of {per_job}")
    if wanted.least != wanted.most:
        words.append("more while requests wait")
    return ", ".join([*words, *_idle_stop(wanted)])


def _bounds(wanted: Wanted) -> str:
    return f"{wanted.least}" if wanted.least == wanted.most else f"{wanted.least} to {wanted.most}"


def _idle_stop(wanted: Wanted) -> list[str]:
    seconds = wanted.idle_stop_s
    return [] if seconds is None else [f"none after {duration(seconds)} without a request"]


def wanted_lines(service: str, wanted: Wanted, live: Sequence[ReplicaStatus], now: float) -> list[str]:
    """Return what is wanted, then the last decisions with their reasons; no line if there is nothing to say.

    `live` replicas are not over, of whichever service.
    """
    live = [status for status in live if status.service == service]
    if wanted.state == "asleep":
        return [asleep_sentence(service, wanted)]
    told = [f"  {duration(max(0.0, now - one.at))} ago {one.sentence}" for one in wanted.decided]
    if not wanted.is_kept and any(one.cause == "demand" for one in wanted.decided):
        return [f"{service}: a gateway starts and ends it", *told]
    if not wanted.is_kept or wanted.state == "stopped" or not (live or wanted.submitting):
        return []
    words = [f"{service}: {sum(one.state != 'draining' for one in live)} of {_bounds(wanted)} replicas"]
    if wanted.machines:
        here = {name: sum(one.machine == name for one in live if one.state != "draining") for name in wanted.machines}
        words.append(", ".join(f"{here[name]} of {count} on {name}" for name, count in wanted.counts.items()))
    if wanted.least != wanted.most:
        words.append(f"{wanted.count} wanted now")
    words += _idle_stop(wanted)
    if wanted.keep_up:
        words.append("each job is replaced before its time limit")
    if wanted.submitting:
        words.append(f"{wanted.submitting} being submitted")
    troubled: dict[str, Wanted | MachineWanted] = {
        "": wanted,
        **{f"on {at}: ": one for at, one in wanted.machines.items()},
    }
    for where, one in troubled.items():
        if one.problem and not one.next_try_at:
            words.append(f"{where}{one.problem}")
        elif one.next_try_at > now:
            again = time.strftime("%H:%M:%S", time.localtime(one.next_try_at))
            words.append(f"{where}{one.problem}; trying again at {again}")
    return ["; ".join(words), *told]
