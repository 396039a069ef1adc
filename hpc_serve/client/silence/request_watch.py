"""Watches the requests under way at the replicas of one service, in a thread that lives only while there are any.

It says when to listen and when to look, tells the requests at a lost replica that they are abandoned, and those at one
whose network is late that another may be asked beside it. Which replica is lost, or late, is decided by what is heard
of the requests (`silence`) and by looks at records and engines (`discovery`), and what becomes of the requests in
`exchange`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

from hpc_serve.client.replicas.pool import ReplicaAddress
from hpc_serve.client.silence.silence import LATE_S, Silence
from hpc_serve.errors import HpcServeError

LISTEN_S = 0.1
LOOK_S = 2.5
DOUBT_S = 0.5  # until the next look, when a replica has missed its first probe

# An engine that ends gently takes no connection any more, and still sends: words of an answer are a sign of life.
HEARD_S = 1.0

# Second requests (`hedge`) at a time: so many, or one for so many requests under way, but no more than the most.
HEDGES = 8
ONE_HEDGE_FOR = 20
MOST_HEDGES = 32

_log = logging.getLogger("hpc_serve.client")


class WatchedRequest(Protocol):
    """One request at one replica. `heard_at_s` is when the replica last sent something of its answer (monotonic).

    `is_talking`: it is a stream that has begun. `prompt_bytes` were sent to it at `began_at_s`.
    `abandon` makes whoever waits for the answer fail at once, for the reason in `why_lost`; `cut` this request alone.
    `is_waiting`: no answer has begun. `ask_beside` asks another replica, too, if that may be; `second` is that
    request then, and `is_second` if this one is itself such a request.
    """

    why_lost: str | None
    began_at_s: float
    prompt_bytes: int
    heard_at_s: float
    is_talking: bool
    is_second: bool
    second: Any
    ask_beside: Callable[[Any], bool] | None

    @property
    def replica(self) -> ReplicaAddress: ...
    @property
    def is_waiting(self) -> bool: ...
    def abandon(self) -> None: ...
    def cut(self) -> None: ...
    def end(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class LookResult:
    """What a look found: why replicas are lost, by name, and whether to look again soon."""

    lost: Mapping[str, str] = field(default_factory=dict)
    is_in_doubt: bool = False


Look = Callable[[Set[str]], LookResult]
"""Looks at replicas by name. Raises HpcServeError."""


class RequestWatch:
    """The requests under way, and the thread that watches them. Safe to share between threads."""

    def __init__(self, look: Look, silence: Silence) -> None:
        self._look = look
        self._silence = silence
        # Reentrant: the garbage collector may end an attempt in the middle of any line.
        self._lock = threading.RLock()
        self._attempts: set[WatchedRequest] = set()
        self._heard_at_s: dict[str, float] = {}
        self._thread: threading.Thread | None = None
        self._look_at_s = 0.0

    def begin(self, attempt: WatchedRequest) -> None:
        """A request is under way from now on."""
        self._attempts.add(attempt)
        if self._thread is not None:  # it looks once more for requests before it ends
            return
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._watch, daemon=True, name="hpc-serve-request-watch")
                with contextlib.suppress(RuntimeError):  # no more threads for this user: the next request tries again
                    thread.start()
                    self._thread = thread

    def end(self, attempt: WatchedRequest) -> None:
        """A request is over."""
        # The lock is for those alone that may be cut, as `cut` may find it under way: every request comes by here.
        with self._lock if attempt.second is not None else contextlib.nullcontext():
            self._attempts.discard(attempt)
        name = attempt.replica.name
        self._heard_at_s[name] = max(attempt.heard_at_s, self._heard_at_s.get(name, attempt.heard_at_s))

    def cut(self, attempt: WatchedRequest) -> None:
        """End one request, if it is still under way: its connection may be another's by then."""
        with self._lock:
            if attempt in self._attempts:
                attempt.cut()

    def was_heard(self, name: str) -> bool:
        """Whether a replica has just sent something of an answer."""
        with self._lock:
            heard = [attempt.heard_at_s for attempt in list(self._attempts) if attempt.replica.name == name]
            last_s = max([*heard, self._heard_at_s.get(name, float("-inf"))])
        return time.monotonic() - last_s < HEARD_S

    def after_fork(self) -> None:
        """In a forked process the requests are those of the process that it came from, as is the thread."""
        self._lock = threading.RLock()
        self._thread = None
        self._silence.after_fork()
        for attempt in list(self._attempts):
            attempt.end()
        self._attempts.clear()

    def _watch(self) -> None:
        self._look_at_s = time.monotonic() + LOOK_S
        complaint = ""
        while True:
            before_s = time.monotonic()
            time.sleep(LISTEN_S)
            now_s = time.monotonic()
            with self._lock:
                attempts = list(self._attempts)
                if not attempts and now_s >= self._look_at_s:
                    self._thread = None
                    if not self._attempts:  # none has begun while this thread was there for it to see
                        return
                    self._thread = threading.current_thread()
            try:
                if (late_s := now_s - before_s - LISTEN_S) > LATE_S:
                    self._silence.stood_still(late_s)
                self._abandon(self._silence.listen(attempts))
                if late := self._silence.late:
                    _ask_beside([attempt for attempt in attempts if attempt.replica.name in late], attempts)
                if attempts and now_s >= self._look_at_s:
                    self._start_look({attempt.replica.name for attempt in attempts})
            except Exception as error:  # without this thread, requests at a lost replica would wait for their time-out
                if repr(error) != complaint:  # it may come ten times a second
                    complaint = repr(error)
                    _log.exception("watching the requests under way")

    def _start_look(self, names: Set[str]) -> None:
        """It may take seconds: what is silent is to be found meanwhile."""
        self._look_at_s = math.inf
        try:
            threading.Thread(target=self._look_once, args=(names,), daemon=True, name="hpc-serve-look").start()
        except RuntimeError:  # no more threads for this user
            self._look_at_s = time.monotonic() + LOOK_S
            raise

    def _look_once(self, names: Set[str]) -> None:
        """Look, and abandon what is lost."""
        pause_s = LOOK_S
        try:
            verdict = self._look(names)
            pause_s = DOUBT_S if verdict.is_in_doubt else LOOK_S
            self._abandon(verdict.lost)
        except HpcServeError as error:
            _log.debug("looking after requests under way: %s", error)
        finally:
            self._look_at_s = time.monotonic() + pause_s

    def _abandon(self, lost: Mapping[str, str]) -> None:
        """The requests at lost replicas are over, for the reason given."""
        if not lost:
            return
        with self._lock:
            attempts = [attempt for attempt in list(self._attempts) if attempt.replica.name in lost]
        for attempt in attempts:
            attempt.why_lost = lost[attempt.replica.name]
            _log.debug("a request leaves %s: %s", attempt.replica.name, attempt.why_lost)
        for attempt in attempts:  # once all know why: cutting one connection cuts all of a replica
            attempt.abandon()


def _ask_beside(late: Collection[WatchedRequest], attempts: Collection[WatchedRequest]) -> None:
    """Ask another replica beside those that are late, for the oldest requests first. Raises RuntimeError."""
    most = min(max(HEDGES, len(attempts) // ONE_HEDGE_FOR), MOST_HEDGES)
    free = most - sum(attempt.is_second for attempt in attempts)
    for attempt in sorted(late, key=lambda attempt: attempt.began_at_s):
        if free > 0 and attempt.ask_beside is not None and attempt.is_waiting:
            free -= attempt.ask_beside(attempt)
