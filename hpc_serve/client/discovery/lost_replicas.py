"""Says of a replica that has sent nothing for a while whether it is lost, for the requests that wait for it.

It is lost if its record or its engine says so, by a look in the background. It is also lost if it was silent for longer
than its limit while another ready replica was heard. The last replica that answers is never given up for its silence:
the fault may be this client's own. There is no thread and no look while nobody waits.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field

from hpc_serve.client.replicas.pool import ReplicaAddress, ReplicaPool
from hpc_serve.client.replicas.silence import SILENT_S, SilenceLimit
from hpc_serve.errors import HpcServeError

LOOK_S = 2.5
DOUBT_S = 0.5  # until the next look, when a replica has missed its first probe
ASK_OTHERS_S = 0.5

# An engine that ends gently takes no connection any more, and still sends: bytes of an answer show that it lives.
HEARD_S = 1.0

_log = logging.getLogger("hpc_serve.client")


@dataclass(frozen=True, kw_only=True)
class LookResult:
    """What a look found: why replicas are lost, by name, and whether to look again soon."""

    lost: Mapping[str, str] = field(default_factory=dict)
    is_in_doubt: bool = False


Look = Callable[[Set[str]], LookResult]
"""Looks at replicas by name. Raises HpcServeError."""
AskOthers = Callable[[Set[str]], None]
"""Has a few replicas asked that are not named, in the background. Raises RuntimeError without a thread for that."""


class LostReplicas:
    """The replicas of one service. Safe to share between threads."""

    def __init__(self, pool: ReplicaPool, look: Look, ask_others: AskOthers, *, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._pool = pool
        self._look = look
        self._ask_others = ask_others
        self._limits: dict[str, SilenceLimit] = {}
        self._reasons: dict[str, tuple[str, float]] = {}
        self.after_fork()

    def after_fork(self) -> None:
        """In a forked process, the lock may be held by a thread that is not there, and no look is under way."""
        self._lock = threading.Lock()
        self._is_looking = False
        self._looked_for: Set[str] = frozenset()
        self._wanted: set[str] = set()
        self._look_at_s = float("-inf")
        self._ask_others_at_s = float("-inf")

    def limit_of(self, name: str) -> SilenceLimit:
        """Return the limit of a replica, which all its connections share."""
        if (limit := self._limits.get(name)) is None:
            limit = self._limits.setdefault(name, SilenceLimit())
        return limit

    def limit_s(self, name: str) -> float:
        """Return for how many seconds a replica may be silent now."""
        return self.limit_of(name).limit_s(self.clock())

    def note_answer(self, name: str) -> None:
        """Note that a replica has answered a probe."""
        self.limit_of(name).proved_at_s = self.clock()

    def was_heard(self, name: str) -> bool:
        """Return whether a replica has just sent bytes of an answer."""
        return self.clock() - self.limit_of(name).heard_at_s < HEARD_S

    def why_lost(self, replica: ReplicaAddress, since_s: float, *, is_silent: bool) -> str | None:
        """Return why a replica is lost that has sent nothing since a time; None if it is not known to be.

        `is_silent`: that is longer than its limit. Has the replica looked at, in the background, and never blocks.
        """
        reason, found_at_s = self._reasons.get(replica.name, ("", float("-inf")))
        if found_at_s > since_s:
            return reason
        now_s = self.clock()
        self._start_look(replica.name, now_s)
        if (other := self._find_other(replica.name, max(since_s, now_s - SILENT_S))) is None:
            self._start_asking(replica.name, now_s)
        elif is_silent:
            return f"it has sent nothing for {now_s - since_s:.1f} s, and {other} answers"
        return None

    def _find_other(self, name: str, since_s: float) -> str | None:
        """Return another replica that has sent bytes or answered a probe since a time."""
        for other in self._pool.others({name}):
            limit = self.limit_of(other.name)
            if max(limit.heard_at_s, limit.proved_at_s) > since_s and not self._pool.is_lost(other):
                return other.name
        return None

    def _start_asking(self, name: str, now_s: float) -> None:
        """Ask others, beside a look: one at a replica that does not answer takes seconds."""
        with self._lock:
            if now_s < self._ask_others_at_s:
                return
            self._ask_others_at_s = now_s + ASK_OTHERS_S
        with suppress(RuntimeError):  # no more threads for this user: later
            self._ask_others({name})

    def _start_look(self, name: str, now_s: float) -> None:
        with self._lock:
            self._wanted.add(name)
            if self._is_looking or (now_s < self._look_at_s and name in self._looked_for):
                return
            self._looked_for, self._wanted = frozenset(self._wanted), set()
            self._is_looking = True
        try:
            threading.Thread(target=self._look_once, daemon=True, name="hpc-serve-look").start()
        except RuntimeError:  # no more threads for this user: later
            self._end_look(LOOK_S)

    def _look_once(self) -> None:
        pause_s = LOOK_S
        try:
            result = self._look(self._looked_for)
            pause_s = DOUBT_S if result.is_in_doubt else LOOK_S
            for name, reason in result.lost.items():
                self._reasons[name] = reason, self.clock()
                _log.debug("requests leave %s: %s", name, reason)
        except (HpcServeError, RuntimeError) as error:  # RuntimeError: no more threads for this user
            _log.debug("looking after requests under way: %s", error)
        finally:
            self._end_look(pause_s)

    def _end_look(self, pause_s: float) -> None:
        with self._lock:
            self._look_at_s = self.clock() + pause_s
            self._is_looking = False
