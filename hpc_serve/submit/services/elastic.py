"""Decides when a service gets more replicas, fewer, or none: from what its engines say of their requests.

Requests must wait for a while before replicas are added, and a replica leaves only after the others could have carried
the load for a while. Unknown is not idle: nothing leaves while one replica cannot be asked. Pure: adjust.py asks, tells
what it saw and when, and does what is decided.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from hpc_serve.errors import InvalidRequestError
from hpc_serve.submit.request.bounds import shown_time

ADD_AFTER_S = 20.0
LEAVE_AFTER_S = 600.0
_VARIABLES = {"HPC_SERVE_ADD_AFTER_S": ADD_AFTER_S, "HPC_SERVE_LEAVE_AFTER_S": LEAVE_AFTER_S}
# The others shall have room for what differs from one window to the next.
_SPARE = 0.8
# A service that is looked at less often than this was not looked after: its windows begin anew.
_LONGEST_GAP_S = 60.0


@dataclass(frozen=True, kw_only=True)
class ReplicaBounds:
    """`least` to `most` replicas; none after `idle_stop_s` without a request (None: never)."""

    least: int
    most: int
    idle_stop_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Windows:
    """For how long requests must wait before a replica is added, and the others carry the load before one leaves."""

    add_after_s: float = ADD_AFTER_S
    leave_after_s: float = LEAVE_AFTER_S


def windows_of(environ: Mapping[str, str]) -> Windows:
    """The windows that the environment asks for. Raises InvalidRequestError."""
    found = {}
    for name, default in _VARIABLES.items():
        try:
            found[name] = float(environ.get(name) or default)
        except ValueError:
            raise InvalidRequestError(f"{name} is {environ[name]!r}: it must be a number of seconds.") from None
    add_after_s, leave_after_s = found.values()
    return Windows(add_after_s=add_after_s, leave_after_s=leave_after_s)


@dataclass(frozen=True, kw_only=True)
class ReplicaLoad:
    """What a ready replica says: how many requests run and wait.

    `counts` are the numbers of requests that it was ever sent, canaries apart, by the server process that counts them.
    `under_way` of those are not answered yet.
    """

    running: int
    waiting: int
    under_way: int
    counts: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class ServiceLook:
    """One look at a service: the load of each ready replica by its name; None where it could not be asked.

    `coming` replicas wait in the queue or start. `draining` ones still have their nodes, and count for nothing else. A
    look that is not `is_complete` may have missed some.
    """

    loads: Mapping[str, ReplicaLoad | None]
    coming: int = 0
    draining: int = 0
    is_complete: bool = True

    @property
    def count(self) -> int:
        return len(self.loads) + self.coming

    @property
    def known(self) -> dict[str, ReplicaLoad]:
        return {name: load for name, load in self.loads.items() if load is not None}

    @property
    def is_known(self) -> bool:
        return self.is_complete and None not in self.loads.values()

    @property
    def requests(self) -> int:
        """How many run or wait."""
        return sum(load.running + load.waiting for load in self.known.values())


@dataclass(frozen=True, kw_only=True)
class Add:
    count: int
    why: str


@dataclass(frozen=True, kw_only=True)
class Leave:
    """One replica leaves: the best to spare of those that come, if `is_coming`, else the ready one of that `name`."""

    name: str
    is_coming: bool
    why: str


@dataclass(frozen=True, kw_only=True)
class Sleep:
    why: str


Step = Add | Leave | Sleep


class ElasticJudge:
    """What is known of one service. All times are seconds of one monotonic clock.

    `own` is the replica whose job decides; it leaves last. `most_running` requests were seen to run on one replica at
    once, so that each is believed to carry as many.
    """

    def __init__(self, windows: Windows, own: str, now_s: float, *, most_running: int = 0) -> None:
        self.most_running = most_running
        self._windows = windows
        self._own = own
        self._look = ServiceLook(loads={}, is_complete=False)
        self._looked_at_s = now_s
        self._counts: dict[tuple[str, str], int] = {}
        self._used_at_s = now_s
        self._known_since_s = now_s
        self._short_since_s: float | None = None
        self._surplus: deque[tuple[float, int]] = deque()
        self._peaks: deque[tuple[float, int]] = deque()

    def note(self, look: ServiceLook, now_s: float) -> None:
        """Take in a look that has ended now."""
        if now_s - self._looked_at_s > _LONGEST_GAP_S:
            self._forget(now_s)
            self._used_at_s = now_s
        has_changed = look.loads.keys() != self._look.loads.keys()
        was_known = self._look.is_known
        self._look, self._looked_at_s = look, now_s
        loads = look.known.values()
        self.most_running = max((self.most_running, *(load.running for load in loads)))
        was_used = self._note_counts(look) or any(load.under_way or load.running > 1 for load in loads)
        if was_used or not look.is_known:
            self._used_at_s = now_s
        if not (look.is_known and was_known):
            self._known_since_s = now_s
            self._peaks.clear()
        self._peaks.append((now_s, look.requests))
        while self._peaks[0][0] < now_s - self._windows.leave_after_s:
            self._peaks.popleft()
        waits = self._waiting_for_room()
        if has_changed or look.coming or waits <= 0 or not look.is_complete:
            self._surplus.clear()
        if waits > 0 and not look.coming and look.is_complete:
            self._surplus.append((now_s, waits))

    def decide(self, bounds: ReplicaBounds, *, may_add: bool = True) -> Step | None:
        """What to do after the last look, if anything. The windows begin anew with what is decided."""
        if not self._look.is_complete:
            self._short_since_s = None
            return None
        found = (
            (self._fill_up(bounds) if may_add else None)
            or (self._add(bounds) if may_add else None)
            or self._sleep(bounds)
            or self._leave_surplus(bounds)
            or self._leave(bounds)
        )
        if found is not None:
            self._forget(self._looked_at_s)
        return found

    def _note_counts(self, look: ServiceLook) -> bool:
        """Whether a request has come since the last look, as far as it is known."""
        now = {(name, one): count for name, load in look.known.items() for one, count in load.counts.items()}
        has_new = any(self._counts.get(key) != count for key, count in now.items())
        self._counts |= now
        return has_new

    def _waiting_for_room(self) -> int:
        """How many requests wait for which no other replica has room."""
        loads = self._look.known.values()
        room = sum(max(0, self.most_running - load.running) for load in loads if not load.waiting)
        return sum(load.waiting for load in loads) - room

    def _fill_up(self, bounds: ReplicaBounds) -> Add | None:
        missing = bounds.least - self._look.count
        if missing <= 0:
            self._short_since_s = None
            return None
        if self._short_since_s is None:
            self._short_since_s = self._looked_at_s
        if self._looked_at_s - self._short_since_s < self._windows.add_after_s:
            return None
        return Add(count=missing, why=f"there was {_replicas(self._look.count)}, of at least {bounds.least}")

    def _add(self, bounds: ReplicaBounds) -> Add | None:
        free = bounds.most - self._look.count - self._look.draining
        if free <= 0 or not self._surplus:
            return None
        waited_s = self._looked_at_s - self._surplus[0][0]
        if waited_s < self._windows.add_after_s:
            return None
        least = min(waits for _, waits in self._surplus)
        count = min(free, math.ceil(least / max(1, self.most_running)))
        waiting = sum(load.waiting for load in self._look.known.values())
        return Add(count=count, why=f"{_requests(waiting)} waited for {shown_time(waited_s)}")

    def _sleep(self, bounds: ReplicaBounds) -> Sleep | None:
        idle_s = self._looked_at_s - self._used_at_s
        if bounds.idle_stop_s is None or not self._look.is_known or idle_s < bounds.idle_stop_s:
            return None
        return Sleep(why=f"no request for {shown_time(idle_s)}")

    def _leave_surplus(self, bounds: ReplicaBounds) -> Leave | None:
        if self._look.count <= bounds.most or not self._look.is_known:
            return None
        return self._one_of_them(f"there were {self._look.count}, of at most {bounds.most}")

    def _leave(self, bounds: ReplicaBounds) -> Leave | None:
        look = self._look
        seen_s = self._looked_at_s - self._known_since_s
        if look.count <= bounds.least or not look.is_known or seen_s < self._windows.leave_after_s:
            return None
        left = len(look.loads) if look.coming else len(look.loads) - 1
        peak = max((requests for _, requests in self._peaks), default=0)
        if left < 1 or peak > _SPARE * self.most_running * left:
            return None
        others = "the other could" if left == 1 else "the others could"
        load = f"{_requests(peak)} at once at most" if peak else "no request"
        return self._one_of_them(f"{others} have carried the load for {shown_time(seen_s)}: {load}")

    def _one_of_them(self, why: str) -> Leave | None:
        """The least loaded one, of equals the newest; the deciding job's own never."""
        if self._look.coming:
            return Leave(name="", is_coming=True, why=why)
        others = [(load.running + load.waiting, name) for name, load in self._look.known.items() if name != self._own]
        if not others:
            return None
        least = min(requests for requests, _ in others)
        return Leave(name=[name for requests, name in others if requests == least][-1], is_coming=False, why=why)

    def _forget(self, now_s: float) -> None:
        self._known_since_s = now_s
        self._short_since_s = None
        self._surplus.clear()
        self._peaks.clear()


def _requests(number: int) -> str:
    return "1 request" if number == 1 else f"{number} requests"


def _replicas(number: int) -> str:
    return "no replica" if number == 0 else "1 replica" if number == 1 else f"{number} replicas"
