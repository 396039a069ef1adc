"""The one rule for a connection that waits: how long the next read may take, and when the replica counts as lost.

Connections in threads and in event loops ask this value for a time limit and tell it what came. A replica that sends
nothing for longer than its limit is lost if the judge knows another one that answers. Until then the wait goes on, and
the judge is asked again. Pure, apart from the clock and the judge.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from hpc_serve.client.replicas.pool import ReplicaAddress
from hpc_serve.client.replicas.sdk import http
from hpc_serve.client.replicas.silence import SilenceLimit
from hpc_serve.rendezvous.gate_headers import COMMENT_CHUNK, PROCESSING

# Seconds between two questions to the judge: while nothing comes, and once the limit is over. The second grows. The
# first question comes so long before the limit is over that the others can be asked meanwhile.
ASK_S = 2.5
ASK_AGAIN_S = 0.1
ASK_BEFORE_S = 0.5


class ReplicaLostError(http.ReadError):
    """The replica was lost while it had the request. The message says why that is believed."""


class ReplicaJudge(Protocol):
    """Knows how every replica of a service is. Never blocks."""

    @property
    def clock(self) -> Callable[[], float]: ...

    def limit_of(self, name: str) -> SilenceLimit:
        """Return the limit of a replica, which all its connections share."""

    def why_lost(self, replica: ReplicaAddress, since_s: float, *, is_silent: bool) -> str | None:
        """Return why a replica is lost that has sent nothing since a time; None if it is not known to be.

        `is_silent`: that is longer than its limit.
        """


class AnswerWait:
    """The waits of one connection, one after the other.

    `expects_signs` is false while the replica sends no signs: it never does, or its answer is no stream of events.
    """

    def __init__(self, replica: ReplicaAddress, judge: ReplicaJudge) -> None:
        self._replica = replica
        self._judge = judge
        self._clock = judge.clock
        self._limit = judge.limit_of(replica.name)
        self._limit_s = 0.0
        self._since_s = 0.0
        self._ends_at_s = math.inf
        self._answer_since_s: float | None = None
        self.expects_signs = replica.signs
        self.look_at_s = math.inf
        """When `again` is due."""

    def begin_request(self) -> None:
        """Begin a request."""
        self.expects_signs = self._replica.signs
        self._answer_since_s = None

    def begin_write(self, timeout_s: float | None) -> float:
        """Begin to send a part of a request; return how long the first attempt may take."""
        self._answer_since_s = None
        now_s = self._clock()
        return self._begin(timeout_s, now_s, now_s, math.inf)

    def begin(self, timeout_s: float | None) -> float:
        """Begin to wait for bytes; return how long the first read may take.

        `timeout_s` is the user's. It counts from the last bytes that were more than a sign.
        """
        now_s = self._clock()
        if self._answer_since_s is None:
            self._answer_since_s = now_s
        limit_s = self._limit.limit_s(now_s) if self.expects_signs else math.inf
        return self._begin(timeout_s, self._answer_since_s, now_s, limit_s)

    def _begin(self, timeout_s: float | None, counts_from_s: float, now_s: float, limit_s: float) -> float:
        self._since_s, self._limit_s = now_s, limit_s
        self._ends_at_s = math.inf if timeout_s is None else counts_from_s + timeout_s
        return self._wait_s(now_s)

    def again(self) -> float | None:
        """Return how long the next read may take after one without bytes; None if the user's time is over.

        Raises ReplicaLostError.
        """
        now_s = self._clock()
        if now_s >= self._ends_at_s:
            return None
        is_silent = now_s - self._since_s >= self._limit_s
        if reason := self._judge.why_lost(self._replica, self._since_s, is_silent=is_silent):
            raise ReplicaLostError(f"{self._replica.name} is lost: {reason}")
        return self._wait_s(now_s)

    def _wait_s(self, now_s: float) -> float:
        over_s = now_s - self._since_s - self._limit_s
        if over_s < 0:
            wait_s = -over_s - ASK_BEFORE_S if over_s < -ASK_BEFORE_S else -over_s
        else:
            wait_s = max(over_s / 4, ASK_AGAIN_S)
        wait_s = max(min(wait_s, ASK_S, self._ends_at_s - now_s), 0.001)
        self.look_at_s = now_s + wait_s
        return wait_s

    def stop(self) -> None:
        """Wait no more."""
        self.look_at_s = math.inf

    def end(self, data: bytes) -> None:
        """Note the bytes that came, which end the wait; b"" is the end of the connection."""
        self.stop()  # their reader may run later than whoever looks next
        now_s = self._clock()
        if data:
            self._limit.note(now_s, now_s - self._since_s if self.expects_signs else 0.0)
        if not is_sign(data):
            self._answer_since_s = None


def is_sign(data: bytes) -> bool:
    """Return whether these bytes of a connection are signs alone, and nothing of the answer."""
    for sign in (PROCESSING, COMMENT_CHUNK):
        if data.startswith(sign):
            return not data.replace(sign, b"")
    return False
