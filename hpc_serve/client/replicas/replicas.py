"""For whoever wants to see where requests go: the replicas that a client knows, and the one that answered last."""

from __future__ import annotations

import contextvars
import weakref
from dataclasses import dataclass

from hpc_serve.client.replicas.pool import ReplicaPool
from hpc_serve.client.replicas.status import ReplicaState, ReplicaStatus


@dataclass(frozen=True, kw_only=True)
class Replica:
    """A replica as a client knows it. `name` is job, restart and number, as in `123-r0-0`; `address` is host:port.

    `state` is `ready` while requests are sent there. `reason` says why they are not.
    """

    name: str
    state: ReplicaState
    address: str = ""
    reason: str = ""


def known_replica(status: ReplicaStatus, pool: ReplicaPool) -> Replica:
    """Return a replica as it was found at the last look; `pool` holds those that get requests."""
    if status.record is None:
        return Replica(name=status.name, state=status.state, reason=status.detail)
    state, reason = status.state, status.detail
    if status.record.name in pool:
        state, reason = "ready", ""
    elif state == "ready":
        state, reason = "unknown", "a request failed there: it is asked before it gets another"
    return Replica(name=replica_of_file(status.record.name), state=state, address=status.address, reason=reason)


class LastReplica:
    """Which replica answered last: in this thread or task, or else in any. Safe to share between threads."""

    def __init__(self) -> None:
        self._anywhere: str | None = None

    def note(self, record_name: str) -> None:
        """A replica has answered a request of this thread or task."""
        self._anywhere = record_name
        _here.set((weakref.ref(self), record_name))

    @property
    def name(self) -> str | None:
        of, record_name = _here.get() or (None, None)
        if of is None or of() is not self:
            record_name = self._anywhere
        return replica_of_file(record_name) if record_name is not None else None


# One for all clients: a variable for each would stay in every context for ever.
_here: contextvars.ContextVar[tuple[weakref.ref[LastReplica], str] | None] = contextvars.ContextVar(
    "hpc_serve_last_replica", default=None
)


def replica_of_file(record_name: str) -> str:
    """Return a replica's name for programs, by the name of its record's file."""
    return record_name.removesuffix(".json")
