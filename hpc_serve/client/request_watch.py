"""Watches the requests under way at the replicas of one service, in a thread that lives only while there are any.

It says when to look, and tells the requests at a lost replica that they are abandoned. Which replica is lost is decided
in discovery.py, and what becomes of an abandoned request in exchange.py.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Protocol

from hpc_serve.client.pool import ReplicaAddress
from hpc_serve.errors import HpcServeError

LOOK_S = 2.5
DOUBT_S = 0.5  # until the next look, when a replica has missed its first probe

# An engine that ends gently takes no connection any more, and still sends: words of an answer are a sign of life.
HEARD_S = 1.0

_log = logging.getLogger("hpc_serve.client")


class Attempt(Protocol):
    """One request at one replica. `heard_at_s` is when the replica last sent something of its answer (monotonic).

    `abandon` makes whoever waits for the answer fail at once, for the reason in `why_lost`.
    """

    why_lost: str | None

    @property
    def replica(self) -> ReplicaAddress: ...
    @property
    def heard_at_s(self) -> float: ...
    def abandon(self) -> None: ...
    def end(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a look found: why replicas are lost, by name, and whether to look again soon."""

    lost: Mapping[str, str] = field(default_factory=dict)
    is_in_doubt: bool = False


Look = Callable[[Set[str]], Verdict]
"""Looks at replicas by name. Raises HpcServeError."""


class RequestWatch:
    """The requests under way, and the thread that watches them. Safe to share between threads."""

    def __init__(self, look: Look) -> None:
        self._look = look
        # Reentrant: the garbage collector may end an attempt in the middle of any line.
        self._lock = threading.RLock()
        self._attempts: set[Attempt] = set()
        self._heard_at_s: dict[str, float] = {}
        self._thread: threading.Thread | None = None

    def begin(self, attempt: Attempt) -> None:
        """A request is under way from now on."""
        with self._lock:
            self._attempts.add(attempt)
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, daemon=True, name="hpc-serve-request-watch")
                self._thread.start()

    def end(self, attempt: Attempt) -> None:
        """A request is over."""
        with self._lock:
            self._attempts.discard(attempt)
            name = attempt.replica.name
            self._heard_at_s[name] = max(attempt.heard_at_s, self._heard_at_s.get(name, attempt.heard_at_s))

    def was_heard(self, name: str) -> bool:
        """Whether a replica has just sent something of an answer."""
        with self._lock:
            heard = [attempt.heard_at_s for attempt in self._attempts if attempt.replica.name == name]
            last_s = max([*heard, self._heard_at_s.get(name, float("-inf"))])
        return time.monotonic() - last_s < HEARD_S

    def after_fork(self) -> None:
        """In a forked process the requests are those of the process that it came from, as is the thread."""
        self._lock = threading.RLock()
        self._thread = None
        for attempt in list(self._attempts):
            attempt.end()
        self._attempts.clear()

    def _watch(self) -> None:
        pause_s = LOOK_S
        while True:
            time.sleep(pause_s)
            with self._lock:
                if not self._attempts:
                    self._thread = None
                    return
                names = {attempt.replica.name for attempt in self._attempts}
            pause_s = self._look_once(names)

    def _look_once(self, names: Set[str]) -> float:
        """Look, and abandon what is lost; seconds until the next look."""
        try:
            verdict = self._look(names)
        except HpcServeError as error:
            _log.debug("looking after requests under way: %s", error)
            return LOOK_S
        with self._lock:
            lost = [attempt for attempt in self._attempts if attempt.replica.name in verdict.lost]
        for attempt in lost:
            attempt.why_lost = verdict.lost[attempt.replica.name]
        for attempt in lost:  # once all know why: cutting one connection cuts all of a replica
            attempt.abandon()
        return DOUBT_S if verdict.is_in_doubt else LOOK_S
