"""What a person reads about services: one in a line, a list of all, and why there is none to talk to. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from hpc_serve.client.replicas.status import ReplicaState, ServiceStatus

# Where no replica is ready, the first of these states that one of them is in describes the service.
_MOST_HOPEFUL_FIRST: tuple[ReplicaState, ...] = ("starting", "pending", "draining", "unresponsive", "unknown")


def summary(status: ServiceStatus) -> str:
    """The state of a service in one line, without its name."""
    if count := len(status.ready):
        return "ready" if count == 1 else f"ready ({count} replicas)"
    for state in _MOST_HOPEFUL_FIRST:
        if matching := [replica for replica in status.replicas if replica.state == state]:
            return f"{matching[-1].sentence} (job {matching[-1].name})"
    if not status.replicas:
        return "nothing was ever published"
    last = max(status.replicas, key=lambda replica: replica.updated_at or 0.0)
    return f"{last.sentence} (job {last.name})"


def listing(services: Sequence[ServiceStatus]) -> str:
    """All services, one a line."""
    return "\n".join(f"  {status.service}: {summary(status)}" for status in services)


def not_found(status: ServiceStatus, others: Sequence[ServiceStatus], *, wanted: str = "service") -> str:
    """Why there is no replica of `status.service` to talk to, what else there is, and what to do.

    `wanted` says what the name may have stood for.
    """
    name = status.service
    others = [other for other in others if other.service != name and other.exists]
    if status.exists:
        text = f"No replica of {name} takes requests. {name} is {summary(status)}."
        if status.is_coming:
            text += f" Wait for it: connect({name!r}, wait=600), or `hpc-serve wait {name}`."
        else:
            text += f" Start one: hpc-serve submit; see what happened: hpc-serve status {name}."
    else:
        close = difflib.get_close_matches(name, [other.service for other in others], n=1)
        text = f"No {wanted} {name!r} in {status.home}."
        text += f" Did you mean {close[0]!r}?" if close else " Start one: hpc-serve submit."
    if status.problems:
        text += "\nNot trusted:\n" + "\n".join(f"  {problem}" for problem in status.problems)
    if others:
        text += f"\nThere {'are' if len(others) > 1 else 'is'}:\n{listing(others)}"
    return text
