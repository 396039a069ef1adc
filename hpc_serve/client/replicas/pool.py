"""Which ready replica a request goes to: the one with the fewest requests under way for what it can take.

How much each can take is measured by how fast it answered (`speeds`): a client with few requests at a time has nothing
to count. Pure, apart from the clock and the random choice among equals.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass

from hpc_serve.client.replicas.speeds import Kind, Speeds
from hpc_serve.trust.connection import Identity

WEIGH_S = 0.2  # replicas are weighed again after this time: a choice is to cost little


@dataclass(frozen=True, kw_only=True)
class ReplicaAddress:
    """Where a replica answers, and how it shows that it is this replica; `name` is its record's."""

    name: str
    host: str
    port: int
    identity: Identity


class ReplicaPool:
    """Counts requests under way by replica, and notes how fast each answers. Safe to share between threads."""

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, chance: Callable[[], float] = random.random
    ) -> None:
        self._clock = clock
        self._chance = chance
        # Reentrant: the garbage collector may end a request, and give its replica back, in the middle of any line.
        self._lock = threading.RLock()
        self._replicas: Mapping[str, ReplicaAddress] = {}  # never changed, but replaced: who reads it needs no lock
        self._doubtful: Set[str] = frozenset()
        self._doubtful_too: Set[str] = frozenset()
        self._under_way: dict[str, int] = {}
        self._speeds = Speeds()
        self._weights: Mapping[str, float] = {}
        self._weighed_at_s = float("-inf")

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
            self._speeds.keep(self._replicas)
            self._weighed_at_s = float("-inf")

    def offer(self, replica: ReplicaAddress) -> None:
        """Offer one more replica, or another address of one."""
        with self._lock:
            self._replicas = {**self._replicas, replica.name: replica}

    def doubt_also(self, names: Set[str]) -> None:
        """Offer these last, too, and of those that were named here before only these."""
        self._doubtful_too = names

    def has_others(self, names: Set[str]) -> bool:
        """Whether a replica is offered that is not named."""
        return any(name not in names for name in self._replicas)

    def others(self, names: Set[str]) -> list[ReplicaAddress]:
        """The replicas that are offered and not named, those that are not in doubt first."""
        found = [replica for name, replica in self._replicas.items() if name not in names]
        return sorted(found, key=lambda replica: self._is_doubtful(replica.name))

    def _is_doubtful(self, name: str) -> bool:
        return name in self._doubtful or name in self._doubtful_too

    def drop(self, name: str) -> None:
        """Offer a replica no more."""
        with self._lock:
            self._replicas = {known: replica for known, replica in self._replicas.items() if known != name}

    def take(self, tried: Set[str] = frozenset(), *, doubtful_too: bool = True) -> ReplicaAddress | None:
        """The least loaded replica not in `tried`, to be given back; None if there is none. Those in doubt come last,
        or not at all.

        Of equals one is chosen at random: many clients with one request each would all choose the same replica. By the
        same chance a slower one gets its share of the requests of a client that has no other under way.
        """
        with self._lock:
            weights = self._weigh()
            replica = min(
                (
                    replica
                    for name, replica in self._replicas.items()
                    if name not in tried and (doubtful_too or not self._is_doubtful(name))
                ),
                key=lambda replica: (
                    self._is_doubtful(replica.name),
                    (self._under_way.get(replica.name, 0) + self._chance()) / weights.get(replica.name, 1.0),
                ),
                default=None,
            )
            if replica is not None:
                self._under_way[replica.name] = self._under_way.get(replica.name, 0) + 1
            return replica

    def note_time(self, replica: ReplicaAddress, kind: Kind, took_s: float) -> None:
        """A request of `take` has come so far in that time."""
        with self._lock:
            self._speeds.note(replica.name, kind, took_s, self._clock())

    def _weigh(self) -> Mapping[str, float]:
        now_s = self._clock()
        if now_s - self._weighed_at_s > WEIGH_S:
            self._weights, self._weighed_at_s = self._speeds.weights(self._replicas, now_s), now_s
        return self._weights

    def give_back(self, replica: ReplicaAddress, kind: Kind | None = None, took_s: float = 0.0) -> None:
        """A request of `take` is over; it took so long, if its answer was of a `kind`."""
        with self._lock:
            if kind is not None:
                self._speeds.note(replica.name, kind, took_s, self._clock())
            left = self._under_way[replica.name] - 1
            if left:
                self._under_way[replica.name] = left
            else:
                del self._under_way[replica.name]

    def after_fork(self) -> None:
        """In a forked process the lock may be one that a thread of the other process holds."""
        self._lock = threading.RLock()
