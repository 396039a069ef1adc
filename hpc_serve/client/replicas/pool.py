"""Which ready replica a request goes to: the one with the fewest requests under way for what it can take.

How much each can take is measured by how fast it answered (`speeds`): a client with few requests at a time has nothing
to count. A replica that was sent such a request before is preferred (`beginnings`). One that was lost lately comes
last. Pure, apart from the clock and the random choice among equals.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field

from hpc_serve.client.replicas.beginnings import Beginnings
from hpc_serve.client.replicas.speeds import Kind, Speeds
from hpc_serve.trust.connection import Identity

WEIGH_S = 0.2  # replicas are weighed again after this time: a choice is to cost little

# So many more requests may be under way at a replica that has the beginning of a request in its cache.
LEAD = 4.0

# A replica that was lost is chosen last for the first time, after each further loss for twice as long.
LOST_FOR_S = 1.0
MOST_LOST_FOR_S = 60.0


@dataclass(frozen=True, kw_only=True)
class ReplicaAddress:
    """Where a replica answers, and how it shows that it is this replica; `name` is its record's.

    `signs`: within its answers it sends signs that it lives. `adapters` are those that its engine has loaded.
    """

    name: str
    host: str
    port: int
    identity: Identity
    signs: bool = False
    adapters: frozenset[str] = field(default=frozenset(), compare=False)


@dataclass(frozen=True)
class _Loss:
    """How often a replica was lost since its last whole answer, and until when it is chosen last."""

    replica: ReplicaAddress
    times: int
    until_s: float


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
        self.is_uneven = False
        """Some replicas have adapters that others lack."""
        self.process = object()
        """Another one in each process that is forked: requests of the other process are not under way here."""
        self._losses: dict[str, _Loss] = {}
        self._under_way: dict[str, int] = {}
        self._speeds = Speeds()
        self._beginnings = Beginnings()
        self._weights: Mapping[str, float] = {}
        self._weighed_at_s = float("-inf")

    def __len__(self) -> int:
        return len(self._replicas)

    def __contains__(self, name: str) -> bool:
        """Whether a replica is offered."""
        return name in self._replicas

    def fill(self, replicas: Iterable[ReplicaAddress]) -> None:
        """Offer these replicas and no others. Counts of replicas that stay go on."""
        with self._lock:
            self._replace({replica.name: replica for replica in replicas})
            self._speeds.keep(self._replicas)
            self._weighed_at_s = float("-inf")

    def offer(self, replica: ReplicaAddress) -> None:
        """Offer one more replica, or another address of one."""
        with self._lock:
            self._replace({**self._replicas, replica.name: replica})

    def _replace(self, replicas: Mapping[str, ReplicaAddress]) -> None:
        self._replicas = replicas
        self.is_uneven = len({replica.adapters for replica in replicas.values()}) > 1

    def lose(self, replica: ReplicaAddress) -> None:
        """Offer a replica last for a while: it was lost. What is lost with it at the same time counts once."""
        with self._lock:
            if self.is_lost(replica):
                return
            before, now_s = self._losses.get(replica.name), self._clock()
            times = before.times + 1 if before is not None and before.replica == replica else 1
            for_s = min(LOST_FOR_S * 2 ** (times - 1), MOST_LOST_FOR_S)
            old = [name for name, loss in self._losses.items() if now_s - loss.until_s > MOST_LOST_FOR_S]
            for name in old:
                del self._losses[name]
            self._losses[replica.name] = _Loss(replica, times, now_s + for_s)

    def is_lost(self, replica: ReplicaAddress) -> bool:
        """Return whether a replica was lost so lately that it is chosen last."""
        loss = self._losses.get(replica.name)
        return loss is not None and loss.replica == replica and self._clock() < loss.until_s

    def has_others(self, names: Set[str]) -> bool:
        """Whether a replica is offered that is not named."""
        return any(name not in names for name in self._replicas)

    def others(self, names: Set[str]) -> list[ReplicaAddress]:
        """The replicas that are offered and not named."""
        return [replica for name, replica in self._replicas.items() if name not in names]

    def lacking(self, adapter: str) -> Set[str]:
        """The replicas without an adapter, if others have it."""
        lacking = {name for name, replica in self._replicas.items() if adapter not in replica.adapters}
        return lacking if len(lacking) < len(self._replicas) else frozenset()

    def drop(self, name: str) -> None:
        """Offer a replica no more."""
        with self._lock:
            self._replace({known: replica for known, replica in self._replicas.items() if known != name})

    def take(self, tried: Set[str] = frozenset(), begins: list[int] | None = None) -> ReplicaAddress | None:
        """The least loaded replica not in `tried`, to be given back; None if there is none. What was lost comes last.

        The one that was last sent the longest of the beginnings `begins` is taken unless it has LEAD more under way.

        Of equals one is chosen at random: many clients with one request each would all choose the same replica. By the
        same chance a slower one gets its share of the requests of a client that has no other under way.
        """
        with self._lock:
            weights = self._weigh()
            known = self._beginnings.replica_of(begins) if begins else None
            chosen, least = None, (True, float("inf"))
            for name, replica in self._replicas.items():
                if name not in tried:
                    load = (self._under_way.get(name, 0) + self._chance()) / weights.get(name, 1.0)
                    load = load - LEAD if name == known else load
                    rank = bool(self._losses) and self.is_lost(replica), load
                    if rank < least:
                        chosen, least = replica, rank
            if chosen is not None:
                self._under_way[chosen.name] = self._under_way.get(chosen.name, 0) + 1
                if begins:
                    self._beginnings.note(begins, chosen.name)
            return chosen

    def note_time(self, replica: ReplicaAddress, kind: Kind, took_s: float) -> None:
        """A request of `take` has come so far in that time."""
        with self._lock:
            self._speeds.note(replica.name, kind, took_s, self._clock())

    def _weigh(self) -> Mapping[str, float]:
        now_s = self._clock()
        if now_s - self._weighed_at_s > WEIGH_S:
            self._weights, self._weighed_at_s = self._speeds.weights(self._replicas, now_s), now_s
        return self._weights

    def give_back(
        self, replica: ReplicaAddress, kind: Kind | None = None, took_s: float = 0.0, *, is_whole: bool = False
    ) -> None:
        """A request of `take` is over; it took so long, if its answer was of a `kind`. `is_whole`: all of it came."""
        with self._lock:
            if kind is not None:
                self._speeds.note(replica.name, kind, took_s, self._clock())
            if is_whole and self._losses:
                self._losses.pop(replica.name, None)
            left = self._under_way[replica.name] - 1
            if left:
                self._under_way[replica.name] = left
            else:
                del self._under_way[replica.name]

    def after_fork(self) -> None:
        """In a forked process no request of `take` is under way, and a thread of the parent may hold the lock."""
        self._lock = threading.RLock()
        self._under_way = {}
        self.process = object()
