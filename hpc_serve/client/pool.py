"""Which ready replica a request goes to: the one with the fewest requests of this client under way.

Pure, apart from a random choice among equals.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Set
from dataclasses import dataclass

from hpc_serve.trust.connection import Identity


@dataclass(frozen=True, kw_only=True)
class ReplicaAddress:
    """Where a replica answers, and how it shows that it is this replica; `name` is its record's."""

    name: str
    host: str
    port: int
    identity: Identity


class ReplicaPool:
    """Counts requests under way by replica. Safe to share between threads."""

    def __init__(self) -> None:
        # Reentrant: the garbage collector may end a request, and give its replica back, in the middle of any line.
        self._lock = threading.RLock()
        self._replicas: dict[str, ReplicaAddress] = {}
        self._doubtful: Set[str] = frozenset()
        self._under_way: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._replicas)

    def __contains__(self, name: str) -> bool:
        """Whether a replica is offered."""
        return name in self._replicas

    def fill(self, replicas: Iterable[ReplicaAddress], *, doubtful: Set[str] = frozenset()) -> None:
        """Offer these replicas and no others, the doubtful ones last. Counts of replicas that stay go on."""
        with self._lock:
            self._replicas = {replica.name: replica for replica in replicas}
            self._doubtful = doubtful

    def offer(self, replica: ReplicaAddress) -> None:
        """Offer one more replica, or another address of one."""
        with self._lock:
            self._replicas[replica.name] = replica

    def drop(self, name: str) -> None:
        """Offer a replica no more."""
        with self._lock:
            self._replicas.pop(name, None)

    def take(self, tried: Set[str] = frozenset()) -> ReplicaAddress | None:
        """The least loaded replica not in `tried`, to be given back; None if there is none.

        Of equals one is chosen at random: many clients with one request each would all choose the same replica.
        """
        with self._lock:
            replica = min(
                (replica for name, replica in self._replicas.items() if name not in tried),
                key=lambda replica: (
                    replica.name in self._doubtful,
                    self._under_way.get(replica.name, 0),
                    random.random(),
                ),
                default=None,
            )
            if replica is not None:
                self._under_way[replica.name] = self._under_way.get(replica.name, 0) + 1
            return replica

    def give_back(self, replica: ReplicaAddress) -> None:
        """A request of `take` is over."""
        with self._lock:
            left = self._under_way[replica.name] - 1
            if left:
                self._under_way[replica.name] = left
            else:
                del self._under_way[replica.name]

    def after_fork(self) -> None:
        """In a forked process the lock may be one that a thread of the other process holds."""
        self._lock = threading.RLock()
