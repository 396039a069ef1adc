"""Which ready replica a request goes to: the one with the fewest requests under way for what it can take.

How much each can take is measured by how fast it answered: a client with few requests at a time has nothing to count.
The choice among equals is random. A replica that was sent such a request before is preferred, for engines keep the keys
and values of prompts: a conversation's next request, or another question on the same document, costs little there. A
replica that was lost lately comes last.

Pure, apart from the clock, the random choice among equals, and the note which replica answered last.
"""

from __future__ import annotations

import contextvars
import math
import random
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Literal

from hpc_serve.client.replicas.status import ReplicaState, ReplicaStatus
from hpc_serve.trust.connection import Identity

# -- how fast each replica has answered lately

Kind = Literal["first", "stream", "whole"]
"""The end of a measured time: a stream's first bytes, a stream's end, or the end of any other answer."""

# What counts as equal: answers are of all lengths, so that equal replicas look unlike for a while.
_EQUAL_WITHIN = 2.0
HALF_LIFE_S = 30.0
_MOST_SAMPLES = 16.0
_ENOUGH_SAMPLES = 1.5  # with fewer, or older ones, a difference counts in part
_SHORTEST_S = 0.02  # shorter times tell of the client and its machine


class _Mean:
    """The mean of the logarithms of times; `count` is how many they are, older ones counting less."""

    def __init__(self) -> None:
        self.value = 0.0
        self._count = 0.0
        self._at_s = 0.0

    def add(self, took_s: float, now_s: float) -> None:
        count = min(self.count(now_s), _MOST_SAMPLES - 1)
        self._count, self._at_s = count + 1, now_s
        self.value += (math.log(max(took_s, _SHORTEST_S)) - self.value) / self._count

    def count(self, now_s: float) -> float:
        return self._count * math.pow(0.5, (now_s - self._at_s) / HALF_LIFE_S)


class Speeds:
    """How fast each replica has answered, as a weight for the choice of the next one. The pool's lock guards it.

    Requests are unlike, so only times of one kind are compared, on a scale of factors, and only a replica that is more
    than twice as slow as the fastest counts as slower. Times are forgotten after a while, so that a replica that was
    slow once is tried again.
    """

    def __init__(self) -> None:
        self._means: dict[Kind, dict[str, _Mean]] = {"first": {}, "stream": {}, "whole": {}}

    def note(self, name: str, kind: Kind, took_s: float, now_s: float) -> None:
        """Note how long a replica took for an answer of that kind."""
        self._means[kind].setdefault(name, _Mean()).add(took_s, now_s)

    def weights(self, names: Iterable[str], now_s: float) -> dict[str, float]:
        """Return each replica's speed as a share of the fastest one's; 1.0 if it is not known to be slower."""
        slower = dict.fromkeys(names, 0.0)
        for of_kind in self._means.values():
            known = {name: of_kind[name] for name in slower if name in of_kind}
            fastest = min((mean.value for mean in known.values()), default=0.0)
            for name, mean in known.items():
                certainty = min(1.0, mean.count(now_s) / _ENOUGH_SAMPLES)
                slower[name] = max(slower[name], (mean.value - fastest) * certainty)
        return {name: 1.0 if log <= math.log(_EQUAL_WITHIN) else math.exp(-log) for name, log in slower.items()}

    def keep(self, names: Iterable[str]) -> None:
        """Forget all replicas but these."""
        kept = set(names)
        for of_kind in self._means.values():
            for name in of_kind.keys() - kept:
                del of_kind[name]


# -- which replica has the beginning of a request in its cache

_SHORTEST_BYTES = 1024
_LONGER = 1.25
_MOST_KNOWN = 20_000


def beginnings(content: bytes) -> list[int]:
    """Return a number for each of some beginnings of a body, the longest last, each half of the body or more.

    Bodies that begin alike have a number in common. A body of less than 1 KiB has none: to read it again costs little.

    >>> one, other = b"a" * 9000 + b"?", b"a" * 9000 + b"b" * 3000
    >>> bool(set(beginnings(one)) & set(beginnings(other))), beginnings(b"short")
    (True, [])
    """
    if len(content) < _SHORTEST_BYTES:
        return []
    found, view, sum_, begin, end = [], memoryview(content), 0, 0, _SHORTEST_BYTES
    while end <= len(view):
        sum_ = zlib.crc32(view[begin:end], sum_)
        if 2 * end >= len(view):
            found.append(end << 32 | sum_)
        begin, end = end, int(end * _LONGER)
    return found


class Beginnings:
    """The replica that was last sent each beginning. Not safe to share between threads."""

    def __init__(self) -> None:
        self._replicas: dict[int, str] = {}  # the latest last

    def replica_of(self, found: list[int]) -> str | None:
        """Return the name of the replica that was sent the longest of these beginnings."""
        return next((self._replicas[one] for one in reversed(found) if one in self._replicas), None)

    def note(self, found: list[int], name: str) -> None:
        """Note that a replica is sent a request with these beginnings."""
        for one in found:
            self._replicas.pop(one, None)
            self._replicas[one] = name
        while len(self._replicas) > _MOST_KNOWN:
            del self._replicas[next(iter(self._replicas))]


# -- the choice

WEIGH_S = 0.2  # replicas are weighed again after this time: a choice is to cost little

LEAD = 4.0
"""Requests that a replica may have more under way if it has the beginning of a request in its cache."""

LOST_FOR_S = 1.0
"""Seconds for which a lost replica is chosen last; twice as many after each further loss."""
MOST_LOST_FOR_S = 60.0


@dataclass(frozen=True, kw_only=True)
class ReplicaAddress:
    """The address of a replica, and the identity by which a connection to it is verified; `name` is its record's.

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
        self._replicas: Mapping[str, ReplicaAddress] = {}  # never changed, but replaced: who reads it needs no lock
        self.is_uneven = False
        """Some replicas have adapters that others lack."""
        self._losses: dict[str, _Loss] = {}
        self._speeds = Speeds()
        self._beginnings = Beginnings()
        self._weights: Mapping[str, float] = {}
        self._weighed_at_s = float("-inf")
        self.after_fork()

    def after_fork(self) -> None:
        """In a forked process no request of `take` is under way, and a thread of the parent may hold the lock."""
        # Reentrant: the garbage collector may end a request, and give its replica back, in the middle of any line.
        self._lock = threading.RLock()
        self._under_way: dict[str, int] = {}
        self.process = object()
        """Another one in each process that is forked: requests of the other process are not under way here."""

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
        """Offer a lost replica last for a while. Requests that are lost with it at the same time count once."""
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
        """Return whether any other replica than these is offered."""
        return any(name not in names for name in self._replicas)

    def others(self, names: Set[str]) -> list[ReplicaAddress]:
        """Return the offered replicas other than these."""
        return [replica for name, replica in self._replicas.items() if name not in names]

    def lacking(self, adapter: str) -> Set[str]:
        """Return the names of the replicas without an adapter, if others have it."""
        lacking = {name for name, replica in self._replicas.items() if adapter not in replica.adapters}
        return lacking if len(lacking) < len(self._replicas) else frozenset()

    def drop(self, name: str) -> None:
        """Offer a replica no more."""
        with self._lock:
            self._replace({known: replica for known, replica in self._replicas.items() if known != name})

    def take(self, tried: Set[str] = frozenset(), begins: list[int] | None = None) -> ReplicaAddress | None:
        """Take the least loaded replica not in `tried`, until `give_back`; None if there is none. Lost ones come last.

        The replica that was last sent the longest of `begins` is taken unless it has LEAD more requests under way.

        The load is requests under way and a random part of one, divided by the replica's weight. So many clients with
        one request each choose different replicas, and a slower replica still gets its share of their requests.
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

    def note_first(self, replica: ReplicaAddress, took_s: float) -> None:
        """Note how long a request of `take` took to the first bytes of its stream."""
        with self._lock:
            self._speeds.note(replica.name, "first", took_s, self._clock())

    def _weigh(self) -> Mapping[str, float]:
        now_s = self._clock()
        if now_s - self._weighed_at_s > WEIGH_S:
            self._weights, self._weighed_at_s = self._speeds.weights(self._replicas, now_s), now_s
        return self._weights

    def give_back(
        self, replica: ReplicaAddress, kind: Kind | None = None, took_s: float = 0.0, *, is_whole: bool = False
    ) -> None:
        """End a request of `take`. It took so long, if its answer was of a `kind`. `is_whole`: all of it came."""
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


# -- for whoever wants to see where requests go


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
